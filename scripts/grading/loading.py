"""The tests could not be loaded: was that the student's text, or the lesson's own?"""

import ast
from collections.abc import Iterator

from exercises.source import Source, first_line, parse


def raised_by(failure: dict, changed: dict[str, tuple[str, str | None]]) -> bool:
    """Whether a line of the student's is among the frames of this record of a failure (see runner.describe).

    `changed` is {path: (the text that ran, the lesson's own text or None)}. A line is the student's if its statement
    is none of the lesson's own module; in a class each of its statements counts by itself.
    """
    for path, line, _ in failure.get("frames", []):
        if path in changed:
            text, own = changed[path]
            known = {known for _, _, known in _statements(parse(own))} if own is not None else set()
            at = [known for first, last, known in _statements(parse(text)) if first <= line <= last]
            if not at or not set(at) <= known:
                return True
    return False


def _statements(source: Source) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, what it says) of each statement of a module, and in its classes."""
    todo = list(source.tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef):
            todo += node.body
            head = ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], node.decorator_list)
            yield first_line(node), node.body[0].lineno - 1, ast.dump(head)
        else:
            yield first_line(node), node.end_lineno, ast.dump(node)
