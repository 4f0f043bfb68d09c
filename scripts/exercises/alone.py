"""One exercise of a learner's in the lesson's own modules, as `course grade` judges it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from exercises.calls import calls_in, circles
from exercises.graft import with_new
from exercises.judge import Verdict, judge
from exercises.model import Exercise, names_by_module
from exercises.source import parse
from exercises.surgery import GraftError, decode, graft_all
from exercises.untaken import changes
from lessons import Lesson


def source(lesson: Lesson, module: str) -> Path:
    """A module's file."""
    return lesson.folder / "code" / f"{module}.py"


def alone_in(own: Lesson, lesson: Lesson, exercises: Sequence[Exercise]) -> dict[Path, str]:
    """The lesson's modules as the course has them, with what is new in the learner's and these exercises' functions.

    Only those that are not so already.
    """
    functions = names_by_module([name for exercise in exercises for name in exercise.functions])
    texts = {}
    for path, pristine, data in _modules(own, lesson):
        try:
            alone = graft_all(_with_new(pristine, data), data, functions.get(path.stem, []))
        except GraftError:
            return {}
        if alone.encode() != data:
            texts[path] = alone
    return texts


def left_out(own: Lesson, lesson: Lesson, exercises: list[Exercise]) -> list[str]:
    """What the learner changed in the lesson's own code beside the exercises: course grade does not take it."""
    functions = {name for exercise in exercises for name in exercise.functions}
    found: list[str] = []
    for path, pristine, data in _modules(own, lesson):
        try:
            found += [f"{path.stem}.{name}" for name in changes(pristine, decode(data))]
        except GraftError:
            continue  # an exercise of it says so
    return [name for name in found if name not in functions]


def circles_in(own: Lesson, lesson: Lesson, exercises: Sequence[Exercise]) -> dict[str, list[str]]:
    """{id of an exercise: those that it calls in a circle}, in what the learner wrote and not in the course's code."""
    pristine = {path.stem: path.read_text(encoding="utf-8") for path in own.modules()}
    mine = dict(pristine)
    for path in filter(Path.is_file, lesson.modules()):
        try:
            parse(text := decode(path.read_bytes()))
        except GraftError:
            continue  # an exercise of it says so
        mine[path.stem] = text
    return circles(calls_in(mine, exercises), calls_in(pristine, exercises))


def _modules(own: Lesson, lesson: Lesson) -> Iterator[tuple[Path, str, bytes]]:
    """(the learner's file, the course's text, the learner's) of each module but main.py."""
    for module in sorted({path.stem for path in own.modules()} - {"main"}):
        path = source(lesson, module)
        yield path, source(own, module).read_text(encoding="utf-8"), path.read_bytes() if path.is_file() else b""


def _with_new(pristine: str, data: bytes) -> str:
    try:
        return with_new(pristine, decode(data))
    except GraftError:
        return pristine


def judge_with(texts: dict[Path, str], lesson: Lesson, exercise: Exercise, deadline: float) -> Verdict:
    """The verdict with these texts; the learner's are put back."""
    before = {path: path.read_bytes() for path in texts if path.is_file()}
    try:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return judge(lesson.folder / "tests", exercise.tests, deadline)
    finally:
        for path in texts:
            path.unlink()
        for path, data in before.items():
            path.write_bytes(data)
