"""A Canvas gradebook CSV as the instructor exported it: which rows are students, which column is the assignment's."""

import difflib
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from csvfile import Record, Table, quoted, read_table
from faults import UserError
from roster import TEST_STUDENTS
from shapes import shown

# Canvas finds students by these, in this order. Others may stand among them; `Section` must be the last.
MATCHING = ("ID", "SIS User ID", "SIS Login ID", "Student")
STUDENT_COLUMNS = (*MATCHING, "Integration ID", "Root Account", "Section")
NEEDED = ("Student", "ID", "Section")
POINTS_POSSIBLE = "Points Possible"
EXCUSED = "EX"
_NUMBER = re.compile(r"[0-9]{1,9}([.,][0-9]{1,9})?")


@dataclass
class Gradebook:
    """The export, its students' rows, and the position of the column to fill."""

    table: Table
    students: list[Record]
    column: int
    points_row: Record

    @property
    def comma(self) -> bool:
        """Whether this gradebook writes 12,5 for 12.5."""
        return "," in self.points_row.value(self.column)

    @property
    def possible(self) -> Decimal:
        """The assignment's points."""
        text = self.points_row.value(self.column)
        value = number(text)
        if not value:
            message = f"{POINTS_POSSIBLE} of {shown(self.table.columns[self.column])} is {text!r}"
            raise self.table.fault(self.points_row.line, f"{message}; a number above 0 is expected")
        return value

    def find(self, student: str) -> Record | None:
        """The row of a student, by ID, SIS User ID, SIS Login ID, then exact name; None if there is none.

        UserError if several rows hold that text in the same column.
        """
        columns = self.table.columns
        for name in MATCHING:
            position = columns.index(name) if name in columns else None
            found = [row for row in self.students if position is not None and row.value(position) == student]
            if len(found) > 1:
                lines = ", ".join(str(row.line) for row in found)
                raise UserError(f"{self.table.path}: {name} {shown(student)} is ambiguous: lines {lines}")
            if found:
                return found[0]
        return None

    def old(self, row: Record) -> str:
        """What stands in the column."""
        return row.value(self.column)

    def fill(self, row: Record, points: Decimal) -> None:
        """Put a grade into the column; nothing else of the file changes."""
        text = f"{points.normalize():f}"
        row.raw[self.column] = quoted(text.replace(".", ",") if self.comma else text, self.table.delimiter)


def number(text: str) -> Decimal | None:
    """A plain number, 12 or 12.5 or 12,5; None for all else, 1,000.00 and NaN and negative ones too."""
    return Decimal(text.replace(",", ".")) if _NUMBER.fullmatch(text) else None


def read_gradebook(path: Path, column: str) -> Gradebook:
    """Read an export and check what Canvas would check on its return. UserError names file and line."""
    table = read_table(path)
    columns = table.columns
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise table.fault(table.heading.line, f"no Canvas gradebook: the column {missing[0]!r} is missing")
    section = columns.index("Section")
    for name in columns[:section]:
        if name not in STUDENT_COLUMNS:
            message = f"{shown(name)} stands before Section, which must be the last of the columns about students"
            raise table.fault(table.heading.line, message)
    late = [name for name in columns[section + 1 :] if name in STUDENT_COLUMNS]
    if late or columns[0] != "Student":
        message = f"{shown(late[0])} stands behind Section" if late else f"the first column is {shown(columns[0])}"
        raise table.fault(table.heading.line, f"{message}; Student comes first, Section last of the student columns")
    position = _assignment(table, column, section)
    students, points = _rows(table)
    return Gradebook(table, students, position, points)


def _assignment(table: Table, column: str, section: int) -> int:
    titles = table.columns[section + 1 :]
    if column in titles and column:
        return section + 1 + titles.index(column)
    close = difflib.get_close_matches(column, titles, n=3, cutoff=0.3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise table.fault(table.heading.line, f"no assignment column {shown(column)}{hint}")


def _rows(table: Table) -> tuple[list[Record], Record]:
    """(students' rows, the row of Points Possible). Rows about assignments and the test student are no students."""
    student, identity = table.columns.index("Student"), table.columns.index("ID")
    students: list[Record] = []
    points: list[Record] = []
    for row in table.filled():
        name = row.value(student)
        if POINTS_POSSIBLE.casefold() in name.casefold():
            points.append(row)
        elif name.casefold() not in TEST_STUDENTS and (name or row.value(identity)):
            students.append(row)
    if len(points) != 1:
        line = points[1].line if points else table.heading.line
        raise table.fault(line, f"{len(points)} rows {POINTS_POSSIBLE!r}; exactly one is expected")
    if not students:
        raise table.fault(table.heading.line, "no student in this gradebook")
    return students, points[0]
