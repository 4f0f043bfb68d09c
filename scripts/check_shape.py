"""The shape of the house: what the top level holds, what a lesson folder holds, what main.py exposes."""

import ast
import re

from catalog import literal_all
from codeindex import CodeIndex
from faults import Fault, read_text
from lessons import Course, Lesson

TOP_LEVEL = ("README.md", "catalog.json", "pyproject.toml", "phases", "scripts")
LICENCES = ("LICENSE", "LICENCE", "LICENSE.md", "LICENSE.txt")


def check_top_level(course: Course) -> list[Fault]:
    """README, catalog, pyproject, phases, scripts, a licence and dot-files: these, and nothing else."""
    present = {path.parts[0] for path in course.files}
    needed = [name for name in TOP_LEVEL if name != "catalog.json"]  # check_catalog reports that one
    faults = [Fault(name, 1, "missing from the top level") for name in needed if name not in present]
    if not present & set(LICENCES):
        faults.append(Fault(LICENCES[0], 1, "missing from the top level"))
    extra = sorted(name for name in present if name not in TOP_LEVEL + LICENCES and not name.startswith("."))
    return faults + [Fault(name, 1, "does not belong on the top level") for name in extra]


def check_folders(course: Course) -> list[Fault]:
    """Folders in phases/ are called NN-name, and so are the lessons in them: another name would never be found."""
    lessons = {lesson.path.parts[:3] for lesson in course.lessons}
    faults = set()
    for path in course.files:
        if path.parts[0] != "phases":
            continue
        if len(path.parts) < 4 or path.parts[:3] not in lessons:
            faults.add(Fault("/".join(path.parts[:3]), 1, "is not in a lesson folder phases/NN-phase/NN-lesson"))
        elif not re.match(r"^\d\d-", path.parts[1]):
            faults.add(Fault("/".join(path.parts[:2]), 1, "a phase folder is called NN-name"))
    return sorted(faults)


def check_search_paths(course: Course) -> list[Fault]:
    """pyproject.toml tells editors where each lesson's modules are."""
    text = read_text(course.root / "pyproject.toml") or ""
    wanted = [lesson.rel("code") for lesson in course.lessons]
    missing = [path for path in wanted if f'"{path}"' not in text]
    return [Fault("pyproject.toml", 1, f'"{path}" is missing from the editors\' search paths') for path in missing]


def check_shape(lesson: Lesson) -> list[Fault]:
    """docs/en.md, code/main.py, quiz.json and at least one tests/test_*.py exist and are not empty."""
    faults = []
    for name in ("docs/en.md", "code/main.py", "quiz.json"):
        if not (read_text(lesson.folder / name) or "").strip():
            faults.append(Fault(lesson.rel(name), 1, "missing or empty"))
    if not lesson.test_files():
        faults.append(Fault(lesson.rel("tests"), 1, "there is no tests/test_*.py"))
    for path in lesson.test_files():
        if not _has_test(read_text(path) or ""):
            faults.append(Fault(lesson.rel("tests", path.name), 1, "holds no unittest.TestCase with a test method"))
    return faults


def _has_test(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True  # check_modules reports it
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    items = [item for node in classes for item in node.body]
    # A class without test methods of its own may inherit them: only a file with no class at all is empty for sure.
    inherits = any(not ast.unparse(base).endswith("TestCase") for node in classes for base in node.bases)
    return inherits or any(getattr(item, "name", "").startswith("test") for item in items)


def check_public_names(lesson: Lesson, index: CodeIndex) -> list[Fault]:
    """main.py ends the guessing: `__all__` is a literal list of names that main.py defines or imports."""
    path = lesson.rel("code", "main.py")
    source = read_text(lesson.folder / "code" / "main.py")
    main = index.mains.get(lesson.id)
    if source is None or main is None:
        return []  # missing or not Python: reported elsewhere
    names, line = literal_all(source)
    if not names:
        return [Fault(path, line, "__all__ must be a literal list of the public names, and not empty")]
    faults = []
    for position, name in enumerate(names):
        if name in names[:position]:
            faults.append(Fault(path, line, f"__all__ names {name!r} twice"))
        elif name not in main.names and name not in main.imported:
            faults.append(Fault(path, line, f"__all__ names {name!r}, which main.py neither defines nor imports"))
    return faults
