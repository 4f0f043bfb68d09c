"""Which of the files that were handed in is a module, also where a browser or a platform has changed its name.

`schedule (1).py`, `schedule-1.py`, `schedule copy.py` and `Schedule.py` stand for schedule.py where that is missing,
nothing else could be meant, and the lesson has no module of that other name. Whoever takes it says so.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from faults import UserError
from grading.platforms import Handed
from lessons import Lesson

_LESSON = re.compile(r"^\d\d-[a-z0-9-]+$")
_NUMBER = r"\(\d+\)|\d+_?"
_COPY = rf"(?:copy|kopie|copie|copia)(?:[ _+-]*(?:{_NUMBER}))?"
_CHANGED = re.compile(rf"^(?P<name>.+?)(?:[ _+-]*\(\d+\)|[ ._+-]+(?:{_NUMBER}|{_COPY}))$", re.IGNORECASE)


def find_module(handed: Handed, lesson: Lesson, module: str) -> str | None:
    """The path of a module among what was handed in, None if it is not there. UserError if two differ.

    The one in this lesson's folder is preferred, then one in a folder `code`, then the one that lies least deep; tests
    and other lessons' folders are passed over. Without one of its name, the one whose name has been changed.
    """
    ranked = _ranked(handed, lesson, lambda stem: stem == module)
    if not ranked:
        like = names_like(handed, lesson, module)
        return like[0] if len({handed.files[path] for path in like}) == 1 else None
    best = sorted(ranked[min(ranked)])
    if len({handed.files[path] for path in best}) > 1:
        raise UserError(f"{module}.py was handed in more than once: {', '.join(best)}")
    return best[0]


def names_like(handed: Handed, lesson: Lesson, module: str) -> list[str]:
    """The paths of files that may be this module under another name."""
    known = {path.stem for path in lesson.modules()}
    ranked = _ranked(handed, lesson, lambda stem: stem not in known and _plain(stem) == module.casefold())
    return sorted(path for paths in ranked.values() for path in paths)


def _plain(stem: str) -> str:
    """The name that it had before, in small letters."""
    stem = stem.strip()
    while match := _CHANGED.match(stem):
        stem = match["name"]
    return stem.casefold()


def _ranked(handed: Handed, lesson: Lesson, fits: Callable[[str], bool]) -> dict[tuple, list[str]]:
    """The paths of Python files whose name fits, by how far they are from where a module is expected."""
    ranked: dict[tuple, list[str]] = {}
    for path in handed.files:
        parts = PurePosixPath(path).parts
        name, _, kind = parts[-1].rpartition(".")
        if kind.lower() != "py" or not fits(name) or "tests" in parts[:-1]:
            continue
        lessons = [part for part in parts[:-1] if _LESSON.match(part)]
        if lessons and lesson.id not in lessons:
            continue
        rank = (lesson.id not in lessons, "code" not in parts[:-1], len(parts))
        ranked.setdefault(rank, []).append(path)
    return ranked
