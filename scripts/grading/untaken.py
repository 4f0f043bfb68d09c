"""What a student changed elsewhere in a module, though an exercise uses it: it is not taken, and that is said."""

import ast

from exercises.source import Source, bound_names, definition, parse, statements
from exercises.surgery import is_stub


def untaken(pristine: str, text: str, names: list[str]) -> list[str]:
    """The functions and values, by qualified name, that these functions of `text` use and both modules define unlike.

    The lesson's own were at work in their place. Stubs are left out, and so is what only others of them use.
    """
    source = parse(text)
    used: set[str] = set()
    for name in names:
        for node in ast.walk(definition(source, name)[1]):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
    ours, theirs = _defined(parse(pristine)), _defined(source)
    changed = [name for name in theirs if name in ours and theirs[name] != ours[name] and name not in names]
    changed = [name for name in changed if name.rpartition(".")[2] in used]
    return [name for name in changed if not (theirs[name].startswith(("Function", "Async")) and is_stub(text, name))]


def _defined(source: Source) -> dict[str, str]:
    """{qualified name: what defines it} of a module's functions and values, and of its classes'."""
    found: dict[str, str] = {}
    todo = [("", source.tree.body)]
    while todo:
        prefix, body = todo.pop()
        for node in statements(body):
            if isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node.body))
            elif not isinstance(node, ast.Import | ast.ImportFrom):
                found |= {f"{prefix}{name}": ast.dump(node) for name in bound_names(node)}
    return found
