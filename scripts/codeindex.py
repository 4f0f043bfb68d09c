"""The lessons' code as an index of names and signatures, read with ast: nothing is imported or run."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from faults import read_text
from lessons import Course, Lesson
from signatures import Signature, decorators, of_fields, of_function

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file of a lesson's code/: what it defines and imports at the top level."""

    path: Path  # relative to the root
    lesson: Lesson
    tree: ast.Module
    lines: list[str]
    names: dict[str, ast.AST | None] = field(default_factory=dict)  # None: a value of which nothing is known
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # alias -> (module, name or None)

    @property
    def name(self) -> str:
        """The name it is imported by."""
        return self.path.stem


@dataclass(frozen=True)
class Target:
    """What a name stands for: a function, a class or (node None) something of which only the existence is known."""

    module: Module
    node: ast.AST | None
    method_of: ast.ClassDef | None = None


def _bound_names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id


def _collect(module: Module, body: list[ast.stmt]) -> None:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            module.names[node.name] = node
        elif isinstance(node, ast.Import):
            module.imported.update({(a.asname or a.name.split(".")[0]): (a.name, None) for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            module.imported.update({(a.asname or a.name): (node.module or "", a.name) for a in node.names})
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                _collect(module, getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                _collect(module, handler.body)
        else:
            for name in _bound_names(node):
                module.names.setdefault(name, None)


def parse_module(lesson: Lesson, path: Path) -> Module | None:
    """The index of one file; None if it does not parse (check_modules reports that)."""
    text = read_text(path)
    try:
        tree = ast.parse(text or "")
    except (SyntaxError, ValueError):
        return None
    module = Module(path.relative_to(lesson.root), lesson, tree, (text or "").splitlines())
    _collect(module, tree.body)
    return module


class CodeIndex:
    """All modules of the course by name, each lesson's `main` apart."""

    def __init__(self, course: Course) -> None:
        self.modules: dict[str, Module] = {}
        self.mains: dict[str, Module] = {}
        for lesson in course.lessons:
            for path in lesson.modules():
                if module := parse_module(lesson, path):
                    if module.name == "main":
                        self.mains[lesson.id] = module
                    else:
                        self.modules.setdefault(module.name, module)

    def module(self, name: str, lesson: Lesson) -> Module | None:
        """The module of that name; `main` is the lesson's own."""
        return self.mains.get(lesson.id) if name == "main" else self.modules.get(name)

    def of_lesson(self, lesson: Lesson) -> list[Module]:
        """The lesson's own modules, main.py among them."""
        everything = [*self.modules.values(), *self.mains.values()]
        return [module for module in everything if module.lesson.id == lesson.id]

    def resolve(self, module: Module, name: str, depth: int = 0) -> Target | None:
        """A top-level name of a module, followed through imports from other modules of the course."""
        if name in module.names:
            return Target(module, module.names[name])
        if name not in module.imported or depth > 10:
            return None
        source, original = module.imported[name]
        origin = self.module(source, module.lesson)
        if origin is None or original is None:
            return Target(module, None)
        return self.resolve(origin, original, depth + 1)

    def bases(self, target: Target) -> tuple[list[Target], bool]:
        """The course's classes a class builds on, itself first, and whether any other class is among its ancestors."""
        known, foreign = [target], False
        for base in target.node.bases if isinstance(target.node, ast.ClassDef) else []:
            found = self.resolve(target.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef) and found.node is not target.node:
                more, outside = self.bases(found)
                known, foreign = known + more, foreign or outside
            elif ast.unparse(base).split("[")[0] not in ("object", "Generic", "Protocol", "ABC", "abc.ABC"):
                foreign = True
        return known, foreign

    def member(self, target: Target, name: str) -> Target | None:
        """A method or attribute of a class, inherited ones included."""
        for owner in self.bases(target)[0]:
            found = class_members(owner.node)
            if name in found:
                return Target(owner.module, found[name], owner.node if found[name] is not None else None)
        return None

    def signature(self, target: Target) -> Signature | None:
        """How a function, method or class is called; None if that cannot be known from the source."""
        if isinstance(target.node, Function):
            return of_function(target.node, method=target.method_of is not None)
        if not isinstance(target.node, ast.ClassDef) or target.node.keywords:
            return None
        known, foreign = self.bases(target)
        for owner in known:
            members = class_members(owner.node)
            if "__new__" in members:
                return None
            if isinstance(members.get("__init__"), Function):
                return of_function(members["__init__"], method=True)
        named_tuple = any(ast.unparse(base).endswith("NamedTuple") for base in target.node.bases)
        if named_tuple or any(name == "dataclass" for name in decorators(target.node)):
            return of_fields([owner.node for owner in reversed(known)])
        return None if foreign else Signature()

    def has_function(self, lesson: Lesson, dotted: str) -> bool:
        """Whether `module.function` or `module.Class.method` is defined in the lesson's own code."""
        name, *rest = dotted.split(".")
        module = self.module(name, lesson)
        if module is None or module.lesson.id != lesson.id or not rest:
            return False
        node: ast.AST | None = module.names.get(rest[0])
        for part in rest[1:]:
            node = class_members(node).get(part) if isinstance(node, ast.ClassDef) else None
        return isinstance(node, Function)

    @cached_property
    def definitions(self) -> dict[str, list[Target]]:
        """Every function, class, method and nested function of the course by its bare name."""
        found: dict[str, list[Target]] = defaultdict(list)
        for module in [*self.modules.values(), *self.mains.values()]:
            for owner in ast.walk(module.tree):
                for node in ast.iter_child_nodes(owner):
                    if isinstance(node, Function | ast.ClassDef):
                        in_class = owner if isinstance(owner, ast.ClassDef) and isinstance(node, Function) else None
                        found[node.name].append(Target(module, node, in_class))
        return found

    @cached_property
    def attributes(self) -> set[str]:
        """Every attribute name that the course's code uses on anything."""
        return {node.attr for tree in self._trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    @cached_property
    def variable_attributes(self) -> set[tuple[str, str]]:
        """(variable, attribute) pairs in the course's code, such as ("flat", "numel")."""
        nodes = (node for tree in self._trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        return {(node.value.id, node.attr) for node in nodes if isinstance(node.value, ast.Name)}

    @cached_property
    def parameters(self) -> set[str]:
        """Every parameter name, since a text may speak of a callback such as `worker(rank, world_size)`."""
        return {node.arg for tree in self._trees() for node in ast.walk(tree) if isinstance(node, ast.arg)}

    def _trees(self) -> list[ast.Module]:
        return [module.tree for module in [*self.modules.values(), *self.mains.values()]]


def class_members(node: ast.AST | None) -> dict[str, ast.AST | None]:
    """What a class body defines, and the attributes its methods set on self; functions with their node."""
    members: dict[str, ast.AST | None] = {}
    for item in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(item, Function):
            members[item.name] = None if "property" in decorators(item) else item
            for inner in ast.walk(item):
                own = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                if own and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    members.setdefault(inner.attr, None)
        elif isinstance(item, ast.ClassDef):
            members[item.name] = item
        else:
            for name in _bound_names(item):
                members.setdefault(name, None)
    return members


BUILTINS = frozenset(dir(builtins))
