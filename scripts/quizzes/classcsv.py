"""A class's answers as one CSV: a row a student, a column a question, as Google Forms and Microsoft Forms export them.

A question's column is headed by its id or its text; a cell holds an option's text or a letter. Letters are those of the
row's `seed`; of the quiz's own order, which is said, where there is no such column. A row without any answer is that of
a student who was absent.
"""

import re
import sys
from pathlib import Path

from csvfile import Record, Table, read_table
from lessons import UnknownLesson
from quizzes.bank import LETTERS, STAGES, Bank, Quiz, plain
from quizzes.sheet import Sheet, other_version
from shapes import shown

# The headings in use, the best first: the first one present names the student.
STUDENT_HEADINGS = ("student", "student id", "id", "id number", "username", "email address", "email", "name")
OWN_HEADINGS = ("name", "lesson", "quiz", "seed")
# What Google Forms and Microsoft Forms add; nothing in these columns is an answer.
FORM_HEADINGS = (
    *("timestamp", "score", "total score", "total points", "quiz feedback", "grade posted time"),
    *("start time", "completion time", "last modified time", "language"),
)
_FORM_COLUMN = re.compile(r"^(?:(?:points|feedback) - (?P<before>.+)|(?P<after>.+) \[(?:score|feedback)\])$")


def read_class(path: Path, bank: Bank, lesson: str | None, stages: tuple[str, ...] = STAGES) -> list[Sheet]:
    """A sheet a row. Each question of `stages` needs its column.

    UserError for an unknown lesson, column, option or version, and for missing columns, with file and line.
    """
    table = read_table(path)
    columns = [plain(column) for column in table.columns]
    quiz = _quiz(table, columns, bank, lesson)
    questions = _question_columns(table, columns, quiz, stages)
    student = _student_column(table, columns)
    seeded = _has_seeds(table, columns)
    sheets, letters = [], False
    for row in table.filled():
        cells = {name: row.value(columns.index(name)) for name in OWN_HEADINGS if name in columns}
        _check_row(table, row, cells, quiz, bank)
        sheet = Sheet(quiz, cells.get("seed") or None, row.value(student), cells.get("name"), path=path, line=row.line)
        for what, text in (("student", sheet.student), ("name", sheet.name or "-")):
            if not text or not text.isprintable():
                raise table.fault(row.line, f"the {what} is {shown(text)}; a text that can be printed is expected")
        for position, name in questions.items():
            try:
                sheet.answers[name] = quiz.by_id[name].position(row.value(position), sheet.seed)
                letters |= row.value(position).upper() in (*LETTERS,)
            except ValueError as error:
                raise table.fault(row.line, f"column {position + 1}: {error}") from error
        sheet.absent = all(answer is None for answer in sheet.answers.values())
        if seeded and not sheet.seed and not sheet.absent:
            raise table.fault(row.line, "the seed is empty, and not in other rows: in which order were options shown?")
        sheets.append(sheet)
    if not sheets:
        raise table.fault(table.heading.line, "no row follows the heading")
    if letters and not seeded:
        print(f"course: {path}: no row has a seed; its letters are those of the quiz's own order", file=sys.stderr)
    return sheets


def _has_seeds(table: Table, columns: list[str]) -> bool:
    """Whether rows say under which seed options were shown. A table that was written for forms must."""
    if "quiz" in columns and "seed" not in columns:
        what = "a column quiz, and no column seed: in which order were options shown?"
        raise table.fault(table.heading.line, what)
    return "seed" in columns and any(row.value(columns.index("seed")) for row in table.filled())


def _quiz(table: Table, columns: list[str], bank: Bank, lesson: str | None) -> Quiz:
    """The quiz that the file is about: as asked for, as its column `lesson` says, or the one whose questions it has."""
    if lesson is not None:
        return bank.quiz(lesson)
    if "lesson" in columns:
        row = next(table.filled(), None)
        if row is None:
            raise table.fault(table.heading.line, "no row follows the heading")
        return _find(table, row, row.value(columns.index("lesson")), bank)
    fits = {quiz: sum(column in _headings(quiz) for column in columns) for quiz in bank.sound()}
    matching = [quiz for quiz, count in fits.items() if count and count == max(fits.values())]
    if len(matching) != 1:
        found = " and ".join(quiz.lesson for quiz in matching) or "none"
        message = f"the columns must hold the questions of one lesson, by id or text; found: {found}"
        raise table.fault(table.heading.line, f"{message} (--lesson NN says which)")
    return matching[0]


def _find(table: Table, row: Record, name: str, bank: Bank) -> Quiz:
    try:
        return bank.quiz(name)
    except UnknownLesson as error:
        raise table.fault(row.line, str(error)) from error


def _headings(quiz: Quiz) -> dict[str, str]:
    """What may stand over a question's column -> its id."""
    return {plain(text): question.id for question in quiz.questions for text in (question.text, question.id)}


def _question_columns(table: Table, columns: list[str], quiz: Quiz, stages: tuple[str, ...]) -> dict[int, str]:
    """Position of a column -> id of its question. Each other column must be a known one, and none be missing."""
    headings = _headings(quiz)
    known = {*STUDENT_HEADINGS, *OWN_HEADINGS, *FORM_HEADINGS}
    questions: dict[int, str] = {}
    for position, column in enumerate(columns):
        if column in headings:
            name = headings[column]
            if name in questions.values():
                raise table.fault(table.heading.line, f"two columns for the question {name!r}")
            questions[position] = name
            continue
        match = _FORM_COLUMN.match(column)
        if column and column not in known and not (match and (match["before"] or match["after"]) in headings):
            message = f"unknown column {shown(table.columns[position])}: no question of {quiz.lesson}"
            raise table.fault(table.heading.line, message)
    if not questions:
        raise table.fault(table.heading.line, f"no column holds answers to a question of {quiz.lesson}")
    missing = [question.id for question in quiz.of(stages) if question.id not in questions.values()]
    if missing:
        what = "no column for the questions" if len(missing) > 1 else "no column for the question"
        hint = "" if len(stages) == 1 else "; --stage grades only those of one stage"
        raise table.fault(table.heading.line, f"{what} {', '.join(map(repr, missing))} of {quiz.lesson}{hint}")
    return questions


def _student_column(table: Table, columns: list[str]) -> int:
    for name in STUDENT_HEADINGS:
        numbered = name == "id" and "start time" in columns  # Microsoft Forms numbers the rows so
        if name in columns and not numbered:
            return columns.index(name)
    expected = ", ".join(STUDENT_HEADINGS)
    raise table.fault(table.heading.line, f"no column says who answered; one of these is expected: {expected}")


def _check_row(table: Table, row: Record, cells: dict[str, str], quiz: Quiz, bank: Bank) -> None:
    if "lesson" in cells and _find(table, row, cells["lesson"], bank) is not quiz:
        raise table.fault(row.line, f"the lesson is {cells['lesson']!r}, in other rows {quiz.lesson!r}")
    if "quiz" in cells and cells["quiz"] != quiz.sha256:
        raise table.fault(row.line, other_version(cells["quiz"], quiz))
