"""Asking a quiz in the terminal: one question after the other, with feedback, and a sheet that is never lost."""

from collections.abc import Callable
from typing import TextIO

from faults import UserError
from quizzes.bank import Question
from quizzes.layout import question_text, stage_title, wrapped
from quizzes.sheet import Sheet

PROMPT = "    Your answer (A to D; Enter leaves it blank): "


def take(sheet: Sheet, stages: tuple[str, ...], source: TextIO, out: TextIO, keep: Callable[[Sheet], None]) -> bool:
    """Ask what the sheet has no answer for, and call `keep` after each answer. False if the input ended, or Ctrl-C."""
    for question in sheet.quiz.of(stages):
        sheet.answers.setdefault(question.id, None)
    keep(sheet)
    try:
        for stage in stages:
            questions = sheet.quiz.of((stage,))
            print(f"\n{stage_title(stage, len(questions))}", file=out)
            for question in questions:
                number = sheet.quiz.numbers[question.id]
                print(f"\n{question_text(number, question, sheet.seed)}\n", file=out)
                if sheet.answers.get(question.id) is None:
                    sheet.answers[question.id] = ask(question, sheet.seed, source, out)
                    keep(sheet)
                print(feedback(question, sheet.answers[question.id], sheet.seed), file=out)
    except (EOFError, KeyboardInterrupt):
        print("\nStopped: the questions that are left stay blank.", file=out)
        return False
    return True


def ask(question: Question, seed: str | None, source: TextIO, out: TextIO) -> int | None:
    """One answer, asked for until it is one. Raises EOFError where the input ends."""
    while True:
        print(PROMPT, end="", file=out, flush=True)
        try:
            line = source.readline()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: {error.reason}; letters from A to D are expected") from error
        if not line:
            raise EOFError
        if not source.isatty():
            print(file=out)  # where nobody typed Enter
        try:
            return question.position(line.strip(), seed)
        except ValueError as error:
            print(f"    {error}", file=out)


def feedback(question: Question, position: int | None, seed: str | None) -> str:
    """What the chosen option's feedback says, which one is right, and why."""
    right = f"{question.letter(question.correct, seed)}  {question.options[question.correct]}"
    if position == question.correct:
        lines = [wrapped(question.feedback[position], "    Correct. ", "    ")]
    elif position is None:
        lines = ["    Left blank.", wrapped(right, "    The answer is ", "    ")]
    else:
        lines = [wrapped(question.feedback[position], "    Not correct. ", "    ")]
        lines.append(wrapped(right, "    The answer is ", "    "))
    return "\n".join([*lines, wrapped(question.explanation, "    ")])
