"""A lesson's quiz as data, the order in which a seed shows its options, and what an answer means."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from catalog import STAGES
from check_quiz import check_quiz
from faults import UserError, read_text
from lessons import Course
from shapes import shown

LETTERS = "ABCD"
_LETTER = re.compile(r"^([A-Za-z])[.):]?$")


@dataclass(frozen=True)
class Question:
    """One question; `correct` is the position of the right option in the quiz's own order."""

    id: str
    stage: str
    text: str
    options: tuple[str, ...]
    correct: int
    explanation: str
    feedback: tuple[str, ...]

    def order(self, seed: str | None) -> list[int]:
        """Positions of the options in the order shown under `seed`; None is the quiz's own order.

        Sorted by a sha256 each, so that every Python on every machine shows the same order.
        """
        positions = list(range(len(self.options)))
        return positions if seed is None else sorted(positions, key=lambda place: _digest([seed, self.id, place]))

    def letter(self, position: int, seed: str | None) -> str:
        """The letter under which `seed` shows an option."""
        return LETTERS[self.order(seed).index(position)]

    def position(self, answer: str, seed: str | None) -> int | None:
        """The option that `answer` means: a letter as shown under `seed`, or the option's text. Blank is None.

        Raises ValueError for anything else, and for a letter that is also the text of another option.
        """
        wanted = plain(answer)
        if not wanted:
            return None
        meant = {place for place, option in enumerate(self.options) if plain(option) == wanted}
        letter = _LETTER.match(answer.strip())
        if letter and letter[1].upper() in LETTERS:
            meant.add(self.order(seed)[LETTERS.index(letter[1].upper())])
        if len(meant) > 1:
            raise ValueError(f"{shown(answer)} is a letter and also the text of another option")
        if not meant:
            raise ValueError(
                f"{shown(answer)} is no option of {self.id!r}; a letter from A to D or its text is expected"
            )
        return meant.pop()


@dataclass(frozen=True)
class Quiz:
    """One lesson's quiz, its questions in the order of `in_order`: forms, tables and exports all take it from here."""

    lesson: str
    title: str
    questions: tuple[Question, ...]

    @cached_property
    def sha256(self) -> str:
        """What a student saw, hashed: ids, stages, questions in their order, options in the quiz's order.

        Which option is right, explanations and feedback are not in it: a key that was corrected grades the same sheets.
        """
        seen = [[each.id, each.stage, each.text, list(each.options)] for each in self.questions]
        return _digest([self.lesson, seen])

    @cached_property
    def by_id(self) -> dict[str, Question]:
        """The questions by their ids."""
        return {question.id: question for question in self.questions}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Each question's number, from 1: wherever one is shown, and whatever part of the quiz is."""
        return {question.id: number for number, question in enumerate(self.questions, 1)}

    def of(self, stages: tuple[str, ...]) -> list[Question]:
        """The questions of these stages, in the quiz's order."""
        return [question for question in self.questions if question.stage in stages]


class Bank:
    """The course's quizzes, each loaded and checked when it is asked for."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self._loaded: dict[str, Quiz] = {}

    def quiz(self, name: str) -> Quiz:
        """The quiz of a lesson, by number or id. UserError for an unknown lesson or a quiz with a fault."""
        lesson = self.course.find(name)
        if lesson.id not in self._loaded:
            text = read_text(lesson.folder / "quiz.json")
            if text is None:
                raise UserError(f"{lesson.rel('quiz.json')}: no such file")
            faults = check_quiz(lesson)
            if faults:
                raise UserError(f"{faults[0]} (the quiz cannot be used; course check lists all faults)")
            found = json.loads(text)
            self._loaded[lesson.id] = Quiz(
                found["lesson"], found["title"], in_order(map(_question, found["questions"]))
            )
        return self._loaded[lesson.id]

    def sound(self) -> list[Quiz]:
        """All quizzes that can be used."""
        quizzes = []
        for lesson in self.course.lessons:
            try:
                quizzes.append(self.quiz(lesson.id))
            except UserError:
                continue  # `course check` reports it; whoever needs this one calls quiz()
        return quizzes


def in_order(questions: Iterable[Question]) -> tuple[Question, ...]:
    """The order in which people meet the questions: by stage, and within a stage as they stand in the file."""
    return tuple(sorted(questions, key=lambda question: STAGES.index(question.stage)))


def stages_of(stage: str | None) -> tuple[str, ...]:
    """The one stage, or all of them."""
    return STAGES if stage is None else (stage,)


def plain(text: str) -> str:
    """A text without its capitals and its kinds of spaces: how answers and headings are compared."""
    return " ".join(text.split()).casefold()


def _question(found: dict) -> Question:
    options, feedback = tuple(found["options"]), tuple(found["feedback"])
    head = (found["id"], found["stage"], found["question"])
    return Question(*head, options, found["correct"], found["explanation"], feedback)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode("ascii")).hexdigest()
