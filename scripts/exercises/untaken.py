"""What a learner changed in the lesson's own code: it is not taken when one exercise is judged, and that is said."""

import ast
import copy
from collections.abc import Iterable
from functools import lru_cache

from exercises.additions import changed, free
from exercises.source import (
    PARTS,
    Function,
    Source,
    bound_names,
    definition,
    has_parts,
    is_main_guard,
    parse,
    statements,
)
from exercises.surgery import GraftError, is_stub

_IMPORT = "\0import "


def changes(pristine: str, text: str) -> list[str]:
    """What `text` has otherwise than the lesson's module, by qualified name.

    Functions, values and the first lines of classes that both define unlike; new names that would take the place of
    something: a special method, what a class inherits, an attribute that its methods set, a builtin that is used; and
    lines that set or call something of what the lesson has, as `Wheel.size = 3` does. Stubs, docstrings and comments do
    not count. GraftError if `text` is not Python.
    """
    here, there = parse(pristine), parse(text)
    ours, theirs = _defined(pristine), _defined(text)
    owners = {"": None} | _classes(here)
    found = []
    for name, what in theirs.items():
        prefix, _, last = name.rpartition(".")
        if name in ours:
            both = (what.split(_IMPORT), ours[name].split(_IMPORT))  # of imports one way in common is enough
            replaced = what != ours[name] and not set(both[0][1:]) & set(both[1][1:])
        else:
            replaced = prefix in owners and not free(here, owners[prefix], [last])
        if replaced and not _is_stub(text, name):
            found.append(name)
    return found + [f"line {node.lineno}" for node in there.tree.body if _acts_on(here, node)]


def _acts_on(here: Source, node: ast.stmt) -> bool:
    """Whether a statement binds nothing, and changes what the module `here` binds; it has no such statement itself."""
    if bound_names(node) or is_main_guard(node) or any(ast.dump(node) == ast.dump(own) for own in here.tree.body):
        return False
    bound = {name for own in here.tree.body for name in bound_names(own)}
    return bool(bound.intersection(changed(node)))


def used(text: str, names: Iterable[str]) -> set[str]:
    """All words that these functions of `text` use as a name or an attribute."""
    found: set[str] = set()
    for name in names:
        for node in ast.walk(definition(parse(text), name)[1]):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
    return found


@lru_cache(maxsize=128)  # each exercise of a student asks for all modules
def _defined(text: str) -> dict[str, str]:
    """{qualified name: what defines it} of a module's functions and values, its classes' heads, and what is in them."""
    found: dict[str, str] = {}
    todo = [("", parse(text).tree.body)]
    while todo:
        prefix, body = todo.pop()
        for node in statements(body):
            if isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node.body))
                head = [ast.dump(each) for each in (*node.bases, *node.keywords, *node.decorator_list)]
                found[f"{prefix}{node.name}"] = " ".join(head)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for item in node.names:
                    name = f"{prefix}{item.asname or item.name.partition('.')[0]}"
                    what = item.name if item.asname or isinstance(node, ast.ImportFrom) else item.name.partition(".")[0]
                    found[name] = f"{found.get(name, '')}{_IMPORT}{getattr(node, 'module', '')}.{what}"
            else:
                for name in bound_names(node):
                    found[f"{prefix}{name}"] = found.get(f"{prefix}{name}", "") + _dump(node)
    return found


def _dump(node: ast.stmt) -> str:
    """What a statement says, without its docstring; of `if`, `try` and the like the head: what is in them follows."""
    if isinstance(node, Function):
        if ast.get_docstring(node, clean=False) is not None:
            node = copy.copy(node)
            node.body = node.body[1:]
    elif has_parts(node):
        node = copy.copy(node)
        vars(node).update({part: [] for part in PARTS if hasattr(node, part)})
    return ast.dump(node)


def _classes(source: Source) -> dict[str, ast.ClassDef]:
    """{qualified name: class} of all classes in a module."""
    found: dict[str, ast.ClassDef] = {}
    todo = [("", source.tree.body)]
    while todo:
        prefix, body = todo.pop()
        for node in statements(body):
            if isinstance(node, ast.ClassDef):
                found[f"{prefix}{node.name}"] = node
                todo.append((f"{prefix}{node.name}.", node.body))
    return found


def _is_stub(text: str, name: str) -> bool:
    try:
        return is_stub(text, name)
    except GraftError:
        return False  # a value, or a class
