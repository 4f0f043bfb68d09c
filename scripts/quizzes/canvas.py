"""Grades into a Canvas gradebook: each grade to its student's row, and a list of all that did not go in."""

from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from csvfile import Record, Table, read_table
from quizzes.gradebook import EXCUSED, Gradebook, number
from shapes import shown


@dataclass(frozen=True)
class Line:
    """One row of a grades CSV. `points` is None where there is no grade, `of` where the file does not say.

    `keys` are what the gradebook may know the student by, the best first.
    """

    number: int
    student: str
    keys: tuple[str, ...]
    points: Decimal | None
    of: Decimal | None


@dataclass
class Filled:
    """What happened to whom. The lists hold students as the grades, `left` as the gradebook, call them."""

    filled: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # those of `filled` who had another grade
    excused: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)  # in the grades, but without points
    unmatched: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # in the gradebook, but not in the grades


def read_grades(path: Path) -> tuple[Table, list[Line]]:
    """Read the columns `student` and `points`, and `id` and `of` if they are there. UserError names file and line.

    With an `id`, `student` may be the name: it is tried where the gradebook does not know the id.
    """
    table = read_table(path)
    columns = [column.casefold() for column in table.columns]
    for name in ("student", "points"):
        if name not in columns:
            raise table.fault(table.heading.line, f"the column {name!r} is missing")
    lines = []
    for row in table.filled():
        student = row.value(columns.index("student"))
        if not student:
            raise table.fault(row.line, "the student is empty")
        identity = row.value(columns.index("id")) if "id" in columns else ""
        of = _points(table, row, columns.index("of")) if "of" in columns else None
        points = _points(table, row, columns.index("points"))
        lines.append(Line(row.line, student, tuple(filter(None, (identity, student))), points, of))
    if not lines:
        raise table.fault(table.heading.line, "no grade follows the heading")
    return table, lines


def _points(table: Table, row: Record, position: int) -> Decimal | None:
    text = row.value(position)
    value = number(text)
    if text and value is None:
        raise table.fault(row.line, f"{table.columns[position]} is {text!r}; a number that is not negative is expected")
    return value


def fill(book: Gradebook, table: Table, lines: list[Line], scale: bool) -> Filled:
    """Fill the gradebook's column. `scale` turns points of `of` into points of the assignment's.

    UserError where two grades belong to one student, and where points do not fit the assignment's.
    """
    done = Filled()
    possible = book.possible
    seen: dict[int, int] = {}
    for line in lines:
        row = next((row for key in line.keys if (row := book.find(key))), None)
        if row is None:
            done.unmatched.append(line.student)
            continue
        if row.line in seen:
            message = f"a second grade for {shown(line.student)}; the first is on line {seen[row.line]}"
            raise table.fault(line.number, f"{message} (grades of one lesson at a time)")
        seen[row.line] = line.number
        if book.old(row).upper() == EXCUSED:
            done.excused.append(line.student)
        elif line.points is None:
            done.without.append(line.student)
        else:
            points = _fitting(possible, table, line, line.points, scale)
            if number(book.old(row)) != points:
                done.changed += [line.student] if book.old(row) else []
                book.fill(row, points)
            done.filled.append(line.student)
    done.left = [row.value(0) for row in book.students if row.line not in seen]
    return done


def _fitting(possible: Decimal, table: Table, line: Line, points: Decimal, scale: bool) -> Decimal:
    """The points as the assignment counts them, to a hundredth if they are scaled."""
    if scale:
        if not line.of:
            raise table.fault(line.number, "to scale, the column 'of' must say how many points there were")
        return (points * possible / line.of).quantize(Decimal("0.01"))
    if line.of is not None and line.of != possible:
        message = f"points of {line.of}, but the assignment's Points Possible are {possible}"
        raise table.fault(line.number, f"{message}; --scale converts them")
    if line.of is None and points > possible:
        raise table.fault(line.number, f"{points} points, but the assignment's Points Possible are {possible}")
    return points
