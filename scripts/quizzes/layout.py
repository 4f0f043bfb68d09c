"""A quiz as plain text: on the terminal, and on a printed form."""

import textwrap

from quizzes.bank import LETTERS, Question

WIDTH = 78  # characters
STAGE_TITLES = {
    "pre": "Before you read",
    "check": "While you read",
    "post": "After the lesson",
}


def wrapped(text: str, first: str = "", rest: str | None = None) -> str:
    """The text in lines of at most WIDTH characters; words and code are not split."""
    rest = " " * len(first) if rest is None else rest
    paragraphs = text.split("\n")
    fill = textwrap.TextWrapper(WIDTH, first, rest, break_long_words=False, break_on_hyphens=False)
    lines = []
    for paragraph in paragraphs:
        lines.append(fill.fill(paragraph) or rest.rstrip())
        fill.initial_indent = rest
    return "\n".join(lines)


def question_text(number: int, question: Question, seed: str | None) -> str:
    """A question with its options, in the order of `seed`."""
    return "\n".join([_asked(number, question), *_options(question, seed, "")])


def form_text(number: int, question: Question, seed: str | None) -> str:
    """The same with a box to mark before each letter, and the id, which sheets and tables call the question by."""
    return "\n".join([_asked(number, question), f"    ({question.id})", *_options(question, seed, "[ ] ")])


def _asked(number: int, question: Question) -> str:
    return wrapped(question.text, f"{number}. ".rjust(4))


def _options(question: Question, seed: str | None, box: str) -> list[str]:
    lines = []
    for letter, place in zip(LETTERS, question.order(seed), strict=True):
        lines.append(wrapped(question.options[place], f"    {box}{letter}  "))
    return lines


def stage_title(stage: str, count: int) -> str:
    """A line over the questions of a stage."""
    return f"== {STAGE_TITLES[stage]} ({stage}): {count} question{'' if count == 1 else 's'} =="
