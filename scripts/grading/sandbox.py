"""Run a function for a student, apart from everything else, and end all that it started.

    supervisor  the caller: adopts orphans, watches, kills; nothing a student's process writes decides more than its run
      holder    a session of its own; leaves the host's namespaces, as far as permitted
        first   the first process of the PID namespace: waits for the run, and with it everything in there ends
          run   limits, environment, no input; then the function. Ranks and whatever else it starts are below

Honest limits. The function's own process runs the student's code and the tests that judge it: who reads this code and
wants to cheat can. Without a mount namespace files outside can be read and changed; without a PID namespace a process
can kill its supervisor, which is noticed and never ends as a success. Root outside a user namespace has no limit on its
number of processes: the supervisor counts them twenty times a second.
"""

import contextlib
import os
import secrets
import select
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grading import isolation as apart
from grading import linux, processes
from grading.capture import Capped, Lines, Pipe
from grading.isolation import Isolation
from grading.leftovers import SharedMemory
from grading.limits import MIB, Limits, environment, set_resource_limits
from grading.records import Channel, Clock

TICK = 0.05  # seconds between two looks at the processes
RECORD_BYTES = 8 * MIB  # of results and stacks


@dataclass
class Ended:
    """How a run ended.

    `reason` is exited (then there is an `exit_code`, 0 if it is `whole`, negative: a signal), or what made the
    supervisor end it: test deadline, deadline, memory, processes, output, records, lost (the run killed those who watch
    it), setup (nothing ran: `detail` says why), cancelled. `left`: processes that could not be killed.
    """

    reason: str
    exit_code: int | None = None
    whole: bool = False  # the function returned, and nobody left in between
    detail: str = ""
    output: str = ""
    records: list[str] = field(default_factory=list)
    stacks: str = ""
    nonce: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all processes that were waited for
    peak_processes: int = 0
    peak_memory: int = 0
    left: list[int] = field(default_factory=list)


Body = Callable[[Channel], None]


def run(
    body: Body,
    folder: Path,
    limits: Limits,
    isolation: Isolation,
    cancel: int | None = None,
    prepare: Callable[[], None] = lambda: None,
    hide: Sequence[str] = (),
) -> Ended:
    """Fork, run `body(channel)` with `folder` as its private one, and wait until nothing of it is left.

    Before that `prepare()` fills the folder; then the paths in `hide` are not seen any more, nor are other people's
    files, where the machine permits that.

    The caller must be a process of one thread with no children of its own: it becomes a subreaper, and every child it
    has afterwards is killed. `folder` exists, is empty, and is the caller's to delete. `cancel` is a file descriptor:
    when it can be read, the run is over.
    """
    linux.become_subreaper()
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    shared = None if isolation.mounts else SharedMemory()
    supervisor = _Supervisor(limits, secrets.token_hex(16))
    try:
        supervisor.start(_Task(body, folder, isolation, prepare, hide))
        ended = supervisor.watch(cancel)
    finally:
        left = processes.end_descendants()
    supervisor.drain()
    if shared is not None:
        shared.remove_new()
    ended.left = left
    return supervisor.report(ended)


class _Supervisor:
    """One run: its four pipes, and what came through them."""

    def __init__(self, limits: Limits, nonce: str) -> None:
        self.limits, self.nonce = limits, nonce
        self.farewell = 100 + secrets.randbelow(150)  # the code with which a run ends that comes to its own end
        self.pipes = {name: Pipe() for name in ("control", "output", "records", "stacks")}
        self.output, self.control = Capped(limits.output_bytes), Lines(MIB)
        self.records, self.stacks = Lines(RECORD_BYTES), Capped(MIB)
        self.clock = Clock(nonce, limits.test_seconds)
        self.open = set(self.pipes)
        self.base = processes.own_memory(os.getpid())
        self.peak_processes = self.peak_memory = 0
        self.begin, self.cpu = time.monotonic(), _cpu_of_children()

    def start(self, task: "_Task") -> None:
        """Fork the holder."""
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor = os.getpid()
        if os.fork() == 0:
            _Family(self, task).hold(supervisor)
        for pipe in self.pipes.values():
            pipe.close_writer()

    def watch(self, cancel: int | None) -> Ended:
        """Wait for the end, or bring it about."""
        while True:
            readers = [self.pipes[name].reader for name in self.open]
            ready = select.select(readers + ([] if cancel is None else [cancel]), [], [], TICK)[0]
            if cancel in ready:
                return Ended("cancelled")
            self._read()
            ended = self._end() or self._excess()
            if ended:
                return ended

    def drain(self) -> None:
        """What is still in the pipes, now that nobody writes into them any more."""
        deadline = time.monotonic() + 5
        while self.open and time.monotonic() < deadline:
            self._read()
        for pipe in self.pipes.values():
            pipe.close()

    def report(self, ended: Ended) -> Ended:
        """Add what was seen of the run."""
        ended.output, ended.stacks = self.output.text(), self.stacks.text()
        ended.records, ended.nonce = self.records.lines, self.nonce
        ended.seconds, ended.cpu_seconds = time.monotonic() - self.begin, _cpu_of_children() - self.cpu
        ended.peak_processes, ended.peak_memory = self.peak_processes, self.peak_memory
        return ended

    def _read(self) -> None:
        for name in list(self.open):
            data = self.pipes[name].read()
            if data == b"":
                self.open.discard(name)
            elif data is not None:
                for line in getattr(self, name).add(data) or []:
                    if name == "records":
                        self.clock.note(line)

    def _end(self) -> Ended | None:
        """What those who hold the run say of its end; they end without a word only if they are killed."""
        for line in self.control.lines:
            word, _, rest = line.partition(" ")
            if word == "exited":
                whole = int(rest) == self.farewell
                return Ended("exited", 0 if whole else int(rest), whole)
            return Ended("setup", detail=rest)
        return None if "control" in self.open else Ended("lost")

    def _excess(self) -> Ended | None:
        """Whether a limit is passed that only somebody outside can see."""
        limits, now = self.limits, time.monotonic()
        pids = processes.living_descendants(os.getpid())
        memory = sum(max(0, processes.own_memory(pid) - self.base) for pid in pids)
        count = max(0, len(pids) - 2)  # without holder and first
        self.peak_processes, self.peak_memory = max(self.peak_processes, count), max(self.peak_memory, memory)
        if now - self.begin > limits.run_seconds:
            return Ended("deadline", detail=f"more than {limits.run_seconds:g} s")
        if test := self.clock.overdue():
            return Ended("test deadline", detail=test)
        if count > limits.processes:
            return Ended("processes", detail=f"{count} processes at once; {limits.processes} are allowed")
        if memory > limits.memory_bytes:
            return Ended("memory", detail=f"{memory // MIB:,} MiB; {limits.memory_bytes // MIB:,} are allowed")
        if self.output.total > limits.flood_bytes:
            return Ended("output", detail=f"more than {limits.flood_bytes // MIB} MiB of output")
        return Ended("records", detail="too much in the channel of the results") if self.records.full else None


@dataclass(frozen=True)
class _Task:
    """What `run` was given."""

    body: Body
    folder: Path
    isolation: Isolation
    prepare: Callable[[], None]
    hide: Sequence[str]


class _Family:
    """What the forked processes do; none of these methods returns."""

    def __init__(self, supervisor: _Supervisor, task: _Task) -> None:
        self.limits, self.body, self.folder, self.isolation = supervisor.limits, task.body, task.folder, task.isolation
        self.task = task
        self.writers = {name: pipe.writer for name, pipe in supervisor.pipes.items()}
        self.nonce, self.farewell = supervisor.nonce, supervisor.farewell

    def _say(self, word: str, text: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self.writers["control"], f"{word} {text}\n".encode())

    def hold(self, supervisor: int) -> None:
        """Leave session and namespaces; fork the first process; end with it."""
        try:
            os.setsid()
            linux.die_with_parent()
            if os.getppid() != supervisor:
                os._exit(1)  # it died before it was watched
            processes.close_all_but(set(self.writers.values()))
            os.nice(5)  # so that who watches gets a turn
            apart.enter(self.isolation, self.folder, self.limits.folder_bytes, self.task.prepare, self.task.hide)
            os.chdir(self.folder)
            first = os.fork()
            if first == 0:
                self.begin()
            for writer in self.writers.values():
                os.close(writer)
            os.waitpid(first, 0)
        except BaseException as error:
            self._say("setup", f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def begin(self) -> None:
        """Be process 1: fork the run, collect what ends, say how the run ended."""
        try:
            linux.die_with_parent()
            apart.enter_processes(self.isolation)
            run = os.fork()
            if run == 0:
                self.run()
            for name in ("output", "records", "stacks"):
                os.close(self.writers[name])
            pid = status = -1
            while pid != run:
                pid, status = os.waitpid(-1, 0)
            self._say("exited", os.waitstatus_to_exitcode(status))
        except BaseException as error:
            self._say("setup", f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def run(self) -> None:
        """Be the student's process."""
        code = 1
        try:
            os.setsid()
            os.close(self.writers["control"])
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, nothing), (1, self.writers["output"]), (2, self.writers["output"])):
                os.dup2(source, target)
            os.close(nothing)
            os.close(self.writers["output"])
            for number, name in ((1, "stdout"), (2, "stderr")):  # the old ones take a pipe for what they were
                stream = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
            for name in ("home", "tmp"):
                (self.folder / name).mkdir(exist_ok=True)
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update(environment(self.folder))
            tempfile.tempdir = None  # what it found before the fork
            linux.drop_capabilities()
            set_resource_limits(self.limits, self.isolation.user)
            self.body(Channel(self.writers["records"], self.writers["stacks"], self.nonce))
            code = self.farewell
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system
