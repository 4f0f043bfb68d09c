"""What a class's answers say about each question.

Discrimination is the item-rest correlation: Pearson's r, over the students, between the item (1 right, 0 wrong) and the
number of *other* items right. For a 0/1 item this is the point-biserial correlation

    r = (mean rest of those right - mean rest of those wrong) / sd(rest) * sqrt(p * (1 - p)),    p = share right,

with sd over all students (divided by n). The item itself is left out of the score, else it would correlate with itself:
S. Henrysson, "Correction of item-total correlations in item analysis", Psychometrika 28 (1963), 211-218. Near 0 or
below it the question does not tell who knows the rest: look at its text, and at the wrong option chosen most.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quizzes.bank import Question

Answers = Mapping[str, int | None]  # question id -> position of the option, None for a blank


@dataclass(frozen=True)
class Item:
    """One question over all students. `chosen` counts each option, in the quiz's own order."""

    question: Question
    students: int
    right: int
    blank: int
    chosen: tuple[int, ...]
    discrimination: float | None  # -1 to 1; None where everybody, or nobody, was right, or all others scored the same

    @property
    def share(self) -> float:
        """The share of students who were right, blanks counted as wrong."""
        return self.right / self.students

    @property
    def wrong_most(self) -> int | None:
        """The wrong option chosen most (the first of several); None if nobody chose a wrong one."""
        wrong = [place for place in range(len(self.chosen)) if place != self.question.correct and self.chosen[place]]
        return max(wrong, key=lambda place: self.chosen[place], default=None)


def is_right(question: Question, answers: Answers) -> bool:
    """A blank is wrong."""
    return answers.get(question.id) == question.correct


def items(questions: list[Question], sheets: list[Answers]) -> list[Item]:
    """Statistics of each question over the sheets, of which there must be one or more."""
    marks = [[is_right(question, answers) for question in questions] for answers in sheets]
    found = []
    for column, question in enumerate(questions):
        counts = Counter(answers.get(question.id) for answers in sheets)
        item = [int(row[column]) for row in marks]
        rest = [sum(row) - row[column] for row in marks]
        chosen = tuple(counts[place] for place in range(len(question.options)))
        found.append(Item(question, len(sheets), sum(item), counts[None], chosen, correlation(item, rest)))
    return found


def correlation(first: list[int], second: list[int]) -> float | None:
    """Pearson's r of two lists of integers; None if one of them does not vary. The sums are exact."""
    count = len(first)
    products = count * sum(a * b for a, b in zip(first, second, strict=True)) - sum(first) * sum(second)
    spread = [count * sum(value * value for value in values) - sum(values) ** 2 for values in (first, second)]
    return products / math.sqrt(spread[0] * spread[1]) if spread[0] and spread[1] else None
