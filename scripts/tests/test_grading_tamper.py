"""Tricks that reach for the tests, or for those who write the results, are no right answers; looks are noted."""

import sys
import unittest
from pathlib import Path
from typing import ClassVar

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading.isolation import NONE
from grading_course import RIGHT, TESTS, GradedCourse

HELPER = "\n\ndef same(one, other):\n    assert one == other, (one, other)\n\n\nclass TestTurn"
FORGE = """
    write, names = recorder._write, ["test_by_any", "test_by_one", "test_on_another_machine"]
    for name in names:
        write("start", test=f"test_wheel.TestTurn.{name}")
        write("pass", test=f"test_wheel.TestTurn.{name}", skipped=name.endswith("machine"))
    write("finished")
    import os
    os._exit(0)"""


def lines(text: str) -> str:
    """As the body of `turn`: it is to be indented, but for the first line."""
    return text.strip().replace("RIGHT", RIGHT).replace("\n", "\n    ")


class Tricks(GradedCourse):
    def setUp(self):
        super().setUp()
        tests = TESTS.replace("\n\nclass TestTurn", HELPER, 1)
        tests = tests.replace("self.assertEqual(turn([1, 2, 3]), [2, 3, 1])", "same(turn([1, 2, 3]), [2, 3, 1])")
        self.put(f"{self.WHEELS}/tests/test_wheel.py", tests)


class TestTricks(Tricks):
    TESTS: ClassVar = "import sys\ntests = sys.modules['test_wheel']\n"
    FRAME: ClassVar = (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    frame = error.__traceback__.tb_frame\n"
        "while type(frame.f_locals.get({local!r})).__name__ != {name!r}:\n    frame = frame.f_back\n"
    )
    TRICKS: ClassVar = {
        "an assertion of a class of tests": (
            f"{TESTS}tests.same = tests.TestTurn.assertEqual = lambda *a, **k: None\nRIGHT",
            "TestTurn.assertEqual",
        ),
        "of its instance": (
            f"{TESTS}{FRAME.format(local='self', name='TestTurn')}frame.f_locals['self'].fail = lambda *a: None\nRIGHT",
            "TestTurn().fail",
        ),
        "a helper of the tests": (f"{TESTS}tests.same = lambda *a: None\nRIGHT", "test_wheel.same"),
        "the text of a helper": (
            f"{TESTS}tests.same.__code__ = (lambda *a: None).__code__\nRIGHT",
            "test_wheel.same",
        ),
        "the text of an assertion": (
            "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda *a, **k: None).__code__\nRIGHT",
            "unittest.case.TestCase.assertEqual",
        ),
        "what writes the results": (
            "import sys\nowner = sys.modules['grading.runner'].Recorder\nowner.addFailure = owner.addSuccess\nRIGHT",
            "grading.runner.Recorder.addFailure",
        ),
        "a method of one object that writes results": (
            f"{FRAME.format(local='result', name='Recorder')}frame.f_locals['result'].addFailure = print\nRIGHT",
            "Recorder().addFailure",
        ),
    }

    @unittest.skipUnless(sys.platform == "linux", "the sandbox needs Linux")
    def test_each_is_found_though_the_test_passes(self):
        verdicts = self.judge_all([lines(text) for text, _ in self.TRICKS.values()])
        for (what, (_, replaced)), verdict in zip(self.TRICKS.items(), verdicts, strict=True):
            with self.subTest(what):
                self.assertEqual(verdict.status, "incorrect")
                self.assertEqual(verdict.failure["kind"], "Tampered", verdict)
                self.assertIn(replaced, verdict.failure["message"])

    @unittest.skipUnless(sys.platform == "linux", "the sandbox needs Linux")
    def test_results_that_the_code_writes_itself(self):
        search = "import gc\nrecorder = next(each for each in gc.get_objects() if type(each).__name__ == 'Recorder')\n"
        frames = f"{self.FRAME.format(local='result', name='Recorder')}recorder = frame.f_locals['result']\n"
        searched, framed = self.judge_all([lines(text) + FORGE for text in (search, frames)])
        self.assertEqual((searched.status, framed.status), ("incorrect", "incorrect"))
        self.assertIn("gc.get_objects was called in", searched.failure["message"])
        self.assertIn("though not at the end of its own program", framed.reason)
        self.assertEqual([text.split(" in ")[0] for text in framed.noted], ["tb_frame"])

    def test_looks_are_noted_and_change_nothing(self):
        text = "import inspect, sys, logging, collections\nsys._getframe()\ninspect.currentframe()\n"
        text += "logging.getLogger('x').warning('y')\ncollections.namedtuple('P', 'a b')\n"
        text += "exec('import sys; sys._getframe()')\n"
        text += f"getattr((0 for _ in ()), '_'.join(('gi', 'frame')))\nsys.settrace(None)\n{RIGHT}"
        for isolation in (None, NONE):
            (verdict,) = self.judge_all([lines(text)], isolation)
            self.assertEqual(verdict.status, "correct", verdict)
            place = f"{self.WHEELS}/code/rings.py, turn"
            looks = [f"sys._getframe in {place}", "sys._getframe in <string>, <module>"]
            self.assertEqual(verdict.noted, [*looks, f"gi_frame in {place}", f"sys.settrace in {place}"])


class TestHonest(Tricks):
    def test_what_tests_may_do_with_themselves(self):
        honest = """
    LIMIT = 3
    known = None

    @classmethod
    def setUpClass(cls):
        cls.known = cls.more = [1, 2, 3]
        cls.LIMIT = 4

    def setUp(self):
        self.known, self.maxDiff = self.more, None
        Counted.alive += 1
        self.assertTrue(callable(self.run))

"""
        self.replace(
            f"{self.WHEELS}/tests/test_wheel.py",
            "class TestTurn(unittest.TestCase):\n",
            f"class TestTurn(unittest.TestCase):{honest}",
        )
        counted = "class Counted:\n    alive = 0\n\n\nclass TestTurn("
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", "class TestTurn(", counted)
        (verdict,) = self.judge_all(["return [*ring[steps:], *ring[:steps]]"])
        self.assertEqual((verdict.status, verdict.noted), ("correct", []), verdict)


if __name__ == "__main__":
    unittest.main()
