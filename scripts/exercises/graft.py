"""Put a learner's function in the place of the lesson's own, and along with it what the lesson lacks."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import lru_cache

from exercises.additions import changed, free
from exercises.source import (
    Function,
    GraftError,
    Source,
    bound_names,
    decode,
    definition,
    first_line,
    has_parts,
    is_main_guard,
    parse,
    statements,
)

Body = list[ast.stmt]


def graft(pristine: str, submitted: str | bytes, qualname: str) -> str:
    """`pristine` with the function `qualname` of `submitted`, and with the new names that this function uses.

    What comes along, transitively: functions, classes, values and imports of the module, and methods and attributes of
    its classes, that the pristine text does not define. What it defines stays as it is, also where the learner has
    changed it: so only this function is judged. What `__init__` would have to set cannot come along.
    GraftError if `submitted` is not Python, or has no such function.
    """
    here = parse(pristine)
    there = parse(decode(submitted) if isinstance(submitted, bytes) else _one_kind_of_newline(submitted))
    _, old = definition(here, qualname)
    _, new = definition(there, qualname)
    span = here.span(old)
    text = there.moved(there.span(new), here.indent(span.first))
    if here.text[: span.end].endswith("\n"):
        text = _line_end(text)
    edits = [(span.start, span.end, text), *_Company(here, there, new).edits()]
    result = _inserted(pristine, edits)
    if result != pristine:
        try:
            parse(result)
        except GraftError as error:
            raise GraftError(f"{qualname} does not fit into the lesson's module: {error}", span.first) from None
    return result


def graft_all(pristine: str, submitted: str | bytes, qualnames: list[str]) -> str:
    """Graft several functions of one module."""
    for qualname in qualnames:
        pristine = graft(pristine, submitted, qualname)
    return pristine


@lru_cache(maxsize=256)
def with_new(pristine: str, submitted: str) -> str:
    """`pristine` with everything of `submitted` that is new: functions, classes, values, imports, methods, attributes.

    Nothing that the pristine text has is replaced; `untaken.changes` names what was left out for that. A statement is
    taken for what it binds, or for what is new that it changes, as `TABLE.append(1)` and `fill(TABLE)` do; another is
    not. GraftError if `submitted` is not Python.
    """
    here, there = parse(pristine), parse(_one_kind_of_newline(submitted))
    result = _inserted(pristine, _Company(here, there).edits())
    try:
        parse(result)
    except GraftError as error:
        raise GraftError(f"what is new does not fit into the lesson's module: {error}") from None
    return result


def _inserted(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, end, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _line_end(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _one_kind_of_newline(text: str) -> str:
    return re.sub("\r\n?", "\n", text.removeprefix("\ufeff"))


class _Company:
    """The statements that the pristine module lacks, and where each belongs: those that a function needs, or all."""

    def __init__(self, here: Source, there: Source, function: ast.stmt | None = None) -> None:
        self.here, self.there = here, there
        self.names: set[str] = set()  # what the function and its company read
        self.attributes: set[str] = set()
        self.own: set[str] = set()  # parameters and local variables
        self.everything = function is None
        if function is not None:
            self._note(function)

    def edits(self) -> list[tuple[int, int, str]]:
        """(start, end, text) for each insertion into the pristine text."""
        pairs = list(_bodies(self.here.tree.body, self.there.tree.body))
        known = [{name for node in ours for name in bound_names(node)} for ours, _, _ in pairs]
        new = [self._new(*pair) if self.everything else set() for pair in pairs]
        carried: list[dict[int, ast.stmt]] = [{} for _ in pairs]  # place among the learner's statements -> statement
        size = -1
        while size != sum(map(len, carried)):  # what is carried may itself need more
            size = sum(map(len, carried))
            for (_, theirs, owner), have, more, taken in zip(pairs, known, new, carried, strict=True):
                wanted = more if self.everything else (self.attributes if owner else self.names) - have
                for at, node in enumerate(theirs):
                    if at not in taken and not is_main_guard(node) and (part := self._part(node, wanted, have)):
                        taken[at] = part
                        self._note(part)
        return [edit for pair, taken in zip(pairs, carried, strict=True) for edit in self._insertions(*pair[:2], taken)]

    def _new(self, ours: Body, theirs: Body, owner: ast.ClassDef | None) -> set[str]:
        """All names that may be added to a body: there is none of them, and none would take another's place."""
        found = {name for node in theirs if not is_main_guard(node) for name in bound_names(node)}
        return free(self.here, owner, found - {name for node in ours for name in bound_names(node)})

    def _note(self, node: ast.stmt) -> None:
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
                self.names.add(item.id)
                self.attributes.add(item.id)  # in a class's body a name may be that of an attribute
            elif isinstance(item, ast.Name | ast.arg):
                self.own.add(item.id if isinstance(item, ast.Name) else item.arg)
            elif isinstance(item, ast.Attribute):
                self.attributes.add(item.attr)
            elif isinstance(item, ast.Global):
                self.names.update(item.names)

    def _part(self, node: ast.stmt, wanted: set[str], have: set[str]) -> ast.stmt | None:
        """The statement, or of an import its part, that defines or changes something wanted."""
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return None if _same(node, self.here.tree.body) else node
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._import(node, wanted)
        return node if wanted & (bound_names(node) | set(changed(node))) else None

    def _import(self, node: ast.Import | ast.ImportFrom, wanted: set[str]) -> ast.stmt | None:
        if any(item.name == "*" for item in node.names):
            bodies = (*self.here.tree.body, *self.there.tree.body)
            known = self.own.union(dir(builtins), *(bound_names(each) for each in bodies))
            return node if self.names - known and not _same(node, self.here.tree.body) else None
        names = [item for item in node.names if (item.asname or item.name.split(".")[0]) in wanted]
        if isinstance(node, ast.Import):
            names += [item for item in node.names if item not in names and self._is_new_submodule(item)]
        if not names:
            return None
        if isinstance(node, ast.Import):
            return ast.copy_location(ast.Import(names), node)
        return ast.copy_location(ast.ImportFrom(node.module, names, node.level), node)

    def _is_new_submodule(self, item: ast.alias) -> bool:
        """Whether `import a.b` adds a submodule to an `a` that the pristine text imports and the function uses."""
        ours = [each.name for node in self.here.tree.body if isinstance(node, ast.Import) for each in node.names]
        package = item.name.split(".")[0]
        imported = any(name.split(".")[0] == package for name in ours)
        return not item.asname and package in self.names and imported and item.name not in ours

    def _insertions(self, ours: Body, theirs: Body, taken: dict[int, ast.stmt]) -> Iterator[tuple[int, int, str]]:
        """Each statement goes behind the last one before it, in the learner's text, that the pristine text has too."""
        texts: dict[int, list[str]] = {}
        anchor = _head(ours)
        places = {name: at for at, node in enumerate(ours) for name in bound_names(node)}
        first = {name: at for at, node in reversed(list(enumerate(ours))) for name in bound_names(node)}
        latest = _latest(first, theirs, taken)
        for at, node in enumerate(theirs):
            if at in taken:
                shared = [first[name] for name in bound_names(node) if name in first]
                early = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                place = _head(ours) if early or _is_future(node) else anchor
                if shared and not isinstance(node, ast.Import | ast.ImportFrom):
                    place = min(place, *shared)  # what both define: the pristine one comes later, and wins
                place = min([place, *(latest[name] for name in bound_names(node) if name in latest)])
                texts.setdefault(place, []).append(self._text(taken[at], theirs[at], ours))
            else:
                anchor = max((places[name] + 1 for name in bound_names(node) if name in places), default=anchor)
        for place, pieces in texts.items():
            offset = self.here.span(ours[place - 1]).end if place else self.here.span(ours[0]).start
            yield offset, offset, "".join(pieces)

    def _text(self, part: ast.stmt, whole: ast.stmt, ours: Body) -> str:
        indent = self.here.indent(first_line(ours[0]))
        if part is not whole:
            return f"{indent}{ast.unparse(part)}\n"
        if has_parts(whole):
            return "\n" + _line_end(self.there.moved(self.there.span(whole), indent))
        start = self.there.offset(whole.lineno, whole.col_offset)
        end = self.there.offset(whole.end_lineno, whole.end_col_offset)
        return f"{indent}{self.there.text[start:end]}\n"


def _bodies(
    ours: Body, theirs: Body, owner: ast.ClassDef | None = None
) -> Iterator[tuple[Body, Body, ast.ClassDef | None]]:
    """The two module bodies, and the bodies of each class that both have, with the pristine class."""
    yield ours, theirs, owner
    classes = {node.name: node for node in statements(theirs) if isinstance(node, ast.ClassDef)}
    for node in statements(ours):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            yield from _bodies(node.body, classes[node.name].body, node)


def _latest(first: dict[str, int], theirs: Body, taken: dict[int, ast.stmt]) -> dict[str, int]:
    """{new name: the pristine statement before which it has to stand}: what a decorator, say, or a default reads.

    The learner may have moved the function; the pristine module has it where it was. `first`: the pristine places.
    """
    latest: dict[str, int] = {}
    for at, node in enumerate(theirs):
        place = min((first[name] for name in bound_names(node) if name in first), default=None)
        if at not in taken and place is not None:
            latest.update({name: min(place, latest.get(name, place)) for name in _read_at_once(node)})
    for _ in taken:  # what these read themselves stands before them, too, and so on
        for node in taken.values():
            read = _names_read(node)
            for place in [latest[name] for name in bound_names(node) if name in latest]:
                late = not isinstance(node, Function) and any(first.get(name, -1) >= place for name in read)
                if late:  # it needs what stands there: earlier it would fail
                    for name in bound_names(node):
                        latest.pop(name, None)
                else:
                    latest.update({name: min(place, latest.get(name, place)) for name in read})
    return latest


def _read_at_once(node: ast.stmt) -> set[str]:
    """The names that a definition reads when it is made, and not when it is called."""
    if isinstance(node, ast.ClassDef):
        now = [*node.bases, *(each.value for each in node.keywords), *node.decorator_list]
        return set().union(*map(_names_read, now), *map(_read_at_once, node.body))
    if not isinstance(node, Function):
        return set()
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    now = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, node.returns]
    now += [each.annotation for each in filter(None, arguments)]
    return set().union(*map(_names_read, filter(None, now)))


def _names_read(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _same(node: ast.stmt, body: Body) -> bool:
    return any(ast.dump(node) == ast.dump(other) for other in body)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _head(body: Body) -> int:
    """How many statements must stay in front: a docstring and `from __future__` imports."""
    at = 1 if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else 0
    while at < len(body) and _is_future(body[at]):
        at += 1
    return at
