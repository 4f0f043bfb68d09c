"""What `grade-quiz` tells: tables, CSV, JSON."""

from typing import Any

from csvfile import csv_text
from quizzes.grade import Grade, Graded
from quizzes.stats import Item
from testrun import table

GRADE_COLUMNS = ("student", "name", "lesson", "points", "of", "percent", "answered", "status", "file")
ITEM_COLUMNS = (
    *("lesson", "number", "question", "stage", "students", "right", "share", "blank", "discrimination"),
    *("wrong_most", "wrong_most_count", "wrong_most_text"),
)


def percent(points: int, of: int) -> float:
    """100 for all points, to a tenth."""
    return round(100 * points / of, 1)


def as_text(graded: Graded) -> str:
    """A table of students, one of questions, and who handed in nothing."""
    of = len(graded.questions)
    students = [
        [
            grade.student,
            grade.name,
            f"{grade.points}/{of}",
            f"{percent(grade.points, of):.1f}",
            str(of - grade.answered),
        ]
        for grade in graded.grades
    ]
    lines = [f"{graded.quiz.lesson}: {graded.quiz.title}", ""]
    lines += [table(["student", "name", "points", "percent", "blank"], students), ""]
    lines += [table(["question", "right", "blank", "discrimination", "wrong option chosen most"], _item_rows(graded))]
    if graded.missing:
        lines += ["", f"No sheet of {len(graded.missing)}: {', '.join(student.id for student in graded.missing)}"]
    return "\n".join(lines)


def _item_rows(graded: Graded) -> list[list[str]]:
    rows = []
    for item in graded.items:
        most = item.wrong_most
        wrong = "" if most is None else f"{item.chosen[most]}x {_short(item.question.options[most])}"
        tells = "-" if item.discrimination is None else f"{item.discrimination:+.2f}"
        number = graded.quiz.numbers[item.question.id]
        rows.append([f"{number:2} {item.question.id}", f"{100 * item.share:.0f} %", str(item.blank), tells, wrong])
    return rows


def _short(text: str, limit: int = 50) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def grades_csv(graded: Graded) -> str:
    """A row a student, and one without points for each who handed in nothing."""
    of = len(graded.questions)
    rows: list[list[object]] = []
    for grade in graded.grades:
        numbers = [grade.points, of, percent(grade.points, of), grade.answered]
        rows.append([grade.student, grade.name, graded.quiz.lesson, *numbers, "graded", grade.sheet.place])
    for student in graded.missing:
        rows.append([student.id, student.name, graded.quiz.lesson, None, of, None, None, "missing", None])
    return csv_text(GRADE_COLUMNS, rows)


def items_csv(graded: Graded) -> str:
    """A row a question."""
    rows = []
    for item in graded.items:
        value = _item(graded, item)
        most = value["wrong_most"] or {"position": None, "count": None, "text": None}
        head = [value[name] for name in ITEM_COLUMNS[1:9]]
        rows.append([graded.quiz.lesson, *head, most["position"], most["count"], most["text"]])
    return csv_text(ITEM_COLUMNS, rows)


def as_json(graded: Graded) -> dict[str, Any]:
    """All of it, with each student's answers. Positions of options are those of quiz.json."""
    return {
        "lesson": graded.quiz.lesson,
        "title": graded.quiz.title,
        "quiz": graded.quiz.sha256,
        "of": len(graded.questions),
        "grades": [_grade(grade, len(graded.questions)) for grade in graded.grades],
        "questions": [_item(graded, item) for item in graded.items],
        "missing": [{"student": student.id, "name": student.name} for student in graded.missing],
    }


def _grade(grade: Grade, of: int) -> dict[str, Any]:
    return {
        "student": grade.student,
        "name": grade.name,
        "file": grade.sheet.place,
        "points": grade.points,
        "percent": percent(grade.points, of),
        "answered": grade.answered,
        "answers": {
            name: {"chosen": grade.sheet.answers.get(name), "right": right} for name, right in grade.right.items()
        },
    }


def _item(graded: Graded, item: Item) -> dict[str, Any]:
    most = item.wrong_most
    option = None if most is None else item.question.options[most]
    return {
        "number": graded.quiz.numbers[item.question.id],
        "question": item.question.id,
        "stage": item.question.stage,
        "students": item.students,
        "right": item.right,
        "share": round(item.share, 4),
        "blank": item.blank,
        "discrimination": None if item.discrimination is None else round(item.discrimination, 4),
        "correct": item.question.correct,
        "chosen": list(item.chosen),
        "wrong_most": None if most is None else {"position": most, "count": item.chosen[most], "text": option},
    }
