"""`course try`: a learner's functions in order, against the lesson's tests, until one does not pass."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from exercises.folder import Marker, lesson_files, read_marker, version, write_folder
from exercises.judge import judge
from exercises.model import Exercise, choose, read_exercises, with_dependencies
from exercises.surgery import GraftError, decode, find, is_stub
from faults import UserError
from lessons import Course, Lesson

IGNORED = shutil.ignore_patterns("__pycache__", "outputs", ".*", "*.egg-info")


@dataclass(frozen=True)
class Report:
    """One exercise: "passed", "failed", "timed out", "skipped", "not started", "broken" or "not reached"."""

    exercise: Exercise
    status: str
    seconds: float = 0.0
    test: str = ""  # the first that failed
    message: str = ""


@dataclass(frozen=True)
class Trial:
    """All exercises asked for, in order, and whose tests were used."""

    marker: Marker
    own_tests: bool  # the folder's own, as the course's lesson is another version
    reports: list[Report]

    @property
    def passed(self) -> bool:
        """Whether every one passed."""
        return all(report.status == "passed" for report in self.reports)


def try_folder(
    course: Course, folder: Path, ids: Sequence[str], deadline: float, tell: Callable[[Report], None] = lambda _: None
) -> Trial:
    """Run the exercises with these ids, and those that they depend on, or all; `tell` hears of each as it is done.

    A snapshot of the folder is judged, with the course's own tests, so that nothing edited meanwhile counts.
    UserError for an unknown id and for a folder that `course start` has not made.
    """
    marker = read_marker(folder)
    with tempfile.TemporaryDirectory(prefix="course-try-") as holder:
        copy = Path(holder).resolve()
        shutil.copytree(folder / "phases", copy / "phases", ignore=IGNORED, symlinks=True)
        own_tests = not _bring_tests(course, marker, copy)
        lesson = Lesson(copy, Path(marker.path))
        exercises = read_exercises(lesson)
        chosen = exercises
        for name in ids:
            chosen = with_dependencies(exercises, choose(exercises, [name])[0])
        reports: list[Report] = []
        for exercise in chosen:
            stopped = any(report.status not in ("passed", "skipped") for report in reports)
            report = Report(exercise, "not reached") if stopped else _try_one(lesson, exercise, deadline)
            shown = report.message.replace(str(copy), str(folder))  # where the learner edits
            reports.append(Report(exercise, report.status, report.seconds, report.test, shown))
            tell(reports[-1])
    return Trial(marker, own_tests, reports)


def _bring_tests(course: Course, marker: Marker, copy: Path) -> bool:
    """Put the course's tests and exercises into the copy, if its lesson is the version that the folder was made of."""
    lesson = next((lesson for lesson in course.lessons if lesson.id == marker.lesson), None)
    if lesson is None or version(course, lesson) != marker.version:
        return False
    files = lesson_files(course, lesson)
    parts = {path: PurePosixPath(path).relative_to(lesson.path.as_posix()).parts for path in files}
    for part in ("tests", "exercises.json"):
        theirs = copy / marker.path / part
        shutil.rmtree(theirs) if theirs.is_dir() else theirs.unlink(missing_ok=True)
    write_folder(copy, {path: files[path] for path in files if parts[path][0] in ("tests", "exercises.json")})
    return True


def _try_one(lesson: Lesson, exercise: Exercise, deadline: float) -> Report:
    for module, names in exercise.by_module.items():
        path = lesson.folder / "code" / f"{module}.py"
        try:
            text = decode(path.read_bytes())
            stubs = [name for name in names if is_stub(text, name)]
        except OSError:
            return Report(exercise, "broken", message=f"{path} is missing")
        except GraftError as error:
            return Report(exercise, "broken", message=f"{path}: {error}")
        if stubs:
            line = find(text, stubs[0]).first
            return Report(
                exercise, "not started", message=f"{path}, line {line}: {module}.{stubs[0]} is still to be written"
            )
    verdict = judge(lesson.folder / "tests", exercise.tests, deadline)
    return Report(exercise, verdict.status, verdict.seconds, verdict.test, verdict.message)


def check_deadline(deadline: float) -> None:
    """UserError for a deadline that is no time."""
    if not 0 < deadline < 1e6:
        raise UserError(f"--deadline is {deadline:g}; seconds above 0 are expected")
