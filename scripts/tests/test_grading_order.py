"""In which order a class is graded: the lesson's own code once for each exercise, before any student's."""

import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from exercises.model import load_exercises
from grading.classrun import ClassRun
from grading.judge import Judge
from grading.submissions import read_class
from grading_course import LIMITS, RIGHT, RINGS, GradedCourse


class TestOrder(GradedCourse):
    def runs(self, students: int, jobs: int, until: str | None = None) -> list[tuple[str, str]]:
        """(exercise, own or a student's) of each run in the sandbox, in the order in which they began.

        Each student hands in other wrong answers, in a module that ends before the text `until`.
        """
        for number in range(students):
            text = RINGS.replace(RIGHT, f"return ring[steps + {number} :]").replace("fmod(distance", f"fmod({number}")
            self.put(f"in/s{number}/rings.py", text[: text.index(until)] if until else text)
        begun, lock = [], threading.Lock()
        perform = Judge._run

        def noted(judge, exercise, changed, *limits):
            with lock:
                begun.append((exercise.id, "student" if changed else "own"))
            return perform(judge, exercise, changed, *limits)

        of, exercises = read_class(self.root / "in", None), load_exercises(self.lesson)
        with Judge(self.graded, self.lesson, LIMITS) as judge, mock.patch.object(Judge, "_run", noted):
            ClassRun(judge, exercises, of, self.root / "out", {}, []).run(of.works, jobs, lambda *_: None)
        return begun

    def test_the_lessons_own_code_runs_first_and_once(self):
        for jobs in (1, 2):
            begun = self.runs(4, jobs)
            own = [run for run in begun if run[1] == "own"]
            self.assertEqual(sorted(own), [("roll", "own"), ("turn", "own")])
            self.assertEqual(len(begun), 2 + 4 * 2)
            self.assertNotIn("student", [kind for _, kind in begun[:2]], f"{jobs} at a time")

    def test_where_few_are_graded_what_nobody_has_attempted_is_not_run(self):
        self.assertEqual(self.runs(1, 1, until="class Wheel"), [("turn", "own"), ("turn", "student")])


if __name__ == "__main__":
    unittest.main()
