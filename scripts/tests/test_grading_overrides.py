"""Points that an instructor sets by hand."""

import csv
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading_course import Grading


class TestOverrides(Grading):
    def test_applied_and_shown(self):
        self.put("o.csv", "student,exercise,points,reason\ns2,turn,2.5,nearly\nAnna Lee,roll,0,copied\n")
        self.assertEqual(self.grade("--overrides", str(self.root / "o.csv")), 0)
        self.assertEqual((self.report("s1")["points"], self.report("s2")["points"]), (3, 7.5))
        self.assertIn("Points set by hand: 2.5 instead of 0. nearly", self.text("out/s2/report.md"))
        self.assertIn("✗*", self.text("out/class.md"))
        self.assertEqual(self.grade("--resume"), 0)
        self.assertEqual((self.report("s1")["points"], self.report("s2")["points"]), (8, 5))

    def test_as_a_spreadsheet_elsewhere_writes_it(self):
        self.put("o.csv", 'student;exercise;points;reason\ns2;turn;2,5;"nearly,\nI | think"\n')
        self.assertEqual(self.grade("--overrides", str(self.root / "o.csv"), "--only", "s2"), 0, self.err)
        self.assertEqual(self.report("s2")["points"], 7.5)
        self.assertIn("| 2.5 / 3 | 3 | set by hand: nearly, I / think |\n", self.text("out/s2/report.md"))

    def test_with_one_student_again_reports_and_tables_still_agree(self):
        self.put("o.csv", "student,exercise,points,reason\ns2,turn,2,nearly\n")
        self.assertEqual(self.grade("--overrides", str(self.root / "o.csv")), 0)
        self.assertEqual(self.grade("--resume", "--only", "s1"), 0)
        rows = list(csv.DictReader(self.text("out/class.csv").splitlines()))
        self.assertEqual((rows[1]["points"], self.report("s2")["points"]), ("5", 5))

    def test_faults_have_file_and_line(self):
        for line, message in (
            ("s9,turn,1,x", "no student"),
            ("s1,spin,1,x", "no exercise"),
            ("s1,turn,4,x", "a number from 0 to 3"),
            ("s1,turn,nan,x", "a number from 0 to 3"),
            ("s1,turn,-1,x", "a number from 0 to 3"),
            ("s1,turn,0_1,x", "a number from 0 to 3"),
            ("s1,turn,1,", "the reason is empty"),
            ("s1,turn,1,x\nAnna Lee,turn,2,y", "a second override"),
        ):
            self.put("o.csv", f"student,exercise,points,reason\n{line}\n")
            self.assertEqual(self.grade("--overrides", str(self.root / "o.csv")), 2)
            self.assertRegex(self.err, rf"o\.csv:{2 + line.count(chr(10))}: .*{message}")


if __name__ == "__main__":
    unittest.main()
