"""Run each folder of tests in a process of its own, and say at the end how it went."""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import sessions

_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_SKIPPED = re.compile(r"\bskipped=(\d+)")


@dataclass(frozen=True)
class Outcome:
    """What one `unittest discover` did. `ran` is 0 if it found no test."""

    name: str
    ran: int
    skipped: int
    seconds: float
    exit_code: int | None  # None: stopped at the deadline

    @property
    def result(self) -> str:
        """ok, or why not."""
        if self.exit_code is None:
            return "TIMED OUT"
        if self.ran == 0:
            return "NO TEST RAN"
        return "ok" if self.exit_code == 0 else "FAILED"


def run_tests(name: str, folder: Path, deadline: float) -> Outcome:
    """`python -m unittest discover -s folder`, its output passed on as it comes, killed after `deadline` seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "unittest", "discover", "-s", str(folder)]
    exit_code, text = sessions.run(command, Path.cwd(), deadline, _pass_on)
    return Outcome(name, *counts(text), time.monotonic() - begin, exit_code)


def counts(output: str) -> tuple[int, int]:
    """(tests that ran, skipped ones among them), as unittest's last lines say."""
    ran, skipped = (sum(map(int, pattern.findall(output)[-1:])) for pattern in (_RAN, _SKIPPED))
    return ran, skipped


def _pass_on(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def table(header: list[str], rows: list[list[str]]) -> str:
    """An aligned table; numbers to the right."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    number = [all(re.fullmatch(r"[\d.]*", row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, number, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def summary(runs: list[Outcome]) -> str:
    """The closing table."""
    rows = [[run.name, str(run.ran), str(run.skipped), f"{run.seconds:.1f}", run.result] for run in runs]
    return table(["tests of", "ran", "skipped", "seconds", "result"], rows)
