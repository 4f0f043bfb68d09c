"""`course try`: a learner's functions in order, against the lesson's tests, until one does not pass."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from exercises.alone import alone_in, circles_in, judge_with, left_out, source
from exercises.folder import Marker, lesson_files, read_marker, version, write_folder
from exercises.judge import Verdict, judge
from exercises.model import Exercise, choose, names_by_module, read_exercises, with_dependencies
from exercises.surgery import GraftError, decode, find, graft_all, is_stub
from faults import UserError
from lessons import Course, Lesson

IGNORED = shutil.ignore_patterns("__pycache__", "outputs", ".*", "*.egg-info")


@dataclass(frozen=True)
class Report:
    """One exercise, and how it went.

    "passed", "failed", "timed out", "skipped", "not started", "not judged", "broken" or "not reached".
    """

    exercise: Exercise
    status: str
    seconds: float = 0.0
    test: str = ""  # the first that failed
    message: str = ""
    note: str = ""  # with what else of the learner's it goes otherwise


@dataclass(frozen=True)
class _Setting:
    """What all exercises are tried in."""

    lesson: Lesson  # the copy of the learner's folder
    own: Lesson | None  # the course's lesson, if the folder is of its version
    exercises: list[Exercise]
    unready: dict[str, Report]
    left: list[str]  # see Trial.left_out
    circles: dict[str, list[str]]
    deadline: float


@dataclass(frozen=True)
class Trial:
    """All exercises asked for, in order, and whose tests were used."""

    marker: Marker
    own_tests: bool  # the folder's own, as the course's lesson is another version
    reports: list[Report]
    left_out: list[str]  # what the learner changed beside the exercises, which course grade does not take

    @property
    def passed(self) -> bool:
        """Whether every one passed."""
        return all(report.status == "passed" for report in self.reports)


def try_folder(
    course: Course, folder: Path, ids: Sequence[str], deadline: float, tell: Callable[[Report], None] = lambda _: None
) -> Trial:
    """Run all exercises, or those with these ids and what they build on as far as it is written, until one fails.

    A snapshot of the folder is judged, with the course's own tests, so that nothing edited meanwhile counts. Functions
    that are not written yet are lent by the course: no exercise has to wait for another. What fails is run once more in
    the lesson's own modules, so that none is blamed for another. `tell` hears of each report.
    UserError for an unknown id and for a folder that `course start` has not made.
    """
    marker = read_marker(folder)
    with tempfile.TemporaryDirectory(prefix="course-try-") as holder:
        copy = Path(holder).resolve()
        _copy(folder, copy)
        own = _same_version(course, marker)
        if own is not None:
            _bring_tests(course, own, copy)
        lesson = Lesson(copy, Path(marker.path))
        exercises = read_exercises(lesson)
        unready = {exercise.id: report for exercise in exercises if (report := _unready(lesson, exercise))}
        if own is not None:
            _lend(own, lesson, exercises)
        left = left_out(own, lesson, exercises) if own is not None else []
        rings = circles_in(own, lesson, exercises) if own is not None else {}
        setting = _Setting(lesson, own, exercises, unready, left, rings, deadline)
        reports: list[Report] = []
        for exercise in _in_question(exercises, ids, unready):
            if any(report.status not in ("passed", "skipped") for report in reports):
                report = Report(exercise, "not reached")
            else:
                report = unready.get(exercise.id) or _run(setting, exercise)
            shown = {key: getattr(report, key).replace(str(copy), str(folder)) for key in ("message", "note")}
            reports.append(replace(report, **shown))  # where the learner edits
            tell(reports[-1])
    return Trial(marker, own is None, reports, left)


def _copy(folder: Path, copy: Path) -> None:
    """A snapshot that can be changed, also of a folder that cannot. UserError, with the file, if one is unreadable."""
    try:
        shutil.copytree(folder / "phases", copy / "phases", ignore=IGNORED, symlinks=True)
    except shutil.Error as error:
        source, _, why = error.args[0][0]
        raise UserError(f"{source}: {why}") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}") from None
    finally:
        for at, _, files in os.walk(copy):
            os.chmod(at, 0o700)
            for path in (Path(at, name) for name in files):
                if not path.is_symlink():
                    path.chmod(0o600)


def _in_question(exercises: list[Exercise], ids: Sequence[str], unready: dict[str, Report]) -> list[Exercise]:
    """In order: all, or those with these ids and, of what they build on, what is written."""
    wanted = choose(exercises, ids)
    needed = {other.id for exercise in wanted for other in with_dependencies(exercises, exercise)}
    return [each for each in exercises if each in wanted or (each.id in needed and each.id not in unready)]


def _same_version(course: Course, marker: Marker) -> Lesson | None:
    """The course's lesson that the folder was made of, if it has not changed since."""
    lesson = next((lesson for lesson in course.lessons if lesson.id == marker.lesson), None)
    return lesson if lesson is not None and version(course, lesson) == marker.version else None


def _bring_tests(course: Course, own: Lesson, copy: Path) -> None:
    """Put the course's tests and exercises into the copy, in place of the learner's."""
    for part in ("tests", "exercises.json"):
        theirs = copy / own.path / part
        shutil.rmtree(theirs) if theirs.is_dir() else theirs.unlink(missing_ok=True)
    places = (own.path / "tests", own.path / "exercises.json")
    files = lesson_files(course, own)
    write_folder(copy, {path: data for path, data in files.items() if any(map(PurePath(path).is_relative_to, places))})


def _lend(own: Lesson, copy: Lesson, exercises: list[Exercise]) -> None:
    """Put the course's functions into the copy where the learner's are still stubs."""
    for module, names in names_by_module([name for exercise in exercises for name in exercise.functions]).items():
        try:
            text = decode(source(copy, module).read_bytes())
            stubs = [name for name in names if _is_stub_in(text, name)]
            lent = graft_all(text, source(own, module).read_bytes(), stubs)
        except (OSError, GraftError):
            continue  # a module that does not parse: the exercise of it says so
        if stubs:
            source(copy, module).write_text(lent, encoding="utf-8")


def _is_stub_in(text: str, name: str) -> bool:
    """Whether it is there and is a stub."""
    try:
        return is_stub(text, name)
    except GraftError as error:
        if error.reason.startswith("not Python"):
            raise
        return False


def _unready(lesson: Lesson, exercise: Exercise) -> Report | None:
    """Why the exercise need not be run: a function of it is still a stub, or gone, or its module does not parse."""
    for module, names in exercise.by_module.items():
        path = source(lesson, module)
        try:
            text = decode(path.read_bytes())
            stubs = [name for name in names if is_stub(text, name)]
        except OSError:
            return Report(exercise, "broken", message=f"{path} is missing")
        except GraftError as error:
            return Report(exercise, "broken", message=f"{path}: {error}")
        if stubs:
            place = f"{path}, line {find(text, stubs[0]).first}"
            return Report(exercise, "not started", message=f"{place}: {module}.{stubs[0]} is still to be written")
    return None


def _run(at: _Setting, exercise: Exercise) -> Report:
    """The report on an exercise that is written.

    Where the learner changed more (`left`), what passes is run once more without that, as course grade does.
    """
    verdict = judge(at.lesson.folder / "tests", exercise.tests, at.deadline)
    together = Report(exercise, verdict.status, verdict.seconds, verdict.test, verdict.message)
    if verdict.status == "skipped" or (verdict.status == "passed" and not at.left):
        return together
    if at.own is None:
        needs = [each.id for each in at.exercises if f"NotImplementedError: [{each.id}]" in verdict.output]
        needs = [needed for needed in needs if needed != exercise.id]
        return replace(together, status="not judged", message=_not_lent(needs[0])) if needs else together
    texts = alone_in(at.own, at.lesson, [exercise])
    if not texts:
        return together
    alone = judge_with(texts, at.lesson, exercise, at.deadline)
    seconds = together.seconds + alone.seconds
    if alone.status == "passed" and exercise.id in at.circles:
        report = _in_circle(at, exercise)
        if report.status != "passed":
            return replace(report, seconds=seconds + report.seconds)
    if verdict.status == "passed":
        if alone.status == "passed":
            return replace(together, seconds=seconds)
        note = f"right only with what else you changed: {', '.join(at.left)}"
        return Report(exercise, alone.status, seconds, alone.test, alone.message, note)
    if alone.status != "passed":
        first = verdict if alone.test == verdict.test else alone
        return Report(exercise, first.status, seconds, first.test, first.message)
    return Report(exercise, "passed", seconds, note=_but_together(at, exercise, verdict, texts))


def _in_circle(at: _Setting, exercise: Exercise) -> Report:
    """The report on an exercise with all that it calls in a circle, as course grade judges it."""
    others = [each for each in at.exercises if each.id in at.circles[exercise.id]]
    verdict = judge_with(alone_in(at.own, at.lesson, [exercise, *others]), at.lesson, exercise, at.deadline)
    names = " and ".join(other.id for other in others)
    note = f"right only with the course's own {names}, and with yours not: they call each other in a circle"
    return Report(exercise, verdict.status, verdict.seconds, verdict.test, verdict.message, note)


def _but_together(at: _Setting, exercise: Exercise, verdict: Verdict, texts: dict[Path, str]) -> str:
    """With what else of the learner's the exercise, right by itself, went as `verdict` says."""
    others = [other for other in at.exercises if other.id != exercise.id]
    begun = [other for other in others if getattr(at.unready.get(other.id), "status", "") != "not started"]
    begun = [other.id for other in begun if other.by_module.keys() & {path.stem for path in texts}]
    what = f"what else you changed in {', '.join(path.name for path in texts)}"
    what += f" (exercises: {', '.join(begun)})" if begun else ""
    return f"right by itself, but with {what} it {verdict.status}: {verdict.test}\n{verdict.message}"


def _not_lent(missing: str) -> str:
    return (
        f"it needs {missing}, which is still to be written, and the course cannot lend it: the lesson has changed\n"
        f"since this folder was made. Write {missing} first; or make a new folder with course start."
    )


def check_deadline(deadline: float) -> None:
    """UserError for a deadline that is no time."""
    if not 0 < deadline < 1e6:
        raise UserError(f"--deadline is {deadline:g}; seconds above 0 are expected")
