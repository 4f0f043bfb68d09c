"""A form a student: a sheet to print, a sheet to fill in as JSON, and, apart from both, what the instructor needs."""

import hashlib
import re
from pathlib import Path

from csvfile import csv_text
from faults import UserError
from inputs import make_folder, write_output
from quizzes.bank import STAGES, Quiz
from quizzes.layout import form_text, stage_title, wrapped
from quizzes.sheet import Sheet
from roster import Roster, Student

HOW = (
    "Mark one option of each question. Or write the letters between the quotes of the .json file of the same name, "
    'for example "B", and hand that in. A question left blank is a wrong answer.'
)


def student_seed(seed: str, student: Student) -> str:
    """The seed of one student's form: it alone, and the quiz, say in which order the options stand.

    With # because a spreadsheet makes a date of 1/2027, and a time of 1:20, when it saves a CSV.
    """
    return f"{seed}#{student.id}"


def blank_sheet(quiz: Quiz, seed: str, student: Student) -> Sheet:
    """The student's sheet, no answer given."""
    answers = {question.id: None for question in quiz.questions}
    return Sheet(quiz, student_seed(seed, student), student.id, student.name, answers=answers)


def printed(sheet: Sheet) -> str:
    """The form as plain text."""
    lines = [f"{sheet.quiz.lesson}: {sheet.quiz.title}", f"Student: {sheet.name} ({sheet.student})", "", wrapped(HOW)]
    for stage in STAGES:
        questions = sheet.quiz.of((stage,))
        lines += ["", stage_title(stage, len(questions))]
        for question in questions:
            lines += ["", form_text(sheet.quiz.numbers[question.id], question, sheet.seed)]
    return "\n".join([*lines, "", f"Seed {sheet.seed}, quiz {sheet.quiz.sha256[:12]}", ""])


def file_name(student: Student) -> str:
    """The id as a part of a file's name; one that holds other characters than these gets a digest, to stay unique."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", student.id)[:60]
    return safe if safe == student.id else f"{safe}-{hashlib.sha256(student.id.encode()).hexdigest()[:8]}"


def write_forms(quiz: Quiz, roster: Roster, seed: str, folder: Path) -> None:
    """Write `folder`/forms (a .txt and a .json a student) and `folder`/instructor (key.csv, answers.csv).

    UserError if one of the two folders has files already: forms of two seeds must not mix.
    """
    forms, instructor = folder / "forms", folder / "instructor"
    for place in (forms, instructor):
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise UserError(f"{place}: exists already; forms go into a new folder")
    for place in (forms, instructor):
        make_folder(place)
    sheets = [blank_sheet(quiz, seed, student) for student in roster.students]
    for student, sheet in zip(roster.students, sheets, strict=True):
        name = f"{quiz.lesson[:2]}-{file_name(student)}"
        write_output(forms / f"{name}.txt", printed(sheet))
        write_output(forms / f"{name}.json", sheet.to_json(blank=""))  # a student only types letters
    write_output(instructor / "key.csv", key_csv(quiz, sheets))
    write_output(instructor / "answers.csv", answers_csv(quiz, sheets))


def key_csv(quiz: Quiz, sheets: list[Sheet]) -> str:
    """The right letters on each student's form, under the form's numbers and the ids: `9 untagged`.

    Its first column is no heading of answers: nobody grades the key.
    """
    columns = ["key for", "name", "seed", *(f"{number} {name}" for name, number in quiz.numbers.items())]
    rows = []
    for sheet in sheets:
        letters = [question.letter(question.correct, sheet.seed) for question in quiz.questions]
        rows.append([sheet.student, sheet.name, sheet.seed, *letters])
    return csv_text(columns, rows)


def answers_csv(quiz: Quiz, sheets: list[Sheet]) -> str:
    """A table into which letters from paper are typed, in the form's order; `grade-quiz` reads it."""
    columns = ["student", "name", "lesson", "quiz", "seed", *(question.id for question in quiz.questions)]
    blank = [""] * len(quiz.questions)
    return csv_text(
        columns, ([each.student, each.name, quiz.lesson, quiz.sha256, each.seed, *blank] for each in sheets)
    )
