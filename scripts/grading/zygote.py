"""A process that has imported torch once, and forks for each run: `import torch` costs more than most tests.

`python -m grading.zygote DESCRIPTOR MODULE...`, started in the folder scripts/. It reads one JSON request a line from
the socket and answers with one line, how the run ended. It has no threads, and at most one run at a time. (A child of
it reads, watches the run, and answers.)
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path

from grading import runner, sandbox
from grading.isolation import Isolation
from grading.limits import Limits, environment
from grading.records import Outcome, read

PRELOADED = (
    *("numpy", "torch", "torch.distributed", "torch.multiprocessing", "torch.testing", "multiprocessing.spawn"),
    "torch._dynamo",  # the first optimizer imports it: two seconds in each run, and it replaces torch.manual_seed
)


class SupervisorLost(RuntimeError):
    """The process that watches runs has ended in the middle of one."""


class Zygote:
    """The other end: starts the process, and sends it requests. To be used by one thread, and closed."""

    def __init__(
        self,
        limits: Limits,
        isolation: Isolation,
        path: list[str],
        preloaded: Sequence[str] = (),
        hide: Sequence[str] = (),
    ) -> None:
        """`path`: the folders that runs import from, relative to the private folder; `preloaded`: modules' names.

        `hide`: files and folders that no run is to see.
        """
        self._hide = list(hide)
        self.limits, self.isolation, self._preloaded = limits, isolation, preloaded
        self._home = tempfile.TemporaryDirectory(prefix="cg-", ignore_cleanup_errors=True)  # short: sockets lie in it
        self.folder = Path(self._home.name).resolve() / "run"
        self._path = path
        self._process: subprocess.Popen | None = None

    def run(self, request: runner.Request) -> sandbox.Ended:
        """Perform a request. SupervisorLost if the process ended instead of answering."""
        if self._process is None:
            self._start()
        value = {"request": vars(request), "limits": vars(self.limits), "isolation": vars(self.isolation)}
        try:
            self._file.write(json.dumps(value | {"folder": str(self.folder), "hide": self._hide}) + "\n")
            self._file.flush()
            answer = self._file.readline()
        except OSError as error:
            answer = f"{error}"
        try:
            return sandbox.Ended(**json.loads(answer))
        except ValueError:
            self.stop()
            raise SupervisorLost("the process that watches the run was ended by it") from None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            own = environment(self.folder)
            own["PYTHONPATH"] = os.pathsep.join(str(self.folder / folder) for folder in self._path)
            own["TMPDIR"] = self._home.name
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grading.zygote", str(theirs.fileno()), *self._preloaded],
                cwd=Path(__file__).resolve().parents[1],
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the grader
            )
        self._socket, self._file = ours, ours.makefile("rw", encoding="utf-8", newline="\n")

    def interrupt(self) -> None:
        """From another thread: end a run that is going on; who waits for it gets SupervisorLost."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End the process, and with it a run; the next request starts another."""
        if self._process is None:
            return
        for end in (self._file, self._socket):
            with contextlib.suppress(OSError):
                end.close()  # it sees the end of the stream, also in a run, and ends that first
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def close(self) -> None:
        """End the process and delete its folder."""
        self.stop()
        self._home.cleanup()


def outcome(ended: sandbox.Ended) -> Outcome:
    """What the records of a run say."""
    return read(ended.nonce, ended.records)


def serve(descriptor: int) -> None:
    """Have each request answered by a child, until the other end is closed.

    This process itself reads nothing: what it read would be in the memory of all later runs, and a student's code could
    find another's there.
    """
    with socket.socket(fileno=descriptor) as connection:
        os.set_inheritable(descriptor, False)
        while connection.recv(1, socket.MSG_PEEK):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    code = serve_one(connection)
                finally:
                    os._exit(code)
            if os.waitpid(child, 0)[1] != 0:
                return  # nobody waits for an answer, or nobody is left to give one


def serve_one(connection: socket.socket) -> int:
    """Read one request, perform it, and answer; return 0, or 1 if nobody waits for the answer."""
    buffer = b""
    while not buffer.endswith(b"\n"):  # one request at a time: nothing follows it before the answer
        data = connection.recv(1 << 16)
        if not data:
            return 1
        buffer += data
    ended = answer(json.loads(buffer), connection)
    if ended.reason == "cancelled":
        return 1
    connection.sendall(json.dumps(dataclasses.asdict(ended)).encode() + b"\n")
    return 0


def answer(value: dict, connection: socket.socket) -> sandbox.Ended:
    """Perform one request in a fresh folder. What this machine refuses (a full disk, say) is no run: "setup"."""
    request, folder = runner.Request(**value["request"]), Path(value["folder"])
    limits, isolation = Limits(**value["limits"]), Isolation(**value["isolation"])
    limits = dataclasses.replace(limits, test_seconds=request.test_seconds, run_seconds=request.run_seconds)
    shutil.rmtree(folder, ignore_errors=True)

    def body(channel: sandbox.Channel) -> None:
        runner.perform(request, folder, channel)

    def prepare() -> None:
        runner.lay_out(request, folder)

    try:
        folder.mkdir()
        return sandbox.run(body, folder, limits, isolation, connection.fileno(), prepare, value["hide"])
    except OSError as error:
        return sandbox.Ended("setup", detail=f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def preload(names: list[str]) -> None:
    """Import what tests need, so that forks have it. What is not installed, the tests will miss themselves."""
    for name in names:
        with contextlib.suppress(ImportError):
            __import__(name)
    unittest.mock.Mock()


if __name__ == "__main__":
    preload(sys.argv[2:])
    serve(int(sys.argv[1]))
