"""Run some of a lesson's tests in a process of its own, and say in a few lines how it went."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import sessions
from testrun import counts

_BLOCK = re.compile(r"^={70}\n(?:FAIL|ERROR): (.+)\n(?:.+\n)*?-{70}\n", re.MULTILINE)
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(:|$)")
KEPT = 400_000  # bytes of output that are looked at: the first half and the last
SHOWN = 12  # lines of a failure


@dataclass(frozen=True)
class Verdict:
    """How the tests went: "passed", "failed", "timed out" or "skipped" (not one of them can run on this machine)."""

    status: str
    seconds: float
    test: str = ""  # the first that failed, as unittest writes it
    message: str = ""  # what it said, shortened
    output: str = ""  # all that was printed


def judge(
    tests_folder: Path, tests: Sequence[str], deadline: float, failfast: bool = True, kept: int = KEPT
) -> Verdict:
    """`python -m unittest TESTS` in the folder, until the first failure.

    No process of it is left, whatever happens; of its output at most `kept` bytes are.
    """
    begin = time.monotonic()
    options = ["--failfast"] if failfast else []
    command = [sys.executable, "-X", "faulthandler", "-m", "unittest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryFile() as output:
        streams = dict(cwd=tests_folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        process = subprocess.Popen(command, start_new_session=True, **streams)
        try:
            code = _wait(process, deadline)
        finally:
            sessions.end(process.pid, alive=process.poll() is None)
            process.kill()
            process.wait()
        text = _read(output, kept)
    seconds = time.monotonic() - begin
    if code is None:
        return Verdict("timed out", seconds, "", _where(text, deadline), text)
    ran, skipped = counts(text)
    if code == 0 and ran > skipped:
        return Verdict("passed", seconds, output=text)
    if code == 0 and ran:
        return Verdict("skipped", seconds, "", "every test was skipped on this machine", text)
    block = _BLOCK.search(text)
    if block is None:
        return Verdict("failed", seconds, "", "\n".join(text.splitlines()[-SHOWN:]), text)
    return Verdict("failed", seconds, block[1], _shortened(text[block.end() :]), text)


def failed_tests(output: str) -> set[str]:
    """test_file.Class.test_method of each that failed; less of it where a class or a file could not begin."""
    found = set()
    for match in _BLOCK.finditer(output):
        name, _, place = match[1].partition(" (")
        place = place.partition(")")[0]
        if place.startswith("unittest.loader._FailedTest"):
            place = name
        elif name.startswith("test") and not place.endswith(f".{name}"):
            place = f"{place}.{name}"  # before Python 3.11
        found.add(place)
    return found


def _wait(process: subprocess.Popen, deadline: float) -> int | None:
    """The exit code; None after the deadline, at which the process is asked to show where it is."""
    try:
        return process.wait(deadline)
    except subprocess.TimeoutExpired:
        if os.name == "posix":
            started = sessions.started_by(process.pid)  # while they can still be told by their parents
            process.send_signal(signal.SIGABRT)  # faulthandler prints every thread
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                pass
            sessions.kill(started)
        return None


def _read(output: BinaryIO, kept: int) -> str:
    """The text, without its middle if there is more than `kept`."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= kept:
        data = output.read()
    else:
        data = output.read(kept // 2)
        output.seek(-kept // 2, os.SEEK_END)
        data += b"\n[...]\n" + output.read()
    return data.decode(errors="replace").replace("\r\n", "\n")


def _shortened(text: str) -> str:
    """The end of one test's traceback: what was raised, from the line that says so."""
    lines = text[: match.start()].rstrip().splitlines() if (match := re.search(r"^[=-]{70}$", text, re.M)) else []
    lines = lines or text.rstrip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    raised = next((i for i in range(last_frame + 1, len(lines)) if _RAISED.match(lines[i])), last_frame + 1)
    kept = lines[raised:]
    return "\n".join(kept if len(kept) <= SHOWN else [*kept[: SHOWN - 1], "..."])


def _where(text: str, deadline: float) -> str:
    """What faulthandler printed of the thread that runs the tests, its newest frames."""
    frames = re.search(r"^(?:Current thread|Thread) .*(?:\n  File .*)+", text[text.rfind("Fatal Python error") :], re.M)
    lines = frames[0].splitlines()[1:SHOWN] if frames else text.splitlines()[-SHOWN:]
    return "\n".join([f"did not finish within {deadline:g} s; it was here:", *lines])
