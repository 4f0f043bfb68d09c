"""ZeRO stage 1: every rank keeps the optimizer state of one N-th of the parameters, and updates only those.

A step is: reduce-scatter the gradients (each rank gets the mean of its shard), Adam on the shard, all-gather the
parameters. On the wire that is exactly what one all-reduce costs; in memory the optimizer state shrinks N times.
"""

import logging
from contextlib import nullcontext

import torch
import zero_state
from adam import AdamSettings
from agreement import Agreement
from blocks import check_stage, plan_blocks
from comm import Comm, TorchComm, Work
from counter import StepCounter, blame, not_finite
from flat import plan_units, sync_module, trainable_parameters
from gathering import Gathering
from gradients import Gradients
from groups import group_facts, split_groups
from memory import check_whole, held_bytes, held_tensors, logical_bytes
from mesh import must_agree
from module_watch import ModuleWatch
from optimizer_base import OptimizerBase, hooked_step
from overlap import cap_bytes
from routes import gather_from_shards
from shard import Shard, build_units, row_norms
from torch import nn
from torch.autograd.graph import increment_version

log = logging.getLogger(__name__)


class ZeroOptimizer(OptimizerBase):
    """AdamW whose state is sharded over the ranks of a group. Also averages the gradients: do not wrap in DDP.

    The module's parameters and gradients become views of flat buffers, one a dtype, padded to a multiple of N. All
    ranks begin with rank 0's values. After several `backward()` calls one `step()` communicates once. A parameter that
    requires a gradient but got none counts as zeros; one that is frozen (requires_grad False) neither moves nor
    travels. All ranks must freeze the same ones before the same step.

    `bucket_cap_mb` cuts the buffers into units of at most so many MiB, each a collective of its own (None: no limit;
    with `overlap` 100). `overlap`: a unit leaves as soon as backward has its last gradient. Then all backwards of a
    step but the last belong into `no_sync()`.

    `groups`: parameter groups as for torch's optimizers (`decay_groups` makes the usual two). `fused`: PyTorch's fused
    kernel does the update, faster and rounded differently; None means on a GPU only.

    If any rank's gradient is not finite, no rank steps: `skipped_steps` counts these, `last_skip` says whose it was.
    After `max_skipped` in a row every rank raises RuntimeError. With the fused kernel on a GPU nobody waits to learn
    whether a step was skipped: there `last_skip` and the error come with the next step whose number `max_skipped`
    divides. A step is treated alike on which the ranks' settings differ, or in stage 3 the blocks that they gathered;
    where somebody waits it is a ValueError at once, on all ranks, with nothing changed.

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
        groups: list[dict] | None = None,
        fused: bool | None = None,
        max_skipped: int = 10,
        bucket_cap_mb: float | None = None,
        overlap: bool = False,
        blocks: list[nn.Module] | None = None,
    ):
        AdamSettings(lr, betas, eps, weight_decay).check()
        check_whole("max_skipped", max_skipped, least=1)
        cap = cap_bytes(bucket_cap_mb, overlap)
        check_stage(stage, bucket_cap_mb, blocks, module)
        named = [(name, param) for name, param in trainable_parameters(module) if param.numel()]
        if not named:
            raise ValueError(f"all parameters of {type(module).__name__} that require a gradient are empty")
        comm = comm or TorchComm()
        if (world_size, rank) != (comm.world_size, comm.rank):
            there = f"{comm.rank} of {comm.world_size}"
            raise ValueError(f"rank {rank!r} of {world_size!r} ranks, but in the group it is {there}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(defaults, split_groups(module, named, groups, defaults))
        self._settings()
        if stage == 1:
            plan, chain = [list(reversed(unit)) for unit in plan_units(named, cap)], []  # inside in the module's order
        else:
            plan, chain = plan_blocks(module, named, blocks)
        facts = defaults | {"fused": fused, "max_skipped": max_skipped, "stage": stage, "overlap": bool(overlap)}
        facts |= {"bucket_cap": cap} if stage == 1 else {"units": [[name for name, _ in unit] for unit in plan]}
        facts |= {} if groups is None else {"groups": group_facts(named, self.param_groups)}
        must_agree(comm, "the optimizer", facts)
        sync_module(module, comm)
        self.comm = comm.unchecked()  # the plan is agreed: it follows from names, shapes and dtypes
        self.stage, (self.units, self.shards) = stage, build_units(plan, self.comm, stage, overlap)
        self.fused = comm.device.type == "cuda" if fused is None else bool(fused)
        self.counter, self.max_skipped, self.last_skip = StepCounter(comm.device), max_skipped, None
        self._lazy = self.fused and comm.device.type == "cuda"
        self._calls, self._bad = 0, None  # _bad: what the norm has told, if there was one
        self._slots = [slot for unit in self.units for slot in unit.slots]
        self.group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        self.watch = ModuleWatch(module, self._slots, self.comm, stage < 3, self._follow)
        self.agreement = Agreement(self.comm, self.units)
        self.gradients = Gradients(self.units, self.shards, self.comm, stage, overlap, self.watch.check)
        parts = module, self.units, self.shards, self.comm, self.gradients, self.agreement
        self.gathering = Gathering(chain, *parts) if stage == 3 else None
        self._follow()
        self.zero_grad()

    @property
    def steps(self) -> int:
        """Steps taken. On a GPU, reading it waits for the device."""
        return self.counter.steps

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped. On a GPU, reading it waits for the device."""
        return self.counter.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; what `set_to_none` says makes no difference."""
        self._bad = None
        self.gradients.forget()
        if self.gathering is not None and self.gathering.in_backward:
            self.gathering.reset()  # a backward has failed

    def no_sync(self):
        """Accumulate gradients without communication; the next backward outside launches it.

        Matters with `overlap`, and from stage 2 on, where gradients and parameters are whole inside.
        """
        overlap = self.gradients.overlap
        return nullcontext() if overlap is None else overlap.paused()

    def gathered(self):
        """Have all parameters there, to be read or written: outside, stage 3 has them only while they compute.

        All ranks enter and leave together, and write the same values. Inside, `step` is an error.
        """
        return nullcontext() if self.gathering is None else self.gathering.opened()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the mean gradient to a global norm of at most `max_norm`; return its norm before. Call before `step`.

        Norms of shards combine as sums of p-th powers (p = inf: as a maximum). Padding is zero and does not count. A
        norm that is not finite scales nothing, and makes `step` skip: it is the same on all ranks, so none has to ask.
        """
        norm_type = float(norm_type)  # "inf" is one, too
        if not max_norm >= 0 or not norm_type > 0:
            raise ValueError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm!r}, {norm_type!r}")
        settings = self._settings()
        self.reduce_gradients()
        norms = torch.cat([row_norms(shard.grad, norm_type, shard.master.dtype) for shard in self.shards])
        if norm_type == float("inf"):
            total = self.agreement.reduce(norms.max(), "max", settings)
        else:
            total = self.agreement.reduce(norms.pow(norm_type).sum(), "sum", settings).pow(1 / norm_type)
        scale = (max_norm / (total[0] + 1e-6)).clamp(max=1.0)  # the 1e-6 is torch's: a zero gradient stays zero
        scale = torch.where(total[0].isfinite(), scale, 1.0)
        for shard in self.shards:
            shard.grad.mul_(scale)
        self._bad = (~total.isfinite()).float()
        return total[0]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give each rank the mean gradient of its shard. `step` and `clip_grad_norm_` call it; twice does no harm.

        The parameters' own gradients are used up by it: they are None until the next backward or `zero_grad`. Raises
        RuntimeError if a gradient came after this call and before `step`: it would be lost.
        """
        self.gradients.reduce()

    def _follow(self) -> None:
        for shard in self.shards:
            shard.follow(self.group_of)

    def _settings(self) -> list[AdamSettings]:
        return [AdamSettings.of(group) for group in self.param_groups]

    @hooked_step
    @torch.no_grad()
    def step(self, closure=None) -> torch.Tensor | None:
        """Reduce-scatter, Adam on this rank's shard, all-gather. Skipped by all ranks if a gradient is not finite.

        `closure`, if given, computes the loss and its gradients first; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings = self._settings()
        if self.gathering is not None:
            self.gathering.reset()
            self.gathering.insist_on_absence()
        self.reduce_gradients()
        bad, self._bad = self._any_bad() if self._bad is None else self._bad, None
        if not self._lazy:
            self.agreement.insist(settings)
        self.counter.record(torch.maximum(bad, self.agreement.differs))
        self._calls += 1
        self.gradients.start_round()
        if self._lazy or not self.counter.bad.item():
            works = []
            for shard in self.shards:
                shard.update(settings, self.counter, self.fused)
                works += self._gather(shard)  # on its way while the next one is updated
            for work in works:
                work.wait()
        try:
            if not self._lazy or self._calls % self.max_skipped == 0:
                self._report_skips()
        finally:
            self.gradients.free()
            self._outdate_graphs()
        return loss

    def _any_bad(self) -> torch.Tensor:
        """Ask all ranks: those that disagreed on skipping a step would hang in the next collective."""
        return self.agreement.reduce(not_finite([shard.grad for shard in self.shards]), "max", self._settings())

    def _report_skips(self) -> None:
        if not self.counter.bad.item():
            return
        self.agreement.insist(self._settings())
        in_a_row = self.counter.in_a_row
        self.last_skip = f"step {self.steps + 1}: {blame(self.comm, self.shards)}"
        if self.comm.rank == 0:
            log.warning("skipped, %d in a row: %s", in_a_row, self.last_skip)
        if in_a_row >= self.max_skipped:
            raise RuntimeError(f"{in_a_row} steps in a row were skipped; the last was {self.last_skip}")

    def _outdate_graphs(self) -> None:
        """Have autograd refuse graphs from before the parameters changed."""
        increment_version([slot.param for slot in self._slots])
        if self.gathering is not None:
            self.gathering.graphs_outdated()

    def _gather(self, shard: Shard) -> list[Work]:
        return gather_from_shards(self.comm, shard) if self.stage < 3 else []  # stage 3: before the next forward

    def shard_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank, masters included: 12 ceil(P/N), summed over units."""
        return logical_bytes([t for shard in self.shards for t in shard.tensors().values()])

    def memory(self) -> dict[str, tuple[int, int]]:
        """Return (logical, live) bytes on this rank of parameters, gradients and optimizer state, padding included.

        Masters that are part of the parameters count there. Live bytes count the storages behind the module's own
        tensors too: they equal the logical ones only if nothing is held twice.
        """
        return held_bytes(self._slots, self.shards)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return all tensors there are now of parameters, gradients and optimizer state; views of each other, too."""
        return held_tensors(self._slots, self.shards)

    def layout(self) -> list[dict]:
        """Return which elements [start, end) of each flat unit this rank's state holds; padding is left out."""
        return zero_state.layout(self)

    def state_dict(self) -> dict:
        """Return this rank's shard without padding, its layout, the groups and counts. Each rank saves its own.

        The tensors are the live ones: copy them to keep them. All else is JSON.
        """
        self.call_hooks("state_dict_pre")
        return self.call_hooks("state_dict_post", zero_state.collect(self))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Restore this rank's shard and drop gradients; parameters follow masters on all ranks. All ranks call it.

        Raises the same ValueError on all ranks, with nothing changed, if on any of them the state is not this rank's
        (layout, parameter names, groups, shapes, dtypes), or if the ranks bring different settings or counts.
        """
        state_dict = self.call_hooks("load_state_dict_pre", state_dict)
        if self.gathering is not None:
            self.gathering.reset()
        zero_state.restore(self, state_dict)
        self.agreement.start_anew()
        if self.gathering is not None:
            self.gathering.forget_writes()
        for shard in self.shards if self.stage < 3 else ():
            for work in gather_from_shards(self.comm, shard, everything=True):
                work.wait()
        self._outdate_graphs()
        self.zero_grad()
        self.call_hooks("load_state_dict_post")
