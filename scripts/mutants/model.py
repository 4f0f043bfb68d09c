"""A mutant: one plausible wrong answer to an exercise, and the test that must reject it."""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from exercises.surgery import find
from faults import UserError, read_text
from jsonpos import Located
from lessons import Course, Lesson

FILE = "mutants.json"


@dataclass(frozen=True)
class Mutant:
    """One entry of a lesson's mutants.json."""

    id: str
    exercise: str  # the id of the exercise whose tests must reject it
    function: str  # module.function or module.Class.method of the lesson's code
    old: str  # occurs exactly once in that function,
    new: str  # and this stands there instead
    what: str  # the wrong answer, as the one who gives it would think it
    symptom: str  # what one sees of it
    caught_by: str  # test_file.Class.test_method
    source: str  # where such a fault was reported, or "course"
    raises: str | None = None  # the error that the test ends with, where it is no failed assertion
    hangs: bool = False  # whether the test may run into its deadline instead

    @property
    def module(self) -> str:
        """The module that it changes."""
        return self.function.partition(".")[0]


class Misfit(UserError):
    """A mutant that cannot be put in: `key` says which part of it is at fault."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def mutate(source: str, mutant: Mutant) -> str:
    """The module's text with the fault in it. Raises Misfit unless it can be put in."""
    try:
        span = find(source, mutant.function.partition(".")[2])
    except UserError as error:
        raise Misfit("function", str(error)) from error
    function = source[span.start : span.end]
    if (count := function.count(mutant.old)) != 1:
        raise Misfit("old", f"old must occur exactly once in {mutant.function}, it occurs {count} times")
    changed = source[: span.start] + function.replace(mutant.old, mutant.new) + source[span.end :]
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise Misfit("new", f"with new in its place the module is no Python: {error}") from error
    return changed


def load(lesson: Lesson) -> list[Mutant]:
    """The lesson's mutants; none if it has no mutants.json. Raises UserError with file and line for what is no mutant.

    Only what a run needs is looked at here; `course check` looks at everything.
    """
    text = read_text(lesson.folder / FILE)
    if text is None:
        return []
    try:
        located = Located(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{lesson.rel(FILE)}:{error.lineno}: no valid JSON: {error.msg}") from error
    mutants = []
    for number, entry in enumerate(located.value if isinstance(located.value, list) else [located.value]):
        try:
            mutants.append(Mutant(**entry))
        except TypeError as error:
            problem = str(error).replace("Mutant.__init__() ", "")
            raise UserError(f"{lesson.rel(FILE)}:{located.line(number)}: no mutant: {problem}") from error
    return mutants


def chosen(course: Course, lesson: str | None, mutant: str | None = None) -> list[tuple[Lesson, Mutant]]:
    """The mutants of a lesson, or of all; one of them if `mutant` is given. Raises UserError if there are none."""
    lessons = course.lessons if lesson is None else [course.find(lesson)]
    found = [(each, one) for each in lessons for one in load(each)]
    if not found:
        raise UserError(f"lesson {lesson} has no {FILE}" if lesson else f"no lesson has a {FILE}")
    named = [(each, one) for each, one in found if mutant in (None, one.id)]
    if not named:
        known = ", ".join(one.id for _, one in found)
        raise UserError(f"lesson {lesson} has no mutant {mutant!r}; it has {known}")
    return named


def code_file(lesson: Lesson, mutant: Mutant) -> Path:
    """The file that the mutant changes, relative to the root."""
    return lesson.path / "code" / f"{mutant.module}.py"
