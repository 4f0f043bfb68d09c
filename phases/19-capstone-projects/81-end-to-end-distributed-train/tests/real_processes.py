"""What tests that start commands need: a deadline, all output, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
DEADLINE = 600  # seconds: a hang is a failure, but many tests share few cores
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


# In a shell's background Ctrl-C is ignored by all, and so it would be by what is started here.
HEARING = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)} if os.name == "posix" else {}


def start(words: list, cwd: Path, **environment: str) -> subprocess.Popen:
    """Start a command in `cwd`, in a session of its own; both its outputs are one."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen([str(word) for word in words], cwd=cwd, env=os.environ | environment, **options, **HEARING)


def finish(process: subprocess.Popen, cwd: Path) -> tuple[int, str]:
    """Wait for a command that was started in `cwd`; return (exit code, output). Raises if processes are left there."""
    try:
        with process:
            out = process.communicate(timeout=DEADLINE)[0]
        end = time.monotonic() + 30
        while (left := processes_in(cwd)) and time.monotonic() < end:
            time.sleep(0.05)  # a process that has just ended takes a moment to be gone
        if left:
            raise AssertionError(f"processes {left} are left of {process.args}:\n{out}")
    finally:
        for each in [*processes_in(cwd), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    return process.returncode, out


def run(words: list, cwd: Path, **environment: str) -> tuple[int, str]:
    """Run a command to its end; return (exit code, output)."""
    return finish(start(words, cwd, **environment), cwd)


def processes_in(folder: Path) -> list[int]:
    """The processes that work in a folder (Linux; elsewhere none are found)."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if Path(os.readlink(link)) == folder.resolve():
                found.append(int(link.parent.name))
    return found


def process_of_rank(rank: int, folder: Path) -> int:
    """The process in a folder that torchrun has made this rank (Linux)."""
    for process in processes_in(folder):
        with suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                return process
    raise AssertionError(f"no process in {folder} is rank {rank}")
