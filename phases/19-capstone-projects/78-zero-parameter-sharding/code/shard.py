"""`Shard`: this rank's part of a flat unit: the optimizer state of its elements, and their update."""

import torch
from adam import BLOCK, AdamSettings, adam_step, fused_adam_steps
from comm import Comm
from counter import StepCounter
from flat import FlatUnit

GPU_BLOCK = 1 << 26  # elements updated by one call: bounds what conversions of bf16 need in passing
ROW = 1 << 16  # elements whose norm is taken at once


class Shard:
    """This rank's part of one flat unit: a master copy of its parameters and both moments, in fp32.

    Parameters of a wider dtype (float64) have their state in that dtype. Where the dtypes are the same, the master is
    no copy: it is this part of the parameters.

    `params` and `grad` are views of the unit's. From stage 2 on, `grad` has memory of its own. In stage 3 the master is
    all that there is of the parameters while they are not gathered: `params` is the master, also if they are bf16.

    `has_grad`: has a mean arrived in this step (from stage 2 on)? `own_bad` (1,): 1 if this rank's own gradient was not
    finite; None where the reduction leaves that to be seen.
    """

    def __init__(self, unit: FlatUnit, comm: Comm, stage: int = 1):
        size = unit.padded // comm.world_size
        self.stage, self.unit, self.start, self.end = stage, unit, comm.rank * size, (comm.rank + 1) * size
        self.params, self.grad = unit.data[self.start : self.end], unit.grad[self.start : self.end]  # views
        self.has_grad, self.own_bad = False, None
        if stage >= 2:
            self.grad = torch.empty_like(self.grad)
        self.master = self.params.to(torch.promote_types(unit.dtype, torch.float32), copy=stage >= 3)
        if stage >= 3:
            self.params = self.master
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.live: list[tuple[int, int]] = []
        self.ranges: list[tuple[int, int, int]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer state by name."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def own_tensors(self) -> list[torch.Tensor]:
        """Return the state that is not part of the parameters."""
        return [tensor for tensor in self.tensors().values() if tensor is not self.params]

    def follow(self, group_of: dict) -> None:
        """Note which elements require a gradient now, neighbours joined. `group_of` says each parameter's group.

        `live`: (start, end) in the unit, what has to travel. `ranges`: (start, end, index of the group), counted from
        the shard's start, where Adam runs: each element with its own group's settings.
        """
        self.live, self.ranges = [], []
        for slot in self.unit.slots:
            if slot.param.requires_grad:
                _append(self.live, slot.start, slot.end)
                start, end = max(slot.start, self.start), min(slot.end, self.end)
                _append(self.ranges, start - self.start, end - self.start, group_of[slot.param])

    def refresh_master(self, part: slice = slice(None)) -> None:
        """Follow what was written into the parameters; where they are still the master, rounded, it keeps its bits."""
        if self.master is not self.params:
            adopt(self.params[part], self.master[part])

    def update(self, settings: list[AdamSettings], counter: StepCounter, fused: bool) -> None:
        """Adam on the master, block by block; then the parameters take its values, rounded to their dtype."""
        size = BLOCK if self.master.is_cpu else GPU_BLOCK
        for begin in range(0, len(self.master), size):
            block = slice(begin, begin + size)
            self.refresh_master(block)
            for index, chosen in enumerate(settings):
                parts = [
                    slice(max(start, begin), min(end, begin + size))
                    for start, end, group in self.ranges
                    if group == index and start < begin + size and end > begin
                ]
                columns = [
                    [tensor[part] for part in parts]
                    for tensor in (self.master, self.grad, self.exp_avg, self.exp_avg_sq)
                ]
                if fused and parts:
                    fused_adam_steps(*columns, counter.taken, chosen, skip=counter.bad)
                elif parts:
                    for row in zip(*columns, strict=True):
                        adam_step(*row, counter.steps, chosen)
            if self.master is not self.params:
                self.params[block].copy_(self.master[block])


def adopt(written: torch.Tensor, master: torch.Tensor) -> None:
    """Make `master` what was written; where that is still the master, rounded, it keeps its bits."""
    unchanged = written == master.to(written.dtype)
    torch.where(unchanged, master, written, out=master)


def row_norms(flat: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the p-norms of (n,) elements in rows of ROW, (n / ROW, rounded up): they combine as those of shards do.

    Not one norm of all: on a CPU torch adds one by one, and what is added to a large sum is lost. Of 50 million fp32
    squares that is 0.8 %.
    """
    whole = len(flat) // ROW * ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, ROW), p, dim=1, dtype=dtype)]
    if whole < len(flat):
        norms.append(torch.linalg.vector_norm(flat[whole:], p, dtype=dtype).view(1))
    return torch.cat(norms)


def build_units(plan: list[list], comm: Comm, stage: int, overlap: bool) -> tuple[list[FlatUnit], list[Shard]]:
    """Return flat units for lists of (name, parameter), whose memory the parameters move into, and this rank's shards.

    What is freed now and then is made with torch.empty: memory from `comm.empty` stays.
    """

    def fleeting(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=comm.device)

    units, shards = [], []
    for named in plan:
        unit = FlatUnit(named, comm, multiple=comm.world_size, empty=fleeting if overlap or stage >= 2 else None)
        unit.own_parameters(fleeting if stage >= 3 else comm.empty)
        shards.append(Shard(unit, comm, stage))
        units.append(unit)
    return units, shards


def _append(ranges: list[tuple], start: int, end: int, *kind: int) -> None:
    """Add a range, unless it is empty; as a part of the last one if that ends where this begins, of the same kind."""
    if start < end:
        if ranges and ranges[-1][1:] == (start, *kind):
            start = ranges.pop()[0]
        ranges.append((start, end, *kind))
