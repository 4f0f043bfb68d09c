"""Find a function in a module's text, take its body out, and tell whether it was left so."""

import ast
import json
import textwrap
import tokenize

from exercises.graft import graft, graft_all
from exercises.source import GraftError, Source, Span, decode, definition, parse

__all__ = ["GraftError", "Span", "body_lines", "decode", "find", "graft", "graft_all", "is_stub", "stub", "stub_all"]
WIDTH = 110  # of the hint in a stub


def find(source: str, qualname: str) -> Span:
    """The lines of `function` or `Class.method`, its decorators included. GraftError if there is no such function."""
    parsed = parse(source)
    return parsed.span(definition(parsed, qualname)[1])


def stub(source: str, qualname: str, hint: str) -> str:
    """The text with that function's body replaced by `raise NotImplementedError(hint)`.

    Its decorators, signature and docstring stay, the comments in its body go, and the rest is the same to the byte.
    """
    parsed = parse(source)
    _, node = definition(parsed, qualname)
    span = parsed.span(node)
    newline = "\r\n" if parsed.lines[span.first - 1].endswith("\r\n") else "\n"
    colon, same_line = _end_of_signature(parsed, node)
    indent = parsed.indent(span.first) + "    " if same_line else parsed.indent(node.body[0].lineno)
    body = [f"{indent}{line}" for line in _raise(hint, WIDTH - len(indent))]
    if ast.get_docstring(node, clean=False) is not None:
        doc = node.body[0]
        start, end = (parsed.offset(doc.lineno, doc.col_offset), parsed.offset(doc.end_lineno, doc.end_col_offset))
        body.insert(0, f"{indent}{source[start:end]}")
    ending = newline if parsed.lines[span.last - 1].endswith(("\r", "\n")) else ""
    return f"{source[:colon]}{newline}{newline.join(body)}{ending}{source[span.end :]}"


def stub_all(source: str, qualnames: dict[str, str]) -> str:
    """Stub several functions of one text: {qualified name: hint}."""
    for qualname, hint in qualnames.items():
        source = stub(source, qualname, hint)
    return source


def body_lines(source: str, qualname: str) -> range:
    """The lines (from 1) of a function's body: what stands below its signature and docstring."""
    parsed = parse(source)
    _, node = definition(parsed, qualname)
    if ast.get_docstring(node, clean=False) is not None:
        return range(node.body[0].end_lineno + 1, parsed.span(node).last + 1)
    colon, _ = _end_of_signature(parsed, node)
    return range(parsed.text.count("\n", 0, colon) + 2, parsed.span(node).last + 1)


def is_stub(source: str, qualname: str) -> bool:
    """Whether that function does nothing but raise NotImplementedError, as a starter's does."""
    _, node = definition(parse(source), qualname)
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    raised = body[0].exc if body and isinstance(body[0], ast.Raise) else None
    raised = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _end_of_signature(source: Source, node: ast.stmt) -> tuple[int, bool]:
    """Where the signature ends (a comment behind its colon included), and whether the body begins on that line."""
    first = node.body[0]
    begin = min([(first.lineno, first.col_offset), *((d.lineno, 0) for d in getattr(first, "decorator_list", []))])
    depth, colon = 0, None
    lines = iter([*source.lines[node.lineno - 1 :], ""])
    for token in tokenize.generate_tokens(lines.__next__):
        line, column = token.start[0] + node.lineno - 1, token.start[1]
        if source.offset(line, 0) + column >= source.offset(*begin):
            break
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and depth == 0:
                colon = (line, source.offset(line, 0) + token.end[1])
    line, offset = colon
    if line == begin[0]:
        return offset, True
    return source.offset(line, 0) + len(source.lines[line - 1].rstrip("\r\n")), False


def _raise(hint: str, width: int) -> list[str]:
    """`raise NotImplementedError(hint)`, the hint in several literals if it is long."""
    line = f"raise NotImplementedError({_literal(hint)})"
    if len(line) <= width:
        return [line]
    same = {"drop_whitespace": False, "replace_whitespace": False, "expand_tabs": False}  # together they are the hint
    pieces = textwrap.wrap(hint, width - 10, break_long_words=False, break_on_hyphens=False, **same)
    return ["raise NotImplementedError(", *(f"    {_literal(piece)}" for piece in pieces), ")"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
