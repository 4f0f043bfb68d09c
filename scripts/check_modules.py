"""Rules that hold between modules: unique names, imports, sys.path, and no path of anyone's machine."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from faults import Fault, read_text
from lessons import Course

IDIOM = "sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob('*/*/code'))"
AS_PYTHON = "sys.path[0] = str(Path(sys.argv[0]).resolve().parent)"  # a script that runs another in its place
DEPENDENCIES = ("torch", "numpy", "matplotlib", "pytest", "xdist", "setuptools")
_MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])(?:[A-Za-z]:[\\/]+Users[\\/]+|/(?:home|Users|root|work|workspaces?)/)\w*")


def python_files(course: Course) -> Iterator[tuple[Path, str]]:
    """(path, kind) of the course's Python files; kind is main, module, test or script."""
    for lesson in course.lessons:
        for path in sorted((lesson.folder / "code").rglob("*.py")):
            yield path, "main" if path.name == "main.py" else "module"
        for path in sorted((lesson.folder / "tests").rglob("*.py")):
            yield path, "test"
    for path in sorted((course.root / "scripts").rglob("*.py")):
        yield path, "test" if "tests" in path.relative_to(course.root).parts else "script"


def check_module_names(course: Course) -> list[Fault]:
    """No module is named like another, like a standard module, or like a dependency."""
    seen: dict[str, str] = {}
    faults = []
    for path, kind in python_files(course):
        if kind == "main" or path.stem == "__init__":
            continue
        if kind == "script" and (path.parent / "__init__.py").exists():
            continue  # imported as package.module: the package's name is what must be unique
        shown = path.relative_to(course.root).as_posix()
        if path.stem in sys.stdlib_module_names or path.stem in DEPENDENCIES:
            faults.append(Fault(shown, 1, f"shadows the module {path.stem!r} of the standard library or a dependency"))
        if path.stem in seen:
            faults.append(Fault(shown, 1, f"a module is called {path.stem!r} already: {seen[path.stem]}"))
        seen.setdefault(path.stem, shown)
    return faults


def _imports_main(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "main" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "main"


def _touches_sys_path(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "sys" and any(alias.name == "path" for alias in node.names)
    is_attribute = isinstance(node, ast.Attribute) and node.attr == "path"
    return is_attribute and isinstance(node.value, ast.Name) and node.value.id == "sys"


def source_faults(source: str, kind: str) -> list[tuple[int, str]]:
    """Faults of one Python file as (line, message). `kind` as in `python_files`, or lesson-test for a lesson's test."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [(error.lineno or 1, f"does not parse: {error.msg}")]
    except ValueError as error:
        return [(1, f"does not parse: {error}")]
    allowed = {"main": IDIOM, "lesson-test": IDIOM, "script": AS_PYTHON}.get(kind)
    idiom = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node) == allowed
        for part in ast.walk(node)
    }
    faults = []
    for node in ast.walk(tree):
        if _imports_main(node):
            faults.append((node.lineno, "imports main; a test loads its own main.py by path, nothing else needs it"))
        if not _touches_sys_path(node):
            continue
        if kind in ("module", "script") and id(node) not in idiom:
            faults.append((node.lineno, "touches sys.path; only main.py and tests do"))
        elif kind in ("main", "lesson-test") and id(node) not in idiom:
            faults.append((node.lineno, f"touches sys.path in another way than the course's one line: {IDIOM}"))
    return sorted(faults)


def check_sources(course: Course) -> list[Fault]:
    """Imports of main, and sys.path, over all Python files."""
    faults = []
    for path, kind in python_files(course):
        shown = path.relative_to(course.root)
        in_lesson = kind == "test" and shown.parts[0] == "phases"
        found = source_faults(read_text(path) or "", "lesson-test" if in_lesson else kind)
        faults += [Fault(shown.as_posix(), line, message) for line, message in found]
    return faults


def machine_paths(text: str) -> list[tuple[int, str]]:
    """(line, path) of every absolute path under somebody's home or work folder."""
    return [(text.count("\n", 0, match.start()) + 1, match.group()) for match in _MACHINE_PATH.finditer(text)]


def check_machine_paths(course: Course) -> list[Fault]:
    """No committed text file names a path that exists on one machine only."""
    faults = []
    for path in course.files:
        for line, found in machine_paths(read_text(course.root / path) or ""):
            faults.append(Fault(path.as_posix(), line, f"a path of one machine: {found}"))
    return faults
