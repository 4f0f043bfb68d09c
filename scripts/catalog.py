"""catalog.json: every lesson as data, generated from the lessons themselves."""

import ast
import json
from typing import Any

from faults import Fault, read_text
from lessons import Course, Lesson, UnknownLesson

STAGES = ("pre", "check", "post")
FILE = "catalog.json"


def literal_all(source: str) -> tuple[list[str] | None, int]:
    """The names in a module's literal `__all__` and its line; None if it has no such list of strings."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return None, error.lineno or 1
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                names = ast.literal_eval(node.value)
            except ValueError:
                return None, node.lineno
            good = isinstance(names, list) and all(isinstance(name, str) for name in names)
            return (names if good else None), node.lineno
    return None, 1


def _load(lesson: Lesson, name: str) -> Any:
    try:
        return json.loads(read_text(lesson.folder / name) or "null")
    except json.JSONDecodeError:
        return None  # `check` says what is wrong with it; the lesson is still listed


def _quiz_counts(lesson: Lesson) -> dict[str, int]:
    quiz = _load(lesson, "quiz.json")
    questions = quiz.get("questions") if isinstance(quiz, dict) else None
    stages = [q.get("stage") for q in questions if isinstance(q, dict)] if isinstance(questions, list) else []
    return {stage: stages.count(stage) for stage in STAGES}


def entry(course: Course, lesson: Lesson) -> dict[str, Any]:
    """One lesson's entry. What a broken lesson lacks is null or empty, so that it still shows."""
    numbers, skills = lesson.header.prerequisites
    exercises = _load(lesson, "exercises.json")
    return {
        "id": lesson.id,
        "path": lesson.path.as_posix(),
        "title": lesson.header.title,
        "minutes": lesson.header.minutes,
        "prerequisites": [_id_of(course, number) for number in numbers],
        "skills": skills,
        "names": literal_all(read_text(lesson.folder / "code" / "main.py") or "")[0] or [],
        "quiz": _quiz_counts(lesson),
        "exercises": len(exercises) if isinstance(exercises, list) else 0,
    }


def _id_of(course: Course, number: str) -> str:
    try:
        return course.find(number).id
    except UnknownLesson:
        return number


def entries(course: Course) -> list[dict[str, Any]]:
    """All lessons, in the order of their folders."""
    return [entry(course, lesson) for lesson in course.lessons]


def render(course: Course) -> str:
    """The text of catalog.json: the same lessons always give the same bytes."""
    return json.dumps({"lessons": entries(course)}, indent=2, ensure_ascii=False) + "\n"


def write(course: Course) -> None:
    """Write catalog.json."""
    (course.root / FILE).write_text(render(course), encoding="utf-8", newline="\n")


def check_catalog(course: Course) -> list[Fault]:
    """catalog.json must be what the lessons say now; the first line that differs is named."""
    found = read_text(course.root / FILE)
    if found is None:
        return [Fault(FILE, 1, "missing; write it with: python scripts/course.py catalog")]
    wanted = render(course).splitlines()
    for number, line in enumerate(found.splitlines(), 1):
        if number > len(wanted) or line != wanted[number - 1]:
            expected = wanted[number - 1].strip() if number <= len(wanted) else "the end of the file"
            message = f"out of date: {line.strip()!r}, the lessons say {expected!r}"
            return [Fault(FILE, number, f"{message}; write it with: python scripts/course.py catalog")]
    if len(found.splitlines()) < len(wanted):
        return [
            Fault(FILE, len(found.splitlines()) + 1, "ends too early; write it with: python scripts/course.py catalog")
        ]
    return []
