"""A run that nobody watches: it saves itself, goes back when training goes wrong, stops when asked, and goes on."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from inject import Drill, Drills
from job import Job
from manifest import CheckpointError  # 80
from memory import check_whole  # 78
from mesh import must_agree  # 76
from ranks import check_seconds  # 76
from reports import Reports
from saving import Checkpoints, alone_in
from spike_guard import Recovery, SpikeError, SpikeGuard
from stopping import StopSignals
from team import Team  # 80
from train import NonFiniteError, Trainer, digest


@dataclass(frozen=True)
class Operations:
    """How a run is operated; what it computes is the job's. Raises ValueError for a setting that makes no sense."""

    checkpoint_every_steps: int | None = 10
    checkpoint_every_minutes: float | None = 10.0  # whichever comes first; None: not by steps, or not by time
    keep_last: int = 3  # checkpoints
    resume: bool = True  # go on from the newest checkpoint, if there is one; without, it is an error that there is one
    spike_factor: float = 2.0  # a loss more than this many times the median ...
    spike_window: int = 16  # ... of so many losses before it is a spike
    most_rollbacks: int = 5  # in a row
    metrics: Path | None = None  # a file of JSON lines
    tensorboard: Path | None = None  # a folder of event files
    progress: bool = False  # on rank 0's stderr
    digests: bool = False  # a hash of all parameters at the start, in each row and rollback: for drills, since it costs
    exams: bool = False  # every job.exam_every steps: the held-out loss, and such a hash
    inject: tuple[Drill, ...] = ()

    def __post_init__(self):
        if self.checkpoint_every_steps is not None:
            check_whole("checkpoint_every_steps", self.checkpoint_every_steps, least=1)
        if self.checkpoint_every_minutes is not None:
            check_seconds("checkpoint_every_minutes", self.checkpoint_every_minutes)
        check_whole("keep_last", self.keep_last, least=2)  # the newest may hold what a spike has spoilt
        self.guards()

    def guards(self) -> tuple[SpikeGuard, Recovery]:
        """Return what decides on rollbacks."""
        return SpikeGuard(self.spike_factor, self.spike_window), Recovery(self.most_rollbacks)

    def facts(self) -> dict:
        """Return what all ranks must have alike, since they do it together."""
        names = "checkpoint_every_steps keep_last resume spike_factor spike_window most_rollbacks digests exams".split()
        return {name: getattr(self, name) for name in names} | {"inject": [str(drill) for drill in self.inject]}


def operate(rank: int, world_size: int, job: Job, operations: Operations, comm=None, clock=time.monotonic) -> dict:
    """Be one rank of a job under these operations; return its log. Checkpoints go to job.folder.

    The log holds "start" and "position", the steps done before and after this call; "rows", one for each step between
    them (none for steps left out); "rollbacks"; and "stopped", whether a signal ended the run early.

    Raises ValueError, before any communication, for a job that says itself when to save and resume, or for drills that
    cannot be; on every rank CheckpointError (another run is in the folder, say), and SpikeError or NonFiniteError when
    rollbacks were no help.
    """
    check(job, operations, world_size)
    with StopSignals() as stop:  # first: to be asked to stop while it starts is no reason to die
        return _take_all(Trainer(job, rank, world_size, comm), operations, stop, clock)


def _take_all(trainer: Trainer, operations: Operations, stop: StopSignals, clock) -> dict:
    """Take the steps of a run until it is over."""
    must_agree(trainer.comm, "operations", operations.facts())  # on several nodes, command lines may differ
    with alone_in(trainer.job.folder, Team.of_comm(trainer.comm)), Run(trainer, operations, clock) as run:
        while (step := run.next_step()) is not None:
            run.prepare(step, stop)
            try:
                row = run.take(step)
            except (NonFiniteError, SpikeError) as fault:  # on every rank, and no parameter has changed
                run.go_back(step, fault)
            else:
                run.finish(row)
    return run.log


def check(job: Job, operations: Operations, world_size: int) -> None:
    """Raise ValueError unless this job can run under these operations."""
    if job.folder is None:
        raise ValueError("an operated job needs a folder for its checkpoints")
    if job.save_at or job.resume or job.inject_nan:
        raise ValueError(
            "save_at, resume and inject_nan are not for an operated job: its operations say what to do when"
        )
    for drill in operations.inject:
        drill.check(job.steps, world_size)


class Run:
    """One rank's run: where it stands, and what happens before, after and instead of a step."""

    def __init__(self, trainer: Trainer, operations: Operations, clock):
        self.trainer, self.operations, self.job = trainer, operations, trainer.job
        trainer.spikes, self.recovery = operations.guards()
        self.drills = Drills(operations.inject, trainer.rank, trainer.world_size)
        every = operations.checkpoint_every_steps, operations.checkpoint_every_minutes
        self.checkpoints = Checkpoints(self.job.folder, trainer.comm, *every, operations.keep_last, clock)
        self.log = {"start": self._start(), "rows": [], "rollbacks": [], "stopped": False} | self._hash()
        self.log["position"] = self.log["start"]
        steps = self.job.steps if operations.progress else None
        self.reports = Reports(trainer.comm, self.log["start"], operations.metrics, operations.tensorboard, steps)

    def _start(self) -> int:
        """Go on from the newest checkpoint; or save the beginning, so that there is something to go back to."""
        saved, checkpoints = self.checkpoints.positions, self.checkpoints
        if not saved:
            checkpoints.save(self.trainer.state(0), 0)
            return 0
        if not self.operations.resume:
            raise CheckpointError(f"{checkpoints.path(saved[-1])}: there is a checkpoint, and the run shall not resume")
        if saved[-1] == self.job.steps:  # nothing is left to do; loaded all the same, to see that it is this job
            self.trainer.job = replace(self.job, steps=self.job.steps + 1)
        self.trainer.load(checkpoints.path(saved[-1]))
        return saved[-1]

    def next_step(self) -> int | None:
        """Return the step to take now; None if the run is over."""
        step = self.recovery.next_step(self.log["position"])
        return None if self.log["stopped"] or step > self.job.steps else step

    def prepare(self, step: int, stop: StopSignals) -> None:
        """Let drills happen, pass over the data of steps that are left out, and see what this rank has to ask for."""
        trainer = self.trainer
        trainer.job = self.drills.before(step, self.job)
        trainer.skip(step - 1 - self.log["position"])
        time_to_save = trainer.rank == 0 and self.checkpoints.is_time()  # one clock
        trainer.wish = "stop" if stop.requested else "save" if time_to_save else ""

    def take(self, step: int) -> dict:
        """Take a step; return its row, with what it cost."""
        trainer, sent = self.trainer, self.trainer.comm.counters.bytes
        before = sent.total()
        row = trainer.step(step)
        tokens = trainer.batches.rows * self.job.seq  # of all ranks
        row["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
        row["tokens_per_second"] = tokens / row["seconds"]
        row["bytes"] = sent.total() - before  # passed to collectives by this rank
        row["ranks"] = trainer.world_size
        return row | self._hash() | self._look(step)

    def finish(self, row: dict) -> None:
        """Note a step that was taken, and save if it is time, or if any rank has asked for it."""
        step, wishes = row["step"], self.trainer.wishes
        self.log["rows"].append(row)
        self.log |= {"position": step, "stopped": "stop" in wishes and step < self.job.steps}
        self.reports.write(row)
        if any(wishes) or self.checkpoints.is_due(step) or step == self.job.steps:
            self.checkpoints.save(self.trainer.state(step), step)
            self.recovery.saved(step)

    def go_back(self, step: int, fault: Exception) -> None:
        """Load an older checkpoint, parameters and all, since step `step` has gone wrong."""
        position = self.recovery.back_to(step, self.checkpoints.positions, fault)
        self._refuse_to_leave_out_the_end(position, fault)
        self.trainer.load(self.checkpoints.go_back(position))
        self.reports.rewind(position, f"{fault}; all ranks go back to step {position}")
        self.log["rows"] = [row for row in self.log["rows"] if row["step"] <= position]
        self.log["rollbacks"].append({"step": step, "position": position, "why": str(fault)} | self._hash())
        self.log["position"] = position

    def _refuse_to_leave_out_the_end(self, position: int, fault: Exception) -> None:
        """A run that leaves out its last steps would end with what a checkpoint holds, and look as if it had finished.

        Nothing is changed: the checkpoints that there are stay.
        """
        if self.recovery.next_step(position) > self.job.steps:
            left_out = f"steps {position + 1} to {self.job.steps} would be left out, and none is left after them"
            raise type(fault)(f"{fault}; it came again: {left_out}") from fault

    def _look(self, step: int) -> dict:
        if not self.operations.exams or (step % self.job.exam_every and step != self.job.steps):
            return {}
        return {"exam": self.trainer.examine(), "digest": digest(self.trainer.optimizer)}

    def _hash(self) -> dict:
        return {"digest": digest(self.trainer.optimizer)} if self.operations.digests else {}

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.reports.close()
        self.checkpoints.__exit__(*error)
