"""`Gathering`: stage 3. A block's parameters are there while it computes, and the next block's are on their way."""

import torch
from blocks import Block
from comm import Comm, Work
from flat import FlatUnit
from residency import absent, allocate, is_absent, release
from routes import gather_from_shards
from shard import Shard
from torch import nn


class Gathering:
    """Gathers parameters before a block's forward and backward, the next block's meanwhile, and frees them after.

    `blocks` are in forward order, the root last: its units are there from its forward to the end of backward. So a step
    gathers a block's units twice, the root's once. All ranks must run the same blocks in the same order.
    """

    def __init__(self, blocks: list[Block], module: nn.Module, units: list[FlatUnit], shards: list[Shard], comm: Comm):
        self.units, self.shards, self.comm = units, shards, comm
        self.inner = [block for block in blocks if block.module is not module]
        self.root = [number for block in blocks if block.module is module for number in block.units]
        self.coming: dict[int, list[Work]] = {}
        self.here, self.in_backward = set(range(len(units))), False
        module.register_forward_pre_hook(lambda *_: self._begin_forward())
        for place, block in enumerate(self.inner):
            block.module.register_forward_pre_hook(lambda *_, place=place: self._need(place, place + 1))
            block.module.register_forward_hook(lambda _m, _i, out, place=place: self._leave(place, out))
        module.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.free_all())
        self.free_all()

    def ask(self, number: int) -> None:
        """Start to gather a unit, unless it is there or on its way."""
        unit, shard = self.units[number], self.shards[number]
        if number not in self.coming and number not in self.here:
            allocate(unit.data)
            with torch.no_grad():
                self.coming[number] = gather_from_shards(self.comm, shard, everything=True)

    def take(self, number: int) -> None:
        """Have a unit's parameters there. Raises ValueError if one was replaced meanwhile: it would be lost."""
        if number in self.here:
            return
        self.ask(number)
        for work in self.coming.pop(number):
            work.wait()
        for slot, view in zip(self.units[number].slots, self.units[number].data_views, strict=True):
            if not is_absent(slot.param):
                raise ValueError(f"{slot.name} was replaced while it was not gathered: write it inside gathered()")
            slot.param.data = view
        self.here.add(number)

    def free(self, number: int) -> None:
        """Free a unit's parameters: every element is NaN until they are gathered again."""
        for work in self.coming.pop(number, ()):
            work.wait()
        if number in self.here:
            for slot in self.units[number].slots:
                slot.param.data = absent(slot.param)
            self.here.remove(number)
        release(self.units[number].data)

    def free_all(self) -> None:
        """Free all units: after backward, after a forward without gradients, before parameters change."""
        self.in_backward = False
        for number in range(len(self.units)):
            self.free(number)

    def unit_left(self, number: int) -> None:
        """Free a unit whose gradients are all there. One with frozen parameters may yet be needed: it stays."""
        if all(slot.param.requires_grad for slot in self.units[number].slots):
            self.free(number)

    def _begin_forward(self) -> None:
        for number in [*self.root, *(self.inner[0].units if self.inner else ())]:
            self.ask(number)
        for number in self.root:
            self.take(number)

    def _need(self, place: int, following: int) -> None:
        for number in self.inner[place].units:
            self.take(number)
        if 0 <= following < len(self.inner):
            for number in self.inner[following].units:
                self.ask(number)

    def _leave(self, place: int, out) -> None:
        """After a block's forward: free it, and have it back before its backward."""
        if self.in_backward:  # a checkpointed forward that runs again: backward comes at once
            return
        for tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._begin_backward(place))
        for number in self.inner[place].units:
            self.free(number)

    def _begin_backward(self, place: int) -> None:
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.free_all)  # runs when backward ends
        self._need(place, place - 1)


def _tensors(out) -> list[torch.Tensor]:
    """Return the tensors in what a module has returned: a tensor, or lists, tuples and dicts of such."""
    if isinstance(out, torch.Tensor):
        return [out]
    items = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]
