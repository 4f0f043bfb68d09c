"""One exercise of a learner's in the lesson's own modules: does it fail by itself, or only with the rest?"""

from pathlib import Path

from exercises.judge import Verdict, judge
from exercises.model import Exercise, names_by_module
from exercises.surgery import GraftError, graft_all
from lessons import Lesson


def source(lesson: Lesson, module: str) -> Path:
    """A module's file."""
    return lesson.folder / "code" / f"{module}.py"


def alone_in(own: Lesson, lesson: Lesson, exercise: Exercise, others: list[Exercise]) -> dict[Path, str]:
    """The modules of all exercises as the course has them, with the learner's functions of this exercise alone.

    Only those that are not so already.
    """
    texts = {}
    for module in names_by_module([name for each in (exercise, *others) for name in each.functions]):
        path, pristine = source(lesson, module), source(own, module).read_text(encoding="utf-8")
        text = path.read_bytes() if path.is_file() else b""
        names = exercise.by_module.get(module, [])
        try:
            alone = graft_all(pristine, text, names)
        except GraftError:
            return {}
        if alone.encode() != text:
            texts[path] = alone
    return texts


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
