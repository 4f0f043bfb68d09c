"""When training goes wrong: what counts as a spike, which checkpoint to go back to, and what to do differently then.

All of it is decided from numbers that every rank has, so that every rank decides the same.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from memory import check_whole  # 78


class SpikeError(RuntimeError):
    """A loss far above those before it. Raised on every rank, before any parameter has changed."""


@dataclass
class SpikeGuard:
    """Watches the loss: one more than `factor` times the median of the last `window` losses is a spike.

    The median, because a mean would rise with every high loss that passes. The first step has nothing to be compared
    with. Raises ValueError for a factor of 1 or less, or a window below 1.
    """

    factor: float = 2.0
    window: int = 16
    losses: deque[float] = field(init=False)  # those that passed, newest last

    def __post_init__(self):
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float) or not self.factor > 1:
            raise ValueError(f"factor must be a number above 1, got {self.factor!r}")
        check_whole("window", self.window, least=1)
        self.losses = deque(maxlen=self.window)

    def check(self, step: int, loss: float) -> None:
        """Raise SpikeError if the mean loss of a step is not finite, or a spike; else remember it.

        It names the step and the loss; of a spike also the factor and the median, and both losses with 4 decimals.
        """
        if not math.isfinite(loss):
            raise SpikeError(f"step {step}: the loss is {loss}")
        median = statistics.median(self.losses) if self.losses else math.inf
        if loss > self.factor * median:
            raise SpikeError(f"step {step}: a loss of {loss:.4f} is more than {self.factor:g} times {median:.4f}")
        self.losses.append(loss)

    def forget(self, losses) -> None:
        """Remember these losses and no others: those that a checkpoint holds."""
        self.losses = deque(losses, maxlen=self.window)


@dataclass
class Recovery:
    """Where to go after each fault, until the run is past it.

    First back to a checkpoint, and the same steps again: a fault of the machine does not come twice. If the same step
    fails again, its data are to blame, or those before it: back once more, and this time without the batches from the
    checkpoint to that step. After `most` rollbacks in a row the fault is raised: what is wrong is not in the data.
    """

    most: int = 5
    failed: list[int] = field(default_factory=list)  # the steps at which this row of rollbacks began
    skipped: set[int] = field(default_factory=set)  # steps that are not taken

    def __post_init__(self):
        check_whole("most", self.most, least=0)

    def back_to(self, step: int, saved: list[int], fault: Exception) -> int:
        """Return the step of the checkpoint to load after a fault at `step`; `saved` are those there are, ascending.

        After `most` rollbacks in a row it raises an error of the fault's type, with the fault's text and their number.
        """
        if len(self.failed) >= self.most:
            raise type(fault)(f"{fault}; rolled back {len(self.failed)} times in a row, to no avail") from fault
        checkpoint = older_than_the_fault(step, saved)
        if step in self.failed:
            self.skipped |= set(range(checkpoint + 1, step + 1))
        self.failed.append(step)
        return checkpoint

    def next_step(self, position: int) -> int:
        """Return the step to take after `position`: the next one that is not skipped."""
        step = position + 1
        while step in self.skipped:
            step += 1
        return step

    def saved(self, position: int) -> None:
        """Hear that there is a checkpoint of `position`. Beyond the fault it ends the row of rollbacks."""
        if self.failed and position >= max(self.failed):
            self.failed.clear()
            self.skipped.clear()


def older_than_the_fault(step: int, saved: list[int]) -> int:
    """Return the newest of `saved` whose successor was taken without a fault; if there is none, the oldest.

    A high loss at step k tells that the parameters after k - 1 were spoilt already. A checkpoint of k - 1 holds them.
    """
    return max((position for position in saved if position < step - 1), default=min(saved))
