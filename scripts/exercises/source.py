"""Python source as text with places: what `surgery` and `graft` find and cut, without running a line of it."""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from faults import UserError

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEEPEST, LARGEST = 300, 14_000  # levels; bits of a number
PARTS = ("body", "handlers", "orelse", "finalbody", "cases")  # of a statement, in which others stand
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_STARTS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
_ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}


class GraftError(UserError):
    """A text that cannot be used: `line` says where (None: nowhere in particular), `reason` why."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason, self.line = reason, line


@dataclass(frozen=True)
class Span:
    """Whole lines of a source: `source[start:end]`, which are the lines `first` to `last`, counted from 1."""

    start: int
    end: int
    first: int
    last: int


def decode(data: bytes) -> str:
    """A source file's text, newlines as \\n; its encoding cookie and BOM are obeyed. GraftError if it is no text."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except SyntaxError as error:
        raise GraftError(f"no Python source: {error.msg}; save the file as UTF-8", error.lineno or 1) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise GraftError(f"byte {error.start} is not {error.encoding}: save the file as UTF-8", line) from None
    except (LookupError, ValueError) as error:  # of codecs that are for no text, as hex
        raise GraftError(f"no Python source: {error}; save the file as UTF-8", 1) from None
    if "\0" in text:
        raise GraftError("not Python: it holds a NUL character", text.count("\n", 0, text.index("\0")) + 1)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class Source:
    """A text with its tree and the offset of each line. GraftError, with the line, if it is not Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = _LINE.findall(text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text)
        except SyntaxError as error:
            raise GraftError(f"not Python: {error.msg}", error.lineno) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise GraftError(f"not Python: {error or type(error).__name__}") from None
        _check_size(self.tree)

    def offset(self, line: int, column: int) -> int:
        """Where ast's (line, column in UTF-8 bytes) is in the text."""
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.stmt) -> Span:
        """A statement's lines, its decorators and the comments at the end of its body included."""
        first, last = first_line(node), node.end_lineno
        after = range(last + 1, len(self.lines) + 1) if has_parts(node) else ()
        for number in after:
            line = self.lines[number - 1].strip()
            if line.startswith("#") and len(self.indent(number)) > len(self.indent(first)):
                last = number
            elif line:
                break
        return Span(self._starts[first - 1], self._starts[last], first, last)

    def indent(self, line: int) -> str:
        """The white space that a line begins with."""
        text = self.lines[line - 1].rstrip("\r\n")
        return text[: len(text) - len(text.lstrip())]

    def inside_strings(self) -> set[int]:
        """The lines that begin inside a string: their first blanks are part of a value."""
        inside: set[int] = set()
        opened: list[int] = []
        for token in tokenize.generate_tokens(iter([*self.lines, ""]).__next__):
            if token.type == tokenize.STRING:
                inside.update(range(token.start[0] + 1, token.end[0] + 1))
            elif token.type in _STARTS:
                opened.append(token.start[0])
            elif token.type in _ENDS:
                inside.update(range(opened.pop() + 1, token.end[0] + 1))
        return inside

    def moved(self, span: Span, indent: str) -> str:
        """The lines of a span, indented by `indent` instead of their own. Tabs count 8; strings keep their values."""
        own = self.indent(span.first)
        lines = self.lines[span.first - 1 : span.last]
        if own != indent or any("\t" in self.indent(number) for number in range(span.first, span.last + 1)):
            strings = self.inside_strings()
            width = len(own.expandtabs(8))
            for at, line in enumerate(lines):
                if line.strip() and span.first + at not in strings:
                    blanks = self.indent(span.first + at).replace("\f", "").expandtabs(8)
                    lines[at] = indent + blanks[width:] + line.lstrip()
        return "".join(lines)


def _check_size(tree: ast.AST) -> None:
    """GraftError for what Python's own tools cannot write: they recurse, and write no number of thousands of digits."""
    level, depth = [tree], 0
    while level:
        depth += 1
        for node in level:
            line = getattr(node, "lineno", None)
            if depth > DEEPEST:
                raise GraftError(f"expressions or blocks are nested more than {DEEPEST} deep", line)
            if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > LARGEST:
                raise GraftError(f"a number of more than {LARGEST} bits", line)
        level = [child for node in level for child in ast.iter_child_nodes(node)]


@lru_cache(maxsize=128)
def parse(text: str) -> Source:
    """The Source of a text, made once; nobody changes its tree."""
    return Source(text)


def first_line(node: ast.stmt) -> int:
    """The line a statement begins on, with its decorators."""
    return min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and those in its if, try, with and loops; not what `if __name__ == ...` guards."""
    for node in body:
        if not is_main_guard(node):
            yield node
        if isinstance(node, Function | ast.ClassDef) or is_main_guard(node):
            continue
        for part in PARTS:
            for inner in getattr(node, part, []):
                yield from statements([inner] if isinstance(inner, ast.stmt) else inner.body)


def has_parts(node: ast.stmt) -> bool:
    """Whether other statements stand in it."""
    return any(hasattr(node, part) for part in PARTS)


def is_main_guard(node: ast.stmt) -> bool:
    """Whether this is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(getattr(name, "id", "") == "__name__" for name in ast.walk(node.test))


def definition(source: Source, qualname: str) -> tuple[list[ast.ClassDef], ast.FunctionDef | ast.AsyncFunctionDef]:
    """The classes around `Class.method` and the function itself: the last of that name, as when the module runs.

    Of a property that is its getter. GraftError if there is none, or if it depends on a condition which one it is.
    """
    *outer, name = qualname.split(".")
    body, classes = source.tree.body, []
    for part in outer:
        found = [node for node in statements(body) if isinstance(node, ast.ClassDef) and node.name == part]
        if not found:
            raise GraftError(f"there is no class {part}, of which {qualname} is a method")
        classes.append(found[-1])
        body = found[-1].body
    functions = [node for node in statements(body) if isinstance(node, Function) and node.name == name]
    functions = [node for node in functions if not _is_accessor(node)]
    others = [node for node in statements(body) if isinstance(node, ast.ClassDef) or not has_parts(node)]
    others = [node for node in others if name in bound_names(node) and not isinstance(node, Function)]
    if functions and not any(node.lineno > functions[-1].lineno for node in others):
        for node in statements(body):
            if sum(any(each in functions for each in statements(part)) for part in _branches(node)) > 1:
                raise GraftError(f"{qualname} is defined in two branches of a statement: keep one", node.lineno)
        return classes, functions[-1]
    if others:
        raise GraftError(f"{qualname} is no function here: it must be defined with def", others[-1].lineno)
    raise GraftError(f"there is no function {qualname}", classes[-1].lineno if classes else None)


def _branches(node: ast.stmt) -> list[list[ast.stmt]]:
    """The bodies of a statement of which not all run."""
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    if isinstance(node, ast.Try):
        return [node.body + node.orelse, *(handler.body for handler in node.handlers)]
    return [case.body for case in getattr(node, "cases", [])]


def _is_accessor(node: ast.stmt) -> bool:
    """Whether this is the setter or deleter of a property."""
    attributes = [item for item in node.decorator_list if isinstance(item, ast.Attribute)]
    return any(item.attr in ("setter", "deleter") and ast.unparse(item.value) == node.name for item in attributes)


def bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement binds in the body it stands in; those of an import with * cannot be known."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {item.asname or item.name.split(".")[0] for item in node.names} - {"*"}
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
    inner += [item for case in getattr(node, "cases", []) for item in case.body]
    names = [child for child in _own_nodes(node) if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load)]
    patterns = [item for case in getattr(node, "cases", []) for item in ast.walk(case.pattern)]
    matched = {getattr(item, "name", None) or getattr(item, "rest", None) for item in patterns} - {None}
    return matched.union((name.id for name in names), *(bound_names(child) for child in inner))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement, not those of statements or comprehensions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.comprehension | ast.Lambda | ast.match_case):
            yield child
            yield from _own_nodes(child)
