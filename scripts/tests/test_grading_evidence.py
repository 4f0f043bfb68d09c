"""What a report shows of a wrong answer: expected and observed, the place in the learner's own file."""

import json
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading.evidence import Cut, _around, collect
from grading.judge import Verdict
from grading.report import _sentence
from grading_course import RIGHT, RINGS, WRONG, Grading


class TestEvidence(Grading):
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

    def test_what_the_student_changed_elsewhere_is_not_taken_and_that_is_said(self):
        text = RINGS.replace(RIGHT, "return ring[steps % HOURS :] + ring[:1]").replace("HOURS = 12", "HOURS = 3")
        self.put("in/s1/code/rings.py", text.replace("fmod(distance, self.size)", "fmod(distance, 3)"))
        self.assertEqual(self.grade("--only", "s1"), 0, self.out)
        self.assertEqual(self.statuses("s1"), ["incorrect", "incorrect"])
        left = [item["evidence"]["not_taken"] for item in self.report("s1")["exercises"]]
        self.assertEqual(left, [["rings.HOURS"]] * 2)
        told = "- not taken: your changes in `rings.HOURS`. Each exercise is judged in the lesson's own code, "
        self.assertEqual(self.text("out/s1/report.md").count(told), 2)

    def test_half_a_surrogate_in_a_message_ends_nothing(self):
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, "raise ValueError('\u00d6 \\udc80')"))
        self.assertEqual(self.grade("--only", "s2"), 0, self.err)
        self.assertIn("\u00d6 \\udc80", self.text("out/s2/report.md"))
        self.assertIn("\u00d6 \udc80", self.report("s2")["exercises"][0]["evidence"]["observed"])


class TestLines(unittest.TestCase):
    def test_lines_are_counted_as_python_does(self):
        self.assertEqual(_around("a = 1\n\fb = '\x85\u2028'\nc = 3", 3)[-1], (3, "c = 3"))


class TestSentence(unittest.TestCase):
    def test_names_of_code_and_files_keep_their_first_letter(self):
        for text in (
            "barrier_only is no function here",
            "rings.py was not handed in",
            "take is no function here",
            "gpipe is defined in two branches",
        ):
            self.assertEqual(_sentence(text), text)
        self.assertEqual(_sentence("still as in the starter"), "Still as in the starter")


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

    def test_the_word_deadlock_alone_is_none(self):
        for message in ("unknown question 'why-deadlock'", "it waits for a deadlock that does not come"):
            self.assertEqual(self.evidence("ValueError", message).waiting, "")
        found = self.evidence("RankError", "rank 1 raised DeadlockError: nobody sends")
        self.assertEqual(found.waiting, "rank 1 raised DeadlockError: nobody sends")

    def test_a_list_of_differences_is_observed_with_its_lines(self):
        message = "Items in the first set but not the second:\n'x'\nItems in the second set but not the first:\n'y'"
        observed = self.evidence("AssertionError", message).observed
        self.assertEqual(observed, f"AssertionError: {' '.join(message.split())}")
        self.assertEqual(self.evidence("ValueError", "one\ntwo").observed, "ValueError: one")
        self.assertEqual(len(self.evidence("AssertionError", "word " * 999).observed), 416)

    def test_where_it_hung(self):
        verdict = Verdict(
            "incorrect", stacks='Thread 1:\n  File "/a/code/rings.py", line 2 in turn\n  File "u", line 3 in f'
        )
        found = collect(verdict, [self.CUT], ("rings.turn",))
        self.assertEqual(found.observed, "it was still in line 5 of s/rings.py")


if __name__ == "__main__":
    unittest.main()
