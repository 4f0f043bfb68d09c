"""Launching ranks, and finding out who is to blame when a run fails.

`run_ranks(worker, N)` starts N processes, gives each a rank and a ready process group, and returns what each worker
returned. Whatever goes wrong first on any rank ends all of them within seconds, as a `RankError` that names the rank.
Under `torchrun` the processes exist already: there `run_ranks` joins them instead.
"""

import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path

import flight
import rank_process
import torch
import torch.distributed as dist
import wire
from held_signals import HeldSignals
from rank_process import under_torchrun

GRACE = 1.0  # seconds: after a first failure, for a better-placed rank to report the cause; and for ranks to end
POLL = 0.2  # seconds between looks at the processes: a rank's own children can hold open what tells of its end

# Python 3.12 warns of every fork of a process with threads. Why it is safe here: see `start_method`.
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)


class RankError(RuntimeError):
    """A rank failed. `rank` is the one to blame, `exitcode` its exit code (negative: a signal; None: still running).

    `collective` says where it was in its communications, `traceback` is its Python traceback where there is one.
    """

    def __init__(self, rank: int, exitcode: int | None, reason: str, collective: str = "", traceback: str = ""):
        super().__init__(rank, exitcode, reason, collective, traceback)  # all of them, so that it can be pickled
        self.rank, self.exitcode, self.reason = rank, exitcode, reason
        self.collective, self.traceback = collective, traceback

    def __str__(self) -> str:
        lines = [f"rank {self.rank} {self.reason}"]
        lines += [f"it was {self.collective}"] if self.collective else []
        lines += ["", self.traceback.rstrip()] if self.traceback else []
        return "\n".join(lines)


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless `world_size` is a whole number of at least 1."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")


def run_ranks(
    worker, world_size, *args, backend="gloo", timeout=None, collective_timeout=60.0, stop_within=None
) -> list:
    """Run `worker(rank, world_size, *args)` in `world_size` processes; return [result of each rank].

    Results are copies: tensors arrive on the CPU, detached. `timeout` (seconds) is a deadline for the whole run (not
    under torchrun), `collective_timeout` the longest wait in one communication. `backend` is "gloo", "nccl", or None:
    no process group. Ctrl-C ends all ranks; with `stop_within` the first Ctrl-C or SIGTERM is passed on to them, as
    SIGTERM, and they have so many seconds to return their results (not under torchrun, which sends signals itself).

    Raises ValueError for bad arguments before any process starts; RankError, naming the rank to blame, when a rank
    raises, exits, is killed or stalls. Either way no process is left, nor one that a rank started (unless that one made
    itself a session of its own).
    """
    check_launch(worker, world_size, backend, timeout, collective_timeout, stop_within)
    if under_torchrun():
        return rank_process.join(worker, world_size, args, backend, collective_timeout)
    hears = [signal.SIGINT] if stop_within is None else [signal.SIGINT, signal.SIGTERM]
    scratch = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
    with HeldSignals(*hears) as signals, scratch as folder:
        run = rank_process.Run(Path(folder), world_size, backend, collective_timeout)
        return _Launch(run, rank_process.Call(worker, args), signals).results(timeout, stop_within)


def check_launch(worker, world_size, backend="gloo", timeout=None, collective_timeout=60.0, stop_within=None) -> None:
    """Raise the ValueError with which `run_ranks` would refuse these arguments, or this machine, before it starts."""
    if not callable(worker):
        raise ValueError(f"worker must be a function (rank, world_size, ...), got {worker!r}")
    check_world_size(world_size)
    if backend not in ("gloo", "nccl", None):
        raise ValueError(f"backend must be 'gloo', 'nccl' or None, got {backend!r}")
    for name, seconds in {"timeout": timeout, "stop_within": stop_within}.items():
        if seconds is not None:
            check_seconds(name, seconds)
    check_seconds("collective_timeout", collective_timeout)
    if backend is not None:
        rank_process.gloo_interface()  # the one that is asked for must exist
    if under_torchrun():
        rank_process.check_started(world_size)
        return
    start_method(backend)
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    if backend == "nccl" and world_size > gpus:
        raise ValueError(f"backend 'nccl' needs a GPU for each rank: {world_size} ranks, {gpus} GPUs")


def check_seconds(name: str, seconds: float) -> None:
    """Raise ValueError unless `seconds` is a number above 0, and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")


def start_method(backend: str | None) -> str:
    """Return "fork" or "spawn"; the environment variable RANKS_START_METHOD overrides the choice.

    Fork starts a rank in milliseconds because torch is imported already. It is safe on Linux without a GPU: ranks run
    one thread, and autograd's device threads, which do not survive a fork, do not exist. A process that is a member of
    a group already (a rank that launches ranks of its own) would hand that group down: it spawns.
    """
    forced = os.environ.get("RANKS_START_METHOD")
    if forced is not None:
        if forced not in ("fork", "spawn"):
            raise ValueError(f"RANKS_START_METHOD must be 'fork' or 'spawn', got {forced!r}")
        return forced
    gpu = backend == "nccl" or torch.accelerator.is_available()
    return "fork" if sys.platform == "linux" and not gpu and not dist.is_initialized() else "spawn"


@dataclasses.dataclass
class _Failure:
    rank: int
    reason: str
    exitcode: int | None
    when: float = 0.0
    traceback: str = ""
    victim: bool = False  # raised because a message did not come or go: another rank is the cause, if it can be found
    waited_for: int | None = None  # the rank whose message did not come, where that is known


class _Launch:
    """One set of rank processes, from start to the last one's end."""

    def __init__(self, run: rank_process.Run, call: rank_process.Call, signals: HeldSignals):
        self.run, self.signals, self.failures = run, signals, {}
        self.processes, self.pipes, self.running = [], [], set()
        flight.create(run.board, run.world_size)
        context = get_context(start_method(run.backend))
        try:
            for rank in range(run.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=rank_process.main, args=(rank, run, call, theirs), name=f"rank {rank}")
                self.pipes.append(ours)
                self.processes.append(process)
                self.running.add(rank)
                process.start()
                theirs.close()
        except BaseException:
            self._end_all()
            raise

    def results(self, timeout: float | None, stop_within: float | None) -> list:
        """Return each rank's result when all are there; raise RankError when one fails or time is up (None: never)."""
        try:
            self._wait(timeout, stop_within)
            if self.failures:
                raise self._blame()
            for pipe in self.pipes:
                with suppress(OSError):  # died just now; its result is here
                    pipe.send_bytes(b"exit")  # all have finished: nobody's last message can be lost any more
            self._wait_for_exit(5.0)
        finally:
            self._end_all()
        return [self._result(rank) for rank in range(self.run.world_size)]

    def _result(self, rank: int):
        try:
            return wire.loads(self.run.result(rank).read_bytes())
        except Exception as error:
            raise RankError(rank, 0, f"returned what cannot be decoded here: {error!r}") from error

    def _wait(self, timeout: float | None, stop_within: float | None) -> None:
        """Return when every rank has delivered its result, or when a failure's cause is known."""
        unfinished, patience, end = set(self.running), math.inf, math.inf
        if timeout is not None:
            end, why = time.monotonic() + timeout, f"within {timeout:g} s, the run's deadline"
        while unfinished and all(failure.victim for failure in self.failures.values()):
            now = time.monotonic()
            if self.signals.heard and stop_within is not None:
                end, why = min(end, now + stop_within), f"within {stop_within:g} s of {self._pass_on()}"
                stop_within = None  # the first signal asks, the next ones are answered
            self.signals.answer()
            if self.failures and patience == math.inf:  # only victims so far: let the rank at fault be seen
                patience = now + GRACE
            if now >= patience:
                return
            if now >= end and not self.failures:
                rank = self._furthest_behind(unfinished, flight.read(self.run.board))
                self.failures[rank] = _Failure(rank, f"had not finished {why}", None)
                return
            self._listen(unfinished, min(POLL, patience - now, max(0.0, end - now)))

    def _pass_on(self) -> str:
        """Send the ranks SIGTERM in the place of a signal that the launcher was sent; return that one's name."""
        for rank in self.running:
            self.processes[rank].terminate()
        return signal.Signals(self.signals.heard.pop(0)).name

    def _listen(self, unfinished: set[int], seconds: float) -> None:
        """Wait for news; take ranks that deliver, or die, out of `unfinished`. A rank that dies early has failed."""
        sentinels = [self.processes[rank].sentinel for rank in self.running]
        ready = connection.wait(sentinels + [self.pipes[rank] for rank in unfinished & self.running], seconds)
        unfinished -= {rank for rank in unfinished if self.pipes[rank] in ready and self.run.result(rank).exists()}
        for rank in [rank for rank in sorted(self.running) if not self._runs(rank)]:
            unfinished.discard(rank)
            self.failures[rank] = self._why(rank)

    def _runs(self, rank: int) -> bool:
        """Say whether a rank still runs. Whatever a rank started ends with it."""
        process = self.processes[rank]
        if rank in self.running and not process.is_alive():
            self.running.discard(rank)
            rank_process.kill_group(process)
        return rank in self.running

    def _why(self, rank: int) -> _Failure:
        code = self.processes[rank].exitcode
        if self.run.error(rank).exists():
            return _Failure(rank, exitcode=code, **json.loads(self.run.error(rank).read_text()))
        if code < 0:
            by_watchdog = self.run.backend == "nccl" and -code == signal.SIGABRT  # NCCL's, when a peer does not answer
            name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            return _Failure(rank, f"was killed by {name}", code, victim=by_watchdog)
        return _Failure(rank, f"exited with code {code} before all ranks had finished", code)

    @staticmethod
    def _furthest_behind(ranks: set[int], positions: list[flight.Position]) -> int:
        """Find the rank that others wait for: not inside a communication, and of those with the fewest entered.

        Inside is who waits. In a pipeline ranks differ in how many they have, so the number alone says nothing.
        """
        return min(ranks, key=lambda rank: (positions[rank].inside, positions[rank].count, rank))

    def _blame(self) -> RankError:
        """Choose the cause: a rank's own failure; else, when all who failed were waiting, a rank that kept them so."""
        positions = flight.read(self.run.board)
        failure = min(self.failures.values(), key=lambda failure: (failure.victim, failure.when))
        if failure.victim:
            failure = self._cause(failure, positions)
        runs_on = failure.exitcode is None and not self.run.result(failure.rank).exists()
        traceback = failure.traceback or (self._stack(failure.rank) if runs_on else "")
        return RankError(failure.rank, failure.exitcode, failure.reason, str(positions[failure.rank]), traceback)

    def _cause(self, victim: _Failure, positions: list[flight.Position]) -> _Failure:
        """Follow who waited for whom to a rank that runs on; if that is not known, take the one furthest behind."""
        chain = [victim.rank]
        while (last := self.failures.get(chain[-1])) and last.waited_for is not None:
            if last.waited_for in chain:
                cycle = [*chain[chain.index(last.waited_for) :], last.waited_for]
                deadlock = f"deadlock: rank {' waited for rank '.join(map(str, cycle))}"
                return dataclasses.replace(victim, reason=f"{victim.reason}\n{deadlock}")
            chain.append(last.waited_for)
        others = set(range(self.run.world_size)) - set(self.failures)
        if not others:
            return victim
        rank = chain[-1] if chain[-1] in others else self._furthest_behind(others, positions)
        if not victim.traceback and positions[rank].count >= positions[victim.rank].count:
            return victim  # it was killed, and nobody is behind it: so it was not for waiting
        did, where = "finished" if self.run.result(rank).exists() else "stalled", positions[victim.rank]
        return _Failure(rank, f"{did} while rank {victim.rank} waited {where} and then {victim.reason}", None)

    def _stack(self, rank: int) -> str:
        """Ask a rank that still runs where it is (its faulthandler answers SIGUSR1); "" if it cannot say."""
        if not self._runs(rank) or not self.run.stack(rank).exists():
            return ""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        launcher = f'  File "{rank_process.__file__}"'  # its own frames, the last, say nothing
        end, text = time.monotonic() + GRACE, ""
        while time.monotonic() < end and launcher not in text:
            self.processes[rank].join(0.02)
            text = self.run.stack(rank).read_text()
        return text.partition(launcher)[0]

    def _wait_for_exit(self, seconds: float) -> None:
        """Return when all have ended, when time is up, or when a signal says that nobody wants to wait any more."""
        end = time.monotonic() + seconds
        while alive := [self.processes[rank].sentinel for rank in sorted(self.running) if self._runs(rank)]:
            if (left := end - time.monotonic()) <= 0 or self.signals.heard:
                return
            connection.wait(alive, min(left, POLL))

    def _end_all(self) -> None:
        """Terminate, wait, kill: a rank that ignores SIGTERM ends too, and so do processes that a rank started."""
        self.running = {rank for rank in self.running if self.processes[rank].pid is not None}  # those that started
        for rank in self.running:
            self.processes[rank].terminate()
        self._wait_for_exit(GRACE)
        for rank in self.running:
            rank_process.kill_group(self.processes[rank])
            self.processes[rank].join()
        for pipe in self.pipes:
            pipe.close()
