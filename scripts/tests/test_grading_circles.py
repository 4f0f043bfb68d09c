"""Exercises that call each other in a circle; and the list of what is to be looked at by hand."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading.grade import Result, _note_leaning
from grading_course import RIGHT, RINGS, Grading

TURN = "at = int(Wheel(1000).rest(steps))\n    return ring[at:] + ring[:at]"
REST = "return math.fmod(distance, self.size)"


class TestCircles(Grading):
    def graded_as(self, turn: str = TURN, rest: str = REST) -> list[str]:
        self.put("in/s1/code/rings.py", RINGS.replace(RIGHT, turn).replace(REST, rest))
        self.assertEqual(self.grade("--resume", "--only", "s1"), 0, self.err)
        return self.statuses("s1")

    def test_each_is_right_with_the_lessons_own_other_and_together_they_are_nothing(self):
        found = self.graded_as(rest="return turn(list(range(self.size)), int(distance % self.size))[0]")
        self.assertEqual(found, ["incorrect", "incorrect"])
        first, second = self.report("s1")["exercises"]
        self.assertIn(
            "it and Roll (roll) call each other in a circle: with the lesson's own it is right", first["reason"]
        )
        self.assertIn("it and Turn a ring (turn) call each other in a circle", second["reason"])
        self.assertTrue(first["evidence"]["observed"].startswith("RecursionError"))
        self.assertEqual([first["points"], second["points"]], [0, 0])
        self.assertEqual(first["files"], ["s1/code/rings.py"])

    def test_through_modules_that_hand_on(self):
        """`from mine2 import first`, `from mine2 import *`; and a name that is only spelt."""
        body = "def first(size, at):\n    return {}(list(range(size)), at)[0]\n"
        for hands_on, call in (
            ("from mine2 import first\n", "rings.turn"),
            ("from mine2 import *\n", "rings.turn"),
            ("from mine2 import *\n", "getattr(rings, 'turn')"),
            ("from mine2 import first\n", "vars(rings)['turn']"),
        ):
            self.put("in/s1/code/mine.py", hands_on)
            self.put("in/s1/code/mine2.py", f"import rings\n\n\n{body.format(call)}")
            text = RINGS.replace(RIGHT, TURN).replace(REST, "return mine.first(self.size, int(distance % self.size))")
            self.put("in/s1/code/rings.py", text.replace("import math", "import math\n\nimport mine"))
            self.assertEqual(self.grade("--only", "s1", "--resume"), 0, self.err)
            self.assertEqual(self.statuses("s1"), ["incorrect", "incorrect"], (hands_on, call))

    def test_through_a_module_of_their_own(self):
        self.put(
            "in/s1/code/mine.py",
            "import rings\n\n\ndef first(size, at):\n    return rings.turn(list(range(size)), at)[0]\n",
        )
        text = RINGS.replace(RIGHT, TURN).replace(REST, "return mine.first(self.size, int(distance % self.size))")
        self.put("in/s1/code/rings.py", text.replace("import math", "import math\n\nimport mine"))
        self.assertEqual(self.grade("--only", "s1"), 0, self.err)
        self.assertEqual(self.statuses("s1"), ["incorrect", "incorrect"])

    def test_what_leans_on_an_exercise_that_is_not_solved_is_told_to_the_instructor(self):
        for rest, told in (("return 0", ["leans on roll, which is not solved"]), (REST, [])):
            self.assertEqual(self.graded_as(rest=rest)[0], "correct")
            self.assertEqual([each["what"] for each in self.report("s1")["by_hand"]], told)
        self.assertNotIn("leans on", self.text("out/s1/report.md"))

    def test_what_leans_on_one_that_is_wrong_for_its_circle(self):
        results = [Result("a", "correct", 1, 1), Result("b", "incorrect", 0, 1)]
        _note_leaning(results, {("a", "b")})
        self.assertEqual([each.noted for each in results], [["leans on b, which is not solved"], []])

    def test_through_a_helper(self):
        helper = "\n\ndef first(size, at):\n    return turn(list(range(size)), at)[0]\n"
        self.put("in/s1/code/rings.py", "")
        text = RINGS.replace(RIGHT, TURN).replace(REST, "return first(self.size, int(distance % self.size))") + helper
        self.put("in/s1/code/rings.py", text)
        self.assertEqual(self.grade("--only", "s1"), 0, self.err)
        self.assertEqual(self.statuses("s1"), ["incorrect", "incorrect"])

    def test_a_call_that_goes_one_way_is_no_circle(self):
        self.assertEqual(self.graded_as(), ["correct", "correct"])

    def test_a_circle_that_ends_is_right(self):
        rest = "return math.fmod(distance, self.size) if self.size > 9 else turn([0, 1, 2, 3], int(distance % 4))[0]"
        self.assertEqual(self.graded_as(rest=rest), ["correct", "correct"])


class TestByHand(Grading):
    def test_what_reaches_behind_the_scenes_is_listed_for_the_instructor_alone(self):
        text = RINGS.replace("import math", "import gc, math\nimport ctypes as c\nfrom sys import modules, argv")
        text = text.replace(
            RIGHT, f"import sys, os\n    sys.modules.get('test_wheel')\n    sys._getframe()\n    {RIGHT}"
        )
        self.put(
            "in/s1/code/rings.py", text + "\n\nclass Same(list):\n    def __eq__(self, other):\n        return True\n"
        )
        self.put("in/s1/code/unused.py", "import gc\n")
        self.put("in/s2/code/rings.py", RINGS)
        self.assertEqual(self.grade(), 0, self.err)
        self.assertEqual(self.statuses("s1"), ["correct", "correct"])
        found = self.report("s1")["by_hand"]
        whats = ["imports gc", "imports ctypes", "sys.modules", "names test_wheel", "sys.modules", "sys._getframe"]
        self.assertEqual([each["what"] for each in found[:6]], whats)
        self.assertEqual(found[6]["what"], "defines __eq__")
        self.assertEqual({each["file"] for each in found[:7]}, {"s1/code/rings.py"})
        self.assertEqual(found[0]["line"], text[: text.index("import gc")].count("\n") + 1)
        if sys.platform == "linux":
            place = f"sys._getframe in {self.WHEELS}/code/rings.py, turn"
            self.assertEqual(found[7:], [{"exercise": "turn", "what": place}])
        self.assertEqual(self.report("s2")["by_hand"], [])
        table = self.text("out/class.md")
        self.assertIn("## To be looked at by hand", table)
        self.assertIn("\n- s1: imports gc (s1/code/rings.py:", table)
        self.assertNotIn("\n- s2: ", table[table.index("## To be") :].partition("\n## ")[0])
        self.assertNotIn("_getframe", self.text("out/s1/report.md"))

    def test_what_the_lessons_own_module_does_is_not_listed(self):
        self.put(f"{self.WHEELS}/code/rings.py", RINGS.replace("import math", "import gc\nimport math"))
        text = RINGS.replace("import math", "import gc\nimport math\nfrom re import compile")
        self.put("in/s1/code/rings.py", text.replace(RIGHT, f"compile('a')\n    {RIGHT}"))
        self.assertEqual(self.grade("--only", "s1"), 0, self.err)
        self.assertEqual(self.statuses("s1")[0], "correct")
        self.assertEqual(self.report("s1")["by_hand"], [])


if __name__ == "__main__":
    unittest.main()
