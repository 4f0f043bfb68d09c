"""Whether a call in a text would bind to the function as it is written: by ast, without running either."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """What a call may pass. `required` are names without a default, `only_position` and `only_keyword` bind one way."""

    positional: tuple[str, ...] = ()
    only_position: int = 0  # how many of `positional` cannot be passed by name
    only_keyword: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    any_positional: bool = False
    any_keyword: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that have a name, in order."""
        return self.positional + self.only_keyword


def decorators(node: ast.AST) -> list[str]:
    """The last parts of the decorators' names: dataclass, property, staticmethod ..."""
    found = []
    for item in getattr(node, "decorator_list", []):
        item = item.func if isinstance(item, ast.Call) else item
        found.append(ast.unparse(item).split(".")[-1])
    return found


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> Signature:
    """The signature a caller sees: without `self` where it is a method."""
    args = node.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None}
    only_position = len(args.posonlyargs)
    if method and "staticmethod" not in decorators(node) and positional:
        required.discard(positional.pop(0))
        only_position = max(0, only_position - 1)
    only_keyword = tuple(arg.arg for arg in args.kwonlyargs)
    any_positional, any_keyword = args.vararg is not None, args.kwarg is not None
    return Signature(tuple(positional), only_position, only_keyword, frozenset(required), any_positional, any_keyword)


def of_fields(classes: list[ast.ClassDef]) -> Signature:
    """The signature of a dataclass or a NamedTuple; base classes first."""
    positional: list[str] = []
    only_keyword: list[str] = []
    required: set[str] = set()
    for node in classes:
        keyword_only = "kw_only=True" in "".join(ast.unparse(item) for item in node.decorator_list)
        for item in node.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            annotation, value = ast.unparse(item.annotation), ast.unparse(item.value) if item.value else ""
            if annotation.endswith("KW_ONLY"):
                keyword_only = True
                continue
            if "ClassVar" in annotation or "init=False" in value:
                continue
            (only_keyword if keyword_only else positional).append(item.target.id)
            if not value or (value.startswith(("field(", "dataclasses.field(")) and "default" not in value):
                required.add(item.target.id)
    return Signature(tuple(positional), 0, tuple(only_keyword), frozenset(required))


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def bind(signature: Signature, call: ast.Call, mention: bool = False) -> str | None:
    """Why the call does not bind, or None. `...`, `*args` and `**kwargs` leave open what else is passed.

    A mention is inline code: there `name()` or `name(key=value)` may leave out what the text is not about.
    """
    given = [arg for arg in call.args if not _is_ellipsis(arg) and not isinstance(arg, ast.Starred)]
    is_open = len(given) < len(call.args) or any(keyword.arg is None for keyword in call.keywords)
    if len(given) > len(signature.positional) and not signature.any_positional:
        return f"{len(given)} positional arguments, at most {len(signature.positional)} are taken"
    filled = set(signature.positional[: len(given)])
    by_name = set(signature.positional[signature.only_position :]) | set(signature.only_keyword)
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        if keyword.arg in filled:
            return f"{keyword.arg!r} is passed twice"
        if keyword.arg not in by_name and not signature.any_keyword:
            return f"there is no parameter {keyword.arg!r}"
        filled.add(keyword.arg)
    if mention and not call.args:
        return None
    missing = [name for name in signature.names if name in signature.required and name not in filled]
    if missing and not is_open:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    return None


def compare(signature: Signature, shown: ast.FunctionDef) -> str | None:
    """Why a signature shown in a text is not the real one, or None: its parameters must exist, in their order."""
    args = shown.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg != "self"]
    for name in names:
        if name not in signature.names and not signature.any_keyword:
            return f"there is no parameter {name!r}"
    order = [signature.positional.index(arg.arg) for arg in args.args if arg.arg in signature.positional]
    return None if order == sorted(order) else "its parameters stand in another order"
