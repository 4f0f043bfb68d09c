"""Tests in a process of their own: each way in which they can end, and nothing left behind."""

import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from textwrap import dedent

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from exercises.judge import KEPT, failed_tests, judge

CASE = "import os, sys, time, subprocess, unittest\nclass TestIt(unittest.TestCase):\n"


class TestJudge(unittest.TestCase):
    def judged(self, body: str, *, deadline: float = 120.0, tests=("test_it",), failfast: bool = True):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        text = CASE + "".join(f"    {line}\n" for line in dedent(body).splitlines())
        (self.folder / "test_it.py").write_text(text, encoding="utf-8")
        return judge(self.folder, tests, deadline, failfast)

    def assert_ends(self, pid: int) -> None:
        """A killed process is gone at once, but not at the same instant."""
        limit = time.monotonic() + 60
        while alive(pid):
            self.assertLess(time.monotonic(), limit, f"process {pid} was left behind")
            time.sleep(0.01)

    def test_passed(self):
        verdict = self.judged("def test_a(self): pass")
        self.assertEqual((verdict.status, verdict.message), ("passed", ""))

    def test_the_first_failure_with_its_message_alone(self):
        verdict = self.judged(
            """
            def test_a(self): self.assertEqual([1, 2], [1, 3], "of rank 1")
            def test_b(self): 1 / 0
            """
        )
        self.assertEqual((verdict.status, verdict.test), ("failed", "test_a (test_it.TestIt.test_a)"))
        self.assertTrue(verdict.message.startswith("AssertionError: Lists differ: [1, 2] != [1, 3]"), verdict.message)
        self.assertIn("of rank 1", verdict.message)
        self.assertNotIn("Zero", verdict.output)

    def test_an_error_of_many_lines_is_cut(self):
        verdict = self.judged(r"def test_a(self): raise ValueError('x\n' * 100)")
        self.assertEqual(len(verdict.message.splitlines()), 12)

    def test_a_module_that_does_not_import_and_a_test_that_is_not_there(self):
        verdict = self.judged("import nothing_of_the_kind")
        self.assertEqual(verdict.status, "failed")
        self.assertIn("nothing_of_the_kind", verdict.message)
        verdict = self.judged("def test_a(self): pass", tests=["test_it.TestIt.test_b"])
        self.assertEqual(verdict.status, "failed")
        self.assertIn("test_b", verdict.message)

    def test_no_test_and_only_skipped_tests_have_not_passed(self):
        self.assertEqual(self.judged("x = 1").status, "failed")
        self.assertEqual(self.judged("def test_a(self): self.skipTest('why')").status, "skipped")
        self.assertEqual(self.judged("def test_a(self): os._exit(0)").status, "failed")

    @unittest.skipUnless(os.name == "posix", "process groups")
    def test_a_hang_names_the_line_and_leaves_no_process(self):
        verdict = self.judged(
            """
            def test_a(self):
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
                with open("child", "w") as file: print(child.pid, file=file, flush=True)
                time.sleep(1e6)
            """,
            deadline=10.0,
        )
        self.assertEqual(verdict.status, "timed out")
        self.assertIn("did not finish within 10 s", verdict.message)
        self.assertIn("in test_a", verdict.message)
        self.assert_ends(int((self.folder / "child").read_text()))

    @unittest.skipUnless(os.name == "posix", "process groups")
    def test_a_child_that_outlives_the_tests_is_ended(self):
        verdict = self.judged(
            """
            def test_a(self):
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
                with open("child", "w") as file: print(child.pid, file=file)
            """
        )
        self.assertEqual(verdict.status, "passed")
        self.assert_ends(int((self.folder / "child").read_text()))

    def test_a_flood_of_output_is_cut_in_the_middle(self):
        verdict = self.judged(
            """
            def test_a(self):
                for _ in range(40): print("x" * 50_000)
                self.fail("at the end")
            """
        )
        self.assertLess(len(verdict.output), KEPT + 100)
        self.assertEqual(verdict.message, "AssertionError: at the end")

    def test_which_tests_failed(self):
        verdict = self.judged(
            """
            def test_a(self): self.fail()
            def test_b(self): 1 / 0
            def test_c(self): pass
            @classmethod
            def tearDownClass(cls): raise ValueError
            """,
            tests=["test_it", "test_nothing"],
            failfast=False,
        )
        failed = {"test_it.TestIt.test_a", "test_it.TestIt.test_b", "test_it.TestIt", "test_nothing"}
        self.assertEqual(failed_tests(verdict.output), failed)
        old = f"{'=' * 70}\nFAIL: test_a (test_it.TestIt)\nIt says so.\n{'-' * 70}\nTraceback"  # Python 3.10's
        self.assertEqual(failed_tests(old), {"test_it.TestIt.test_a"})

    def test_no_input_and_bytes_that_are_no_text(self):
        verdict = self.judged(
            r"""
            def test_a(self):
                self.assertEqual(sys.stdin.read(), "")
                os.write(1, b"\xff\xfe\n")
                self.fail("so")
            """
        )
        self.assertEqual(verdict.message, "AssertionError: so")


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        pass
    if sys.platform == "linux":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    unittest.main()
