"""Which new names a learner's text may add to the lesson's modules: those that take nothing's place."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator

from exercises.source import Function, Source, bound_names, statements

_SPECIAL = re.compile(r"__\w+__")


def free(source: Source, owner: ast.ClassDef | None, names: Iterable[str]) -> set[str]:
    """Those of these names that may be added to a module, or to its class `owner`, which does not bind them.

    Not: special names, a builtin that the module uses, what a class inherits (from a class of its module), and
    attributes that its methods set.
    """
    occupied: set[str] = set()
    if owner is None:
        read = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
        occupied = set(dir(builtins)) & read
    else:
        classes = {node.name: node for node in statements(source.tree.body) if isinstance(node, ast.ClassDef)}
        for node in _family(owner, classes):
            occupied |= {name for each in statements(node.body) for name in bound_names(each)} | _attributes_set(node)
    return {name for name in names if name not in occupied and not _SPECIAL.fullmatch(name)}


def _family(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and those of its module that it inherits from."""
    found = [owner]
    for node in found:
        bases = [classes[each] for base in node.bases if (each := getattr(base, "id", "")) in classes]
        found += [base for base in bases if base not in found]
    return found


def _attributes_set(node: ast.ClassDef) -> set[str]:
    """The names x in `self.x = ...`."""
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}


def changed(node: ast.stmt) -> Iterator[str]:
    """The names whose values a statement may change: TABLE in `TABLE["a"] = 1`, `TABLE.update(more)`, `fill(TABLE)`.

    Of a bare call the function, too: `fill()` changes what it fills.
    """
    if isinstance(node, Function | ast.ClassDef):
        return
    for item in ast.walk(node):
        stored = isinstance(item, ast.Subscript | ast.Attribute) and not isinstance(item.ctx, ast.Load)
        called = isinstance(item, ast.Expr) and isinstance(item.value, ast.Call)
        root = item.value.func if called else item if stored else None
        if called and getattr(root, "id", "") != "print":
            given = [*item.value.args, *(each.value for each in item.value.keywords)]
            yield from (each.id for each in (root, *given) if isinstance(each, ast.Name))
        while isinstance(root, ast.Subscript | ast.Attribute):
            root = root.value
            if isinstance(root, ast.Name):
                yield root.id
