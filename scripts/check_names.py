"""Names and calls in a lesson's docs: what they say of the course's code must be true of it."""

import ast
import math
import os
import re
import sys
import textwrap
import warnings

from codeindex import BUILTINS, CodeIndex, Module, Target, class_members
from faults import Fault
from lessons import Lesson
from mdtext import Block
from signatures import bind, compare

# A bare `ceil(P / N)` or `fsync(fd)` is not taken for a function of the course.
GENERAL = BUILTINS | set(dir(math)) | set(dir(os))
FOREIGN_SECTIONS = ("Use It", "Production patterns in the wild")  # here other projects' modules may be imported
_KNOWN_ROOTS = sys.stdlib_module_names | {"torch", "numpy", "matplotlib"}
_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
_FILE = re.compile(r"\.(py|json|jsonl|md|txt|bin|pt|png|svg|csv|yml|yaml|toml|zip|safetensors|tmp|log)$")
_CALL = re.compile(r"^(?:def )?([A-Za-z_]\w*)\((.*)\)(?:\s*->.*|:)?$")
QUOTE = re.compile(r"^#\s*([\w./-]+\.py)\b")


def parse_quietly(text: str) -> ast.Module | None:
    """The syntax tree, or None; without the warnings that formulas such as 2(N-1) cause."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def is_quote(block: Block) -> bool:
    """Whether a block says that it is quoted code: its first line is a comment `# module.py`."""
    return bool(block.lines) and bool(QUOTE.match(block.lines[0]))


def _bound(tree: ast.AST) -> set[str]:
    """Every name that a block binds itself: assignments, definitions, parameters, loops, imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


class DocNames:
    """The names of one lesson's docs, checked against the index of the course's code."""

    def __init__(self, lesson: Lesson, index: CodeIndex) -> None:
        self.lesson, self.index = lesson, index
        self.own_modules = {module.path for module in index.of_lesson(lesson)}
        self.foreign: set[str] = set()  # imported in a block from elsewhere: torch's DistributedDataParallel, say
        self.defined: set[str] = set()  # defined by a block of this text
        self.aliases: dict[str, str] = {}  # `from ddp import DistributedDataParallel as DDP`
        self.faults: list[tuple[int, str]] = []

    def check(self) -> list[tuple[int, str]]:
        """(line, message) of every fault."""
        document = self.lesson.document
        blocks = [block for block in document.blocks if block.language in ("python", "py") and not is_quote(block)]
        trees = [(block, parse_quietly(textwrap.dedent("\n".join(block.lines)))) for block in blocks]
        for block, tree in trees:
            if tree is None:
                self.faults.append((block.line, "this python block does not parse"))
                continue
            self._imports(tree, block.line, document.section_of(block.line))
            self.defined |= _bound(tree)
        for block, tree in trees:
            if tree is not None:
                self._block(tree, block.line)
        for line, text in document.code_spans:
            self._span(line, text)
        return sorted(set(self.faults))

    def _imports(self, tree: ast.Module, line: int, section: str) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias.name, None, alias.asname, line + node.lineno, section)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._import(node.module or "", alias.name, alias.asname, line + node.lineno, section)

    def _import(self, source: str, name: str | None, alias: str | None, line: int, section: str) -> None:
        module = self.index.module(source, self.lesson)
        if module is None:
            root = source.split(".")[0]
            self.foreign.add(alias or name or root)
            if root not in _KNOWN_ROOTS and section not in FOREIGN_SECTIONS:
                self.faults.append((line, f"imports {source!r}, which is no module of the course"))
        elif name is not None and name != "*" and self.index.resolve(module, name) is None:
            self.faults.append((line, f"imports {name!r}, which {module.path.name} does not define"))
        elif alias:
            self.aliases[alias] = name or source

    def _block(self, tree: ast.Module, line: int) -> None:
        bound = _bound(tree)
        classes: dict[str, list[Target]] = {}  # variables made by calling a class of the course
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
                targets = self._functions(node.value.func, set())
                if isinstance(node.targets[0], ast.Name) and targets:
                    made = [target for target in targets if isinstance(target.node, ast.ClassDef)]
                    classes[node.targets[0].id] = made
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node, line + node.lineno, bound, mention=False)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._attribute(node, line + node.lineno, bound, classes.get(node.value.id, []))
        for node in ast.walk(tree):
            func = node.func if isinstance(node, ast.Call) else None
            if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and classes.get(func.value.id):
                members = [self.index.member(target, func.attr) for target in classes[func.value.id]]
                self._binds(node, [member for member in members if member], line + node.lineno, mention=False)

    def _span(self, line: int, text: str) -> None:
        if _FILE.search(text) or "/" in text.split("(")[0]:
            return
        if _DOTTED.match(text):
            self._dotted(text, line)
            return
        if (match := _CALL.match(text)) is None and "(" not in text:
            return
        tree = parse_quietly(text.split("->")[0].rstrip() if "->" in text and not text.startswith("def ") else text)
        if tree is not None and not text.startswith("def "):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    self._call(node, line, _bound(tree), mention=True)
                elif isinstance(node, ast.Attribute):
                    self._dotted(ast.unparse(node), line)
        elif match is not None:
            self._shown_signature(match[1], match[2], line)

    def _shown_signature(self, name: str, parameters: str, line: int) -> None:
        tree = parse_quietly(f"def {name}({parameters}): ...")
        targets = self._named(name)
        if tree is None or name in self.foreign | self.defined or name in GENERAL:
            return
        if not targets:
            self._unknown(name, line)
            return
        signatures = [self.index.signature(target) for target in targets]
        problems = [compare(signature, tree.body[0]) if signature else None for signature in signatures]
        if all(problems):
            self.faults.append((line, f"{name}(...) is shown otherwise than it is written: {problems[0]}"))

    def _named(self, name: str) -> list[Target]:
        """What a bare name may mean: the lesson's own definitions if there are any, else the course's."""
        found = self.index.definitions.get(self.aliases.get(name, name), [])
        own = [target for target in found if target.module.path in self.own_modules]
        return own or found

    def _functions(self, func: ast.expr, bound: set[str]) -> list[Target] | None:
        """What a call's function may mean; None if it is none of the course's business, [] if it does not exist."""
        if isinstance(func, ast.Name):
            if func.id in bound | self.foreign | self.defined or len(func.id) == 1:
                return None
            targets = self._named(func.id)
            return None if not targets and func.id in GENERAL | self.index.parameters else targets
        chain = ast.unparse(func).split(".") if isinstance(func, ast.Attribute) else []
        if len(chain) < 2 or not all(part.isidentifier() for part in chain) or chain[0] in bound | self.foreign:
            return None
        return self._members(chain)

    def _members(self, chain: list[str]) -> list[Target] | None:
        """What `module.name`, `Class.method` or `variable_called_like_a_module.method` may mean."""
        if chain[-1].startswith("__") and chain[-1].endswith("__"):
            return None  # Python's own
        module = self.index.module(self.aliases.get(chain[0], chain[0]), self.lesson)
        if module is None:
            classes = [target for target in self._named(chain[0]) if isinstance(target.node, ast.ClassDef)]
            if not classes:
                return None
            return self._in_classes(classes, chain[1:])
        target = self.index.resolve(module, chain[1])
        if target is not None:
            if len(chain) == 2:
                return [target]
            return self._in_classes([target], chain[2:]) if isinstance(target.node, ast.ClassDef) else None
        found = self._methods_near(module, chain[1])
        # `flat.numel()`: a variable that is called like a module, used in the course's code in the same way.
        return found or (None if (chain[0], chain[1]) in self.index.variable_attributes or len(chain) > 2 else [])

    def _in_classes(self, classes: list[Target], rest: list[str]) -> list[Target] | None:
        found = [self.index.member(target, rest[0]) for target in classes]
        if any(found):
            return [target for target in found if target] if len(rest) == 1 else None
        foreign = any(self.index.bases(target)[1] for target in classes)
        return None if foreign and rest[0] in self.index.attributes else []

    def _methods_near(self, module: Module, name: str) -> list[Target]:
        """Members of the module's classes and of their subclasses: `comm.agree` is a method of what comm.py defines."""
        own = {node.name for node in module.names.values() if isinstance(node, ast.ClassDef)}
        found = []
        for targets in self.index.definitions.values():
            for target in targets:
                if isinstance(target.node, ast.ClassDef) and name in class_members(target.node):
                    if any(owner.node.name in own for owner in self.index.bases(target)[0]):
                        found.append(Target(target.module, class_members(target.node)[name], target.node))
        return found

    def _call(self, node: ast.Call, line: int, bound: set[str], mention: bool) -> None:
        targets = self._functions(node.func, bound)
        if targets == []:
            self._unknown(ast.unparse(node.func), line)
        elif targets:
            self._binds(node, targets, line, mention)

    def _binds(self, node: ast.Call, targets: list[Target], line: int, mention: bool) -> None:
        signatures = [self.index.signature(target) for target in targets]
        problems = [bind(signature, node, mention) if signature else None for signature in signatures]
        if problems and all(problems):
            self.faults.append((line, f"{ast.unparse(node.func)}(...) does not fit its definition: {problems[0]}"))

    def _attribute(self, node: ast.Attribute, line: int, bound: set[str], classes: list[Target]) -> None:
        assert isinstance(node.value, ast.Name)
        if classes and self._in_classes(classes, [node.attr]) == []:
            self._unknown(f"{node.value.id}.{node.attr}", line)
        elif node.value.id not in bound | self.foreign and self._members([node.value.id, node.attr]) == []:
            self._unknown(f"{node.value.id}.{node.attr}", line)

    def _dotted(self, text: str, line: int) -> None:
        chain = text.split(".")
        if all(part.isidentifier() for part in chain) and chain[0] not in self.foreign and self._members(chain) == []:
            self._unknown(text, line)

    def _unknown(self, name: str, line: int) -> None:
        self.faults.append((line, f"{name}: there is no such name in the course's code"))


def check_names(lesson: Lesson, index: CodeIndex) -> list[Fault]:
    """Names in inline code and python blocks exist; calls bind to the real signatures."""
    return [Fault(lesson.rel("docs/en.md"), line, message) for line, message in DocNames(lesson, index).check()]
