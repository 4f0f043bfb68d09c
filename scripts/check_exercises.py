"""exercises.json: the schema, and that the functions and tests it names exist."""

import ast
import json
from typing import Any

from codeindex import CodeIndex
from faults import Fault, read_text
from jsonpos import Located
from lessons import Lesson

KEYS = ("id", "title", "kind", "function", "points", "tests", "depends_on", "hint")
KINDS = ("build", "extend")


def _texts(value: Any) -> list[str] | None:
    """A text or a list of texts, as a list; None for anything else."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        return None
    return texts if all(isinstance(text, str) and text.strip() for text in texts) else None


def exercise_faults(exercise: Any, earlier: set[str]) -> list[tuple[str | None, str]]:
    """Faults of one exercise's schema as (key or None, message); `earlier` holds the ids before it."""
    if not isinstance(exercise, dict):
        return [(None, f"an exercise must be an object, not {type(exercise).__name__}")]
    faults: list[tuple[str | None, str]] = []
    faults += [(key, f"unknown key {key!r}; known are {', '.join(KEYS)}") for key in exercise if key not in KEYS]
    faults += [(None, f"the key {key!r} is missing") for key in KEYS if key not in exercise]
    for key in ("id", "title", "hint"):
        if key in exercise and not (isinstance(exercise[key], str) and exercise[key].strip()):
            faults.append((key, f"{key} is {exercise[key]!r}; a text that is not empty is expected"))
    if "kind" in exercise and exercise["kind"] not in KINDS:
        faults.append(("kind", f"unknown kind {exercise['kind']!r}; known are {', '.join(KINDS)}"))
    points = exercise.get("points", 1)
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        faults.append(("points", f"points is {points!r}; a whole number above 0 is expected"))
    for key in ("function", "tests"):
        if key in exercise and _texts(exercise[key]) is None:
            faults.append((key, f"{key} must be a name or a list of names"))
    if str(exercise.get("id")) in earlier:
        faults.append(("id", f"the id {exercise['id']!r} is taken by an earlier exercise"))
    depends = exercise.get("depends_on", [])
    if not isinstance(depends, list):
        return [*faults, ("depends_on", "depends_on must be a list of ids")]
    unknown = [name for name in depends if name not in earlier]
    return faults + [("depends_on", f"{name!r} is the id of no earlier exercise") for name in unknown]


def test_names(lesson: Lesson) -> set[str]:
    """test_ddp, test_ddp.TestBuckets, test_ddp.TestBuckets.test_order ... as unittest names them."""
    names: set[str] = set()
    for path in lesson.test_files():
        names.add(path.stem)
        try:
            tree = ast.parse(read_text(path) or "")
        except SyntaxError:
            continue
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in classes:
            names.add(f"{path.stem}.{name}")
            names.update(f"{path.stem}.{name}.{method}" for method in _methods(classes, name))
    return names


def _methods(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """A class's methods, with those of its bases in the same file."""
    if name not in classes:
        return set()
    others = {other: node for other, node in classes.items() if other != name}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    own = {item.name for item in classes[name].body if isinstance(item, ast.FunctionDef)}
    return own.union(*(_methods(others, base) for base in bases))


def _name_faults(lesson: Lesson, index: CodeIndex, exercise: dict, tests: set[str]) -> list[tuple[str, str]]:
    faults = []
    for name in _texts(exercise.get("function")) or []:
        if not index.has_function(lesson, name):
            faults.append(("function", f"no function {name!r} in {lesson.rel('code')} (written module.Class.method)"))
    for name in _texts(exercise.get("tests")) or []:
        if name not in tests:
            faults.append(("tests", f"no test {name!r} in {lesson.rel('tests')} (written test_file.Class.test_method)"))
    return faults


def check_exercises(lesson: Lesson, index: CodeIndex) -> list[Fault]:
    """exercises.json, where there is one."""
    path = lesson.rel("exercises.json")
    if not (lesson.folder / "exercises.json").exists():
        return []
    try:
        located = Located(read_text(lesson.folder / "exercises.json") or "")
    except json.JSONDecodeError as error:
        return [Fault(path, error.lineno, f"no valid JSON: {error.msg}")]
    if not isinstance(located.value, list):
        return [Fault(path, 1, "a list of exercises is expected")]
    faults = []
    earlier: set[str] = set()
    tests = test_names(lesson)
    for number, exercise in enumerate(located.value):
        found = exercise_faults(exercise, earlier)
        if isinstance(exercise, dict):
            found += _name_faults(lesson, index, exercise, tests)
            earlier.add(str(exercise.get("id")))
        for key, message in found:
            place = (number, key) if key else (number,)
            faults.append(Fault(path, located.line(*place), f"exercise {number + 1}: {message}"))
    return faults
