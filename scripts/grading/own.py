"""A student's own versions of the lesson's modules: what is new in them, and what was changed and is not taken."""

from exercises.graft import with_new
from exercises.model import Exercise, read_exercises
from exercises.source import GraftError, decode, parse
from exercises.untaken import changes, used
from faults import UserError
from grading.judge import Judge
from grading.naming import find_module
from grading.submissions import Work


def not_taken(judge: Judge, exercise: Exercise, work: Work) -> list[str]:
    """What the student changed of the lesson's own code, and the exercise was judged without: "module.qualified.name".

    Functions of other exercises are named only if this one uses them.
    """
    others = {name for other in read_exercises(judge.lesson) for name in other.functions}
    texts = texts_of(judge, work)
    words: set[str] = set()
    for module, names in exercise.by_module.items():
        words |= used(texts[module][1] if module in texts else judge.layout.source(module), names)
    found = []
    for module, (_, text) in texts.items():
        names = [f"{module}.{name}" for name in changes(judge.layout.source(module), text)]
        names = [name for name in names if name not in exercise.functions]
        found += [name for name in names if name not in others or name.rpartition(".")[2] in words]
    return found


def texts_of(judge: Judge, work: Work) -> dict[str, tuple[str, str]]:
    """{module: (path, text)} of the lesson's modules that were handed in, can be read, and are not as the course's."""
    found = {}
    for module in sorted(path.stem for path in judge.lesson.modules()):
        pristine = judge.layout.source(module)
        try:
            path = find_module(work.handed, judge.lesson, module)
            text = "" if path is None else decode(work.handed.files[path])
            parse(text)
        except UserError:
            continue  # an exercise that asks for it says what is wrong
        if path is not None and pristine is not None and text != pristine:
            found[module] = (path, text)
    return found


def lesson_with_new(pristine: str, text: str) -> str:
    """The lesson's module with all that is new in the student's; as it is, where that does not fit in."""
    try:
        return with_new(pristine, text)
    except GraftError:
        return pristine  # it does not fit together: only what is used is taken
