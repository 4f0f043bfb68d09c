"""Bytes held by each rank: what the formulas of ZeRO say, and what live tensors really hold."""

import torch


def shard_bounds(total: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """Return (start, end, chunk) of a rank's part of `total` elements: chunk = ceil(total / N), end <= total.

    The last ranks may hold less, or nothing; padded to `chunk`, all are equal.
    """
    if total < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"no shard {rank!r} of {total!r} elements over {world_size!r} ranks")
    chunk = -(-total // world_size)
    return min(rank * chunk, total), min((rank + 1) * chunk, total), chunk


def model_state_bytes(p_params: int, world_size: int, stage: int, param_bytes: int = 4) -> dict[str, int]:
    """Return bytes a rank holds of parameters, gradients and optimizer state (fp32 master and both Adam moments: 12).

    Stage 0 is plain data parallelism; stage 1 shards optimizer state, 2 gradients too, 3 parameters too. Source:
    Rajbhandari et al. 2020, with ceil(P/N) for a shard.
    """
    for name, value, least in (("p_params", p_params, 1), ("world_size", world_size, 1), ("stage", stage, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if stage > 3:
        raise ValueError(f"stage must be 0 to 3, got {stage}")
    chunk = -(-p_params // world_size)
    return {
        "parameters": param_bytes * (chunk if stage >= 3 else p_params),
        "gradients": param_bytes * (chunk if stage >= 2 else p_params),
        "optimizer": 12 * (chunk if stage >= 1 else p_params),
    }


def memory_table(p_params: int, world_size: int) -> str:
    """Return a table of bytes a rank for plain DDP and stages 1 to 3 in fp32, and how far stage 1 lowers the sum."""
    rows, totals = [], []
    for stage, name in enumerate(("vanilla DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        held = model_state_bytes(p_params, world_size, stage)
        totals.append(sum(held.values()))
        drop = 100 * (1 - totals[-1] / totals[0])
        rows.append([name, *(f"{n:,}" for n in (*held.values(), totals[-1])), f"{drop:.1f}%"])
    header = ["bytes a rank", "parameters", "gradients", "optimizer", "sum", "drop"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [header, *rows]]
    return "\n".join([*lines, f"drop: {100 * (1 - totals[1] / totals[0]):.1f}%"])


def logical_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of all elements of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def live_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the storages behind these tensors, each storage once however many views it has."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
