"""course grade from the command line: statuses, evidence, tables, overrides, going on after an interruption."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import course
import gradescope
from exercises.model import load_exercises
from exercises.surgery import stub
from grading.evidence import Cut, collect
from grading.judge import Verdict
from grading_course import RIGHT, RINGS, GradedCourse

ROSTER = "id,name\ns1,Anna Lee\ns2,Bo Dyk\ns3,Cy Ray\ns4,Di Fox\ns5,Ed Moe\n"
WRONG = "# my own file\n\n" + RINGS.replace(RIGHT, "shift = steps + 1\n    return ring[shift:] + ring[:shift]")


class Grading(GradedCourse):
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

    def test_what_was_not_attempted_is_in_the_table_alone(self):
        self.put("in/s3/code/rings.py", "")
        (self.root / "in/s3/code/rings.py").rename(self.root / "in/s3/code/other.py")
        self.grade("--only", "s3")
        text = self.text("out/s3/report.md")
        self.assertIn("| turn | not attempted | 0 / 3 |  | rings.py was not handed in |", text)
        self.assertNotIn("## ", text)

    def test_evidence_is_in_the_learners_own_file(self):
        self.grade("--only", "s2", "--json")
        (item, _) = json.loads(self.out)["students"][0]["exercises"]
        evidence = item["evidence"]
        line = WRONG[: WRONG.index("def turn")].count("\n") + 1
        self.assertEqual(evidence["file"], "s2/code/rings.py")
        self.assertEqual(evidence["line"], line)
        self.assertEqual(dict(evidence["lines"])[line], "def turn(ring, steps=1):")
        self.assertEqual(evidence["observed"], "[2, 3, 1]")
        self.assertEqual(evidence["expected"], "[1, 2, 3]   (self.assertEqual(turn([1, 2, 3], steps), expected))")
        self.assertEqual(evidence["test"], "test_wheel.TestTurn.test_by_any (steps=0)")
        text = self.text("out/s2/report.md")
        self.assertIn("--only s2 --exercise turn", text)
        self.assertIn(f">{line:5} def turn", text)

    def test_an_exception_has_the_line_that_raised_it(self):
        self.put("in/s2/code/rings.py", "# one\n" + RINGS.replace(RIGHT, "ring.x = 1"))
        self.grade("--only", "s2", "--exercise", "turn")
        evidence = self.report("s2")["exercises"][0]["evidence"]
        self.assertEqual(dict(evidence["lines"])[evidence["line"]], "    ring.x = 1")
        self.assertTrue(evidence["observed"].startswith("AttributeError: "))

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

    def test_what_the_student_changed_elsewhere_is_not_taken_and_that_is_said(self):
        text = RINGS.replace(RIGHT, "return ring[steps % HOURS :] + ring[:1]").replace("HOURS = 12", "HOURS = 3")
        self.put("in/s1/code/rings.py", text.replace("fmod(distance, self.size)", "fmod(distance, 3)"))
        self.assertEqual(self.grade("--only", "s1"), 0, self.out)
        self.assertEqual(self.statuses("s1"), ["incorrect", "incorrect"])
        reasons = [item["reason"] for item in self.report("s1")["exercises"]]
        self.assertEqual(reasons[0], "a test failed (with the lesson's own HOURS, not with yours)")
        self.assertEqual(reasons[1], "a test failed")

    def test_half_a_surrogate_in_a_message_ends_nothing(self):
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, "raise ValueError('\u00d6 \\udc80')"))
        self.assertEqual(self.grade("--only", "s2"), 0, self.err)
        self.assertIn("\u00d6 \\udc80", self.text("out/s2/report.md"))
        self.assertIn("\u00d6 \udc80", self.report("s2")["exercises"][0]["evidence"]["observed"])

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


class TestInterruption(Grading):
    @unittest.skipUnless(os.name == "posix", "signals")
    def test_it_ends_at_once_and_can_go_on(self):
        for number, name in ((signal.SIGINT, "first"), (signal.SIGTERM, "second")):
            self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, f"while {number:d}:\n        pass"))
            script = str(Path(__file__).resolve().parents[1] / "course.py")
            words = [sys.executable, script, "--root", str(self.root), "grade", "1", str(self.root / "in")]
            words += ["--roster", str(self.root / "roster.csv"), "--out", str(self.root / name), "--jobs", "1"]
            run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            line = run.stdout.readline()
            self.assertIn("s1: 8 of 8", line)  # so that s2 is next, which would take until its deadline
            run.send_signal(number)
            out, err = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 130, err)
            self.assertEqual(err.splitlines()[-1], "course: interrupted; the same command with --resume goes on")
            self.assertNotIn("Traceback", err)
            self.assertNotIn("s2:", out)
            self.assertFalse((self.root / name / "s2" / "report.json").exists())
        self.put("in/s2/code/rings.py", WRONG)
        options = ["--roster", str(self.root / "roster.csv"), "--out", str(self.root / "first"), "--resume"]
        self.assertEqual(self.course("grade", "1", str(self.root / "in"), *options), 0)
        self.assertIn("s1: 8 of 8 (as before)", self.out)


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


class TestCollect(unittest.TestCase):
    """Evidence from texts that ranks write."""

    CUT = Cut("s/rings.py", "x = 1\n\n\ndef turn():\n    return 0\n", "def turn():\n    return 0\n", "code/rings.py")

    def evidence(self, kind: str, message: str, frames=(), stacks=""):
        failure = {"kind": kind, "message": message, "frames": list(frames)}
        return collect(Verdict("incorrect", test="t", failure=failure, stacks=stacks), [self.CUT], ("rings.turn",))

    def test_rank_and_place(self):
        found = self.evidence("RankError", "rank 2 raised ValueError", [["code/rings.py", 2, "turn"], ["t.py", 1, ""]])
        self.assertEqual((found.rank, found.file, found.line), (2, "s/rings.py", 5))

    def test_who_waited_for_whom(self):
        found = self.evidence("DeadlockError", "deadlock: rank 0 waits for rank 1, rank 1 waits for rank 0")
        self.assertIn("rank 0 waits for rank 1, rank 1 waits for rank 0", found.waiting)

    def test_where_it_hung(self):
        verdict = Verdict(
            "incorrect", stacks='Thread 1:\n  File "/a/code/rings.py", line 2 in turn\n  File "u", line 3 in f'
        )
        found = collect(verdict, [self.CUT], ("rings.turn",))
        self.assertEqual(found.observed, "it was still in line 5 of s/rings.py")


if __name__ == "__main__":
    unittest.main()
