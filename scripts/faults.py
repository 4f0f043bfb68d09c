"""A fault: where it is and what is wrong. Every check returns a list of these."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Fault:
    """One line of the report: `path:line: message`."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def read_text(path: Path) -> str | None:
    """The file as text, or None if it is missing or not UTF-8 (a picture, say)."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


class UserError(ValueError):
    """Bad input to a command: which value it was, and what was expected. `course` prints it and exits with 2."""
