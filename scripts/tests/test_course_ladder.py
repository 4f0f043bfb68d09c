import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fake_course import FakeCourse

COURSE = Path(__file__).resolve().parents[1] / "course.py"


class TestLadder(FakeCourse):
    def course(self, *args) -> subprocess.CompletedProcess:
        command = [sys.executable, str(COURSE), *map(str, args)]
        return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=120)

    def test_every_argument_reaches_the_tool_of_lesson_81(self):
        self.put("phases/19-things/81-train/code/helper_81.py", "NAME = 'helper'")
        tool = "import sys, helper_81\nprint(helper_81.NAME, sys.argv[1:])\nsys.exit(4)"
        self.put("phases/19-things/81-train/code/ladder.py", tool)
        for given, passed in [
            ([], []),
            (["--quick", "--json"], ["--quick", "--json"]),
            (["--tied", "--processes"], ["--processes", "--tied"]),
            (["--dtype", "float64", "--quick"], ["--quick", "--dtype=float64"]),
            (["--only", "dp2 m4", "--only", "tp2", "--steps", "3"], ["--only=dp2 m4", "--only=tp2", "--steps=3"]),
        ]:
            result = self.course("--root", self.root, "ladder", *given)
            self.assertEqual((result.returncode, result.stdout.strip()), (4, f"helper {passed}"), result.stderr)

    def test_a_course_without_the_lesson(self):
        result = self.course("--root", self.root, "ladder")
        self.assertEqual(result.returncode, 2)
        self.assertIn("81", result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_the_real_ladder(self):
        result = self.course("ladder", "--only", "dp2 zero2", "--only", "m4", "--steps", "2", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rungs = json.loads(result.stdout)
        self.assertEqual([rung["plan"] for rung in rungs], ["dp2 pp1 tp1 zero2 m1", "dp1 pp1 tp1 zero0 m4"])
        self.assertTrue(all(rung["sent"] == rung["sent_predicted"] for rung in rungs))
        refused = self.course("ladder", "--only", "tp3")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("cannot be shared by 3", refused.stderr)


if __name__ == "__main__":
    unittest.main()
