"""When did each rank compute what? Measured while a pipeline runs, in the form in which the simulator predicts it."""

import statistics
import time

import torch
from comm import Comm
from instructions import Compute
from simulator import Slot


class Stopwatch:
    """Give one to a `Pipeline` as its `stopwatch`: it notes when each computation of a step begins and ends.

    Waiting for a message is not part of a computation. On GPUs the times are those of the device.
    """

    def __init__(self, comm: Comm):
        self.comm, self.cuda = comm, comm.device.type == "cuda"

    def start(self) -> None:
        """Begin a step: all ranks start together, at time 0."""
        self._spans: list[tuple] = []  # (computation, begin, end)
        self.comm.agree(None)
        self._zero = self.mark()

    def mark(self):
        """Return this moment; on a GPU the moment when it gets here."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, work: Compute, begin) -> None:
        """Record a computation that began at the mark `begin` and ends now."""
        self._spans.append((work, begin, self.mark()))

    def slots(self) -> list[Slot]:
        """Return the last step's timeline of all ranks, in seconds. All ranks call it."""
        if self.cuda:
            torch.cuda.synchronize()
        own = [[w.kind, w.stage, w.microbatch, self._since(a), self._since(b)] for w, a, b in self._spans]
        everyone = enumerate(self.comm.agree(own))
        found = [Slot(a, b, rank, Compute(*work)) for rank, spans in everyone for *work, a, b in spans]
        return sorted(found, key=lambda slot: (slot.start, slot.rank))

    def _since(self, mark) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self.cuda else mark - self._zero


def stage_times(slots: list[Slot]) -> dict[str, list[float]]:
    """Return {kind: [the median time of each stage]} of a measured timeline: what the simulator takes."""
    found: dict[tuple, list[float]] = {}
    for slot in slots:
        found.setdefault((slot.compute.kind, slot.compute.stage), []).append(slot.end - slot.start)
    stages = range(1 + max(stage for _, stage in found))
    kinds = sorted({kind for kind, _ in found})
    return {kind: [statistics.median(found[kind, stage]) for stage in stages] for kind in kinds}
