"""What else a student wrote: what is new comes along, what the lesson has is not replaced, and that is said."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from exercises.graft import with_new
from exercises.untaken import changes
from grading_course import EXERCISES, RIGHT, RINGS, Grading
from lessons import Course

LESSON = '''"""Doc."""
import math

SIZE = 1


class Base:
    def send(self):
        return SIZE


class Part(Base):
    """A part."""

    def __init__(self, a):
        self.a = a

    def run(self):
        """Doc."""
        return helper(self.a)


def helper(a):
    return max(a, SIZE)


def other():
    return 3
'''
MINE = '''"""Mine."""
import math, os
import json as js

SIZE = 2
MORE: int = 4


def max(*a):
    return 9


class Base:
    def send(self):
        return SIZE

    @classmethod
    def make(cls):
        return cls()


class Part(Base):
    """Mine."""

    extra = 3

    def __init__(self, a):
        self.a, self.n = a, 0

    def __repr__(self):
        return "x"

    def send(self):
        return 2

    def a(self):
        return 1

    def fresh(self):
        return js.dumps(MORE)

    def run(self):
        """Other words."""
        return helper(self.a)  # and a comment


def second(a):
    return os.sep


def helper(a):
    return max(a, MORE)


def other():
    raise NotImplementedError("hint")


class New:
    pass


Base.send = None
MORE += 1
print("not taken: it binds nothing")
if __name__ == "__main__":
    left = 1
'''


class TestTexts(unittest.TestCase):
    def test_what_is_new_is_added_and_nothing_is_replaced(self):
        text = with_new(LESSON, MINE)
        names: dict = {"__name__": "m"}
        exec(text, names)
        self.assertEqual((names["SIZE"], names["MORE"], names["other"](), names["helper"](7)), (1, 5, 3, 7))
        part = names["Part"](5)
        self.assertEqual((part.a, part.extra, part.fresh(), part.send(), part.run()), (5, 3, "5", 1, 5))
        self.assertIsInstance(names["Base"].make(), names["Base"])
        self.assertEqual((names["second"](0), names["New"].__name__), ("/", "New"))
        for name in ("max", "left"):
            self.assertNotIn(name, names)
        self.assertNotIn("__repr__", vars(names["Part"]))
        self.assertEqual(with_new(text, MINE), text)
        self.assertEqual(with_new(LESSON, LESSON), LESSON)

    def test_what_was_changed_is_named(self):
        expected = ["SIZE", "max", "helper", "Part.__init__", "Part.__repr__", "Part.send", "Part.a"]
        line = MINE[: MINE.index("Base.send = None")].count("\n") + 1
        self.assertEqual(changes(LESSON, MINE), [*expected, f"line {line}"])
        self.assertEqual(changes(LESSON, LESSON), [])
        self.assertEqual(changes(LESSON, LESSON.replace("Part(Base)", "Part")), ["Part"])


GEARS = '''"""Gears."""


class Gear:
    """A gear."""

    teeth = 3

    def mesh(self):
        return self.teeth
'''


class TestGrades(Grading):
    def setUp(self):
        super().setUp()
        self.put(f"{self.WHEELS}/code/gears.py", GEARS)
        self.graded = Course(self.root)

    def graded_as(self, **texts: str) -> list[str]:
        for module, text in texts.items():
            self.put(f"in/s1/code/{module}.py", text)
        self.assertEqual(self.grade("--resume", "--only", "s1"), 0, self.err)
        return self.statuses("s1")

    def left(self) -> list:
        return [item["evidence"].get("not_taken") for item in self.report("s1")["exercises"]]

    def test_a_classmethod_in_another_module_of_the_lesson(self):
        gears = GEARS + "\n    @classmethod\n    def cut(cls, ring, at):\n        return ring[at:] + ring[:at]\n"
        text = RINGS.replace("import math", "import math\n\nfrom gears import Gear")
        found = self.graded_as(rings=text.replace(RIGHT, "return Gear.cut(ring, steps)"), gears=gears)
        self.assertEqual(found, ["correct", "correct"])
        self.assertIn("s1/code/gears.py", self.report("s1")["files"]["looked_at"])

    def test_a_module_of_ones_own_that_calls_a_new_helper_of_the_lessons(self):
        self.put("in/s1/code/mine.py", "def around(ring, n):\n    import rings\n\n    return rings.cut(ring, n)\n")
        text = RINGS.replace("HOURS = 12", "HOURS = 12\n\n\ndef cut(ring, n):\n    return ring[n:] + ring[:n]")
        text = f"import mine\n{text.replace(RIGHT, 'return mine.around(ring, steps)')}"
        self.assertEqual(self.graded_as(rings=text), ["correct", "correct"])

    def test_an_attribute_that_init_would_have_to_set_is_named(self):
        text = RINGS.replace("self.size = size", "self.size = self.width = size")
        found = self.graded_as(rings=text.replace("distance / self.size", "distance / self.width"))
        self.assertEqual(found, ["correct", "incorrect"])
        self.assertEqual(self.left(), [None, ["rings.Wheel.__init__"]])
        self.assertIn("not taken: your changes in `rings.Wheel.__init__`", self.text("out/s1/report.md"))

    def test_a_helper_changed_in_another_module_is_named_and_exercises_only_if_they_are_used(self):
        text = RINGS.replace(RIGHT, "return [0]").replace("distance / self.size", "0 * len(turn([1]))")
        self.assertEqual(self.graded_as(rings=text, gears=GEARS.replace("teeth = 3", "teeth = 4")), ["incorrect"] * 2)
        self.assertEqual(self.left(), [["gears.Gear.teeth"], ["gears.Gear.teeth", "rings.turn"]])

    def test_of_two_modules_one_is_the_lessons_own(self):
        roll = {**EXERCISES[1], "function": ["rings.Wheel.roll", "gears.Gear.turns"]}
        self.put(f"{self.WHEELS}/code/gears.py", f"{GEARS}\n    def turns(self):\n        return helper\n")
        self.put_json(f"{self.WHEELS}/exercises.json", [EXERCISES[0], roll])
        text = RINGS.replace("distance / self.size", "distance").replace(RIGHT, "return 0")
        self.put("in/s1/code/gears.py", (self.root / self.WHEELS / "code/gears.py").read_text())
        self.assertEqual(self.graded_as(rings=text), ["incorrect", "incorrect"])
        self.assertEqual(self.left(), [None, None])

    def test_a_new_line_that_fails_costs_only_those_that_use_it(self):
        text = RINGS.replace("HOURS = 12", "HOURS = 12\nimport nothing_of_this_name\nBAD = 1 / 0")
        self.assertEqual(self.graded_as(rings=text), ["correct", "correct"])
        text = text.replace(RIGHT, "return BAD")
        self.assertEqual(self.graded_as(rings=text, gears="def (:\n"), ["incorrect", "correct"])
        self.assertEqual(self.graded_as(rings=RINGS, gears=f"{GEARS}\nBAD = 1 / 0\n"), ["correct", "correct"])

    def test_a_new_helper_beside_the_published_solution(self):
        self.assertEqual(self.graded_as(rings=f"{RINGS}\n\ndef mine():\n    pass\n"), ["correct", "correct"])
        self.assertEqual([item["published"] for item in self.report("s1")["exercises"]], [True, True])


if __name__ == "__main__":
    unittest.main()
