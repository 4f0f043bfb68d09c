"""Processes in sessions of their own, with deadlines; when one has ended, nothing that it started lives on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from grading.processes import descendants

_sessions: set[int] = set()  # those that run now


def run(
    command: list[str],
    folder: Path,
    deadline: float,
    on_line: Callable[[str], object] = str,
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run a command in `folder`, without input; return (exit code, its output), the code None at the deadline.

    `on_line` gets each line as it comes. `environment` is added to this process's own.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    begun(process.pid)
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
        end(process.pid, alive=process.poll() is None)
        process.kill()
        process.wait()
    reader.join(timeout=10)  # what held the pipe has been killed
    if not reader.is_alive():
        process.stdout.close()
    return code, "".join(lines)


def begun(session: int) -> None:
    """Note a session that somebody else has started, for `end_all`."""
    _sessions.add(session)


def end(session: int, alive: bool = False) -> None:
    """Kill what is left of a session that was started here, and what it has started in sessions of its own.

    `alive`: its first process has not been waited for, so that its number is still its own.
    """
    if os.name == "posix":
        kill(started_by(session) if alive else [])
        for _ in range(3):  # one that is just forking may be missed once
            kill([*([session] if alive else []), *_members(session)])
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
    _sessions.discard(session)


def end_all() -> None:
    """Kill everything that runs now: for a command that is interrupted."""
    for session in list(_sessions):
        end(session, alive=True)


def started_by(pid: int) -> list[int]:
    """All descendants of a process, where the system shows them. They can be told only while it lives."""
    return descendants(pid) if sys.platform == "linux" else []


def kill(pids: Iterable[int]) -> None:
    """Kill processes, of which some may have ended already."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _members(session: int) -> list[int]:
    """The processes of a session, where the system shows them (Linux; elsewhere ranks end with their launcher)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found
