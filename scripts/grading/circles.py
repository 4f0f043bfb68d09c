"""Exercises of a student that call each other in a circle, each judged with the lesson's own other one.

`one_f_one_b` returns what `zb_h1` returns, less something, and `zb_h1` calls `one_f_one_b`: each is right while the
lesson's own is in the other's place, and together they are nothing.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from exercises.model import Exercise, names_by_module
from exercises.source import Function, GraftError, bound_names, decode, parse, statements
from exercises.surgery import graft_all, is_stub
from grading.beside import modules_beside
from grading.judge import Judge
from grading.own import lesson_with_new, texts_of
from grading.submissions import Work


Calls = set[
    tuple[str, str]
]  # (one, other), ids of exercises: one calls the other, directly or through what else there is


def called(judge: Judge, exercises: list[Exercise], work: Work) -> tuple[Calls, Calls]:
    """Who calls whom in the student's exercises put together, and who in the lesson's own code."""
    own = {path.stem: text for path in judge.lesson.modules() if (text := judge.layout.source(path.stem)) is not None}
    joined = own | with_all(judge, exercises, work) | _modules_of_its_own(judge, work)
    functions = tuple((exercise.id, tuple(exercise.functions)) for exercise in exercises)
    return _calls(tuple(joined.items()), functions), _calls(tuple(own.items()), functions)


def circles(calls: Calls, known: Calls) -> dict[str, list[str]]:
    """{id of an exercise: those that it is in a circle with}, beyond the circles of the lesson's own code."""
    new = sorted(_mutual(calls) - _mutual(known))
    return {one: [other for first, other in new if first == one] for one, _ in new}


def with_all(judge: Judge, exercises: list[Exercise], work: Work) -> dict[str, str]:
    """The lesson's modules with what is new in the student's and the functions of all these exercises, if written."""
    texts = texts_of(judge, work)
    names = names_by_module([name for exercise in exercises for name in exercise.functions])
    found = {}
    for module, (_, text) in texts.items():
        found[module] = lesson_with_new(judge.layout.source(module), text)
        for name in names.get(module, []):
            try:
                found[module] = found[module] if is_stub(text, name) else graft_all(found[module], text, [name])
            except GraftError:
                continue  # it is not there: its exercise says so
    return found


def _modules_of_its_own(judge: Judge, work: Work) -> dict[str, str]:
    """The student's own modules, which the lesson's import."""
    found = {}
    for path, text in texts_of(judge, work).values():
        for name, file in modules_beside(work.handed, path, text, judge.layout).items():
            try:
                parse(own := decode(work.handed.files[file]))
            except GraftError:
                continue  # the run says what is wrong with it
            found[PurePosixPath(name).name] = own
    return found


@lru_cache(maxsize=8)  # the lesson's own are the same for all students
def _calls(texts: tuple[tuple[str, str], ...], functions: tuple[tuple[str, tuple[str, ...]], ...]) -> Calls:
    """`texts`: (module, its text) of each; `functions`: (id of an exercise, its functions)."""
    graph = _graph(dict(texts))
    reach = {one: _reached(graph, names) for one, names in functions}
    return {(one, other) for one in reach for other, names in functions if one != other and reach[one] & set(names)}


def _mutual(calls: Calls) -> Calls:
    return {(one, other) for one, other in calls if (other, one) in calls}


def _reached(graph: dict[str, set[str]], start: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    todo = list(start)
    while todo:
        new = graph.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


@dataclass
class _Names:
    """What the modules together define, and what names stand for what."""

    defined: dict[str, ast.stmt]
    passed_on: dict[str, str]  # "module.name" that a module has from another, or by another name: what it is
    functions: dict[str, list[str]]  # of modules, by their own names
    methods: dict[str, list[str]]

    def origin(self, full: str) -> str:
        """What a name is in the end: modules hand on what they import."""
        seen: set[str] = set()
        while full in self.passed_on and full not in seen:
            seen.add(full)
            full = self.passed_on[full]
        return full


def _graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """{"module.qualified.name": those that it names} for functions, methods, and values that a module keeps."""
    bodies = {module: parse(text).tree.body for module, text in texts.items()}
    defined: dict[str, ast.stmt] = {}
    for module, body in bodies.items():
        defined |= _definitions(module, body)
    aliases = {module: _aliases(module, body, texts, defined) for module, body in bodies.items()}
    names = _Names(defined, {}, {}, {})
    names.passed_on = {
        f"{module}.{name}": full
        for module, found in aliases.items()
        for name, full in found.items()
        if full != f"{module}.{name}"
    }
    for name, node in defined.items():
        if isinstance(node, Function):
            kind = names.methods if name.count(".") > 1 else names.functions
            kind.setdefault(name.rpartition(".")[2], []).append(name)
    return {
        name: set(_named(name, node, aliases[name.partition(".")[0]], names)) - {name} for name, node in defined.items()
    }


def _definitions(prefix: str, body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in statements(body):
        if isinstance(node, ast.ClassDef):
            found |= _definitions(f"{prefix}.{node.name}", node.body)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            found |= {f"{prefix}.{name}": node for name in bound_names(node)}
    return found


def _aliases(module: str, body: list[ast.stmt], texts: dict[str, str], defined: dict[str, ast.stmt]) -> dict[str, str]:
    """{name in this module: what it is}: "schedule" or "schedule.gpipe"."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom) and node.module in texts:
            found |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
            if "*" in found:
                del found["*"]
                everything = (name.split(".") for name in defined)
                found |= {
                    parts[1]: ".".join(parts) for parts in everything if parts[0] == node.module and len(parts) == 2
                }
        elif isinstance(node, ast.Import):
            found |= {item.asname or item.name: item.name for item in node.names if item.name in texts}
    return found | {name: f"{module}.{name}" for node in statements(body) for name in bound_names(node) - set(found)}


def _named(name: str, node: ast.stmt, aliases: dict[str, str], names: _Names) -> Iterator[str]:
    """The functions and values that it names, or spells in a text, as for getattr; of an unknown object, methods."""
    inside = name.rpartition(".")[0] if isinstance(node, Function) else ""
    for item in ast.walk(node):
        full = ""
        if isinstance(item, ast.Name):
            full = aliases.get(item.id, "")
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name):
            owner = inside if item.value.id in ("self", "cls") else aliases.get(item.value.id, "")
            full = f"{owner}.{item.attr}"
            yield from names.methods.get(item.attr, []) if not owner else ()
        elif isinstance(item, ast.Attribute):
            yield from names.methods.get(item.attr, [])
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield from names.functions.get(item.value, [])
        full = names.origin(full)
        yield from (each for each in (full, f"{full}.__init__") if each in names.defined)
