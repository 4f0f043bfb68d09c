"""Drills: faults that are made to happen at a known step, so that one can see what the run does about them.

spike@12     the learning rate of step 12 is a thousand times too large
nan@12       a gradient of one rank becomes NaN in step 12
kill@12:1    rank 1 kills itself before step 12
sigterm@12   a rank sends itself SIGTERM before step 12
"""

import os
import re
import signal
from dataclasses import dataclass, replace

from job import Job

SPIKE = 1000.0  # the learning rate of a "spike" step is multiplied by this
KINDS = ("spike", "nan", "kill", "sigterm")


@dataclass(frozen=True)
class Drill:
    """A fault, the step at which it happens, and the rank that has it (-1: the last one; a spike is every rank's)."""

    kind: str
    step: int
    rank: int = -1

    def check(self, steps: int, world_size: int) -> None:
        """Raise ValueError unless a run of `steps` steps on `world_size` ranks can have this drill."""
        if self.step > steps:
            raise ValueError(f"{self}: there are only {steps} steps")
        if self.kind == "spike" and self.step == steps:
            raise ValueError(f"{self}: the next step's loss would show it, and there are only {steps} steps")
        if self.rank >= world_size:
            raise ValueError(f"{self}: there are only {world_size} ranks")

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + (f":{self.rank}" if self.rank >= 0 else "")


def parse_drill(text: str) -> Drill:
    """Return the drill that a text like "kill@12:1" describes. Raises ValueError."""
    found = re.fullmatch(r"(\w+)@([1-9]\d*)(?::(\d+))?", text, re.ASCII)
    if found is None or found[1] not in KINDS or (found[1] == "spike" and found[3]):
        raise ValueError(f"expected {', '.join(KINDS[:-1])} or {KINDS[-1]}, @STEP, and a :RANK if one, got {text!r}")
    return Drill(found[1], int(found[2]), int(found[3] or -1))


class Drills:
    """The drills of one rank. Each happens once: not again after a rollback, nor in a process started anew."""

    def __init__(self, drills: tuple[Drill, ...], rank: int, world_size: int):
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun
        self.left, self.rank, self.world_size = [] if restarted else list(drills), rank, world_size

    def before(self, step: int, job: Job) -> Job:
        """Let happen what is due before a step; return the job as this step, and no other, shall see it."""
        due = [drill for drill in self.left if drill.step == step]
        self.left = [drill for drill in self.left if drill.step != step]
        for drill in due:
            rank = drill.rank % self.world_size
            if drill.kind == "spike":
                job = replace(job, lr=job.lr * SPIKE)
            elif drill.kind == "nan":
                job = replace(job, inject_nan=(step, rank))
            elif rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL if drill.kind == "kill" else signal.SIGTERM)
        return job
