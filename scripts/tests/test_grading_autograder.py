"""The zip for Gradescope: the same bytes each time; unpacked somewhere, it grades."""

import json
import os
import shutil
import subprocess
import sys
import unittest
import zipfile
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import gradescope
from grading_course import RINGS, WRONG, Grading

SCRIPTS = Path(__file__).resolve().parents[1]


class TestAutograder(Grading):
    def setUp(self):
        super().setUp()
        ignored = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(SCRIPTS, self.root / "scripts", dirs_exist_ok=True, ignore=ignored)
        self.box = self.root / "box"

    def write(self, name: str = "a.zip") -> bytes:
        self.assertEqual(self.course("autograder", "1", str(self.root / name)), 0, self.err)
        return (self.root / name).read_bytes()

    def unpack(self) -> None:
        self.write()
        with zipfile.ZipFile(self.root / "a.zip") as archive:
            archive.extractall(self.box / "source")

    def grade(self, text: str) -> tuple[int, dict]:
        (self.box / "submission").mkdir(exist_ok=True)
        (self.box / "submission" / "rings.py").write_text(text)
        own = {"AUTOGRADER": str(self.box), "COURSE_PYTHON": sys.executable}
        script = ["bash", str(self.box / "source" / "run_autograder")]
        run = subprocess.run(script, env=os.environ | own, capture_output=True, text=True, timeout=300)
        results = json.loads((self.box / "results" / "results.json").read_text())
        gradescope.check_results(results)
        return run.returncode, results

    def test_the_same_bytes_and_never_over_another_file(self):
        self.assertEqual(self.write("a.zip"), self.write("b.zip"))
        self.assertEqual(self.course("autograder", "1", str(self.root / "a.zip")), 2)
        self.assertEqual(self.course("autograder", "1", str(self.root / "a.zip"), "--force"), 0)

    def test_what_is_in_it(self):
        self.write()
        with zipfile.ZipFile(self.root / "a.zip") as archive:
            modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        self.assertEqual((modes["setup.sh"], modes["run_autograder"]), (0o100755, 0o100755))
        self.assertIn(f"{self.WHEELS}/tests/test_wheel.py", modes)
        self.assertIn("scripts/course.py", modes)
        self.assertFalse([name for name in modes if name.startswith("in/") or "__pycache__" in name])

    @unittest.skipUnless(os.name == "posix", "Gradescope's machines run Linux")
    def test_it_grades(self):
        self.unpack()
        code, right = self.grade(RINGS.replace("ring[steps:] + ring[:steps]", "[*ring[steps:], *ring[:steps]]"))
        self.assertEqual((code, right["score"]), (0, 8))
        with mock.patch.dict(os.environ, {"AUTOGRADER": str(self.box)}):
            self.assertEqual(self.course("autograde", "1", "--json"), 0, self.err)
        self.assertEqual(json.loads(self.out)["score"], 8)
        code, wrong = self.grade(WRONG)
        self.assertEqual((code, wrong["score"]), (0, 5))
        self.assertEqual([test["status"] for test in wrong["tests"]], ["failed", "passed"])
        self.assertIn("[2, 3, 1]", wrong["tests"][0]["output"])
        tests = self.box / "source" / self.WHEELS / "tests" / "test_wheel.py"
        tests.write_text(tests.read_text().replace("Wheel(4).rest(6), 2", "Wheel(4).rest(6), 9"))
        code, undecided = self.grade(WRONG)
        self.assertEqual((code, undecided["score"]), (1, 0))
        self.assertIn("could not judge", undecided["output"])

    def test_elsewhere_the_inner_command_says_what_it_is_for(self):
        self.assertEqual(self.course("autograde", "1"), 2)
        self.assertIn("/autograder/submission", self.err)


if __name__ == "__main__":
    unittest.main()
