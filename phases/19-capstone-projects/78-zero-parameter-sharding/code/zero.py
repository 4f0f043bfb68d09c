"""ZeRO stage 1: every rank keeps the optimizer state of one N-th of the parameters, and updates only those.

A step is: reduce-scatter the gradients (each rank gets the mean of its shard), Adam on the shard, all-gather the
parameters. On the wire that is exactly what one all-reduce costs; in memory the optimizer state shrinks N times.
"""

from itertools import chain, zip_longest

import torch
from adam import AdamSettings, adam_step
from comm import Comm, TorchComm
from flat import FlatUnit, plan_units, sync_module, trainable_parameters
from memory import check_whole, live_bytes, logical_bytes
from mesh import must_agree
from torch import nn


class Shard:
    """This rank's part of one flat unit: a master copy of its parameters and both moments, in fp32.

    Parameters of a wider dtype (float64) have their state in that dtype.
    """

    def __init__(self, unit: FlatUnit, rank: int, world_size: int):
        size = unit.padded // world_size
        self.unit, self.start, self.end = unit, rank * size, (rank + 1) * size
        self.params, self.grad = unit.data[self.start : self.end], unit.grad[self.start : self.end]  # views
        self.master = self.params.to(torch.promote_types(unit.dtype, torch.float32), copy=True)
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

    def refresh_master(self) -> None:
        """Follow what was written into the parameters; where they are still the master, rounded, it keeps its bits."""
        if self.params.dtype == self.master.dtype:
            self.master.copy_(self.params)
        else:
            unchanged = self.params == self.master.to(self.params.dtype)
            self.master.copy_(torch.where(unchanged, self.master, self.params))

    def update(self, step: int, settings: AdamSettings) -> None:
        """Adam on the master; then the parameters take its values, rounded to their dtype."""
        self.refresh_master()
        for start, end in self.trainable_ranges():
            part = slice(start, end)
            adam_step(self.master[part], self.grad[part], self.exp_avg[part], self.exp_avg_sq[part], step, settings)
        self.params.copy_(self.master)


class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW whose state is sharded over the ranks of a group. Also averages the gradients: do not wrap in DDP.

    The module's parameters and gradients become views of flat buffers, one a dtype, padded to a multiple of N. All
    ranks begin with rank 0's values. After several `backward()` calls one `step()` communicates once. A parameter that
    requires a gradient but got none counts as zeros; one that is frozen (requires_grad False) does not move.

    If any rank's gradient is not finite, no rank steps: `skipped_steps` counts these.

    Raises ValueError, before anything is changed, if `world_size` or `rank` is not the group's, a setting is out of
    range, the module has nothing to train or a complex parameter, or the ranks' modules or settings differ.
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
        comm: Comm | None = None,
    ):
        AdamSettings(lr, betas, eps, weight_decay).check()
        named = [(name, param) for name, param in trainable_parameters(module) if param.numel()]
        if not named:
            raise ValueError(f"all parameters of {type(module).__name__} that require a gradient are empty")
        comm = comm or TorchComm()
        if (world_size, rank) != (comm.world_size, comm.rank):
            raise ValueError(
                f"rank {rank!r} of {world_size!r} ranks, but in the group it is {comm.rank} of {comm.world_size}"
            )
        if stage != 1:
            raise ValueError(f"stage must be 1, got {stage!r}")
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        must_agree(comm, "the optimizer", settings)
        sync_module(module, comm)
        self.comm = comm.unchecked()  # the plan is agreed: it follows from names, shapes and dtypes
        plan = [list(reversed(unit)) for unit in plan_units(named, cap_bytes=1 << 62)]  # one unit a dtype, in order
        self.units = [FlatUnit(unit, self.comm, multiple=comm.world_size) for unit in plan]
        for unit in self.units:
            unit.own_parameters()
        self.shards = [Shard(unit, comm.rank, comm.world_size) for unit in self.units]
        self.steps, self.skipped_steps, self._reduced = 0, 0, False
        self._frozen_at_start = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        # What schedulers need of a torch Optimizer. Its own __init__ would import torch._dynamo: 1.2 s.
        self.defaults, self.state = settings, {}
        self.param_groups = [{"params": [param for _, param in named], **settings}]
        self.zero_grad()

    def add_param_group(self, param_group: dict) -> None:
        """Raise ValueError: all parameters are one group."""
        raise ValueError("ZeroOptimizer has one parameter group, the module's trainable parameters")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients. They stay views of the flat buffers, whatever `set_to_none` says."""
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
        norm_type = float(norm_type)  # "inf" is one, too
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r}, {norm_type!r}")
        self.reduce_gradients()
        norms = torch.stack([torch.linalg.vector_norm(s.grad, norm_type, dtype=s.master.dtype) for s in self.shards])
        if norm_type == float("inf"):
            total = norms.max().reshape(1)
            self.comm.all_reduce(total, op="max")
        else:
            total = norms.pow(norm_type).sum().reshape(1)
            self.comm.all_reduce(total)
            total = total.pow(1 / norm_type)
        scale = (max_norm / (total[0] + 1e-6)).clamp(max=1.0)  # the 1e-6 is torch's: a zero gradient stays zero
        for shard in self.shards:
            shard.grad.mul_(scale)
        return total[0]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give each rank the mean gradient of its shard. `step` and `clip_grad_norm_` call it; twice does no harm.

        The parameters' own gradients are used up by it: they are None until the next backward or `zero_grad`.
        Raises RuntimeError if a gradient came after this call and before `step`: it would be lost.
        """
        if self._reduced:
            for slot in (slot for unit in self.units for slot in unit.slots):
                if slot.param.grad is not None:
                    raise RuntimeError(f"{slot.name} got a gradient after all were reduced: step or zero_grad first")
            return
        self._check_parameters()
        for unit, shard in zip(self.units, self.shards, strict=True):
            unit.grad[unit.numel :].zero_()  # clipping by a norm that is NaN makes the padding NaN, too
            for index, slot in enumerate(unit.slots):
                if slot.param.grad is None:
                    unit.views[index].zero_()
                else:
                    unit.take_grad(index)
                slot.param.grad = None
            self.comm.reduce_scatter(shard.grad, unit.grad, op="avg")
        self._reduced = True

    def _check_parameters(self) -> None:
        """Raise ValueError if the module has changed in a way that the flat buffers cannot follow."""
        for name, param in self._frozen_at_start:
            if param.requires_grad:
                raise ValueError(f"{name} was frozen when the optimizer was built: build a new one to train it")
        for unit in self.units:
            start, size = unit.data.data_ptr(), unit.data.element_size()
            for slot in unit.slots:
                if slot.param.data_ptr() != start + slot.start * size:
                    raise ValueError(f"{slot.name} has left the flat buffer: move and convert a module, then wrap it")

    @torch.no_grad()
    def step(self, closure=None) -> torch.Tensor | None:
        """Reduce-scatter, Adam on this rank's shard, all-gather. Skipped by all ranks if a gradient is not finite.

        `closure`, if given, computes the loss and its gradients first; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self._reduced = False
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
        extremes = [torch.isfinite(x) for shard in self.shards for x in shard.grad.aminmax()]  # NaN shows in both
        bad = (~torch.stack(extremes)).any().float().reshape(1)
        self.comm.all_reduce(bad, op="max")
        return bad.item() == 0

    def _gather_parameters(self) -> None:
        for unit, shard in zip(self.units, self.shards, strict=True):
            self.comm.all_gather(unit.data, shard.params)

    def shard_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank: 12 ceil(P/N), summed over units."""
        return logical_bytes([t for shard in self.shards for t in shard.tensors().values()])

    def memory(self) -> dict[str, tuple[int, int]]:
        """Return (logical, live) bytes on this rank of parameters, gradients and optimizer state, padding included.

        Live bytes count the storages behind the module's own tensors too: they equal the logical ones only if nothing
        is held twice.
        """
        slots = [slot for unit in self.units for slot in unit.slots]
        own_grads = [slot.param.grad for slot in slots if slot.param.grad is not None]
        held = {
            "parameters": ([unit.data for unit in self.units], [slot.param for slot in slots]),
            "gradients": ([unit.grad for unit in self.units], own_grads),
            "optimizer": ([tensor for shard in self.shards for tensor in shard.tensors().values()], []),
        }
        return {name: (logical_bytes(flat), live_bytes(flat + own)) for name, (flat, own) in held.items()}

    def layout(self) -> list[dict]:
        """Return which elements [start, end) of each flat unit this rank's state holds; padding is left out."""
        layout = []
        for index, shard in enumerate(self.shards):
            total = shard.unit.numel
            start, end = min(shard.start, total), min(shard.end, total)
            layout.append({"unit": f"unit{index}", "start": start, "end": end, "total": total})
        return layout

    @torch.no_grad()
    def state_dict(self) -> dict:
        """Return this rank's shard without padding, its layout, and the settings. Each rank saves its own.

        The tensors are the live ones: copy them to keep them. All else is JSON.
        """
        state = {}
        for shard, place in zip(self.shards, self.layout(), strict=True):
            shard.refresh_master()
            held = place["end"] - place["start"]
            state[place["unit"]] = {name: tensor[:held] for name, tensor in shard.tensors().items()}
        return {
            "state": state,
            "layout": self.layout(),
            "names": [[slot.name for slot in unit.slots] for unit in self.units],
            "settings": {key: value for key, value in self.param_groups[0].items() if key != "params"},
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Restore this rank's shard; the parameters follow the masters on all ranks. All ranks call it.

        Raises the same ValueError on all ranks, with nothing changed, if on any of them the state is not this rank's
        (layout, parameter names, shapes, dtypes), or if the ranks bring different settings or counts.
        """
        mine = self.state_dict()
        faults = self.comm.agree(_fault_in(state_dict, mine))
        if any(faults):
            raise ValueError("; ".join(f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault))
        common = {key: state_dict[key] for key in ("settings", "steps", "skipped_steps")}
        must_agree(self.comm, "the optimizer's state", common)
        for unit, tensors in mine["state"].items():
            for name, tensor in tensors.items():
                tensor.copy_(state_dict["state"][unit][name])
        self.steps, self.skipped_steps = common["steps"], common["skipped_steps"]
        self.param_groups[0].update(common["settings"], betas=tuple(common["settings"]["betas"]))
        for shard in self.shards:
            shard.params.copy_(shard.master)
        self._gather_parameters()


def _fault_in(saved: dict, mine: dict) -> str | None:
    """Say what about a saved state does not fit this rank's own; None if all of it does."""
    try:
        if saved["layout"] != mine["layout"]:
            return f"layout must be {mine['layout']}, got {saved['layout']}"
        for name, found in zip_longest(chain(*mine["names"]), chain(*saved["names"])):
            if name != found:
                return f"the state has parameter {found} where this model has {name}"
        if _kinds(saved["state"]) != _kinds(mine["state"]):
            return f"state must be {_kinds(mine['state'])}, got {_kinds(saved['state'])}"
        for key in ("steps", "skipped_steps"):
            check_whole(key, saved[key], least=0)
        AdamSettings(**{key: saved["settings"][key] for key in ("lr", "betas", "eps", "weight_decay")}).check()
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _kinds(state: dict) -> dict:
    return {unit: {name: (str(t.dtype), tuple(t.shape)) for name, t in named.items()} for unit, named in state.items()}
