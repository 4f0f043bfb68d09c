"""course grade goes on: after a change, after an interruption."""

import csv
import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading.judge import Judge
from grading_course import RIGHT, RINGS, WRONG, Grading
from interrupts import HEARING


class TestResume(Grading):
    def test_only_what_changed_is_run_again(self):
        self.assertEqual(self.grade(), 0)
        self.assertEqual(self.grade(), 2)
        self.assertIn("--resume goes on with it", self.err)
        self.put("in/s2/code/rings.py", RINGS)
        self.assertEqual(self.grade("--resume"), 0)
        again = [line for line in self.out.splitlines() if line.startswith("[") and "as before" not in line]
        self.assertEqual([line.split()[1] for line in again], ["s2:"])
        self.assertEqual(self.report("s2")["points"], 8)

    def test_where_nothing_is_left_to_do_nothing_is_run(self):
        self.assertEqual(self.grade("--jobs", "2"), 0)
        self.assertIn("lesson 01: 5 students to grade, 2 exercises, 2 at a time; first its tests are run", self.out)
        table = self.text("out/class.md")
        with mock.patch.object(Judge, "_run", side_effect=AssertionError("a run")):
            self.assertEqual(self.grade("--resume", "--jobs", "2"), 0, self.err)
            self.assertEqual(self.out.splitlines()[0], "0 students to grade (5 reports kept), 2 exercises")
            self.assertEqual(self.out.count("(as before)"), 5)
        self.assertEqual(self.text("out/class.md"), table)

    def test_what_was_not_decided_is_run_again(self):
        path = f"{self.WHEELS}/tests/test_wheel.py"
        self.replace(path, "Wheel(4).rest(6), 2", "Wheel(4).rest(6), 9")
        self.assertEqual(self.grade(), 1)
        self.replace(path, "Wheel(4).rest(6), 9", "Wheel(4).rest(6), 2")
        self.assertEqual(self.grade("--resume"), 0)
        self.assertEqual(self.report("s2")["points"], 5)

    def test_reports_on_another_lesson_are_not_replaced(self):
        self.put("out/s1/report.json", '{"lesson": "79-other"}')
        self.assertEqual(self.grade("--resume"), 2)
        self.assertRegex(self.err, r"s1.report\.json: a report on 79-other; a folder for reports on 01-wheels is")

    def test_a_half_written_report_is_run_again(self):
        self.put("out/s1/report.json", '{"key": 1')
        self.assertEqual(self.grade("--resume", "--only", "s1"), 0)
        self.assertEqual(self.report("s1")["points"], 8)

    def test_one_student_again_leaves_the_others_in_the_tables(self):
        self.assertEqual(self.grade(), 0)
        self.put("in/s2/code/rings.py", RINGS)
        self.assertEqual(self.grade("--resume", "--only", "s2"), 0)
        rows = list(csv.DictReader(self.text("out/class.csv").splitlines()))
        self.assertEqual([row["points"] for row in rows], ["8", "8", "0", "0", "0"])
        self.assertEqual(self.grade("--resume", "--exercise", "turn"), 2)
        self.assertIn("a report on turn, roll; it would be replaced by one on turn", self.err)

    def test_part_of_a_lesson_can_go_on(self):
        self.assertEqual(self.grade("--exercise", "turn", "--only", "s1"), 0, self.err)
        (self.root / "out" / "s1" / "kept").touch()
        self.assertEqual(self.grade("--exercise", "turn", "--resume"), 0, self.err)
        self.assertEqual([item["exercise"] for item in self.report("s2")["exercises"]], ["turn"])
        self.assertIn("4 students to grade (1 report kept), 1 exercise", self.out)
        before = self.text("out/s2/report.json")
        self.assertEqual(self.grade("--resume"), 2)
        self.assertIn("a report on turn; it would be replaced by one on turn, roll", self.err)
        self.assertEqual(self.text("out/s2/report.json"), before)


class TestInterruption(Grading):
    @unittest.skipUnless(os.name == "posix", "signals")
    def test_it_ends_at_once_and_can_go_on(self):
        for number, name in ((signal.SIGINT, "first"), (signal.SIGTERM, "second")):
            self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, f"while {number:d}:\n        pass"))
            script = str(Path(__file__).resolve().parents[1] / "course.py")
            words = [sys.executable, script, "--root", str(self.root), "grade", "1", str(self.root / "in")]
            words += ["--roster", str(self.root / "roster.csv"), "--out", str(self.root / name), "--jobs", "1"]
            run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **HEARING)
            self.assertIn("5 students to grade", run.stdout.readline())
            line = run.stdout.readline()
            self.assertIn("s1: 8 of 8", line)  # so that s2 is next, which would take until its deadline
            run.send_signal(number)
            out, err = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 130, err)
            self.assertEqual(err.splitlines()[-1], "course: interrupted; the same command with --resume goes on")
            self.assertNotIn("Traceback", err)
            self.assertNotIn("s2:", out)
            self.assertFalse((self.root / name / "s2" / "report.json").exists())
            table = self.text(f"{name}/class.md")
            self.assertIn("**Not finished: 1 of 5 so far.** `--resume` goes on.", table)
            self.assertIn("| Anna Lee | s1 | 8 / 8 |", table)
        self.put("in/s2/code/rings.py", WRONG)
        options = ["--roster", str(self.root / "roster.csv"), "--out", str(self.root / "first"), "--resume"]
        self.assertEqual(self.course("grade", "1", str(self.root / "in"), *options), 0)
        self.assertIn("s1: 8 of 8 (as before)", self.out)
        self.assertNotIn("Not finished", self.text("first/class.md"))


if __name__ == "__main__":
    unittest.main()
