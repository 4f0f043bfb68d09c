"""An answer sheet: who, which lesson, which version of its quiz, under which seed, and the answers.

As JSON: {"lesson", "quiz": sha256, "seed", "student", "name", "time", "answers": {question id: letter or null}}. The
letter is the one shown under the sheet's own seed, so that a sheet says by itself what was chosen.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import UserError
from inputs import json_text, read_json
from jsonpos import Located
from lessons import UnknownLesson
from quizzes.bank import Bank, Quiz
from shapes import FILLED, MOMENT, OBJECT, Rule, object_faults, shown


def _is_named(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable())


NAMED = Rule("null, or a text that can be printed", _is_named)
RULES = {
    "lesson": FILLED,
    "quiz": FILLED,
    "seed": NAMED,  # null: the quiz's own order
    "student": NAMED,
    "name": NAMED,
    "time": MOMENT,
    "answers": OBJECT,
}
REQUIRED = ("lesson", "quiz", "seed", "answers")


@dataclass
class Sheet:
    """One student's answers to one quiz: question id -> position of the chosen option, None for a blank."""

    quiz: Quiz
    seed: str | None = None
    student: str | None = None
    name: str | None = None
    time: str | None = None
    answers: dict[str, int | None] = field(default_factory=dict)
    path: Path = Path("sheet")
    line: int = 1
    absent: bool = False  # a student's row without any answer, in a table that was prepared for a class
    lines: dict[str, int] = field(default_factory=dict, compare=False)  # where its parts stand: {"student": 5}

    @property
    def place(self) -> str:
        """Where it stands, as a message shows it."""
        return f"{self.path}:{self.line}"

    def place_of(self, part: str) -> str:
        """Where a part of it stands; where it stands itself, if that is not known."""
        return f"{self.path}:{self.lines.get(part, self.line)}"

    def to_json(self, blank: str | None = None) -> str:
        """The sheet as a file; `blank` is what stands for no answer, null or ""."""
        value: dict[str, Any] = {"lesson": self.quiz.lesson, "quiz": self.quiz.sha256, "seed": self.seed}
        for key in ("student", "name", "time"):
            if getattr(self, key) is not None:
                value[key] = getattr(self, key)
        value["answers"] = {}
        for name, position in self.answers.items():
            question = self.quiz.by_id[name]
            value["answers"][name] = blank if position is None else question.letter(position, self.seed)
        return json_text(value)


def read_sheet(path: Path, bank: Bank) -> Sheet:
    """Read one JSON sheet. UserError with file and line for all that is no sheet of this course's quizzes."""
    located = read_json(path)
    for place, message in object_faults(located.value, RULES, REQUIRED):
        raise UserError(f"{path}:{located.line(*place)}: {message}")
    found = located.value
    try:
        quiz = bank.quiz(found["lesson"])
    except UnknownLesson as error:
        raise UserError(f"{path}:{located.line('lesson')}: {error}") from error
    if found["quiz"] != quiz.sha256:
        raise UserError(f"{path}:{located.line('quiz')}: {other_version(found['quiz'], quiz)}")
    sheet = Sheet(quiz, found["seed"], found.get("student") or None, found.get("name"), found.get("time"), path=path)
    sheet.lines = {part: located.line(part) for part in found}
    for name, answer in found["answers"].items():
        sheet.answers[name] = _answer(located, sheet, name, answer)
    return sheet


def other_version(found: str, quiz: Quiz) -> str:
    """What to say about the hash of another quiz."""
    return f"answers to another version of {quiz.lesson}'s quiz: {shown(found)}; today's is {quiz.sha256!r}"


def _answer(located: Located, sheet: Sheet, name: str, answer: Any) -> int | None:
    place = f"{sheet.path}:{located.line('answers', name)}"
    question = sheet.quiz.by_id.get(name)
    if question is None:
        raise UserError(f"{place}: no question {shown(name)} in {sheet.quiz.lesson}'s quiz")
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise UserError(
            f"{place}: the answer is {shown(answer)}; a letter from A to D, the option's text or null is expected"
        )
    try:
        return question.position(answer, sheet.seed)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
