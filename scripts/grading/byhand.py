"""What an instructor should look at by hand: code that reaches for its tests, or behind Python's scenes.

A look at the text, and what a witness saw in runs; no points depend on it. Who knows this list gets around it.
"""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from exercises.source import GraftError, bound_names, decode, parse
from grading.grade import Result
from grading.layout import Layout
from grading.submissions import Work

MODULES = {"gc", "ctypes", "inspect", "unittest", "builtins", "marshal", "importlib", "grading", "faulthandler"}
ATTRIBUTES = {
    *("tb_frame", "f_back", "f_locals", "f_globals", "f_builtins", "gi_frame", "cr_frame"),
    *("__code__", "__globals__", "__closure__", "__subclasses__", "__builtins__"),
    *("_getframe", "_current_frames", "_exit", "settrace", "setprofile", "addaudithook", "meta_path"),
}
CALLS = {"exec", "eval", "compile", "__import__"}
METHODS = {"__eq__", "__ne__", "__instancecheck__"}  # an object that equals everything
SHOWN = 8  # places that class.md names for each student; report.json has all


def suspects(work: Work, results: list[Result], layout: Layout) -> list[dict]:
    """{"file", "line", "what"} for each place in the files that were looked at, {"exercise", "what"} for what was seen.

    What the lesson's own module of that name does, too, is left out.
    """
    looked = {file for result in results for file in result.files}
    tests = {PurePosixPath(path).stem for path in layout.files if path.startswith(f"{layout.tests}/")}
    found: list[dict] = []
    for path, data in sorted(work.handed.files.items()) if work.handed else ():
        shown = work.handed.origins.get(path, path)
        if shown in looked:
            own = {what for _, what in _places((layout.source(PurePosixPath(path).stem) or "").encode(), tests)}
            places = dict.fromkeys((line, what) for line, what in _places(data, tests) if what not in own)
            found += [{"file": shown, "line": line, "what": what} for line, what in sorted(places)]
    return found + [{"exercise": result.exercise, "what": what} for result in results for what in result.noted]


def lines(report: dict) -> list[str]:
    """A line of class.md for the student; none if there is nothing."""
    told = [
        f"{each['what']} ({each['file']}:{each['line']})"
        if "file" in each
        else f"{each['what']} (in {each['exercise']})"
        for each in report["by_hand"]
    ]
    more = [f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    return [f"- {report['student']['id']}: {', '.join(told[:SHOWN] + more)}"] if told else []


def _places(data: bytes, tests: set[str]) -> Iterator[tuple[int, str]]:
    try:
        tree = parse(decode(data)).tree
    except GraftError:
        return
    own = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in bound_names(node)}
    for node in ast.walk(tree):
        for what in _suspicious(node, tests):
            if what not in own & CALLS:  # `from re import compile`
                yield getattr(node, "lineno", 1), what


def _suspicious(node: ast.AST, tests: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from _imports([item.name for item in node.names], tests)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        yield from _imports([module], tests)
        yield from (f"{module}.{item.name}" for item in node.names if _is_suspect(module, item.name))
    elif isinstance(node, ast.Attribute) and _is_suspect(getattr(node.value, "id", ""), node.attr):
        yield f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else f".{node.attr}"
    elif isinstance(node, ast.Name) and node.id in CALLS | {"__builtins__", "__loader__"}:
        yield node.id
    elif isinstance(node, ast.FunctionDef) and node.name in METHODS:
        yield f"defines {node.name}"
    elif isinstance(node, ast.Constant) and node.value in tests:
        yield f"names {node.value}"


def _imports(names: list[str], tests: set[str]) -> Iterator[str]:
    yield from (f"imports {name}" for name in names if name.partition(".")[0] in MODULES | tests)


def _is_suspect(owner: str, name: str) -> bool:
    return name in ATTRIBUTES or (owner == "sys" and name == "modules")
