"""mutants.json: the schema, and that what it names exists and can be put in."""

import json
import re
from typing import Any

from check_exercises import test_names
from faults import Fault, read_text
from jsonpos import Located
from lessons import Lesson
from mutants.model import FILE, Misfit, Mutant, code_file, mutate

TEXTS = ("id", "exercise", "function", "old", "new", "what", "symptom", "caught_by", "source")
OPTIONAL = {"raises": str, "hangs": bool}
LEAST = 8  # mutants a lesson
_ID = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
_SOURCE = re.compile(r"^(course|public lesson|[\w.-]+/[\w.-]+#\d+)$")


def _schema_faults(entry: Any, earlier: set[str]) -> list[tuple[str | None, str]]:
    """Faults of one entry as (key or None, message), without a look at what it names."""
    if not isinstance(entry, dict):
        return [(None, f"a mutant must be an object, not {type(entry).__name__}")]
    known = (*TEXTS, *OPTIONAL)
    faults: list[tuple[str | None, str]] = []
    faults += [(key, f"unknown key {key!r}; known are {', '.join(known)}") for key in entry if key not in known]
    faults += [(None, f"the key {key!r} is missing") for key in TEXTS if key not in entry]
    for key in TEXTS:
        if key in entry and not isinstance(entry[key], str):
            faults.append((key, f"{key} is {entry[key]!r}; a text is expected"))
        elif key != "new" and key in entry and not entry[key].strip():
            faults.append((key, f"{key} is empty"))
    for key, kind in OPTIONAL.items():
        if key in entry and not isinstance(entry[key], kind):
            faults.append((key, f"{key} is {entry[key]!r}; a {kind.__name__} is expected"))
    if not faults:
        if not _ID.match(entry["id"]):
            faults.append(("id", f"the id {entry['id']!r} must be words of small letters and digits with - between"))
        if entry["id"] in earlier:
            faults.append(("id", f"the id {entry['id']!r} is taken by an earlier mutant"))
        if not _SOURCE.match(entry["source"]):
            faults.append(("source", f"source {entry['source']!r} must be course, public lesson or owner/project#1"))
    return faults


def _name_faults(lesson: Lesson, mutant: Mutant, exercises: dict[str, list[str]], tests: set[str]):
    """Faults of what a mutant names, as (key, message)."""
    if mutant.exercise not in exercises:
        yield "exercise", f"no exercise {mutant.exercise!r} in {lesson.rel('exercises.json')}"
    elif not any(f"{mutant.caught_by}.".startswith(f"{name}.") for name in exercises[mutant.exercise]):
        yield "caught_by", f"{mutant.caught_by} is no test of the exercise {mutant.exercise}"
    if mutant.caught_by.count(".") != 2 or mutant.caught_by not in tests:
        yield "caught_by", f"no test {mutant.caught_by!r} in {lesson.rel('tests')} (test_file.Class.test_method)"
    source = read_text(lesson.root / code_file(lesson, mutant))
    if source is None:
        yield "function", f"no module {mutant.module!r} in {lesson.rel('code')}"
        return
    try:
        mutate(source, mutant)
    except Misfit as error:
        yield error.key, str(error)


def _exercise_tests(lesson: Lesson) -> dict[str, list[str]]:
    """The tests of each exercise; nothing where exercises.json is broken (check_exercises says how)."""
    try:
        entries = json.loads(read_text(lesson.folder / "exercises.json") or "[]")
        found = {each["id"]: [each["tests"]] if isinstance(each["tests"], str) else each["tests"] for each in entries}
        return {name: list(tests) for name, tests in found.items()}
    except (ValueError, TypeError, KeyError):
        return {}


def check_mutants(lesson: Lesson) -> list[Fault]:
    """mutants.json, which a lesson with exercises has."""
    path, text = lesson.rel(FILE), read_text(lesson.folder / FILE)
    if text is None:
        exercises = (lesson.folder / "exercises.json").exists()
        return [Fault(path, 1, "missing: wrong answers that the exercises' tests reject")] if exercises else []
    try:
        located = Located(text)
    except json.JSONDecodeError as error:
        return [Fault(path, error.lineno, f"no valid JSON: {error.msg}")]
    if not isinstance(located.value, list):
        return [Fault(path, 1, "a list of mutants is expected")]
    faults, earlier, tests, exercises = [], set(), test_names(lesson), _exercise_tests(lesson)
    for number, entry in enumerate(located.value):
        found = _schema_faults(entry, earlier) or [*_name_faults(lesson, Mutant(**entry), exercises, tests)]
        earlier.add(entry.get("id") if isinstance(entry, dict) else None)
        for key, message in found:
            place = (number, key) if key else (number,)
            faults.append(Fault(path, located.line(*place), f"mutant {number + 1}: {message}"))
    if len(located.value) < LEAST:
        faults.append(Fault(path, 1, f"{len(located.value)} mutants; at least {LEAST} are expected"))
    return faults
