"""course grade from the command line: statuses, tables, and what is refused."""

import csv
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import course
import gradescope
from grading_course import RIGHT, RINGS, Grading


class TestClass(Grading):
    def test_statuses_tables_and_files(self):
        self.assertEqual(self.grade(), 0, self.out)
        self.assertEqual(self.statuses("s1"), ["correct", "correct"])
        self.assertEqual(self.statuses("s2"), ["incorrect", "correct"])
        self.assertEqual(self.statuses("s3"), ["not attempted"] * 2)
        self.assertEqual(self.statuses("s4"), ["blocked"] * 2)
        self.assertEqual(self.statuses("s5"), ["not attempted"] * 2)
        self.assertEqual(self.report("s4")["exercises"][0]["evidence"], {"file": "s4/code/rings.py", "line": 1})
        rows = list(csv.DictReader(self.text("out/class.csv").splitlines()))
        self.assertEqual([row["points"] for row in rows], ["8", "5", "0", "0", "0"])
        self.assertEqual(rows[1], {"student": "Bo Dyk", "id": "s2", "points": "5", "of": "8", "turn": "0", "roll": "5"})
        table = self.text("out/class.md")
        self.assertIn("| Bo Dyk | s2 | 5 / 8 | ✗ | ✓ |", table)
        self.assertIn("- `x9`: nobody in roster.csv goes by x9", table)
        self.assertIn("Nothing was handed in by: s5", table)
        missing = json.loads(self.text("out/class.json"))["isolation"]["missing"]
        self.assertEqual("- each run was kept apart" in table, not missing)
        for student in ("s1", "s2", "s4"):
            gradescope.check_results(json.loads(self.text(f"out/{student}/results.json")))

    def test_who_handed_in_the_published_solution(self):
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, "turned = ring[steps:] + ring[:steps]\n    return turned"))
        self.grade()
        self.assertEqual(self.statuses("s2"), ["correct", "correct"])
        self.assertEqual([item["published"] for item in self.report("s2")["exercises"]], [False, True])
        table = self.text("out/class.md")
        self.assertIn("## Word for word the published solution", table)
        self.assertIn("- s1: turn, roll\n- s2: roll\n", table)
        for student in ("s3", "s4", "s5"):
            self.assertFalse(any(item["published"] for item in self.report(student)["exercises"]))

    def test_one_function_missing_is_not_the_others_fault(self):
        self.put("in/s1/code/rings.py", RINGS.replace("def roll", "def rolls"))
        self.assertEqual(self.grade("--only", "s1"), 0)
        self.assertEqual(self.statuses("s1"), ["correct", "not attempted"])

    def test_new_modules_beside_it_come_along_and_replace_nothing(self):
        text = f"from spokes import around\n{RINGS.replace(RIGHT, 'return around(ring, steps)')}"
        self.put("in/s1/code/rings.py", text)
        self.put("in/s1/code/spokes.py", "from tools import cut\n\n\ndef around(*it):\n    return cut.at(*it)\n")
        self.put("in/s1/code/tools/__init__.py", "")
        self.put("in/s1/code/tools/cut.py", "def at(ring, n):\n    return ring[n:] + ring[:n]\n")
        self.put("in/s1/code/main.py", "raise KeyError('not to be run')\n")
        self.put("in/s1/code/math.py", "raise KeyError('not to be run')\n")
        self.put("in/s2/code/rings.py", text)
        self.put("in/s2/code/spokes.py", "\n\ndef around(ring, n):\n    return ring.turned\n")
        self.put("in/s3/code/rings.py", text)
        self.put("in/s3/code/spokes.py", "def around(:\n")
        self.put("in/s4/code/rings.py", text)
        self.assertEqual(self.grade(), 0, self.out)
        self.assertEqual(self.statuses("s1"), ["correct", "correct"])
        self.assertEqual(self.statuses("s2"), ["incorrect", "correct"])
        evidence = self.report("s2")["exercises"][0]["evidence"]
        self.assertEqual((evidence["file"], evidence["line"]), ("s2/code/spokes.py", 4))
        self.assertEqual(self.statuses("s3"), ["blocked", "correct"])
        self.assertEqual(self.report("s3")["exercises"][0]["evidence"], {"file": "s3/code/spokes.py", "line": 1})
        self.assertEqual(self.statuses("s4"), ["incorrect", "correct"])
        self.assertIn("No module named 'spokes'", self.text("out/s4/report.md"))

    @unittest.skipUnless(sys.platform == "linux", "elsewhere every file's name is Unicode")
    def test_a_folder_whose_name_is_no_text(self):
        self.put(os.fsdecode(b"in/M\xfcller/code/rings.py"), RINGS)
        words = [sys.executable, course.__file__, "--root", str(self.root), "grade", "1", str(self.root / "in")]
        run = subprocess.run([*words, "--out", str(self.root / "out")], capture_output=True, timeout=120)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(b"M\\udcfcller: 8 of 8", run.stdout)

    def test_what_cannot_be_judged_is_open_and_the_exit_code_says_so(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", "Wheel(4).rest(6), 2", "Wheel(4).rest(6), 9")
        self.assertEqual(self.grade(), 1)
        self.assertEqual(self.statuses("s2"), ["incorrect", "error"])
        self.assertIsNone(self.report("s2")["points"])
        self.assertIn("not decided: s2 roll: the tests fail here on the lesson as it is", self.out)
        self.assertFalse((self.root / "out/s2/results.json").exists())

    def test_a_fault_of_the_grader_leaves_one_exercise_open_and_the_class_is_graded(self):
        with mock.patch("grading.grade.not_taken", side_effect=KeyError("peak")):
            self.assertEqual(self.grade(), 1)
        self.assertEqual(self.statuses("s2"), ["error", "correct"])
        self.assertEqual(self.report("s2")["exercises"][0]["points"], None)
        self.assertRegex(
            self.out, r"not decided: s2 turn: the grader itself failed, please report it: KeyError: 'peak' \("
        )
        self.assertEqual(self.grade("--resume"), 0, self.err)
        self.assertEqual(self.statuses("s2"), ["incorrect", "correct"])

    def test_circles_that_cannot_be_looked_for_are_the_instructors_to_see(self):
        self.put("in/s1/code/rings.py", RINGS.replace(RIGHT, f"at = steps\n    {RIGHT}"))
        with mock.patch("grading.grade.called", side_effect=RecursionError("deep")):
            self.assertEqual(self.grade("--only", "s1"), 0, self.err)
        whats = {each["what"].partition(" (")[0] for each in self.report("s1")["by_hand"]}
        fault = "the grader itself failed, please report it: RecursionError: deep"
        self.assertEqual(whats, {f"no circle was looked for: {fault}"})


class TestRoster(Grading):
    def test_without_ids_the_email_address_is_taken_and_that_is_said(self):
        self.put("roster.csv", "kid,name,email\n1,Anna Lee,s1@x.org\n")
        (self.root / "in/s1").rename(self.root / "in/s1@x.org")
        self.assertEqual(self.grade("--only", "s1@x.org"), 0, self.err)
        self.assertIn("roster.csv: no column holds an id: that of 'email' is taken\n", self.err)
        self.put("roster.csv", "id,name,email\n1,Anna Lee,s1@x.org\n")
        self.assertEqual(self.grade("--only", "1", "--resume"), 0, self.err)
        self.assertNotIn("no column", self.err)


class TestBadInput(Grading):
    def test_errors_name_the_value(self):
        for options, message in (
            (["--only", "zz"], "--only 'zz'"),
            (["--exercise", "zz"], "no exercise 'zz'"),
            (["--jobs", "0"], "--jobs 0"),
            (["--test-seconds", "-1"], "--test-seconds -1"),
        ):
            self.assertEqual(self.grade(*options), 2)
            self.assertIn(message, self.err)

    def test_a_lesson_without_exercises(self):
        self.assertEqual(self.course("grade", "2", str(self.root / "in"), "--out", str(self.root / "o")), 2)


if __name__ == "__main__":
    unittest.main()
