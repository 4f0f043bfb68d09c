"""The proof that a test rejects a wrong answer: run it on a copy of the course, as it is and with the fault in it."""

import json
import re
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sessions
from lessons import Course, Lesson
from mutants import process
from mutants.model import Mutant, code_file, mutate

DEADLINE = 300.0  # seconds for one test
HANG_DEADLINE = 20.0  # for one that may hang with the fault
# These say that the module is broken, which anybody notices: no test has judged the answer.
_BROKEN = re.compile(r"\b(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError|UnboundLocalError)\b")


@dataclass(frozen=True)
class Finding:
    """How a test went: `kind` is passed, failed, error, skipped, or deadline."""

    kind: str
    error: str = ""  # the error's type
    text: str = ""

    @property
    def first_line(self) -> str:
        """The error and the first line of what it says."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return ": ".join(part for part in (self.error, lines[0] if lines else "") if part) or self.kind

    def rejects(self, mutant: Mutant) -> bool:
        """Whether this is how the mutant's test must end: an assertion, or the error that the mutant names."""
        if self.kind == "deadline":
            return mutant.hangs
        if _BROKEN.search(f"{self.error} {self.text}"):
            return False
        if self.kind == "failed":
            return mutant.raises in (None, self.error)
        return self.kind == "error" and self.error == mutant.raises


@contextmanager
def copied(course: Course, lesson: Lesson, mutant: Mutant | None = None):
    """A folder with every lesson's code and this lesson's tests, where they are in the course; with a fault in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        parts = [each.path / "code" for each in course.lessons] + [lesson.path / "tests"]
        for part in parts:
            if (course.root / part).is_dir():
                shutil.copytree(course.root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = folder / code_file(lesson, mutant)
            path.write_text(mutate(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
        yield folder


_idle: list[process.RunServer] = []


@contextmanager
def servers():
    """Inside, tests may run: each run borrows a server that is idle, or starts one. At the end all are closed."""
    try:
        yield
    except BaseException:
        sessions.end_all()
        raise
    finally:
        while _idle:
            _idle.pop().close()


def run_tests(folder: Path, lesson: Lesson, names: list[str], deadline: float) -> dict[str, Finding]:
    """Run these tests of a copy in one process; one `Finding` a name. Call it inside `servers()`."""
    try:
        server = _idle.pop()
    except IndexError:
        server = process.RunServer()
    try:
        ended = server.run(folder, folder / lesson.path / "tests", names, deadline)
    finally:
        _idle.append(server)
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
        text = f"no result: {output[-300:]}" if ended else f"stopped after {deadline:g} s"
        return {name: Finding("error" if ended else "deadline", text=text) for name in names}
    return {name: Finding(*found[name]) if found[name] else Finding("passed") for name in names}


@dataclass(frozen=True)
class Judged:
    """What became of one mutant."""

    lesson: Lesson
    mutant: Mutant
    finding: Finding
    fault: str = ""  # why this proves nothing, if it does not

    @property
    def rejected(self) -> bool:
        """Whether the test passes without the fault, and rejects it."""
        return not self.fault and self.finding.rejects(self.mutant)


def baseline(course: Course, lesson: Lesson, mutants: list[Mutant]) -> dict[str, Finding]:
    """How the tests that should reject these mutants go without any fault. One process for all of them."""
    names = sorted({mutant.caught_by for mutant in mutants})
    with copied(course, lesson) as folder:
        return run_tests(folder, lesson, names, DEADLINE * len(names))


def judge(course: Course, lesson: Lesson, mutant: Mutant, without: Finding) -> Judged:
    """Run the mutant's test on a fresh copy with the fault; `without` is how it went on one without."""
    if without.kind != "passed":
        return Judged(lesson, mutant, without, f"{mutant.caught_by} does not pass without the fault")
    with copied(course, lesson, mutant) as folder:
        deadline = HANG_DEADLINE if mutant.hangs else DEADLINE
        finding = run_tests(folder, lesson, [mutant.caught_by], deadline)[mutant.caught_by]
    return Judged(lesson, mutant, finding)
