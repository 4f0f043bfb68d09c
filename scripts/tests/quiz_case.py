"""What the tests of quizzes share: the fake course, a folder for files, and commands run in this process."""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

from fake_course import FakeCourse

import course
from lessons import Course
from quizzes.bank import Bank, Quiz

REAL = Path(__file__).resolve().parents[2]


class QuizCase(FakeCourse):
    """A fake course at `self.root`, a folder `self.work` for what people hand in."""

    def setUp(self) -> None:
        super().setUp()
        self.work = self.root / "outputs"
        self.work.mkdir()
        self.bank = Bank(Course(self.root))
        self.quiz = self.bank.quiz("01")

    def file(self, name: str, data: str | bytes | dict) -> Path:
        """Write a file into the work folder."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(data, indent=1) if isinstance(data, dict) else data
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def course(self, *args: object, stdin: str = "", code: int = 0) -> tuple[str, str]:
        """Run one command, expect its exit code, return what it printed to output and to errors."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            found = course.main(["--root", str(self.root), *map(str, args)])
        self.assertEqual(found, code, out.getvalue() + err.getvalue())
        return out.getvalue(), err.getvalue()

    def refused(self, message: str, *args: object, stdin: str = "") -> None:
        """The command ends with 2, says this, and prints nothing else."""
        _, err = self.course(*args, stdin=stdin, code=2)
        self.assertIn(message, err)
        self.assertTrue(err.startswith("course: "), err)

    def sheet(self, student: str | None = None, seed: str | None = None, **answers: str | None) -> dict:
        """A sheet of the first lesson as JSON; answers by question id."""
        value = {"lesson": self.quiz.lesson, "quiz": self.quiz.sha256, "seed": seed, "answers": answers}
        return value | ({} if student is None else {"student": student})

    def letters(self, seed: str | None, wrong: int = 0) -> dict[str, str]:
        """The right letters under a seed; the first `wrong` of them are wrong."""
        return right_letters(self.quiz, seed, wrong)


def right_letters(quiz: Quiz, seed: str | None, wrong: int = 0) -> dict[str, str]:
    """A letter for each question; the first `wrong` are wrong."""
    found = {}
    for number, question in enumerate(quiz.questions):
        place = (question.correct + (number < wrong)) % len(question.options)
        found[question.id] = question.letter(place, seed)
    return found
