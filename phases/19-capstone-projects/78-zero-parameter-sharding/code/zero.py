"""ZeRO stage 1: every rank keeps the optimizer state of one N-th of the parameters, and updates only those.

A step is: reduce-scatter the gradients (each rank gets the mean of its shard), Adam on the shard, all-gather the
parameters. On the wire that is exactly what one all-reduce costs; in memory the optimizer state shrinks N times.
"""

from collections import OrderedDict

import memory
import torch
from adam import AdamSettings, adam_step
from comm import TorchComm
from flat import FlatUnit, plan_units, sync_module, trainable_parameters
from torch import nn


class Shard:
    """This rank's part of one flat unit: an fp32 master of its parameters, and both moments."""

    def __init__(self, unit: FlatUnit, rank: int, world_size: int):
        size = unit.padded // world_size
        self.unit, self.start, self.end = unit, rank * size, (rank + 1) * size
        self.params, self.grad = unit.data[self.start : self.end], unit.grad[self.start : self.end]  # views
        self.master = self.params.float() if self.params.dtype != torch.float32 else self.params.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer state by name."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def trainable_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of the shard, joined where they touch, whose parameters require a gradient now."""
        ranges: list[tuple[int, int]] = []
        for slot in self.unit.slots:
            start, end = max(slot.start, self.start) - self.start, min(slot.end, self.end) - self.start
            if slot.param.requires_grad and start < end:
                start = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
                ranges.append((start, end))
        return ranges

    def update(self, step: int, settings: AdamSettings) -> None:
        """Adam on the master; then the parameters take its values, rounded to their dtype."""
        for start, end in self.trainable_ranges():
            part = slice(start, end)
            grad = self.grad[part].float()
            adam_step(self.master[part], grad, self.exp_avg[part], self.exp_avg_sq[part], step, settings)
            self.params[part].copy_(self.master[part])


class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW whose state is sharded over the ranks of a group. Also averages the gradients: do not wrap in DDP.

    The module's parameters and gradients become views of flat buffers, one a dtype, padded to a multiple of N. All
    ranks begin with rank 0's values. After several `backward()` calls one `step()` communicates once. A parameter that
    requires a gradient but got none counts as zeros; one that is frozen (requires_grad False) does not move.

    If any rank's gradient is not finite, no rank steps: `skipped_steps` counts these.

    Raises ValueError, before anything is changed, if `world_size` or `rank` is not the group's, a setting is out of
    range, the module has nothing to train or a complex parameter, or the ranks' modules differ.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stage: int = 1,
        comm=None,
    ):
        AdamSettings(lr, betas, eps, weight_decay).check()
        named = trainable_parameters(module)
        comm = comm or TorchComm()
        if (world_size, rank) != (comm.world_size, comm.rank):
            raise ValueError(
                f"rank {rank!r} of {world_size!r} ranks, but in the group it is {comm.rank} of {comm.world_size}"
            )
        if stage != 1:
            raise ValueError(f"stage must be 1, got {stage!r}")
        sync_module(module, comm)
        self.comm = comm.unchecked()  # the plan is agreed: it follows from names, shapes and dtypes
        plan = [list(reversed(unit)) for unit in plan_units(named, cap_bytes=1 << 62)]  # one unit a dtype, in order
        self.units = [FlatUnit(unit, self.comm, multiple=world_size) for unit in plan]
        for unit in self.units:
            unit.own_parameters()
        self.shards = [Shard(unit, rank, world_size) for unit in self.units]
        self.steps, self.skipped_steps, self._reduced = 0, 0, False
        self._init_optimizer(named, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        module.register_load_state_dict_post_hook(lambda *_: self.refresh_masters())
        self.zero_grad()

    def _init_optimizer(self, named: list, settings: dict) -> None:
        """Be a torch Optimizer for schedulers, without its __init__, which would import torch._dynamo (1.2 s)."""
        self.defaults, self.state = settings, {}
        self.param_groups = [{"params": [param for _, param in named], **settings}]
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero all gradients; they stay views of the flat buffers, whatever `set_to_none` says."""
        for unit in self.units:
            unit.grad.zero_()
            for slot, view in zip(unit.slots, unit.views, strict=True):
                slot.param.grad = view if slot.param.requires_grad else None
        self._reduced = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the mean gradient to a global norm of at most `max_norm`; return its norm before. Call before `step`.

        Norms of shards combine as sums of p-th powers (p = inf: as a maximum). Padding is zero and does not count.
        """
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r}, {norm_type!r}")
        self.reduce_gradients()
        norms = torch.stack([torch.linalg.vector_norm(s.grad.float(), norm_type) for s in self.shards])
        if norm_type == float("inf"):
            total = norms.max().reshape(1)
            self.comm.all_reduce(total, op="max")
        else:
            total = norms.pow(norm_type).sum().reshape(1)
            self.comm.all_reduce(total)
            total = total.pow(1 / norm_type)
        for shard in self.shards:
            shard.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total[0]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give each rank the mean gradient of its shard. `step` and `clip_grad_norm_` call it; twice does no harm."""
        if self._reduced:
            return
        for unit, shard in zip(self.units, self.shards, strict=True):
            for index, slot in enumerate(unit.slots):
                if slot.param.grad is not None:
                    unit.take_grad(index)
            self.comm.reduce_scatter(shard.grad, unit.grad, op="avg")
        self._reduced = True

    @torch.no_grad()
    def step(self, closure=None):
        """Reduce-scatter, Adam on this rank's shard, all-gather. Skipped by all ranks if a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        if self._all_finite():
            self.steps += 1
            group = self.param_groups[0]
            settings = AdamSettings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for shard in self.shards:
                shard.update(self.steps, settings)
            self._gather_parameters()
        else:
            self.skipped_steps += 1
        return loss

    def _all_finite(self) -> bool:
        """Ask all ranks: those that disagreed on skipping a step would hang in the next collective."""
        bad = torch.stack([~torch.isfinite(shard.grad).all() for shard in self.shards]).any().float().reshape(1)
        self.comm.all_reduce(bad, op="max")
        return bad.item() == 0

    def _gather_parameters(self) -> None:
        for unit, shard in zip(self.units, self.shards, strict=True):
            self.comm.all_gather(unit.data, shard.params)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the masters from the parameters: called after `module.load_state_dict`."""
        for shard in self.shards:
            shard.master.copy_(shard.params)

    def shard_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank: 12 ceil(P/N), summed over units."""
        return memory.logical_bytes([t for shard in self.shards for t in shard.tensors().values()])

    def memory(self) -> dict[str, tuple[int, int]]:
        """Return (logical, live) bytes on this rank of parameters, gradients and optimizer state, padding included."""
        held = {
            "parameters": [unit.data for unit in self.units],
            "gradients": [unit.grad for unit in self.units],
            "optimizer": [tensor for shard in self.shards for tensor in shard.tensors().values()],
        }
        return {name: (memory.logical_bytes(tensors), memory.live_bytes(tensors)) for name, tensors in held.items()}

    def layout(self) -> list[dict]:
        """Return which elements of each flat unit this rank's state holds: [start, end) of `total`, padding left out."""
        return [
            {
                "unit": f"unit{index}",
                "start": min(shard.start, shard.unit.numel),
                "end": min(shard.end, shard.unit.numel),
                "total": shard.unit.numel,
            }
            for index, shard in enumerate(self.shards)
        ]

    def state_dict(self) -> dict:
        """Return this rank's shard without padding, its layout, and the settings. Each rank saves its own."""
        state = {}
        for shard, place in zip(self.shards, self.layout(), strict=True):
            held = place["end"] - place["start"]
            state[place["unit"]] = {name: tensor[:held] for name, tensor in shard.tensors().items()}
        settings = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        counts = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        return {"state": state, "layout": self.layout(), "settings": settings, **counts}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Restore this rank's shard; the parameters follow the masters on all ranks. All ranks call it.

        Raises ValueError, with nothing changed, if the shard is of another layout, shape or dtype.
        """
        mine, saved = self.state_dict(), state_dict["state"]
        if state_dict["layout"] != mine["layout"]:
            raise ValueError(f"this rank's shard is {mine['layout']}, the state is for {state_dict['layout']}")
        pairs = [
            (name, live, saved[unit][name]) for unit in mine["state"] for name, live in mine["state"][unit].items()
        ]
        for name, live, tensor in pairs:
            if (tensor.shape, tensor.dtype) != (live.shape, live.dtype):
                expected = f"{live.dtype} {tuple(live.shape)}"
                raise ValueError(f"{name} must be {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
        for _, live, tensor in pairs:
            live.copy_(tensor)
        self.steps, self.skipped_steps = state_dict["steps"], state_dict["skipped_steps"]
        self.param_groups[0].update(state_dict["settings"], betas=tuple(state_dict["settings"]["betas"]))
        for shard in self.shards:
            shard.params.copy_(shard.master)
        self._gather_parameters()
