"""`ModuleWatch`: notices what happens to a module after its parameters have moved into flat buffers."""

import operator
from collections.abc import Callable
from itertools import chain

from comm import Comm
from flat import Slot
from mesh import must_agree
from torch import nn


class ModuleWatch:
    """What is allowed later: to freeze parameters and to unfreeze them, on all ranks alike. `check` looks.

    `on_change` is called when other parameters require a gradient than before. `stay`: whether parameters keep their
    place in memory (not in stage 3).
    """

    def __init__(self, module: nn.Module, slots: list[Slot], comm: Comm, stay: bool, on_change: Callable[[], None]):
        self.module, self.slots, self.comm, self.on_change = module, slots, comm, on_change
        self.places = [(slot, slot.param.data_ptr()) for slot in slots if stay]
        self.trained = {slot.param for slot in slots}
        self.requiring = self._requiring()
        self._look_around()

    def check(self) -> None:
        """Raise ValueError if the module has changed in a way that the flat buffers cannot follow."""
        if not _identical(self._members(), self.members):
            self._look_around()
        for name, param in self.outside:
            if param.requires_grad:
                words = "was frozen, or not there, when the optimizer was built: build a new one to train it"
                raise ValueError(f"{name} {words}")
        for slot, place in self.places:
            if slot.param.data_ptr() != place:
                raise ValueError(f"{slot.name} has left the flat buffer: move and convert a module, then wrap it")
        if self._requiring() != self.requiring:  # what travels has changed: once, all ranks compare
            named = {slot.name: slot.param.requires_grad for slot in self.slots}
            must_agree(self.comm, "which parameters require a gradient", named)
            self.requiring = self._requiring()
            self.on_change()

    def _look_around(self) -> None:
        """Note all submodules and parameters, and which of these nobody trains."""
        self.tables = [table for m in self.module.modules() for table in (m._modules, m._parameters)]
        self.members = self._members()
        named = self.module.named_parameters()
        self.outside = [(name, param) for name, param in named if param not in self.trained and param.numel()]

    def _members(self) -> list:
        """Return the submodules and parameters that there are now. (`parameters()` would take seven times as long.)"""
        return list(chain.from_iterable(map(dict.values, self.tables)))

    def _requiring(self) -> list[bool]:
        return [slot.param.requires_grad for slot in self.slots]


def _identical(one: list, two: list) -> bool:
    return len(one) == len(two) and all(map(operator.is_, one, two))
