"""Bytes held by each rank: what the formulas of ZeRO say, and what live tensors really hold."""

import torch
from residency import is_absent

STAGES = ("vanilla DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def check_whole(name: str, value: int, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`. True and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def shard_bounds(total: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """Return (start, end, chunk) of a rank's part of `total` elements: chunk = ceil(total / N), end <= total.

    The last ranks may hold less, or nothing; padded to `chunk`, all are equal.
    """
    check_whole("total", total, least=0)
    check_whole("world_size", world_size, least=1)
    check_whole("rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size {world_size}, got {rank}")
    chunk = -(-total // world_size)
    return min(rank * chunk, total), min((rank + 1) * chunk, total), chunk


def model_state_bytes(
    p_params: int, world_size: int, stage: int, param_bytes: int = 4, master: bool = True
) -> dict[str, int]:
    """Return bytes a rank holds of parameters, gradients and optimizer state (fp32 master and both Adam moments: 12).

    Stage 0 is plain data parallelism; stage 1 shards optimizer state, 2 gradients too, 3 parameters too. Without a
    `master`, since fp32 parameters can be their own, the state is 8. Source: Rajbhandari et al. 2020, with ceil(P/N)
    for a shard. Raises ValueError, with the value, for an argument that is no whole number in its range.
    """
    check_whole("p_params", p_params, least=1)
    check_whole("stage", stage, least=0)
    check_whole("param_bytes", param_bytes, least=1)
    if stage >= len(STAGES):
        raise ValueError(f"stage must be at most {len(STAGES) - 1}, got {stage}")
    chunk = shard_bounds(p_params, world_size, 0)[2]
    return {
        "parameters": param_bytes * (chunk if stage >= 3 else p_params),
        "gradients": param_bytes * (chunk if stage >= 2 else p_params),
        "optimizer": (12 if master else 8) * (chunk if stage >= 1 else p_params),
    }


def memory_table(p_params: int, world_size: int, stage: int = 1) -> str:
    """Return a table of bytes a rank for plain DDP and all stages in fp32, and how far this stage lowers the sum.

    Raises ValueError for the arguments for which `model_state_bytes` does.
    """
    rows, totals, chosen = [], [], sum(model_state_bytes(p_params, world_size, stage).values())
    for each, name in enumerate(STAGES):
        held = model_state_bytes(p_params, world_size, each)
        totals.append(sum(held.values()))
        drop = 100 * (1 - totals[-1] / totals[0])
        rows.append([name, *(f"{n:,}" for n in (*held.values(), totals[-1])), f"{drop:.1f}%"])
    header = ["bytes a rank", "parameters", "gradients", "optimizer", "sum", "drop"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [header, *rows]]
    return "\n".join([*lines, f"drop: {100 * (1 - chosen / totals[0]):.1f}%"])


def logical_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of all elements of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def live_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the storages behind these tensors, each storage once however many views it has."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def unit_bytes(units: list[tuple[int, int]], world_size: int, stage: int) -> dict[str, int]:
    """Return bytes a rank holds for flat units, each given as (elements, bytes an element): a sum over units.

    A unit is padded to N equal chunks of ceil(elements / N). State is fp32, or wider if the parameters are. Parameters
    of that width are their own masters; in stage 3 masters are all there is of parameters, and count as these. Stage 0,
    data parallelism, has neither chunks nor padding. Without fleeting memory: after backward, outside of blocks.
    """
    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for numel, size in units:
        state, chunk = max(4, size), shard_bounds(numel, world_size, 0)[2]
        whole, share = (chunk * world_size, chunk) if stage else (numel, numel)
        held["parameters"] += state * chunk if stage == 3 else size * whole
        held["gradients"] += size * (chunk if stage >= 2 else whole)
        held["optimizer"] += (2 * state + (state if size < state and stage != 3 else 0)) * share
    return held


def held_tensors(slots: list, shards: list) -> dict[str, list[torch.Tensor]]:
    """Return all tensors that a `ZeroOptimizer` and its module hold now, by what they are; views of each other, too."""
    params = [slot.param for slot in slots if not is_absent(slot.param)]
    grads = [slot.param.grad for slot in slots if slot.param.grad is not None]
    return {
        "parameters": [t for s in shards for t in (s.params, s.unit.data)] + params,
        "gradients": [t for s in shards for t in (s.grad, s.unit.memory)] + grads,
        "optimizer": [tensor for shard in shards for tensor in shard.own_tensors()],
    }


def held_bytes(slots: list, shards: list) -> dict[str, tuple[int, int]]:
    """Return (logical, live) bytes of parameters, gradients and optimizer state that a `ZeroOptimizer` holds now.

    Logical is what the stage says: whole flat units or shards, padding included. Live are all storages: of units, of
    shards, and behind the module's own tensors; none of what is not there now. In stage 3 the masters are what there is
    of the parameters.
    """
    share = {
        "parameters": [s.params if s.stage >= 3 else s.unit.data for s in shards],
        "gradients": [s.grad if s.stage >= 2 else s.unit.grad for s in shards],
        "optimizer": [tensor for shard in shards for tensor in shard.own_tensors()],
    }
    held = held_tensors(slots, shards)
    return {name: (logical_bytes(share[name]), live_bytes(held[name])) for name in share}
