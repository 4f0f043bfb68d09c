"""`Overlap`: lets units leave while backward is still at work on earlier layers."""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from flat import FlatUnit, watch_gradients
from residency import allocate

DEFAULT_CAP_MB = 100
NO_CAP = 1 << 62


def cap_bytes(bucket_cap_mb: float | None, overlap: bool) -> float:
    """Return how large a unit may be. None: no limit, or with overlap the default. Raises ValueError if not above 0."""
    if bucket_cap_mb is None:
        return DEFAULT_CAP_MB * 2**20 if overlap else NO_CAP
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be a number above 0, got {bucket_cap_mb!r}")
    return bucket_cap_mb * 2**20


class Overlap:
    """Counts gradients as backward finishes them; calls `launch(unit's index)` for each unit when it is complete.

    Units leave strictly in their order, on all ranks the same. `begin()` is called before the first of a round. What
    stays incomplete (a parameter without a gradient) is left to the caller: `launched` says how many have left.

    With `at_end`, a round is a backward: when it ends, units leave that are incomplete, then `at_end()` is called.
    Without `when_complete`, units leave only then, and when `passed` is called.
    """

    def __init__(
        self,
        units: list[FlatUnit],
        begin: Callable[[], None],
        launch: Callable[[int], None],
        at_end: Callable[[], None] | None = None,
        when_complete: bool = True,
    ):
        self.units, self.begin, self.launch, self.at_end, self.enabled = units, begin, launch, at_end, True
        self.when_complete = when_complete
        self.reset()
        watch_gradients(units, self._on_gradient)

    def reset(self) -> None:
        """Expect the gradients of a new round."""
        self.launched, self.pending, self.over = 0, None, set()

    def start(self) -> None:
        """Begin a round, unless one is on."""
        if self.pending is None:
            self.begin()
            self.pending = [sum(slot.param.requires_grad for slot in unit.slots) for unit in self.units]
            if self.at_end is not None:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def passed(self, number: int) -> None:
        """Let a unit leave, complete or not, as soon as those before it have left."""
        self.over.add(number)
        self._launch_while(lambda: self.launched in self.over)

    @contextmanager
    def paused(self):
        """Inside, gradients accumulate and no unit leaves."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _on_gradient(self, number: int, index: int) -> None:
        param = self.units[number].slots[index].param
        if not param.requires_grad:  # frozen since forward
            param.grad = None
            return
        if number < self.launched:
            words = "all backwards but the last go into no_sync(), checkpointing wants use_reentrant=False"
            raise RuntimeError(f"a gradient came after its unit had left: {words}")
        if not self.enabled:
            allocate(self.units[number].memory)
            self.units[number].take_grads([index])  # the next backward adds to it there
            return
        self.start()
        self.pending[number] -= 1
        if self.when_complete:
            self._launch_while(lambda: self.pending[self.launched] == 0)

    def _launch_while(self, ready: Callable[[], bool]) -> None:
        while self.launched < len(self.units) and ready():
            self.launched += 1
            self.launch(self.launched - 1)

    def _backward_ended(self) -> None:
        if self.pending is not None:
            self._launch_while(lambda: True)
            self.reset()
            self.at_end()
