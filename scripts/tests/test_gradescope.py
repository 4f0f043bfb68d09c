import copy
import json
import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import classroom50
import gradescope
from shapes import path_of

FULL = {
    "score": 4.5,
    "execution_time": 12.25,
    "output": "one of two",
    "output_format": "text",
    "test_output_format": "md",
    "test_name_format": "text",
    "visibility": "after_due_date",
    "stdout_visibility": "hidden",
    "extra_data": {"lesson": "76"},
    "tests": [
        {"score": 2, "max_score": 2, "status": "passed", "name": "ring", "name_format": "text", "number": "1.1"},
        {"score": 2.5, "max_score": 3, "output": "no", "output_format": "ansi", "tags": ["a"], "visibility": "visible"},
        {"score": 0, "max_score": 0, "extra_data": {}},
    ],
    "leaderboard": [{"name": "bytes", "value": 1024, "order": "asc"}, {"name": "rank", "value": "**"}],
}
CLASSROOM = {
    "schema": "classroom50/result/v1",
    "classroom": "dist-2027",
    "assignment": "76",
    "submission": "s1",
    "commit": "abc",
    "release": "",
    "review": "",
    "datetime": "2027-01-02T03:04:05Z",
    "score": 2,
    "max-score": 5,
    "tests": [
        {"test-name": "ring", "passed": True, "score": 2, "max-score": 2},
        {"test-name": "tree", "passed": False, "score": 0, "max-score": 3},
    ],
}
WRONG = object()  # stands for: delete the key


def changed(value: dict, place: tuple, new: object) -> dict:
    """A copy in which one place holds something else."""
    value = copy.deepcopy(value)
    *outer, last = place
    inner = value
    for part in outer:
        inner = inner[part]
    if new is WRONG:
        del inner[last]
    else:
        inner[last] = new
    return value


class TestGradescope(unittest.TestCase):
    def test_every_key_is_accepted(self):
        gradescope.check_results(FULL)
        self.assertEqual(set(FULL), set(gradescope.RESULT_RULES))
        self.assertEqual({key for item in FULL["tests"] for key in item}, set(gradescope.TEST_RULES))

    def test_the_writer_sums_and_checks(self):
        tests = [gradescope.test("ring", 2, 2, number="1"), gradescope.test("tree", 1.5, 3, "rank 1: 3, not 4")]
        value = gradescope.results(tests, output="seen", execution_time=3.5, visibility="visible")
        self.assertEqual(value["score"], 3.5)
        self.assertEqual([item["status"] for item in value["tests"]], ["passed", "failed"])
        self.assertEqual(json.loads(json.dumps(value, allow_nan=False)), value)
        self.assertEqual(gradescope.results([], score=0)["score"], 0)
        self.assertEqual(gradescope.results(tests, score=9)["score"], 9)  # overrides the sum

    def test_the_writer_refuses(self):
        for score, most in [(3, 2), (-1, 2), (math.nan, 2), (True, 1), ("1", 1)]:
            with self.assertRaisesRegex(ValueError, "'ring'"):
                gradescope.test("ring", score, most)
        with self.assertRaisesRegex(ValueError, r"\$\.colour: unknown key"):
            gradescope.results([], colour="red")
        with self.assertRaisesRegex(ValueError, r"\$\.tests\[0\]\.number: number is 1; a text"):
            gradescope.results([gradescope.test("ring", 1, 1, number=1)])
        with self.assertRaisesRegex(ValueError, r"\$\.tests\[0\]: an object is expected, not str"):
            gradescope.results(["ring"])

    def test_each_wrong_place_is_named(self):
        wrong = [
            (("score",), "4.5"),
            (("score",), True),
            (("score",), math.inf),
            (("execution_time",), -1),
            (("output",), None),
            (("output_format",), "markdown"),
            (("test_name_format",), 3),
            (("visibility",), "public"),
            (("stdout_visibility",), ""),
            (("extra_data",), []),
            (("tests",), {}),
            (("tests", 0), None),
            (("tests", 1, "score"), math.nan),
            (("tests", 0, "status"), "pass"),
            (("tests", 0, "name"), " "),
            (("tests", 0, "number"), 1.1),
            (("tests", 1, "tags"), ["a", 1]),
            (("tests", 2, "points"), 1),
            (("leaderboard", 0, "order"), "up"),
            (("leaderboard", 1, "value"), None),
        ]
        for place, new in wrong:
            with self.subTest(place=place, new=new):
                faults = gradescope.result_faults(changed(FULL, place, new))
                self.assertIn(path_of(place), [path_of(found) for found, _ in faults])
                with self.assertRaises(ValueError):
                    gradescope.check_results(changed(FULL, place, new))

    def test_a_score_is_needed_somewhere(self):
        tests_only = changed(FULL, ("score",), WRONG)
        gradescope.check_results(tests_only)
        for value in (changed(tests_only, ("tests", 1, "score"), WRONG), {}, {"tests": []}):
            with self.assertRaisesRegex(ValueError, "a score is missing"):
                gradescope.check_results(value)
        with self.assertRaisesRegex(ValueError, "an object is expected, not list"):
            gradescope.check_results([])


class TestClassroom50(unittest.TestCase):
    def test_the_writer_sums_and_checks(self):
        tests = [classroom50.test("ring", 2, 2), classroom50.test("tree", 0, 3)]
        value = classroom50.result("dist-2027", "76", tests, "2027-01-02T03:04:05Z", submission="s1", commit="abc")
        self.assertEqual(value, CLASSROOM)
        self.assertEqual(list(value), list(classroom50.RESULT_RULES))

    def test_the_writer_refuses(self):
        for bad in (["ring"], [classroom50.test("ring", 1.5, 2)], [classroom50.test("ring", 3, 2)]):
            with self.assertRaisesRegex(ValueError, r"\$\.tests\[0\]"):
                classroom50.result("c", "a", bad, "2027-01-02T03:04:05+01:00")
        with self.assertRaisesRegex(ValueError, r"\$\.datetime"):
            classroom50.result("c", "a", [], "2027-01-02T03:04:05")  # of which place?

    def test_each_wrong_place_is_named(self):
        classroom50.check_result(CLASSROOM)
        wrong = [
            (("schema",), "classroom50/result/v2"),
            (("classroom",), ""),
            (("commit",), None),
            (("datetime",), "yesterday"),
            (("datetime",), 20270102),
            (("score",), 2.0),
            (("score",), True),
            (("score",), 3),
            (("max-score",), 6),
            (("max_score",), 5),
            (("tests", 0, "passed"), 1),
            (("tests", 1, "score"), 4),
            (("tests", 1, "max-score"), "3"),
            (("tests", 1, "name"), "tree"),
        ]
        for place, new in wrong:
            with self.subTest(place=place, new=new):
                faults = classroom50.result_faults(changed(CLASSROOM, place, new))
                self.assertIn(path_of(place), [path_of(found) for found, _ in faults])
        for key in CLASSROOM:
            with self.assertRaisesRegex(ValueError, f"the key '{key}' is missing"):
                classroom50.check_result(changed(CLASSROOM, (key,), WRONG))
