import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fake_course import FakeCourse

COURSE = Path(__file__).resolve().parents[1] / "course.py"


class TestMemory(FakeCourse):
    def course(self, *args) -> subprocess.CompletedProcess:
        command = [sys.executable, str(COURSE), *map(str, args)]
        return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=120)

    def test_every_argument_reaches_the_calculator_of_lesson_78(self):
        tool = "phases/19-things/78-zero/code/memory_calculator.py"
        self.put("phases/19-things/78-zero/code/helper_78.py", "NAME = 'helper'")
        self.put(tool, "import sys, helper_78\nprint(helper_78.NAME, sys.argv[1:])\nsys.exit(4)")
        for given, passed in [
            ([], []),
            (["--params", "7e9", "--ranks", "64"], ["--params=7e9", "--ranks=64"]),
            (["--dtype", "bf16", "--json"], ["--dtype=bf16", "--json"]),
            (["--params=-1"], ["--params=-1"]),
        ]:
            result = self.course("--root", self.root, "memory", *given)
            self.assertEqual((result.returncode, result.stdout.strip()), (4, f"helper {passed}"), result.stderr)

    def test_the_papers_example(self):
        """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 GB. Their stage 3 has a bf16 shard beside the master."""
        result = self.course("memory", "--params", "7.5B", "--ranks", "64", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        (case,) = json.loads(result.stdout)
        self.assertEqual((case["params"], case["ranks"], case["dtype"]), (7_500_000_000, 64, "bf16"))
        sums = [round(row["sum"] / 1e9, 1) for row in case["stages"]]
        self.assertEqual(sums, [120.0, 31.4, 16.6, round(7.5 * 14 / 64, 1)])

    def test_the_default_table(self):
        result = self.course("memory")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [line.split() for line in result.stdout.splitlines()]
        self.assertIn(["70B", "64", "1,120.0", "293.1", "155.3", "15.3"], rows)
        self.assertIn(["1T", "1,024", "16,000.0", "4,011.7", "2,013.7", "13.7"], rows)
        self.assertEqual(sum(row[0] in ("7B", "70B", "1T") for row in rows if row), 15)

    def test_fp32_parameters_are_their_own_masters(self):
        result = self.course("memory", "--params", "1000", "--ranks", "3", "--dtype", "fp32", "--json")
        stages = json.loads(result.stdout)[0]["stages"]
        self.assertEqual(
            stages[0], {"stage": "vanilla DDP"} | dict(parameters=4000, gradients=4000, optimizer=8000, sum=16000)
        )
        self.assertEqual(stages[3]["sum"], 16 * 334)

    def test_bad_input(self):
        for option in ("--params=-1", "--ranks=2.5", "--dtype=int8"):
            result = self.course("memory", option)
            self.assertEqual(result.returncode, 2)
            self.assertIn(option.split("=")[0], result.stderr)
            self.assertNotIn("Traceback", result.stderr)


if __name__ == "__main__":
    unittest.main()
