"""The commands for starters: start, export, try."""

from collections.abc import Callable


def register(add: Callable) -> None:
    """Add these commands: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
