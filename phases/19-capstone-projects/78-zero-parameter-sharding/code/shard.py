"""`Shard`: this rank's part of a flat unit: the optimizer state of its elements, and their update."""

import torch
from adam import BLOCK, AdamSettings, adam_step, fused_adam_steps
from counter import StepCounter
from flat import FlatUnit

GPU_BLOCK = 1 << 26  # elements updated by one call: bounds what conversions of bf16 need in passing


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

    def trainable_ranges(self, group_of: dict) -> list[tuple[int, int, int]]:
        """Return (start, end, index of the group) of what requires a gradient now, counted from the shard's start.

        `group_of` says it for each parameter. Neighbours of one group are joined. The ranges are where Adam runs: each
        element with its own group's settings.
        """
        ranges: list[tuple[int, int, int]] = []
        for slot in self.unit.slots:
            start, end = max(slot.start, self.start) - self.start, min(slot.end, self.end) - self.start
            if slot.param.requires_grad and start < end:
                index = group_of[slot.param]
                if ranges and ranges[-1][1:] == (start, index):
                    start = ranges.pop()[0]
                ranges.append((start, end, index))
        return ranges

    def refresh_master(self, part: slice = slice(None)) -> None:
        """Follow what was written into the parameters; where they are still the master, rounded, it keeps its bits."""
        master, params = self.master[part], self.params[part]
        if params.dtype == master.dtype:
            master.copy_(params)
        else:
            unchanged = params == master.to(params.dtype)
            master.copy_(torch.where(unchanged, master, params))

    def update(self, group_of: dict, settings: list[AdamSettings], counter: StepCounter, fused: bool) -> None:
        """Adam on the master, block by block; then the parameters take its values, rounded to their dtype."""
        ranges, size = self.trainable_ranges(group_of), BLOCK if self.master.is_cpu else GPU_BLOCK
        for begin in range(0, len(self.master), size):
            block = slice(begin, begin + size)
            self.refresh_master(block)
            for index, chosen in enumerate(settings):
                parts = [
                    slice(max(start, begin), min(end, begin + size))
                    for start, end, group in ranges
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
            self.params[block].copy_(self.master[block])
