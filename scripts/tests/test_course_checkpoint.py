import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fake_course import FakeCourse

COURSE = Path(__file__).resolve().parents[1] / "course.py"


class TestCheckpoint(FakeCourse):
    def course(self, *args) -> subprocess.CompletedProcess:
        command = [sys.executable, str(COURSE), *map(str, args)]
        return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=120)

    def test_every_argument_reaches_the_tool_of_lesson_80(self):
        tool = "phases/19-things/80-checkpoint/code/checkpoint_tools.py"
        self.put("phases/19-things/80-checkpoint/code/helper_80.py", "NAME = 'helper'")
        self.put(tool, "import sys, helper_80\nprint(helper_80.NAME, sys.argv[1:])\nsys.exit(4)")
        for given, passed in [
            (["show", "D"], ["show", "D"]),
            (["verify", "D", "--fast", "--json"], ["verify", "D", "--json", "--fast"]),
            (["convert", "D", "--to", "O", "--step", "3"], ["convert", "D", "--to", "O", "--step", "3"]),
        ]:
            result = self.course("--root", self.root, "checkpoint", *given)
            self.assertEqual((result.returncode, result.stdout.strip()), (4, f"helper {passed}"), result.stderr)

    def test_a_course_without_the_lesson(self):
        result = self.course("--root", self.root, "checkpoint", "show", "D")
        self.assertEqual(result.returncode, 2)
        self.assertIn("80", result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_the_real_tool(self):
        with tempfile.TemporaryDirectory() as folder:
            result = self.course("checkpoint", "verify", folder, "--json")
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertIn("manifest.json: missing", json.loads(result.stderr)["error"])
        self.assertEqual(self.course("checkpoint", "burn", "D").returncode, 2)


if __name__ == "__main__":
    unittest.main()
