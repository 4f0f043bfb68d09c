"""Grading: sheets to grades. A right answer is a point; a wrong one and a blank are none."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from faults import UserError
from quizzes.bank import STAGES, Bank, Question, Quiz
from quizzes.classcsv import read_class
from quizzes.sheet import Sheet, read_sheet
from quizzes.stats import Item, is_right, items
from roster import Roster, Student
from shapes import moment
from words import counted

FAULTS_SHOWN = 20


@dataclass(frozen=True)
class Grade:
    """One student's grade for one quiz."""

    student: str
    name: str
    sheet: Sheet
    right: dict[str, bool]  # question id -> right, of the questions that are graded

    @property
    def points(self) -> int:
        """How many were right."""
        return sum(self.right.values())

    @property
    def answered(self) -> int:
        """How many were not left blank."""
        return sum(self.sheet.answers.get(name) is not None for name in self.right)


@dataclass(frozen=True)
class Graded:
    """A class's grades for one quiz, what they say about its questions, and who of the class handed in nothing."""

    quiz: Quiz
    questions: list[Question]
    grades: list[Grade]
    items: list[Item]
    missing: list[Student]


def find_files(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """(answer files, files left aside): of a folder all .json files in it, at any depth; files as they are given.

    Left aside are other files, among them hidden ones, which macOS puts into zips.
    """
    taken: list[Path] = []
    aside: list[Path] = []
    for path in paths:
        if path.is_dir():
            files = sorted(found for found in path.rglob("*") if not found.is_dir())  # a link to nothing, too
            for found in files:
                is_sheet = found.suffix.lower() == ".json" and not found.name.startswith(".")
                (taken if is_sheet else aside).append(found)
        elif path.suffix.lower() in (".json", ".csv"):
            taken.append(path)
        else:
            raise UserError(f"{path}: neither a folder nor a .json or .csv file")
    return _once(taken), _once(aside)


def _once(paths: list[Path]) -> list[Path]:
    """Without the second mention of a file that was given twice."""
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def read_answers(
    paths: Iterable[Path], bank: Bank, lesson: str | None = None, stages: tuple[str, ...] = STAGES
) -> list[Sheet]:
    """All sheets of these files. `lesson` is what a class CSV is about, where it does not say.

    A class CSV needs a column for each question of `stages`; in sheets, a question left out is a blank.

    UserError names the first fault of each file that has one, so that a class's sheets are put right in one go.
    """
    sheets: list[Sheet] = []
    faults: list[str] = []
    for path in paths:
        try:
            is_table = path.suffix.lower() == ".csv"
            sheets += read_class(path, bank, lesson, stages) if is_table else [read_sheet(path, bank)]
        except UserError as error:
            faults.append(str(error))
    _raise(faults)
    if lesson is not None:
        wanted = bank.quiz(lesson)
        for sheet in sheets:
            if sheet.quiz is not wanted:
                raise UserError(
                    f"{sheet.place_of('lesson')}: answers to {sheet.quiz.lesson}; {wanted.lesson} is to be graded"
                )
    if not sheets:
        raise UserError("no answer sheet was found; .json files, folders of them, or a .csv are expected")
    return sheets


def _raise(faults: list[str]) -> None:
    """UserError with all of them, but for very many; nothing if there is none."""
    more = len(faults) - FAULTS_SHOWN
    if faults:
        rest = [f"and {counted(more, 'more sheet')} with faults"] if more > 0 else []
        raise UserError("\n".join(faults[:FAULTS_SHOWN] + rest))


def grade(sheets: list[Sheet], stages: tuple[str, ...], roster: Roster | None, newest: bool) -> list[Graded]:
    """Grade each quiz that occurs, in the order of the lessons. Who was absent gets no grade, and is listed.

    UserError for all students who are not in the roster, for two sheets of one student unless `newest`, and for a quiz
    of which all were absent.
    """
    students: list[Student] = []
    faults: list[str] = []
    for sheet in sheets:
        try:
            students.append(_student(sheet, roster))
        except UserError as error:
            faults.append(str(error))
    _raise(faults)
    graded = []
    for quiz in sorted({sheet.quiz for sheet in sheets}, key=lambda quiz: quiz.lesson):
        chosen: dict[str, tuple[Student, Sheet]] = {}
        known = list(roster.students) if roster else []
        for student, sheet in zip(students, sheets, strict=True):
            if sheet.quiz is quiz and sheet.absent:
                known.append(student)
            elif sheet.quiz is quiz:
                key = student.id.casefold()
                if key in chosen:
                    sheet = _newer(student, chosen[key][1], sheet, newest)
                chosen[key] = (student, sheet)
        if not chosen:
            empty = next(sheet for sheet in sheets if sheet.quiz is quiz)
            raise UserError(f"{empty.path}: no row holds an answer to {quiz.lesson}")
        missing = {student.id.casefold(): student for student in known if student.id.casefold() not in chosen}
        graded.append(_graded(quiz, stages, list(chosen.values()), list(missing.values())))
    return graded


def _graded(quiz: Quiz, stages: tuple[str, ...], chosen: list[tuple[Student, Sheet]], missing: list[Student]) -> Graded:
    questions = quiz.of(stages)
    if not questions:
        raise UserError(f"{quiz.lesson} has no question of stage {', '.join(stages)}")
    grades = []
    for student, sheet in sorted(chosen, key=lambda pair: (pair[0].id.casefold(), pair[0].id)):
        right = {question.id: is_right(question, sheet.answers) for question in questions}
        grades.append(Grade(student.id, student.name, sheet, right))
    return Graded(quiz, questions, grades, items(questions, [each.sheet.answers for each in grades]), missing)


def _student(sheet: Sheet, roster: Roster | None) -> Student:
    """Who wrote it. A sheet that does not say goes by the name of its file."""
    name = sheet.student or sheet.path.stem
    if roster is None:
        return Student(name, sheet.name or "")
    try:
        found = roster.find(name)
    except UserError as error:
        raise UserError(f"{sheet.place_of('student')}: {error}") from error
    if found is None:
        whose = "" if sheet.student else "it does not say whose it is, and by its own name "
        raise UserError(f"{sheet.place_of('student')}: {whose}the student {name!r} is not in {roster.path}")
    return found


def _newer(student: Student, first: Sheet, second: Sheet, newest: bool) -> Sheet:
    """Of two sheets of a student the newer: by row in one file, by `time` if both say, else by the files' times."""
    if not newest:
        raise UserError(f"two sheets of student {student.id!r}: {first.place} and {second.place}; --newest takes one")
    if first.path == second.path:
        return max(first, second, key=lambda sheet: sheet.line)
    times = [_time(sheet, bool(first.time and second.time)) for sheet in (first, second)]
    if times[0] == times[1]:
        raise UserError(f"two sheets of student {student.id!r} are equally new: {first.place} and {second.place}")
    return first if times[0] > times[1] else second


def _time(sheet: Sheet, recorded: bool) -> float:
    return moment(sheet.time).timestamp() if recorded and sheet.time else sheet.path.stat().st_mtime
