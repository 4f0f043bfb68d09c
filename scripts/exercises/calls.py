"""Who calls whom among the functions of exercises: directly, or through whatever else the modules define."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from exercises.model import Exercise
from exercises.source import Function, bound_names, parse, statements

Calls = set[tuple[str, str]]  # (one, other), ids of exercises: one calls the other


def calls_in(texts: Mapping[str, str], exercises: Iterable[Exercise]) -> Calls:
    """Who calls whom in these modules: {name: text}. Every text is Python."""
    return _calls(tuple(texts.items()), tuple((exercise.id, tuple(exercise.functions)) for exercise in exercises))


def circles(calls: Calls, known: Calls) -> dict[str, list[str]]:
    """{id of an exercise: those that it is in a circle with}, beyond the circles of the lesson's own code."""
    new = sorted(_mutual(calls) - _mutual(known))
    return {one: [other for first, other in new if first == one] for one, _ in new}


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
