"""The exercises of a lesson as data, read from its exercises.json and checked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from check_exercises import check_exercises, exercise_faults
from codeindex import CodeIndex
from faults import UserError, read_text
from jsonpos import Located
from lessons import Course, Lesson


@dataclass(frozen=True)
class Exercise:
    """One exercise. A function is "module.Class.method", a test "test_file.Class.test_method" or less of it."""

    id: str
    title: str
    kind: str  # build or extend
    functions: tuple[str, ...]
    points: int
    tests: tuple[str, ...]
    depends_on: tuple[str, ...]  # ids of exercises before this one
    hint: str

    @property
    def stub_text(self) -> str:
        """What a starter's function raises in place of its body: which exercise it is, and the hint."""
        return f"[{self.id}] {self.hint}"

    @property
    def by_module(self) -> dict[str, list[str]]:
        """The qualified names in each module: {"mesh": ["Mesh.send", "Mesh.recv"]}."""
        return names_by_module(self.functions)


def names_by_module(functions: Sequence[str]) -> dict[str, list[str]]:
    """{"mesh": ["Mesh.send"]} for ["mesh.Mesh.send"], in the order given, each once."""
    found: dict[str, list[str]] = {}
    for function in dict.fromkeys(functions):
        module, _, name = function.partition(".")
        found.setdefault(module, []).append(name)
    return found


def load_exercises(lesson: Lesson) -> list[Exercise]:
    """The lesson's exercises in order; none if it has no exercises.json.

    UserError, with file and line, if the file is not what `course check` expects: a key, a name or a test is wrong.
    """
    alone = Course(lesson.root)
    alone.lessons = [lesson]  # an exercise names functions of its own lesson only: no other needs to be read
    faults = check_exercises(lesson, CodeIndex(alone))
    if faults:
        more = f" (and {len(faults) - 1} more: see course check)" if len(faults) > 1 else ""
        raise UserError(f"{faults[0]}{more}")
    return read_exercises(lesson)


def read_exercises(lesson: Lesson) -> list[Exercise]:
    """The same where a learner may have broken the functions: only the file itself is checked."""
    path = lesson.folder / "exercises.json"
    if not path.exists():
        return []
    try:
        located = Located(read_text(path) or "")
    except json.JSONDecodeError as error:
        raise UserError(f"{lesson.rel('exercises.json')}:{error.lineno}: no valid JSON: {error.msg}") from None
    items = located.value if isinstance(located.value, list) else [None]
    exercises: list[Exercise] = []
    for number, item in enumerate(items):
        for key, message in exercise_faults(item, {exercise.id for exercise in exercises}):
            line = located.line(number, key) if key else located.line(number)
            raise UserError(f"{lesson.rel('exercises.json')}:{line}: exercise {number + 1}: {message}")
        exercises.append(_exercise(item))
    return exercises


def _exercise(item: dict) -> Exercise:
    functions, tests = ([item[key]] if isinstance(item[key], str) else item[key] for key in ("function", "tests"))
    same = {key: item[key] for key in ("id", "title", "kind", "points", "hint")}
    return Exercise(functions=tuple(functions), tests=tuple(tests), depends_on=tuple(item["depends_on"]), **same)


def choose(exercises: list[Exercise], ids: Sequence[str]) -> list[Exercise]:
    """The exercises with these ids, all if none is given; UserError that names the known ids for another."""
    known = [exercise.id for exercise in exercises]
    for name in ids:
        if name not in known:
            raise UserError(f"no exercise {name!r}; the exercises are: {', '.join(known) or 'none'}")
    return [exercise for exercise in exercises if not ids or exercise.id in ids]


def with_dependencies(exercises: list[Exercise], exercise: Exercise) -> list[Exercise]:
    """The exercise and all that it builds on, directly or not, in order."""
    needed = {exercise.id}
    for other in reversed(exercises):  # an exercise depends on earlier ones only
        if other.id in needed:
            needed.update(other.depends_on)
    return [other for other in exercises if other.id in needed]
