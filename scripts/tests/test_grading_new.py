"""What else a student wrote: what is new comes along, what the lesson has is not replaced, and that is said."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from exercises.graft import graft_all, with_new
from exercises.untaken import _defined, changes
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

    def grafted(self, ours: str, theirs: str, *names: str) -> dict:
        """What the module defines with all that is new, and these functions."""
        found: dict = {"__name__": "m"}
        text = graft_all(with_new(ours, theirs), theirs, list(names))
        self.assertEqual(with_new(text, theirs), text)
        exec(text, found)
        return found

    def test_a_call_that_fills_what_is_new_comes_along(self):
        ours = "def f(x):\n    return x\n"
        for fill, call in (("def fill():\n    T.append(5)", "fill()"), ("def fill(t):\n    t.append(5)", "fill(t=T)")):
            theirs = f"T = []\n\n\n{fill}\n\n\n{call}\n\n\ndef f(x):\n    return T[x]\n"
            self.assertEqual(self.grafted(ours, theirs, "f")["f"](0), 5)
        theirs = "def shout():\n    print('x')\n\n\nprint(shout)\nf(3)\n\n\ndef f(x):\n    return x\n"
        self.assertNotIn("print(shout)", with_new(ours, theirs))
        self.assertEqual(changes(ours, theirs), ["line 6"])

    def test_what_a_moved_function_reads_when_it_is_defined_stands_before_it(self):
        ours = "def f(x):\n    return x\n\n\ndef g(x):\n    return x\n"
        head = "def g(x):\n    return x\n\n\nA = 1\nN = A + 2\n\n\n"
        self.assertEqual(self.grafted(ours, f"{head}def f(x=N):\n    return x\n", "f")["f"](), 3)
        deco = "def deco(h):\n    return lambda x: h(x) + plus\n\n\n@deco\ndef f(x: N):\n    return x\n"
        self.assertEqual(self.grafted(ours, f"{head}plus = N\n\n\n{deco}", "f")["f"](1), 4)
        late = "def g(x):\n    return x\n\n\nN = g(3)\n\n\ndef f(x=N):\n    return x\n"
        self.assertIn("\n\n\ndef g(x):\n    return x\nN = g(3)\n", with_new(ours, late))  # before g it would fail
        ours = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
        theirs = (
            "class A:\n    def g(self):\n        return 2\n\n    N = 3\n\n    def f(self, n=N):\n        return n\n"
        )
        self.assertEqual(self.grafted(ours, theirs, "A.f")["A"]().f(), 3)

    def test_a_name_that_the_lesson_imports_is_named_when_it_means_something_else(self):
        ours = "import os, math\nfrom math import sin as wave\n\n\ndef f(x):\n    return wave(x)\n"
        self.assertEqual(changes(ours, ours.replace("sin", "cos")), ["wave"])
        self.assertEqual(changes(ours, f"{ours}\n\ndef math():\n    pass\n"), ["math"])
        self.assertEqual(changes(ours, f"import os.path\nfrom math import pi\n{ours}"), [])

    def test_a_long_ladder_of_elif_is_read_in_a_time_that_fits(self):
        rungs = [f"elif x == {n}:\n    n{n} = 1\n" for n in range(100)]
        text = f"x = 5\n{''.join(rungs)[2:]}"
        self.assertEqual(changes("x = 5\n", text), [])
        self.assertLess(sum(map(len, _defined(text).values())), 2_000_000)

    def test_names_of_patterns(self):
        theirs = "match [1, 2, 3]:\n    case [first, *rest]:\n        pass\n\n\ndef f(x):\n    return first, rest\n"
        self.assertEqual(self.grafted("def f(x):\n    return x\n", theirs, "f")["f"](0), (1, [2, 3]))
        ours = "class A:\n    def f(self):\n        return 1\n"
        theirs = "class A:\n\tmatch 3:\n\t\tcase more:\n\t\t\tless = 2\n\n\tdef f(self):\n\t\treturn self.less\n"
        self.assertEqual(self.grafted(ours, theirs, "A.f")["A"]().f(), 2)  # with tabs

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

    def test_a_module_with_a_byte_order_mark_that_imports_another(self):
        self.put("in/s1/code/mine.py", "\ufefffrom cutter import cut\n")
        self.put("in/s1/code/cutter.py", "def cut(ring, n):\n    return ring[n:] + ring[:n]\n")
        text = f"import mine\n{RINGS.replace(RIGHT, 'return mine.cut(ring, steps)')}"
        self.assertEqual(self.graded_as(rings=text), ["correct", "correct"])

    def test_what_pythons_own_tools_cannot_write_is_blocked(self):
        for line in ("N = " + "1 + " * 1200 + "1", f"N = 0x{'f' * 4000}", "# coding: hex", "# coding: punycode"):
            text = f"{line}\n{RINGS}".replace(RIGHT, "return 0")
            self.assertEqual(self.graded_as(rings=text), ["blocked", "blocked"], line[:20])
            self.assertEqual(self.report("s1")["exercises"][0]["evidence"]["line"], 1, line[:20])

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
