"""`Gathering`: stage 3. A block's parameters are there while it computes, and the next block's are on their way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from agreement import Agreement
from blocks import Block
from comm import Comm, Work
from flat import FlatUnit
from gradients import Gradients
from residency import Absence, allocate, release
from routes import gather_from_shards
from shard import Shard, adopt
from torch import nn


@dataclass(eq=False)
class Call:
    """One forward of the block at this place; backward comes to it once."""

    place: int


class Gathering:
    """Gathers parameters before a block's forward and backward, the next block's meanwhile, and frees them after.

    `blocks` are in forward order, the root last: its units are there from its forward to the end of backward. So a step
    gathers a block's units twice, the root's once. All ranks must run the same blocks in the same order.

    When backward goes from one block to another, the first is over: its parameters are freed and its gradients leave.
    Not earlier, when its last gradient comes: a rank may have none, and all must communicate in one order.
    """

    def __init__(
        self,
        blocks: list[Block],
        module: nn.Module,
        units: list[FlatUnit],
        shards: list[Shard],
        comm: Comm,
        gradients: Gradients,
        agreement: Agreement,
    ):
        self.units, self.shards, self.comm = units, shards, comm
        self.gradients, self.agreement = gradients, agreement
        self.inner = [block for block in blocks if block.module is not module]
        self.root = [number for block in blocks if block.module is module for number in block.units]
        self.absences = [Absence([slot.param for slot in unit.slots]) for unit in units]
        self.coming: dict[int, list[Work]] = {}
        self.here, self.in_forward, self.in_backward, self.open = set(range(len(units))), False, False, False
        self.trail: list[Call] = []  # forwards that backward has not come to yet
        self.began: list[Call] = []  # to these this backward has come
        self.at_work: list[int] = []  # places of blocks that are not over
        module.register_forward_pre_hook(lambda *_: self._begin_forward())
        for place, block in enumerate(self.inner):
            block.module.register_forward_pre_hook(lambda *_, place=place: self._enter(place))
            block.module.register_forward_hook(lambda _m, _i, out, place=place: self._leave(place, out))
        module.register_forward_hook(lambda _m, _i, out: self._end_forward(out), always_call=True)
        self.free_all()

    def ask(self, number: int) -> None:
        """Start to gather a unit, unless it is there or on its way."""
        unit, shard = self.units[number], self.shards[number]
        if number not in self.coming and number not in self.here:
            allocate(unit.data)
            self.agreement.note(number)
            with torch.no_grad():
                self.coming[number] = gather_from_shards(self.comm, shard, everything=True)

    def take(self, number: int) -> None:
        """Have a unit's parameters there. Raises ValueError if one was written meanwhile: that is lost."""
        if number in self.here:
            return
        self.ask(number)
        for work in self.coming.pop(number):
            work.wait()
        self._insist(number)
        unit = self.units[number]
        for slot, view in zip(unit.slots, unit.data_views, strict=True):
            slot.param.data = view
        self.here.add(number)

    def insist_on_absence(self) -> None:
        """Raise ValueError if a parameter was written while it was not there."""
        for number in range(len(self.units)):
            if number not in self.here:
                self._insist(number)

    def _insist(self, number: int) -> None:
        if written := self.absences[number].written():
            names = " or ".join(self.units[number].slots[index].name for index in written[:3])
            self.absences[number].restore()
            self.free_all()
            raise ValueError(f"{names} was written while it was not gathered: write it inside gathered()")

    def free(self, number: int) -> None:
        """Free a unit's parameters: every element is NaN until they are gathered again."""
        if self.open:
            return
        for work in self.coming.pop(number, ()):
            work.wait()
        if number in self.here:
            self.absences[number].begin()
            self.here.remove(number)
        release(self.units[number].data)

    def free_all(self) -> None:
        """Free all units."""
        for number in range(len(self.units)):
            self.free(number)

    def reset(self) -> None:
        """Free all, and forget forwards and backwards that were given up: parameters are about to change."""
        if self.open:
            raise RuntimeError("parameters cannot change inside gathered(): leave it first")
        self.in_backward = False
        for things in (self.trail, self.began, self.at_work):
            things.clear()
        self.free_all()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, all parameters are there and may be written; at the end the shards take what was."""
        if self.open:
            yield
            return
        if self.in_forward or torch._C._current_graph_task_id() >= 0:
            raise RuntimeError("in the midst of forward or backward parameters come and go: enter gathered() before")
        for step in (self.ask, self.take):
            for number in range(len(self.units)):
                step(number)
        self.open = True
        try:
            yield
        finally:
            self.open = False
            for unit, shard in zip(self.units, self.shards, strict=True):
                for slot, view in zip(unit.slots, unit.data_views, strict=True):
                    if slot.param.data_ptr() != view.data_ptr():
                        raise ValueError(f"{slot.name} was replaced inside gathered(): copy into it instead")
                with torch.no_grad():
                    adopt(unit.data[shard.start : shard.end], shard.master)
            self.free_all()

    def forget_writes(self) -> None:
        """Take back what was written to parameters that were not there: all have new values by now."""
        for absence in self.absences:
            absence.restore()

    def graphs_outdated(self) -> None:
        """The parameters' versions were raised though nobody wrote to what stands for them."""
        for absence in self.absences:
            absence.note_versions()

    def _begin_forward(self) -> None:
        if torch._C._current_graph_task_id() < 0:  # not a forward that runs again in backward
            self.in_forward, self.in_backward = True, False  # in backward: should the last one have failed
        for number in self.root:
            self.ask(number)
        if not self.in_backward:
            self._ask_for(0)
        for number in self.root:
            self.take(number)

    def _end_forward(self, out) -> None:
        """After the whole forward, or its failure: then `out` is None."""
        self.in_forward = False
        if not self.in_backward and (out is None or not torch.is_grad_enabled()):
            self.free_all()
            return
        for tensor in _that_need_gradients(out):
            tensor.register_hook(lambda grad: self._begin_backward())

    def _ask_for(self, place: int) -> None:
        for number in self.inner[place].units if place < len(self.inner) else ():
            self.ask(number)

    def _enter(self, place: int) -> None:
        for number in self.inner[place].units:
            self.take(number)
        if not self.in_backward:
            self._ask_for(place + 1)

    def _leave(self, place: int, out) -> None:
        """After a block's forward: free it, and have it back before its backward."""
        if self.in_backward:  # a checkpointed forward that runs again: backward comes at once
            return
        call = Call(place)
        tensors = _made_here(_that_need_gradients(out)) if torch.is_grad_enabled() else []
        for tensor in tensors:
            tensor.register_hook(lambda grad: self._come_to(call))
        if tensors:
            self.trail.append(call)
        for number in self.inner[place].units:
            self.free(number)

    def _begin_backward(self) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            raise RuntimeError("stage 3 has freed what a second derivative needs: no create_graph=True")
        self.in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.gradients.backward_begins()
        for number in self.root:  # gone if something else was computed since forward
            self.take(number)

    def _come_to(self, call: Call) -> None:
        """Have a block there for its backward; those that are over leave, and the next one is on its way."""
        self._begin_backward()
        if call in self.began:  # through another of its outputs
            return
        self.began.append(call)
        if call in self.trail:
            self.trail.remove(call)
        ahead = {call.place, *(each.place for each in self.trail)}
        for place in [place for place in self.at_work if place not in ahead]:
            self.at_work.remove(place)
            for number in self.inner[place].units:
                self.free(number)
                self.gradients.passed(number)
        if call.place not in self.at_work:
            self.at_work.append(call.place)
        for number in self.inner[call.place].units:
            self.take(number)
        if self.trail:
            self._ask_for(self.trail[-1].place)

    def _end_backward(self) -> None:
        self.in_backward = False
        self.began.clear()
        self.at_work.clear()
        self.free_all()


def _made_here(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that no block before has returned: backward comes to the block that made a tensor.

    One that only hands it on has no backward, and must not come between.
    """
    found = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            known = tensor.grad_fn.metadata.setdefault("outputs of blocks", set())  # goes with the graph
            if tensor.output_nr not in known:
                known.add(tensor.output_nr)
                found.append(tensor)
    return found


def _that_need_gradients(out) -> list[torch.Tensor]:
    """Return the tensors that require a gradient in what a module has returned: a tensor, or lists and dicts of such.

    Raises TypeError for what cannot be looked into: backward would come to the module unnoticed.
    """
    if isinstance(out, torch.Tensor):
        return [out] if out.requires_grad else []
    if out is None or isinstance(out, str | int | float | complex):
        return []
    if not isinstance(out, dict | list | tuple):
        raise TypeError(f"stage 3: a block returned {type(out).__name__}: return tensors, or lists or dicts of them")
    items = out.values() if isinstance(out, dict) else out
    return [tensor for item in items for tensor in _that_need_gradients(item)]
