"""The text's list of exercises and exercises.json say the same."""

import re

from exercises.model import Exercise, read_exercises
from faults import Fault, UserError
from lessons import Lesson

_ITEM = re.compile(r"^(\d+)\. \*\*", re.MULTILINE)


def heading_of(number: int, exercise: Exercise) -> str:
    """How the text's list begins an exercise: `2. **Publish** (build, 10 points, `a.f` and `a.g`)`."""
    *most, last = [f"`{name}`" for name in exercise.functions]
    names = f"{', '.join(most)} and {last}" if most else last
    return f"{number}. **{exercise.title}** ({exercise.kind}, {exercise.points} points, {names})"


def check_section(lesson: Lesson) -> list[Fault]:
    """The section Exercises begins with `course start NN`, and lists every exercise in order, with its points."""
    try:
        exercises = read_exercises(lesson)
    except UserError:
        return []  # check_exercises says what is wrong with it
    heading = next((item for item in lesson.document.headings if item.text == "Exercises"), None)
    if not exercises or heading is None:
        return []
    path, lines = lesson.rel("docs/en.md"), lesson.document.lines
    following = [item.line for item in lesson.document.headings if item.line > heading.line and item.level <= 2]
    text = "\n".join(lines[heading.line : following[0] - 1 if following else len(lines)])
    faults = []
    items = list(_ITEM.finditer(text))
    before = text[: items[0].start()] if items else text
    total = f"{sum(exercise.points for exercise in exercises)} points"
    for wanted in (f" start {lesson.number}\n", f" try learn/{lesson.id}\n", total):
        if wanted not in before:
            faults.append(Fault(path, heading.line, f"the section must say {wanted.strip()!r} before its list"))
    ends = [item.start() for item in items[1:]] + [len(text)]
    shown = [" ".join(text[item.start() : end].split()) for item, end in zip(items, ends, strict=True)]
    for at, exercise in enumerate(exercises):
        wanted = heading_of(at + 1, exercise)
        if at >= len(shown) or not shown[at].startswith(wanted):
            line = heading.line + 1 + text.count("\n", 0, items[at].start()) if at < len(items) else heading.line
            faults.append(Fault(path, line, f"the list of exercises must go on with {wanted!r}, as in exercises.json"))
            break
    else:
        if len(shown) > len(exercises):
            faults.append(
                Fault(path, heading.line, f"the list has {len(shown)} exercises, exercises.json {len(exercises)}")
            )
    return faults
