"""A tiny lesson that can be graded, and a class that hands it in: no torch, tests that take milliseconds."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import course
from exercises.model import Exercise, load_exercises
from exercises.surgery import stub
from fake_course import IDIOM, FakeCourse
from grading.isolation import Isolation
from grading.judge import Judge, Verdict
from grading.limits import Limits
from lessons import Course

RINGS = '''"""Rings."""

import math

HOURS = 12


def turn(ring, steps=1):
    """The ring, turned to the left."""
    return ring[steps:] + ring[:steps]


class Wheel:
    """A wheel."""

    def __init__(self, size=1):
        self.size = size

    def roll(self, distance):
        """How often it turns."""
        return distance / self.size

    def rest(self, distance):
        """What is left of the last turn."""
        return math.fmod(distance, self.size)
'''

TESTS = f"""import sys
import unittest
from pathlib import Path

{IDIOM}
from rings import Wheel, turn


class TestTurn(unittest.TestCase):
    def test_by_one(self):
        self.assertEqual(turn([1, 2, 3]), [2, 3, 1])

    def test_by_any(self):
        for steps, expected in ((0, [1, 2, 3]), (2, [3, 1, 2])):
            with self.subTest(steps=steps):
                self.assertEqual(turn([1, 2, 3], steps), expected)

    @unittest.skip("not on this machine")
    def test_on_another_machine(self):
        self.fail()


class TestRoll(unittest.TestCase):
    def test_roll(self):
        self.assertEqual(Wheel(2).roll(6), 3)

    def test_rest(self):
        self.assertEqual(Wheel(4).rest(6), 2)
"""

EXERCISES = [
    {
        "id": "turn",
        "title": "Turn a ring",
        "kind": "build",
        "function": "rings.turn",
        "points": 3,
        "tests": ["test_wheel.TestTurn", "test_wheel.TestTurn.test_by_one"],
        "depends_on": [],
        "hint": "Cut it in two.",
    },
    {
        "id": "roll",
        "title": "Roll",
        "kind": "extend",
        "function": ["rings.Wheel.roll", "rings.Wheel.rest"],
        "points": 5,
        "tests": ["test_wheel.TestRoll"],
        "depends_on": ["turn"],
        "hint": "Distance over size.",
    },
]
RIGHT = "return ring[steps:] + ring[:steps]"
LIMITS = Limits(run_seconds=120, test_seconds=60)


class GradedCourse(FakeCourse):
    """The course of FakeCourse, whose first lesson has exercises with tests."""

    def setUp(self) -> None:
        super().setUp()
        self.put(f"{self.WHEELS}/code/rings.py", RINGS)
        self.put(f"{self.WHEELS}/tests/test_wheel.py", TESTS)
        self.put_json(f"{self.WHEELS}/exercises.json", EXERCISES)
        self.graded = Course(self.root)
        self.lesson = self.graded.find("1")

    def exercise(self, name: str) -> Exercise:
        """The exercise with that id."""
        return next(item for item in load_exercises(self.lesson) if item.id == name)

    def judge_all(
        self, texts: list[str], isolation: Isolation | None = None, limits: Limits = LIMITS, name: str = "turn"
    ) -> list[Verdict]:
        """The verdicts on these bodies of `turn` (lines, to be indented by 4 but for the first)."""
        with Judge(self.graded, self.lesson, limits, isolation) as judge:
            return [judge.judge(self.exercise(name), {"rings": RINGS.replace(RIGHT, text)}) for text in texts]


ROSTER = "id,name\ns1,Anna Lee\ns2,Bo Dyk\ns3,Cy Ray\ns4,Di Fox\ns5,Ed Moe\n"
WRONG = "# my own file\n\n" + RINGS.replace(RIGHT, "shift = steps + 1\n    return ring[shift:] + ring[:shift]")


class Grading(GradedCourse):
    """Students of every kind, what they handed in, and `course grade` in this process."""

    def setUp(self):
        super().setUp()
        self.put("roster.csv", ROSTER)
        starter = RINGS
        for exercise in load_exercises(self.lesson):
            for name in exercise.by_module["rings"]:
                starter = stub(starter, name, exercise.stub_text)
        self.put("in/s1/code/rings.py", RINGS)
        self.put("in/s2/code/rings.py", WRONG)
        self.put("in/s3/code/rings.py", starter)
        self.put("in/s4/code/rings.py", "def turn(:\n")
        self.put("in/x9/code/rings.py", RINGS)

    def course(self, *argv: str) -> int:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = course.main(["--root", str(self.root), *argv])
        self.out, self.err = out.getvalue(), err.getvalue()
        return code

    def grade(self, *options: str) -> int:
        named = ["--roster", str(self.root / "roster.csv"), "--out", str(self.root / "out")]
        return self.course("grade", "1", str(self.root / "in"), *named, *options)

    def report(self, student: str) -> dict:
        return json.loads(self.text(f"out/{student}/report.json"))

    def statuses(self, student: str) -> list[str]:
        return [item["status"] for item in self.report(student)["exercises"]]
