"""Launching ranks, and finding out who is to blame when a run fails.

`run_ranks(worker, N)` starts N processes, gives each a rank and a ready process group, and returns what each worker
returned. Whatever goes wrong first on any rank ends all of them within seconds, as a `RankError` that names the rank.
Under `torchrun` the processes exist already: there `run_ranks` joins them instead.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path

import flight
import rank_process
import torch
import wire

GRACE = 1.0  # seconds a failed run waits for the report of the rank that caused it, and a rank has to end by itself


class RankError(RuntimeError):
    """A rank failed. `rank` is the one to blame, `exitcode` its exit code (negative: a signal; None: still running).

    `collective` says where it was in its communications, `traceback` is its Python traceback where there is one.
    """

    def __init__(self, rank: int, exitcode: int | None, reason: str, collective: str = "", traceback: str = ""):
        lines = [f"rank {rank} {reason}"]
        lines += [f"it was {collective}"] if collective else []
        lines += ["", traceback.rstrip()] if traceback else []
        super().__init__("\n".join(lines))
        self.rank, self.exitcode, self.collective, self.traceback = rank, exitcode, collective, traceback


def under_torchrun() -> bool:
    """Say whether a launcher (torchrun or alike) has already made this process one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless `world_size` is a whole number of at least 1."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")


def run_ranks(worker, world_size, *args, backend="gloo", timeout=None, collective_timeout=60.0) -> list:
    """Run `worker(rank, world_size, *args)` in `world_size` processes; return [result of each rank].

    Results are copies: tensors arrive on the CPU, detached. `timeout` (seconds) is a deadline for the whole run,
    `collective_timeout` the longest wait in one communication. `backend` is "gloo", "nccl", or None: no process group.

    Raises ValueError for bad arguments before any process starts; RankError, naming the rank to blame, when a rank
    raises, exits, is killed or stalls. No process is left in either case.
    """
    _check(world_size, backend, timeout, collective_timeout)
    if under_torchrun():
        return rank_process.join(worker, world_size, args, backend, collective_timeout)
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        run = rank_process.Run(Path(folder), world_size, backend, collective_timeout)
        return _Launch(run, rank_process.Call(worker, args)).results(timeout)


def _check(world_size, backend, timeout, collective_timeout) -> None:
    check_world_size(world_size)
    if backend not in ("gloo", "nccl", None):
        raise ValueError(f"backend must be 'gloo', 'nccl' or None, got {backend!r}")
    for name, seconds in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
    if collective_timeout is None:
        raise ValueError("collective_timeout must be a positive number of seconds, got None")
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    if backend == "nccl" and world_size > gpus and not under_torchrun():
        raise ValueError(f"backend 'nccl' needs a GPU for each rank: {world_size} ranks, {gpus} GPUs")


def start_method(backend: str | None) -> str:
    """Return "fork" or "spawn"; the environment variable RANKS_START_METHOD overrides the choice.

    Fork starts a rank in milliseconds because torch is imported already. It is safe on Linux without a GPU: ranks run
    one thread, and autograd's device threads, which do not survive a fork, do not exist.
    """
    forced = os.environ.get("RANKS_START_METHOD")
    if forced is not None:
        if forced not in ("fork", "spawn"):
            raise ValueError(f"RANKS_START_METHOD must be 'fork' or 'spawn', got {forced!r}")
        return forced
    can_fork = sys.platform == "linux" and backend != "nccl" and not torch.accelerator.is_available()
    return "fork" if can_fork else "spawn"


@dataclass
class _Failure:
    rank: int
    reason: str
    exitcode: int | None = 1
    when: float = 0.0
    traceback: str = ""
    victim: bool = False  # raised because a message did not come or go: perhaps another rank is the cause


class _Launch:
    """One set of rank processes, from start to the last one's end."""

    def __init__(self, run: rank_process.Run, call: rank_process.Call):
        self.run, self.failures = run, {}
        flight.create(run.board, run.world_size)
        context = get_context(start_method(run.backend))
        self.processes, self.pipes = [], []
        try:
            for rank in range(run.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=rank_process.main, args=(rank, run, call, theirs), name=f"rank {rank}")
                self.pipes.append(ours)
                process.start()
                self.processes.append(process)
                theirs.close()
        except BaseException:
            self._end_all()
            raise

    def results(self, timeout: float | None) -> list:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._wait(deadline)
            if self.failures:
                raise self._blame()
            data = [self.run.result(rank).read_bytes() for rank in range(self.run.world_size)]
            for pipe in self.pipes:
                pipe.send_bytes(b"exit")  # all have finished: nobody's last message can be lost any more
            self._wait_for_exit(5.0)
        finally:
            self._end_all()
        return [wire.loads(item) for item in data]

    def _wait(self, deadline: float | None) -> None:
        """Return when every rank has delivered its result, or when a failure's cause is known."""
        waiting = set(range(self.run.world_size))
        while waiting:
            self._wait_once(waiting, deadline)
            if not all(failure.victim for failure in self.failures.values()):
                return
            if self.failures:  # only victims so far: give the rank at fault a moment to be seen
                patience = min(failure.when for failure in self.failures.values()) + GRACE - time.time()
                if patience <= 0:
                    return
                deadline = min(deadline or float("inf"), time.monotonic() + patience)
            elif deadline is not None and time.monotonic() >= deadline:
                rank = self._furthest_behind(waiting)
                self.failures[rank] = _Failure(rank, "had not finished when the run's deadline passed", exitcode=None)
                return

    def _wait_once(self, waiting: set[int], deadline: float | None) -> None:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        handles = {self.processes[rank].sentinel: rank for rank in waiting}
        handles |= {self.pipes[rank]: rank for rank in waiting}
        for rank in {handles[handle] for handle in connection.wait(list(handles), timeout)}:
            waiting.discard(rank)
            if not self.run.result(rank).exists():
                self.failures[rank] = self._why(rank)

    def _why(self, rank: int) -> _Failure:
        process = self.processes[rank]
        process.join(GRACE)
        if self.run.error(rank).exists():
            report = json.loads(self.run.error(rank).read_text())
            return _Failure(rank, exitcode=process.exitcode, **report)
        if process.exitcode is not None and process.exitcode < 0:
            return _Failure(rank, f"was killed by {signal.Signals(-process.exitcode).name}", process.exitcode)
        return _Failure(rank, f"exited with code {process.exitcode} without a result", process.exitcode)

    def _furthest_behind(self, ranks: set[int]) -> int:
        """Find the rank that others wait for: fewest communications entered, and not inside one."""
        positions = flight.read(self.run.board)
        return min(ranks, key=lambda rank: (positions[rank].count, positions[rank].inside, rank))

    def _blame(self) -> RankError:
        """Choose the cause: a rank's own failure; else, when all who failed were waiting, a rank that kept them so."""
        positions = flight.read(self.run.board)
        failure = min(self.failures.values(), key=lambda f: (f.victim, f.when))
        others = set(range(self.run.world_size)) - set(self.failures)
        if failure.victim and others:
            behind, wanted = self._furthest_behind(others), positions[failure.rank]
            if (positions[behind].count, positions[behind].inside) < (wanted.count, True):
                did = "finished" if self.run.result(behind).exists() else "stalled"
                waited = f"while rank {failure.rank} waited {wanted}, then {failure.reason}"
                failure = _Failure(behind, f"{did} {waited}", exitcode=None)
        traceback = failure.traceback or (self._stack(failure.rank) if failure.exitcode is None else "")
        return RankError(failure.rank, failure.exitcode, failure.reason, str(positions[failure.rank]), traceback)

    def _stack(self, rank: int) -> str:
        """Ask a rank that still runs where it is (its faulthandler answers SIGUSR1); "" if it cannot say."""
        if not hasattr(signal, "SIGUSR1") or not self.processes[rank].is_alive():
            return ""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        end, text = time.monotonic() + GRACE, ""
        while time.monotonic() < end and "File" not in text:
            self.processes[rank].join(0.02)
            text = self.run.stack(rank).read_text() if self.run.stack(rank).exists() else ""
        return text.partition(f'  File "{rank_process.__file__}"')[0]  # the launcher's own frames say nothing

    def _wait_for_exit(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        running = {process.sentinel for process in self.processes}
        while running and (left := end - time.monotonic()) > 0:
            running -= set(connection.wait(list(running), left))

    def _end_all(self) -> None:
        """Terminate, wait, kill: a rank that ignores SIGTERM ends too, and so do processes that a rank started."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        self._wait_for_exit(GRACE if any(process.is_alive() for process in self.processes) else 0)
        for process in self.processes:
            rank_process.kill_group(process)
            process.join()
        for pipe in self.pipes:
            pipe.close()
