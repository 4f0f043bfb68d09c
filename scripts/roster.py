"""The class list: a CSV with `id`, `name` and, if you like, `email`, or an export of Canvas, Moodle or Gradescope."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from csvfile import Record, Table, read_table
from faults import UserError
from shapes import shown

# The headings in use, the best first: the first column in which anything stands is taken.
ID_HEADINGS = (
    "id",
    "student id",
    "student",
    "sid",
    "sis user id",
    "sis login id",
    "id number",
    "username",
    "email",
    "email address",
)
NAME_HEADINGS = ("name", "full name", "student name", "student")
FIRST_HEADINGS = ("first name", "firstname", "given name")
LAST_HEADINGS = ("last name", "lastname", "surname", "family name")
EMAIL_HEADINGS = ("email", "email address", "e-mail", "e-mail address")
TEST_STUDENTS = ("student, test", "test student")  # Canvas puts one into each class


@dataclass(frozen=True)
class Student:
    """One student: `id` as the platform knows it, and the line of the roster."""

    id: str
    name: str
    email: str = ""
    line: int = 0


@dataclass
class Roster:
    """All students of a class, in the order of the file."""

    path: Path
    students: list[Student] = field(default_factory=list)
    note: str = ""  # what somebody may not have meant

    def find(self, text: str) -> Student | None:
        """The student with this id, else this email address, else exactly this name; None if there is none.

        Capitals and spaces around do not count. UserError if several students have that name.
        """
        wanted = text.strip().casefold()
        for what in ("id", "email", "name"):
            found = [student for student in self.students if wanted and getattr(student, what).casefold() == wanted]
            if len(found) > 1:
                ids = ", ".join(f"{student.id} (line {student.line})" for student in found)
                raise UserError(f"{self.path}: {shown(text)} could be any of: {ids}; use the id")
            if found:
                return found[0]
        return None


def announced_roster(path: Path | None) -> Roster | None:
    """The roster, if there is one; what its author may not have meant is printed to standard error."""
    roster = None if path is None else read_roster(path)
    if roster is not None and roster.note:
        print(f"course: {roster.note}", file=sys.stderr)
    return roster


def read_roster(path: Path) -> Roster:
    """Read and check: an id for everyone, no id or email address twice. UserError names file and line."""
    table = read_table(path)
    columns = [column.casefold() for column in table.columns]
    canvas = columns[:2] == ["student", "id"]
    names = _name_columns(table, columns)
    identity = _column(table, columns, [heading for heading in ID_HEADINGS if not (heading == "student" and canvas)])
    if identity is None or identity in names:
        raise table.fault(table.heading.line, f"no column holds an id; one of these is expected: {_list(ID_HEADINGS)}")
    email = _column(table, columns, EMAIL_HEADINGS)
    students = []
    for row in table.filled():
        name = " ".join(filter(None, (row.value(position) for position in names)))
        if canvas and _is_no_student(row.value(identity), name):
            continue
        students.append(_student(table, row, row.value(identity), name, "" if email is None else row.value(email)))
    if not students:
        raise table.fault(table.heading.line, "no student follows the heading")
    for what in ("id", "email"):
        _check_unique(table, students, what)
    heading = table.columns[identity]
    note = f"{path}: no column holds an id: that of {shown(heading)} is taken" if identity == email else ""
    return Roster(path, students, note)


def _column(table: Table, columns: list[str], headings: tuple[str, ...] | list[str]) -> int | None:
    present = [columns.index(heading) for heading in headings if heading in columns]
    used = [position for position in present if any(row.value(position) for row in table.filled())]
    return (used or present or [None])[0]


def _name_columns(table: Table, columns: list[str]) -> list[int]:
    first, last = (_column(table, columns, headings) for headings in (FIRST_HEADINGS, LAST_HEADINGS))
    if first is not None and last is not None:
        return [first, last]
    name = _column(table, columns, NAME_HEADINGS)
    if name is None:
        expected = f"{_list(NAME_HEADINGS)}, or first name and last name"
        raise table.fault(table.heading.line, f"no column holds the names; one of these is expected: {expected}")
    return [name]


def _is_no_student(identity: str, name: str) -> bool:
    """Rows of a Canvas gradebook that are about the assignments, and the student that Canvas made up."""
    return not (identity or name) or "points possible" in name.casefold() or name.casefold() in TEST_STUDENTS


def _student(table: Table, row: Record, identity: str, name: str, email: str) -> Student:
    for what, text in (("id", identity), ("name", name)):
        if not text:
            raise table.fault(row.line, f"the {what} is empty")
        if not text.isprintable():
            raise table.fault(row.line, f"the {what} {shown(text)} holds a character that cannot be printed")
    return Student(identity, name, email, row.line)


def _check_unique(table: Table, students: list[Student], what: str) -> None:
    seen: dict[str, int] = {}
    for student in students:
        key = getattr(student, what).casefold()
        if key and key in seen:
            raise table.fault(
                student.line, f"the {what} {shown(getattr(student, what))} is on line {seen[key]} already"
            )
        seen[key] = student.line


def _list(words: tuple[str, ...]) -> str:
    return ", ".join(words)
