"""The commands for quizzes: quiz, quiz-forms, grade-quiz, export-quiz, canvas."""

import argparse
from collections.abc import Callable
from pathlib import Path

from quizzes.actions import export_quiz, fill_canvas, grade_quizzes, take_quiz, write_quiz_forms
from quizzes.bank import STAGES
from quizzes.export import FORMATS


def register(add: Callable) -> None:
    """Add these commands: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
    quiz = add("quiz", take_quiz, "ask a lesson's quiz here, with feedback on each answer and the score at the end")
    _lesson(quiz)
    quiz.add_argument("--stage", choices=STAGES, help="only the questions before, during or after the lesson")
    quiz.add_argument("--seed", metavar="S", help="any text or number: the order of the options (default: 0)")
    quiz.add_argument("--student", metavar="ID", help="who answers; written into the sheet")
    quiz.add_argument("--answers", type=Path, metavar="FILE", help="write the answers there, after each of them")
    quiz.add_argument("--from", type=Path, dest="begun", metavar="FILE", help="go on with a sheet; ask what is blank")
    _force(quiz)
    _json(quiz, "the score and each answer; questions then go to standard error")

    forms = add("quiz-forms", write_quiz_forms, "write a form a student, and the key apart from them")
    _lesson(forms)
    forms.add_argument("--roster", type=Path, required=True, metavar="CSV", help="the class: columns id, name, email")
    forms.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets the folders forms and instructor")
    forms.add_argument("--seed", default="0", metavar="S", help="any text or number; each student's is S#id")
    _json(forms, "what was written")

    grade = add("grade-quiz", grade_quizzes, "grade answer sheets; say what they tell about the questions")
    grade.add_argument(
        "answers", type=Path, nargs="+", metavar="ANSWERS", help=".json sheets, folders of them, a class's .csv"
    )
    grade.add_argument("--lesson", metavar="NN", help="the lesson (default: what the sheets say)")
    grade.add_argument("--stage", choices=STAGES, help="grade only the questions of this stage")
    grade.add_argument(
        "--roster", type=Path, metavar="CSV", help="the class; who handed in nothing, or an empty row, is listed"
    )
    grade.add_argument("--newest", action="store_true", help="of two sheets of a student take the newer")
    grade.add_argument("--out", type=Path, metavar="DIR", help="write NN-grades.csv, NN-questions.csv, NN-quiz.json")
    _force(grade)
    _json(grade, "grades and statistics")

    export = add("export-quiz", export_quiz, "write a quiz as a learning platform imports it")
    _lesson(export)
    export.add_argument("out", type=Path, metavar="OUT", help="the file: .zip for qti, .xml for moodle")
    export.add_argument(
        "--format", choices=FORMATS, required=True, help="qti: QTI 1.2 for Canvas; moodle: Moodle XML; json: as data"
    )
    _force(export)
    _json(export, "what was written")

    canvas = add("canvas", fill_canvas, "fill a column of a Canvas gradebook with grades of a quiz or of code")
    canvas.add_argument("gradebook", type=Path, metavar="GRADEBOOK.csv", help="the gradebook as Canvas exported it")
    canvas.add_argument(
        "--grades",
        type=Path,
        required=True,
        metavar="CSV",
        help="columns student (an id, or the name), points; also id, of",
    )
    canvas.add_argument(
        "--column", required=True, metavar="TITLE", help="the heading to fill, such as 'Quiz 76 (1234)'"
    )
    canvas.add_argument("--out", type=Path, required=True, metavar="CSV", help="the filled gradebook")
    canvas.add_argument("--scale", action="store_true", help="turn points of `of` into Points Possible")
    canvas.add_argument("--allow-unmatched", action="store_true", help="leave out grades of whom the gradebook lacks")
    _force(canvas)
    _json(canvas, "what was filled, and what was not")


def _lesson(command: argparse.ArgumentParser) -> None:
    command.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")


def _force(command: argparse.ArgumentParser) -> None:
    command.add_argument("--force", action="store_true", help="overwrite files that are there")


def _json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help=f"print as JSON: {what}")
