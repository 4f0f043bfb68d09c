"""What each quiz command does with its arguments: read, work, write, print. Returns the exit code."""

import sys
from argparse import Namespace
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from csvfile import formula_cells
from faults import UserError
from inputs import check_writable, json_text, make_folder, write_output
from lessons import Course
from quizzes import report
from quizzes.ask import take
from quizzes.bank import Bank, stages_of
from quizzes.canvas import Filled, fill, read_grades
from quizzes.export import FORMATS
from quizzes.forms import write_forms
from quizzes.grade import find_files, grade, read_answers
from quizzes.gradebook import read_gradebook
from quizzes.sheet import Sheet, read_sheet
from quizzes.stats import is_right
from roster import announced_roster
from words import counted


def take_quiz(course: Course, args: Namespace) -> int:
    """Ask; 1 if it was stopped before the end."""
    sheet = _sheet(args, Bank(course))
    if args.answers is not None:
        check_writable(args.answers, args.force)
    force = args.force

    def keep(sheet: Sheet) -> None:
        nonlocal force
        if args.answers is not None:
            sheet.time = datetime.now(timezone.utc).isoformat(timespec="seconds")
            write_output(args.answers, sheet.to_json(), force)
            force = True  # from now on it is our own file

    out = sys.stderr if args.json else sys.stdout
    finished = take(sheet, stages_of(args.stage), sys.stdin, out, keep)
    print(_score(sheet, args.stage), file=out)
    if args.json:
        print(json_text(_result(sheet, args.stage, finished)), end="")
    return 0 if finished else 1


def _sheet(args: Namespace, bank: Bank) -> Sheet:
    quiz = bank.quiz(args.lesson)
    _check_text("--student", args.student)
    _check_text("--seed", args.seed)
    if args.begun is None:
        return Sheet(quiz, "0" if args.seed is None else args.seed, args.student)
    sheet = read_sheet(args.begun, bank)
    for name, given, found in (
        ("lesson", quiz.lesson, sheet.quiz.lesson),
        ("seed", args.seed, sheet.seed),
        ("student", args.student, sheet.student or args.student),
    ):
        if given not in (None, found):
            raise UserError(f"{args.begun}: its {name} is {found!r}, not {given!r}")
    sheet.student = sheet.student or args.student
    return sheet


def _check_text(option: str, text: str | None) -> None:
    if text is not None and not (text.strip() and text.isprintable()):
        raise UserError(f"{option} {text!r}; a text that can be printed is expected")


def _score(sheet: Sheet, stage: str | None) -> str:
    questions = sheet.quiz.of(stages_of(stage))
    parts = []
    for each in stages_of(stage):
        asked = sheet.quiz.of((each,))
        parts.append(f"{each} {sum(is_right(question, sheet.answers) for question in asked)}/{len(asked)}")
    right = sum(is_right(question, sheet.answers) for question in questions)
    blank = sum(sheet.answers.get(question.id) is None for question in questions)
    return f"\nScore: {right} of {len(questions)} ({', '.join(parts)}), {blank} left blank"


def _result(sheet: Sheet, stage: str | None, finished: bool) -> dict[str, Any]:
    questions = sheet.quiz.of(stages_of(stage))
    answers = []
    for question in questions:
        place = sheet.answers.get(question.id)
        letter = None if place is None else question.letter(place, sheet.seed)
        right = is_right(question, sheet.answers)
        answers.append({"id": question.id, "stage": question.stage, "letter": letter, "chosen": place, "right": right})
    head = {"lesson": sheet.quiz.lesson, "quiz": sheet.quiz.sha256, "seed": sheet.seed, "student": sheet.student}
    points = sum(answer["right"] for answer in answers)
    return {**head, "finished": finished, "points": points, "of": len(questions), "answers": answers}


def write_quiz_forms(course: Course, args: Namespace) -> int:
    """Write the forms."""
    quiz = Bank(course).quiz(args.lesson)
    _check_text("--seed", args.seed)
    roster = announced_roster(args.roster)
    write_forms(quiz, roster, args.seed, args.out)
    value = {"lesson": quiz.lesson, "quiz": quiz.sha256, "seed": args.seed, "students": len(roster.students)}
    lines = [
        f"{args.out / 'forms'}: {counted(len(roster.students), 'form')}, each a .txt to print and a .json to fill in",
        f"{args.out / 'instructor'}: key.csv, and answers.csv for letters typed from paper",
    ]
    _warn_of_formulas([text for student in roster.students for text in (student.id, student.name)])
    _show(args, value | {"out": str(args.out)}, "\n".join(lines))
    return 0


def grade_quizzes(course: Course, args: Namespace) -> int:
    """Grade; 0 whatever the grades are."""
    bank = Bank(course)
    roster = announced_roster(args.roster)
    files, aside = find_files(args.answers)
    stages = stages_of(args.stage)
    found = grade(read_answers(files, bank, args.lesson, stages), stages, roster, args.newest)
    if aside:
        names = ", ".join(map(str, aside[:5])) + (", ..." if len(aside) > 5 else "")
        tables = any(path.suffix.lower() == ".csv" for path in aside)
        hint = " (a class's .csv is read where it is named itself)" if tables else ""
        print(f"{len(aside)} left aside, as no .json: {names}{hint}", file=sys.stderr)
    if args.out is not None:
        make_folder(args.out)
        written: list[tuple[Path, str]] = []
        for each in found:
            for name, text in (
                ("grades.csv", report.grades_csv(each)),
                ("questions.csv", report.items_csv(each)),
                ("quiz.json", json_text(report.as_json(each))),
            ):
                written.append((args.out / f"{each.quiz.lesson[:2]}-{name}", text))
        for path, _ in written:
            check_writable(path, args.force)
        for path, text in written:
            write_output(path, text, args.force)
        _warn_of_formulas([text for each in found for one in each.grades for text in (one.student, one.name)])
    _show(args, [report.as_json(each) for each in found], "\n\n".join(map(report.as_text, found)))
    return 0


def export_quiz(course: Course, args: Namespace) -> int:
    """Write one file."""
    quiz = Bank(course).quiz(args.lesson)
    write_output(args.out, FORMATS[args.format](quiz), args.force)
    value = {"lesson": quiz.lesson, "format": args.format, "questions": len(quiz.questions), "out": str(args.out)}
    _show(args, value, f"{args.out}: {counted(len(quiz.questions), 'question')} of {quiz.lesson} as {args.format}")
    return 0


def fill_canvas(course: Course, args: Namespace) -> int:
    """Fill the column; 1, and nothing is written, if a grade has no student and that is not allowed."""
    book = read_gradebook(args.gradebook, args.column)
    if args.out.exists() and args.out.samefile(args.gradebook):
        raise UserError(f"{args.out}: is the gradebook itself; write another file")
    check_writable(args.out, args.force)
    done = fill(book, *read_grades(args.grades), args.scale)
    refused = bool(done.unmatched) and not args.allow_unmatched
    if not refused:
        write_output(args.out, book.table.text(), args.force)
    value = {"column": args.column, "written": not refused, **asdict(done)}
    _show(args, value, _filled_text(args, done, refused))
    return 1 if refused else 0


def _filled_text(args: Namespace, done: Filled, refused: bool) -> str:
    lines = [f"filled {args.column!r}: {len(done.filled)}"]
    for what, names in (
        ("had another grade", done.changed),
        ("excused, left so", done.excused),
        ("without points, left as they are", done.without),
        ("in the gradebook, without a grade", done.left),
        ("not in the gradebook", done.unmatched),
    ):
        if names:
            lines.append(f"{what}: {len(names)}: {'; '.join(names)}")
    end = "nothing was written: --allow-unmatched leaves those out who are not in the gradebook"
    return "\n".join([*lines, end if refused else f"written: {args.out}"])


def _warn_of_formulas(texts: list[str]) -> None:
    """Names are written as they are; who opens them in a spreadsheet should know."""
    found = formula_cells(texts)
    if found:
        print(f"note: a spreadsheet takes these for formulas: {', '.join(map(repr, found[:5]))}", file=sys.stderr)


def _show(args: Namespace, value: Any, text: str) -> None:
    print(json_text(value) if args.json else f"{text}\n", end="")
