"""overrides.csv: what an instructor decided by hand. Columns student, exercise, points, reason."""

from dataclasses import dataclass
from pathlib import Path

from csvfile import read_table
from exercises.model import Exercise
from faults import UserError
from grading.submissions import Class
from quizzes.gradebook import number
from shapes import shown

COLUMNS = ("student", "exercise", "points", "reason")


@dataclass(frozen=True)
class Override:
    """One line: these points, whatever the tests said."""

    student: str
    exercise: str
    points: float
    reason: str


def read_overrides(path: Path, of: Class, exercises: list[Exercise]) -> dict[tuple[str, str], Override]:
    """{(student's id, exercise's id): override}. UserError, with file and line: unknown, there twice, no number."""
    table = read_table(path)
    columns = [column.casefold() for column in table.columns]
    if sorted(columns) != sorted(COLUMNS):
        raise table.fault(table.heading.line, f"the columns {', '.join(COLUMNS)} are expected")
    known = {exercise.id: exercise for exercise in exercises}
    found: dict[tuple[str, str], Override] = {}
    for row in table.filled():
        student, exercise, points, reason = (row.value(columns.index(name)) for name in COLUMNS)
        if exercise not in known:
            raise table.fault(row.line, f"no exercise {shown(exercise)}; the exercises are: {', '.join(known)}")
        try:
            works = of.only(student)
        except UserError:
            works = []
        if len(works) != 1:
            raise table.fault(row.line, f"{'no' if not works else 'more than one'} student {shown(student)}")
        if not reason:
            raise table.fault(row.line, "the reason is empty")
        key = (works[0].student.id, exercise)
        if key in found:
            raise table.fault(row.line, f"a second override for {works[0].student.id} and {exercise}")
        value = _points(points, known[exercise])
        if value is None:
            raise table.fault(row.line, f"points are {shown(points)}; a number from 0 to {known[exercise].points}")
        found[key] = Override(works[0].student.id, exercise, value, " ".join(reason.split()))
    return found


def _points(text: str, exercise: Exercise) -> float | None:
    value = number(text)
    if value is None or value > exercise.points:
        return None
    return int(value) if value == int(value) else float(value)
