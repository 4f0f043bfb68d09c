"""Processes in sessions of their own, with deadlines; when one has ended, nothing that it started lives on."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_sessions: set[int] = set()  # those that run now


def run(command: list[str], folder: Path, deadline: float, on_line: Callable[[str], None]) -> tuple[int | None, str]:
    """Run a command in `folder`, without input; return (exit code, its output), the code None at the deadline.

    `on_line` gets each line as it comes. Temporary files are made in `folder`/tmp.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    # output comes as it is written; a copy is used once, its bytecode never
    more = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _sessions.add(process.pid)
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout:
            lines.append(line.decode(errors="replace"))
            on_line(lines[-1])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(deadline)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process.pid)
        process.kill()
        process.wait()
    reader.join(timeout=10)  # what held the pipe has been killed
    return code, "".join(lines)


class RunServer:
    """A process that runs tests in processes of their own (run_server.py). One run at a time."""

    def __init__(self) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command, scripts = [sys.executable, "-m", "mutants.run_server"], Path(__file__).parents[1]
        self._process = subprocess.Popen(command, cwd=scripts, start_new_session=True, **pipes)

    def run(self, folder: Path, python_path: Path, names: list[str], deadline: float) -> bool:
        """Run tests in `folder`, which gets result.json and output.txt; return whether they ended by the deadline."""
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        question = {"folder": str(folder), "python_path": str(python_path), "result": str(result), "names": names}
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()
        session = int(self._process.stdout.readline())
        _sessions.add(session)
        late = threading.Event()
        timer = threading.Timer(deadline, lambda: (late.set(), end(session, alive=True)))
        timer.start()
        try:
            self._process.stdout.readline()
        finally:
            timer.cancel()
            end(session)
        return not late.is_set()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def end(session: int, alive: bool = False) -> None:
    """Kill what is left of a session that was started here. Ranks have groups of their own in it.

    `alive`: its first process has not been waited for, so that its number is still its own.
    """
    if os.name == "posix":
        for _ in range(3):  # one that is just forking may be missed once
            for pid in [*([session] if alive else []), *_members(session)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
    _sessions.discard(session)


def end_all() -> None:
    """Kill everything that runs now: for a command that is interrupted."""
    for session in list(_sessions):
        end(session, alive=True)


def _members(session: int) -> list[int]:
    """The processes of a session, where the system shows them (Linux; elsewhere ranks end with their launcher)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found
