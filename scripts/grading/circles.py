"""Exercises of a student that call each other in a circle, each judged with the lesson's own other one.

`one_f_one_b` returns what `zb_h1` returns, less something, and `zb_h1` calls `one_f_one_b`: each is right while the
lesson's own is in the other's place, and together they are nothing.
"""

from pathlib import PurePosixPath

from exercises.calls import Calls, calls_in
from exercises.model import Exercise, names_by_module
from exercises.source import GraftError, decode, parse
from exercises.surgery import graft_all, is_stub
from grading.beside import modules_beside
from grading.judge import Judge
from grading.own import lesson_with_new, texts_of
from grading.submissions import Work


def called(judge: Judge, exercises: list[Exercise], work: Work) -> tuple[Calls, Calls]:
    """Who calls whom in the student's exercises put together, and who in the lesson's own code."""
    own = {path.stem: text for path in judge.lesson.modules() if (text := judge.layout.source(path.stem)) is not None}
    joined = own | with_all(judge, exercises, work) | _modules_of_its_own(judge, work)
    return calls_in(joined, exercises), calls_in(own, exercises)


def with_all(judge: Judge, exercises: list[Exercise], work: Work) -> dict[str, str]:
    """The lesson's modules with what is new in the student's and the functions of all these exercises, if written."""
    texts = texts_of(judge, work)
    names = names_by_module([name for exercise in exercises for name in exercise.functions])
    found = {}
    for module, (_, text) in texts.items():
        found[module] = lesson_with_new(judge.layout.source(module), text)
        for name in names.get(module, []):
            try:
                found[module] = found[module] if is_stub(text, name) else graft_all(found[module], text, [name])
            except GraftError:
                continue  # it is not there: its exercise says so
    return found


def _modules_of_its_own(judge: Judge, work: Work) -> dict[str, str]:
    """The student's own modules, which the lesson's import."""
    found = {}
    for path, text in texts_of(judge, work).values():
        for name, file in modules_beside(work.handed, path, text, judge.layout).items():
            try:
                parse(own := decode(work.handed.files[file]))
            except GraftError:
                continue  # the run says what is wrong with it
            found[PurePosixPath(name).name] = own
    return found
