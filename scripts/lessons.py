"""The lessons as data: found on disk, nothing typed by hand."""

import fnmatch
import re
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from faults import UserError, read_text
from mdtext import Document

_FOLDER = re.compile(r"^\d\d-[a-z0-9]+(-[a-z0-9]+)*$")
_FIELD = re.compile(r"^\*\*(\w+):\*\*\s*(.*?)\s*$")
_MINUTES = re.compile(r"^~?(\d+) minutes$")
FIELDS = ("Type", "Languages", "Prerequisites", "Time")


class UnknownLesson(UserError):
    """No lesson, or more than one, goes by that number or id."""


@dataclass
class Header:
    """What the top of `docs/en.md` says; a part that is missing is None. `lines` holds where each was found."""

    title: str | None = None
    hook: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def minutes(self) -> int | None:
        """The number in `**Time:** ~90 minutes`."""
        match = _MINUTES.match(self.fields.get("Time", ""))
        return int(match[1]) if match else None

    @property
    def prerequisites(self) -> tuple[list[str], list[str]]:
        """Lesson numbers or ids, and plain skills, of `**Prerequisites:** 76, 77; Python basics`."""
        text = re.sub(r"(?i)\blessons?\s+(?=\d)", "", self.fields.get("Prerequisites", ""))
        items = [item.strip() for item in re.split("[;,]", text) if item.strip()]
        numbers = [item for item in items if re.match(r"^\d+(-[a-z0-9-]+)?$", item)]
        return numbers, [item for item in items if item not in numbers]


@dataclass(frozen=True)
class Lesson:
    """One lesson folder. `path` is relative to the root of the repository."""

    root: Path
    path: Path

    @property
    def id(self) -> str:
        """The folder's name, for example 76-collective-ops-from-scratch."""
        return self.path.name

    @property
    def number(self) -> str:
        """The two digits the folder begins with."""
        return self.id[:2]

    @property
    def folder(self) -> Path:
        """The folder itself, absolute."""
        return self.root / self.path

    def rel(self, *parts: str) -> str:
        """A path in this lesson as a fault shows it."""
        return self.path.joinpath(*parts).as_posix()

    @cached_property
    def docs_text(self) -> str | None:
        """The text of docs/en.md, None if there is none."""
        return read_text(self.folder / "docs" / "en.md")

    @cached_property
    def document(self) -> Document:
        """docs/en.md taken apart; empty if there is none."""
        return Document(self.docs_text or "")

    @cached_property
    def header(self) -> Header:
        """The lines above the first section."""
        return parse_header(self.docs_text or "")

    def modules(self) -> list[Path]:
        """The Python files in code/, main.py among them."""
        return sorted((self.folder / "code").glob("*.py"))

    def test_files(self) -> list[Path]:
        """The files that `unittest discover` loads."""
        return sorted((self.folder / "tests").glob("test_*.py"))


def parse_header(text: str) -> Header:
    """Read title, hook and fields; stop at the first section."""
    header = Header()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            break
        if line.startswith("# ") and header.title is None:
            header.title, header.lines["title"] = line[2:].strip(), number
        elif line.startswith("> ") and header.hook is None:
            header.hook, header.lines["hook"] = line[2:].strip(), number
        elif (match := _FIELD.match(line)) and match[1] not in header.fields:
            header.fields[match[1]], header.lines[match[1]] = match[2], number
    return header


class Course:
    """The repository seen as a course: its lessons in order, its files."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        found = (path for path in self.root.glob("phases/*/*") if path.is_dir() and _FOLDER.match(path.name))
        self.lessons = [Lesson(self.root, path.relative_to(self.root)) for path in sorted(found)]

    def find(self, name: str) -> Lesson:
        """The lesson with this number (76) or id; UnknownLesson if there is not exactly one."""
        number = name.zfill(2) if name.isdigit() else None
        matches = [lesson for lesson in self.lessons if name == lesson.id or number == lesson.number]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UnknownLesson(f"lesson {name!r} could be any of: {', '.join(le.id for le in matches)}")
        known = ", ".join(lesson.number for lesson in self.lessons) or "none"
        raise UnknownLesson(f"no lesson {name!r}; the lessons are: {known}")

    @cached_property
    def files(self) -> list[Path]:
        """Files that are committed or would be: relative, sorted. Ignored files are left out."""
        if (self.root / ".git").exists():
            command = ["git", "-C", str(self.root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            try:
                listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
                return sorted({Path(name) for name in listed if name and (self.root / name).is_file()})
            except (OSError, subprocess.CalledProcessError):
                pass  # no git on this machine: walk
        return sorted(self._walk())

    def _walk(self) -> list[Path]:
        ignored = [line.strip("/ ") for line in (read_text(self.root / ".gitignore") or "").splitlines()]
        ignored = [".git", *(pattern for pattern in ignored if pattern and not pattern.startswith("#"))]
        found: list[Path] = []
        folders = [self.root]
        while folders:
            for path in folders.pop().iterdir():
                if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored):
                    continue
                if path.is_dir():
                    folders.append(path)
                elif path.is_file():
                    found.append(path.relative_to(self.root))
        return found
