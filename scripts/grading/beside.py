"""New modules of a student's, beside the file that imports them: they come along, none of the lesson's is replaced."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from exercises.folder import imported
from exercises.source import GraftError, decode, parse
from grading.layout import Layout
from grading.platforms import Handed

SCRIPTS = Path(__file__).resolve().parents[1]


def modules_beside(handed: Handed, path: str, text: str, layout: Layout) -> dict[str, str]:
    """{name: path handed in} of the new modules that `text` (the module at `path`, or what is left of it) imports.

    Directly or not. The name is that of the file in the lesson's code, without .py: "tools" or "tools/loops". A module
    is new if neither the lesson, nor Python, nor an installed package has one of that name: those are taken instead.
    """
    folder = PurePosixPath(path).parent
    found: dict[str, str] = {}
    todo = [text]
    while todo:
        for name in sorted(_new(todo.pop(), layout)):
            for file, data in handed.files.items():
                inside = PurePosixPath(file)
                mine = inside == folder / f"{name}.py" or inside.is_relative_to(folder / name)
                if mine and inside.suffix == ".py" and file not in found.values():
                    found[inside.relative_to(folder).with_suffix("").as_posix()] = file
                    todo.append(_text(data))
    return found


def _text(data: bytes) -> str:
    try:
        return decode(data)
    except GraftError:
        return ""  # whoever takes the file says so


def _new(text: str, layout: Layout) -> set[str]:
    try:
        parse(text)
    except GraftError:
        return set()  # whoever takes the file says so
    known = {PurePosixPath(path).stem for path in layout.files} | sys.stdlib_module_names
    return {name for name in imported(text) - known if not _is_installed(name)}


def _is_installed(name: str) -> bool:
    """Whether a package or module that is no part of these scripts has that name."""
    spec = PathFinder.find_spec(name)
    return spec is not None and not (spec.origin and Path(spec.origin).resolve().is_relative_to(SCRIPTS))
