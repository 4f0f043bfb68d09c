"""Fair timing: our code and PyTorch's own on the same work, interleaved in one run, as ratios with an interval."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One contender: median seconds, and how many times faster the first one is (> 1: the first is faster).

    `low` and `high` bound the median ratio with at least 95% confidence (order statistics of the pairs; no normality).
    """

    name: str
    seconds: float
    ratio: float
    low: float
    high: float

    def against(self, target: float) -> tuple[bool, str]:
        """Return (is a target of the ratio not missed, the words for it): it is, if the whole interval is below it."""
        state = "met" if self.low >= target else "open: the interval holds it" if self.high >= target else "missed"
        return state != "missed", f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}), {state}"


def compare(contenders: dict[str, Callable[[], float | None]], pairs: int = 9, warmup: int = 1) -> list[Row]:
    """Time each contender `pairs` times, interleaved; the first is ours, the others are compared with it.

    A contender that returns a number of seconds has timed itself (the slowest rank, say); else the call is timed.
    """
    if pairs < 6:
        raise ValueError(f"a 95% interval of a median needs 6 pairs or more, got {pairs}")
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, pairs):
        for name in names if turn % 2 else reversed(names):  # alternate, so that no one always runs second
            started = time.perf_counter()
            own = contenders[name]()
            elapsed = time.perf_counter() - started if own is None else own
            if turn >= 0:
                times[name].append(elapsed)
    return [summary(name, times[name], times[names[0]]) for name in names]


def slowest(work: Callable[[], object], comm, repeats: int = 1) -> float:
    """Return the seconds that one call of `work` takes on the slowest rank; all ranks of `comm` start together."""
    comm.agree(None)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
    return max(comm.agree((time.perf_counter() - started) / repeats))


def summary(name: str, theirs: list[float], ours: list[float]) -> Row:
    """Summarise paired times: the ratio is theirs / ours, pair by pair."""
    ratios = [t / o for t, o in zip(theirs, ours, strict=True)]
    return Row(name, statistics.median(theirs), *median_interval(ratios))


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return (median, low, high): the two bound the true median with at least 95% confidence; it takes 6 values."""
    ordered, skip = sorted(values), _outside(len(values))
    return statistics.median(ordered), ordered[skip], ordered[-1 - skip]


def _outside(n: int) -> int:
    """How many of n sorted values may be dropped at each end so that the rest covers the median with 95% confidence."""
    from math import comb

    tail, skip = 0.0, -1
    while tail <= 0.025:
        skip += 1
        tail += comb(n, skip) / 2**n
    return max(0, skip - 1)
