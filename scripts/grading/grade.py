"""Grade what one student handed in: each exercise alone, in the pristine lesson with the student's functions in it.

| status        | what it means                                                                   | points |
|---------------|---------------------------------------------------------------------------------|--------|
| correct       | every test of the exercise ran exactly once and passed                          | all    |
| incorrect     | a test failed, or the run ended in another way than with all tests passed       | 0      |
| not attempted | the functions are as in the starter, or file or function was not handed in      | 0      |
| blocked       | cannot be run: no Python, cannot be cut out, or the submission's time is used up | 0      |
| error         | it could not be judged: the tests fail here on the lesson's own code, say       | open   |
"""

import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exercises.calls import Calls, circles
from exercises.model import Exercise, read_exercises
from exercises.source import GraftError, decode, definition, parse
from exercises.surgery import graft_all, is_stub
from faults import UserError
from grading.beside import modules_beside
from grading.circles import called, with_all
from grading.evidence import Cut, collect
from grading.judge import FACTOR, Judge, Stopped, Verdict
from grading.own import lesson_with_new, not_taken, texts_of
from grading.runner import LOADING
from grading.naming import find_module, names_like
from grading.submissions import Work
from lessons import Lesson

STATUSES = ("correct", "incorrect", "not attempted", "blocked", "error")


@dataclass
class Result:
    """One exercise of one student. `points` is None where nothing is decided."""

    exercise: str
    status: str
    points: float | None
    of: float
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    tests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    own_seconds: float = 0.0  # what its tests take with the lesson's own code
    reused: bool = False
    files: list[str] = field(default_factory=list)  # that it was taken from
    published: bool = False  # word for word the lesson's own solution, which everybody can read
    override: dict[str, Any] | None = None
    noted: list[str] = field(default_factory=list)  # for the instructor: what a witness saw in the run


class NotAttempted(Exception):
    """Nothing of an exercise was handed in; the text says what is missing."""


class Blocked(Exception):
    """What was handed in cannot be put into the lesson; `file` and `line` say where."""

    def __init__(self, reason: str, file: str = "", line: int | None = None) -> None:
        super().__init__(reason)
        self.file, self.line = file, line


def grade(judge: Judge, exercises: list[Exercise], work: Work) -> list[Result]:
    """All exercises of one student, in order."""
    begin = time.monotonic()
    results: list[Result] = []
    for exercise in exercises:
        slow = FACTOR * sum(result.own_seconds for result in results)  # no answer fails because the machine is busy
        if time.monotonic() - begin > judge.limits.submission_seconds + slow and work.handed is not None:
            reason = f"not run: the submission's {judge.limits.submission_seconds:g} s were used up before"
            results.append(Result(exercise.id, "blocked", 0, exercise.points, reason))
            continue
        try:
            results.append(grade_exercise(judge, exercise, work))
        except (Stopped, OSError):
            raise
        except Exception as error:  # the class is graded all the same
            results.append(Result(exercise.id, "error", None, exercise.points, _own_fault(error)))
    try:
        _judge_circles(judge, results, work)
    except (Stopped, OSError):
        raise
    except Exception as error:
        for result in results:
            result.noted = [*result.noted, f"no circle was looked for: {_own_fault(error)}"]
    return results


def _own_fault(error: Exception) -> str:
    """What to say of a fault of the grader itself: nobody's points are decided by it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"the grader itself failed, please report it: {type(error).__name__}: {error} ({where})"


def _judge_circles(judge: Judge, results: list[Result], work: Work) -> None:
    """What is right only because each of some exercises was judged with the lesson's own others is not."""
    exercises = {exercise.id: exercise for exercise in read_exercises(judge.lesson)}
    right = {result.exercise: result for result in results if result.status == "correct" and not result.published}
    if not right:
        return
    calls, known = called(judge, [*exercises.values()], work)
    found = circles(calls, known)
    for exercise in (each for each in exercises.values() if each.id in right and each.id in found):
        others = [exercises[other] for other in found[exercise.id]]
        cuts = _cut_all(judge, exercise, work)
        texts = with_all(judge, [exercise, *others], work)
        for module, text in texts.items():
            if module in cuts:
                cuts[module].grafted = text
        verdict = judge.judge(exercise, {module: each.grafted for module, each in cuts.items()} | texts)
        if verdict.status == "incorrect":
            names = ", ".join(f"{other.title} ({other.id})" for other in others)
            why = (
                f"it and {names} call each other in a circle: with the lesson's own it is right, with yours of all not"
            )
            wrong = _result(exercise, replace(verdict, reason=f"{why}; {verdict.reason}"), list(cuts.values()))
            results[results.index(right[exercise.id])] = replace(wrong, files=right[exercise.id].files)
    _note_leaning(results, calls - known)


def _note_leaning(results: list[Result], calls: Calls) -> None:
    """Tell the instructor of each exercise that is right because the lesson's own stands for one that is not."""
    status = {result.exercise: result.status for result in results}
    for index, result in enumerate(results):
        others = [other for one, other in sorted(calls) if one == result.exercise]
        told = [
            f"leans on {other}, which is not solved" for other in others if status.get(other, "correct") != "correct"
        ]
        if result.status == "correct" and told:
            results[index] = replace(result, noted=[*result.noted, *told])


def grade_exercise(judge: Judge, exercise: Exercise, work: Work) -> Result:
    """One exercise."""
    try:
        cuts = _cut_all(judge, exercise, work)
    except NotAttempted as missing:
        return Result(exercise.id, "not attempted", 0, exercise.points, str(missing))
    except Blocked as blocked:
        place = {"file": blocked.file, "line": blocked.line} if blocked.file else {}
        evidence = {key: value for key, value in place.items() if value is not None}
        return Result(exercise.id, "blocked", 0, exercise.points, str(blocked), evidence)
    verdict = judge.judge(exercise, {module: cut.grafted for module, cut in cuts.items()})
    if verdict.status == "incorrect" and verdict.test == LOADING:  # a new line may be at fault that it does not use
        fewer = cut(judge.lesson, judge, exercise, work, everything=False)
        if {module: each.grafted for module, each in fewer.items()} != {m: each.grafted for m, each in cuts.items()}:
            cuts, verdict = fewer, judge.judge(exercise, {module: each.grafted for module, each in fewer.items()})
    result = _result(exercise, verdict, list(cuts.values()))
    if result.status == "incorrect" and (left := not_taken(judge, exercise, work)):
        result.evidence["not_taken"] = left
    result.files = sorted(cut.file for cut in cuts.values())
    result.published = all(_is_published(judge, module, cuts[module], exercise) for module in exercise.by_module)
    return result


def _cut_all(judge: Judge, exercise: Exercise, work: Work) -> dict[str, Cut]:
    """With all that is new; if that cannot be, the exercise may do without."""
    try:
        return cut(judge.lesson, judge, exercise, work)
    except Blocked:
        return cut(judge.lesson, judge, exercise, work, everything=False)


def _is_published(judge: Judge, module: str, cut: Cut, exercise: Exercise) -> bool:
    pristine = judge.layout.source(module)
    return graft_all(pristine, cut.text, exercise.by_module[module]) == pristine


def _result(exercise: Exercise, verdict: Verdict, cuts: list[Cut]) -> Result:
    points = {"correct": exercise.points, "incorrect": 0}.get(verdict.status)
    evidence = collect(verdict, cuts, exercise.functions).to_json() if verdict.status == "incorrect" else {}
    more = {name: round(getattr(verdict, name), 3) for name in ("seconds", "cpu_seconds", "own_seconds")}
    more |= {"tests": verdict.tests, "reused": verdict.reused, "noted": verdict.noted}
    return Result(exercise.id, verdict.status, points, exercise.points, verdict.reason, evidence, **more)


def cut(lesson: Lesson, judge: Judge, exercise: Exercise, work: Work, everything: bool = True) -> dict[str, Cut]:
    """The lesson's modules with the student's functions of this exercise in them, and new modules that these import.

    With all that is new in the student's modules of the lesson, of which nothing replaces what the lesson has; or only
    with what these functions use (`everything` is False). Raises NotAttempted, or Blocked with file and line.
    """
    if work.handed is None:
        raise NotAttempted("nothing was handed in")
    cuts, stubs, missing, beside = {}, [], [], {}
    for module, names in exercise.by_module.items():
        try:
            path = find_module(work.handed, lesson, module)
        except UserError as error:
            raise Blocked(str(error)) from None
        if path is None:
            like = [work.handed.origins.get(each, each) for each in names_like(work.handed, lesson, module)]
            which = f"; which of these is it: {', '.join(like)}?" if like else ""
            missing.append(f"{module}.py was not handed in{which}")
            continue
        shown = work.handed.origins.get(path, path)
        text = _text(work.handed.files[path], shown)
        missing += _missing(text, names, shown)
        if not missing:
            stubs += [is_stub(text, name) for name in names]
            grafted = _graft(judge.layout.source(module), text, names, shown, everything)
            cuts[module] = Cut(shown, text, grafted, judge.layout.path(module))
            beside |= modules_beside(work.handed, path, grafted, judge.layout)
    if missing:
        problems = work.handed.problems
        raise NotAttempted("; ".join(missing + problems[:3]))
    if all(stubs):
        raise NotAttempted("still as in the starter")
    for module, (path, text) in texts_of(judge, work).items() if everything else ():
        more = lesson_with_new(judge.layout.source(module), text)
        if module not in cuts and more != judge.layout.source(module):
            cuts[module] = Cut(work.handed.origins.get(path, path), text, more, judge.layout.path(module))
            beside |= modules_beside(work.handed, path, more, judge.layout)
    for module, path in beside.items():
        shown = work.handed.origins.get(path, path)
        text = _text(work.handed.files[path], shown)
        cuts[module] = Cut(shown, text, text, judge.layout.path(module))
    return cuts


def _text(data: bytes, shown: str) -> str:
    try:
        text = decode(data)
        parse(text)
        return text
    except GraftError as error:
        raise Blocked(error.reason, shown, error.line) from None


def _missing(text: str, names: list[str], shown: str) -> list[str]:
    found = []
    for name in names:
        try:
            definition(parse(text), name)
        except GraftError as error:
            if error.reason.startswith("there is no"):
                found.append(f"{shown}: {error.reason}")
            else:
                raise Blocked(error.reason, shown, error.line) from None
    return found


def _graft(pristine: str, text: str, names: list[str], shown: str, everything: bool) -> str:
    try:
        return graft_all(lesson_with_new(pristine, text) if everything else pristine, text, names)
    except GraftError as error:
        raise Blocked(error.reason, shown, error.line) from None
