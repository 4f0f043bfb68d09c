"""A folder that holds one lesson and the modules it borrows, laid out as in the course, so that it runs alone."""

import ast
import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from faults import UserError, read_text
from lessons import Course, Lesson

MARKER = ".course.json"
FORMAT = 1
Files = dict[str, bytes]  # path in the folder, with /, -> content


def lesson_files(course: Course, lesson: Lesson) -> Files:
    """The lesson's own files, as they would be committed; its wrong answers stay with the course."""
    paths = [path for path in course.files if path.is_relative_to(lesson.path)]
    return {
        path.as_posix(): (course.root / path).read_bytes()
        for path in paths
        if path != lesson.path / "mutants.json" and "__pycache__" not in path.parts
    }


def borrowed_files(course: Course, lesson: Lesson) -> Files:
    """The other lessons' modules that the lesson's code and tests import, directly or not."""
    owners = {path.stem: path for other in course.lessons for path in other.modules() if path.stem != "main"}
    todo = [*lesson.modules(), *(lesson.folder / "tests").glob("*.py")]
    seen = set(todo)
    while todo:
        found = {owners[name] for name in imported(read_text(todo.pop()) or "") if name in owners} - seen
        seen |= found
        todo += found
    others = sorted(path for path in seen if not path.is_relative_to(lesson.folder))
    return {path.relative_to(course.root).as_posix(): path.read_bytes() for path in others}


@lru_cache(maxsize=512)
def imported(text: str) -> frozenset[str]:
    """The modules that a source imports anywhere, also inside its functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(item.name.split(".")[0] for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return frozenset(names)


def digest(files: Files) -> str:
    """One hash of paths and contents: which version of a lesson this is."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{hashlib.sha256(files[path]).hexdigest()}\n".encode())
    return total.hexdigest()


def version(course: Course, lesson: Lesson) -> str:
    """The hash of what judges a learner: the lesson's code, tests and exercises, and the modules it borrows."""
    own = {path: data for path, data in lesson_files(course, lesson).items() if _judges(lesson, path)}
    return digest({**own, **borrowed_files(course, lesson)})


def _judges(lesson: Lesson, path: str) -> bool:
    part = PurePosixPath(path).relative_to(lesson.path.as_posix()).parts[0]
    return part in ("code", "tests", "exercises.json")


@dataclass(frozen=True)
class Marker:
    """What a folder's `.course.json` says: which lesson it holds, where, in which version, and whether as a starter."""

    lesson: str  # 76-collective-ops-from-scratch
    path: str  # of the lesson in the folder
    version: str
    starter: bool

    def to_json(self) -> bytes:
        """The file's content."""
        return (json.dumps({"format": FORMAT, **vars(self)}, indent=2) + "\n").encode()


def read_marker(folder: Path) -> Marker:
    """The marker of a folder that `course start` or `course export` has written; UserError for any other."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    text = read_text(folder / MARKER)
    if text is None:
        raise UserError(f"{folder} has no {MARKER}: it is not a folder that course start has made")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{folder / MARKER}:{getattr(error, 'lineno', 1)}: no valid JSON: {error}") from None
    kinds = {"lesson": str, "path": str, "version": str, "starter": bool}
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f'{folder / MARKER}:1: an object with "format": {FORMAT} is expected')
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind):
            raise UserError(f"{folder / MARKER}:1: {key} is {value.get(key)!r}; a {kind.__name__} is expected")
    path = PurePosixPath(value["path"])
    if path.is_absolute() or ".." in path.parts or not (folder / path / "code").is_dir():
        raise UserError(f"{folder / MARKER}:1: there is no lesson in {value['path']!r}")
    return Marker(**{key: value[key] for key in kinds})


def check_free(course: Course, folder: Path, above: bool = True) -> None:
    """UserError if a lesson must not be written there: something is there, or it is among the course's own files.

    With `above` also if the folder that it is to lie in does not exist: a name was mistyped.
    """
    if above and not folder.absolute().parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; the name of a new folder is expected")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: nothing is overwritten; name another folder, or remove it first")
    for own in ("phases", "scripts"):
        if folder.resolve().is_relative_to(course.root / own):
            raise UserError(f"{folder} is inside the course's own {own}; name a folder outside of it")


def write_folder(folder: Path, files: Files) -> None:
    """Write all files into a folder that is new or empty. UserError, with the file, if the system refuses one."""
    for path, data in files.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        except OSError as error:
            raise UserError(f"{folder / path}: {error.strerror or error}") from error
