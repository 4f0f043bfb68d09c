"""`Gradients`: brings the gradients of flat units to the shards, and frees what is not needed (stage 2 and above)."""

from collections.abc import Callable

import torch
from comm import Comm
from counter import not_finite
from flat import FlatUnit
from overlap import Overlap
from residency import allocate, release
from routes import goes_whole, reduce_to_shards
from shard import Shard


class Gradients:
    """When units leave, and the memory they need.

    Stage 1: a rank's shard is a view of a unit's flat gradient. Backwards add to it; a step reduces once. With
    `overlap` a flat gradient has memory only from backward to the end of the step.

    Stage 2 and above: only from when its gradients are complete until they are reduced, and one unit has so at a
    time. Every backward outside `no_sync` reduces all units and adds the means to the shards.

    `begin()` is called before the first unit of a round leaves.
    """

    def __init__(self, units: list[FlatUnit], shards: list[Shard], comm: Comm, stage: int, overlap: bool, begin):
        self.units, self.shards, self.comm, self.begin = units, shards, comm, begin
        self.freed = stage > 1  # are gradients outside the shard, when they are reduced?
        self.fleeting = overlap or self.freed  # has a flat gradient memory only from backward to the end of a step?
        self.works: list[Callable[[], None]] = []  # launched, not waited for
        self.launched, self.reduced, self.arrived = 0, False, False
        at_end = self._backward_ended if self.freed else None
        self.overlap = Overlap(units, begin, self.launch, at_end, stage < 3) if overlap or self.freed else None

    def forget(self) -> None:
        """Drop all gradients and expect new ones."""
        self.start_round()
        for unit in self.units:
            if self.overlap is None:
                unit.grad.zero_()
            for slot, view in zip(unit.slots, unit.views, strict=True):
                slot.param.grad = view if self.overlap is None and slot.param.requires_grad else None
        self.free()

    def free(self) -> None:
        """Give back the memory of gradients that were used, or are not wanted."""
        if self.fleeting:
            for shard in self.shards:
                release(shard.unit.memory)
                release(shard.grad)

    def start_round(self) -> None:
        """Expect the gradients of a new step."""
        self._settle()  # where a backward was given up
        self.launched, self.reduced, self.arrived = 0, False, False
        for shard in self.shards:
            shard.has_grad = False
        if self.overlap is not None:
            self.overlap.reset()

    def reduce(self) -> None:
        """Give each rank the mean gradient of its shard: launch what has not left, wait for all. Again: do nothing.

        Raises RuntimeError, with the parameter's name, if a gradient has come since that would be lost.
        """
        if self.reduced or self.arrived:
            for slot in (slot for unit in self.units for slot in unit.slots):
                if slot.param.grad is not None:
                    raise RuntimeError(f"{slot.name} got a gradient after all were reduced: step or zero_grad first")
        else:
            self.begin()
            for number in range(self.launched, len(self.units)):
                self.launch(number)
            self._settle()
        self.reduced = True

    def backward_begins(self) -> None:
        """Begin a round, whether or not this rank will have a gradient. Stage 3, where all ranks do so at one point."""
        if self.overlap.enabled:
            self.overlap.start()

    def passed(self, number: int) -> None:
        """Let a unit leave: no gradient of it can come any more."""
        if self.overlap.enabled:
            self.overlap.passed(number)

    def _backward_ended(self) -> None:
        self._settle()
        self.launched, self.arrived = 0, True

    @torch.no_grad()
    def launch(self, number: int) -> None:
        """Put a unit's gradients into its flat memory, zeros where there are none, and start to reduce them."""
        unit, shard, present = self.units[number], self.shards[number], []
        if self.freed:
            self._settle()  # it has had the time of a block's backward
        if self.fleeting:
            allocate(unit.memory)
            unit.memory[unit.numel :].zero_()
        for index, slot in enumerate(unit.slots):
            if slot.param.grad is None or not slot.param.requires_grad:
                unit.views[index].zero_()
            else:
                present.append(index)
        unit.take_grads(present)
        for slot in unit.slots:
            slot.param.grad = None
        self.launched += 1
        reduce = self._reduce_and_free if self.freed else self._reduce_in_place
        self.works.append(reduce(shard))

    def _reduce_in_place(self, shard: Shard) -> Callable[[], None]:
        shard.own_bad = None if goes_whole(self.comm, shard) else not_finite([shard.unit.grad])
        return reduce_to_shards(self.comm, shard, shard.grad).wait

    def _reduce_and_free(self, shard: Shard) -> Callable[[], None]:
        unit = shard.unit
        bad = not_finite([unit.grad])  # of this rank's own: after the reduction nobody can tell
        shard.own_bad = torch.maximum(shard.own_bad, bad) if shard.has_grad else bad
        allocate(shard.grad)
        out = torch.empty_like(shard.grad) if shard.has_grad else shard.grad
        work, adds, shard.has_grad = reduce_to_shards(self.comm, shard, out), shard.has_grad, True

        def finish() -> None:
            work.wait()
            release(unit.memory)
            if adds:
                shard.grad.add_(out)

        return finish

    def _settle(self) -> None:
        """Wait for what was launched."""
        while self.works:
            self.works.pop(0)()
