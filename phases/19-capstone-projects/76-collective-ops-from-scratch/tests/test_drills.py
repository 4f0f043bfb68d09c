"""Failure drills: each shows the failure it promises, with an exit code that is not 0, and leaves nothing behind."""

import contextlib
import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import drills
from ranks import RankError

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
SECONDS = 120  # only a hang takes that long


@dataclasses.dataclass
class Ran:
    """What a drill has left: its exit code, what it printed, and files and processes that should not be there."""

    code: int
    out: str
    err: str
    files: list
    processes: list


def run_drill(*argv: str) -> Ran:
    """Run main.py as a process with a folder of its own for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, MAIN, *argv],
            env=os.environ | {"TMPDIR": folder, "TEMP": folder, "TMP": folder, "DRILL_TEST": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        return Ran(process.returncode, out, err, os.listdir(folder), processes_with(f"DRILL_TEST={folder}"))


def processes_with(variable: str) -> list[str]:
    """Find processes by a variable of their environment, which a child inherits whatever group it is in (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in entry.read_bytes().split(b"\0"):
                found.append(entry.parent.name)
    return found


class TestDrills(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with ThreadPoolExecutor(2) as pool:
            running = {name: pool.submit(run_drill, "--drill", name) for name in drills.DRILLS}
        cls.ran = {name: each.result() for name, each in running.items()}

    def assert_report(self, name: str, *parts: str) -> Ran:
        ran = self.ran[name]
        self.assertEqual(ran.code, drills.FAILED, ran)
        for part in parts:
            self.assertRegex(ran.err, part)
        return ran

    def test_each_ends_with_exit_code_1_and_claims_no_success(self):
        for name, ran in self.ran.items():
            with self.subTest(drill=name):
                self.assertEqual(ran.code, 1, ran)
                self.assertNotRegex(ran.out, r"(?i)\bok\b|claims hold|verified|success|passed")
                self.assertNotIn("this is not the failure", ran.err)

    def test_each_leaves_no_process_and_no_file(self):
        for name, ran in self.ran.items():
            with self.subTest(drill=name):
                self.assertEqual((ran.files, ran.processes), ([], []))

    def test_each_says_first_what_happens_and_at_the_end_how_to_read_it(self):
        for name, ran in self.ran.items():
            with self.subTest(drill=name):
                lines = ran.out.splitlines()
                self.assertTrue(lines[0].startswith(f"drill {name}, 4 ranks: "), lines)
                self.assertTrue(lines[1].startswith("look for: "), lines)
                self.assertEqual([line.split(":")[0].strip() for line in lines[-3:]], ["cause", "where", "victims"])
                self.assertNotIn("{", ran.out)

    def test_the_report_has_no_frame_of_the_launcher(self):
        for name, ran in self.ran.items():
            with self.subTest(drill=name):
                for file in ("ranks.py", "rank_process.py", "main.py"):
                    self.assertNotIn(f'{os.sep}{file}"', ran.err)

    @unittest.skipUnless(hasattr(signal, "SIGKILL"), "needs SIGKILL")
    def test_kill(self):
        ran = self.assert_report(
            "kill", r"^ranks.RankError: rank 3 was killed by SIGKILL\nit was after communication 2"
        )
        self.assertNotIn("Traceback", ran.err)
        self.assertIn("cause:   rank 3: ended from outside by signal 9 (a shell shows 137)", ran.out)
        self.assertIn("victims: ranks 0, 1, 2", ran.out)

    def test_stall(self):
        ran = self.assert_report(
            "stall",
            r"^ranks.RankError: rank 3 stalled while rank [012] waited in communication 3 \(all_reduce\)",
            r"(?s)line \d+ in wait\n.*drills.py\", line \d+ in stalled\n.*drills.py\", line \d+ in train\n",
        )
        self.assertIn("cause:   rank 3: it still ran", ran.out)

    def test_raise(self):
        ran = self.assert_report(
            "raise",
            r"^ranks.RankError: rank 3 raised KeyError: 2\nit was after communication 2 \(all_reduce\)\n",
            r"(?s)Traceback.*in train\n.*in raised\n    return gradient \* len\(labels\[2\]\)\n.*KeyError: 2",
        )
        self.assertIn("cause:   rank 3: it raised KeyError: 2", ran.out)
        self.assertNotIn("gloo", ran.err)

    def test_mismatch(self):
        values = {
            "mismatch": 'dtype: rank 0, 1, 2 has "float32"; rank 3 has "float64"',
            "mismatch-shape": "shape: rank 0, 1, 2 has [4]; rank 3 has [3]",
        }
        for name, words in values.items():
            with self.subTest(drill=name):
                error = f"ValueError: ranks disagree on a collective: {words}"
                ran = self.assert_report(name, rf"RankError: rank [0-3] raised {re.escape(error)}")
                said = re.findall(r"^\[rank [0-3]\] (\w+: .*)$", ran.err, re.M)  # a slow rank may be ended before it
                self.assertLessEqual(set(said), {error})
                self.assertIn("victims: none: every rank raised the same error", ran.out)

    def test_deadlock(self):
        ran = self.assert_report("deadlock", r"rank \d raised mesh.MeshTimeout: rank \d waited for a message")
        circle = re.search(r"^deadlock: rank (\d(?: waited for rank \d)+)$", ran.err, re.M)[1].split(
            " waited for rank "
        )
        self.assertEqual([(int(a) + 1) % 4 for a in circle[:-1]], [int(b) for b in circle[1:]])
        self.assertEqual((len(circle), circle[0]), (5, circle[-1]))
        self.assertIn("cause:   no rank alone: a circle of waits", ran.out)


class TestArguments(unittest.TestCase):
    def test_one_rank_and_unknown_names_are_refused_by_the_parser(self):
        for argv, words in (
            (("--drill", "kill", "--world-size", "1"), "--drill needs at least 2 ranks, got --world-size 1"),
            (("--drill", "explode"), "invalid choice: 'explode' (choose from"),
        ):
            ran = run_drill(*argv)
            self.assertEqual((ran.code, ran.out), (2, ""), ran)
            self.assertIn(words, ran.err)

    def test_the_parser_knows_the_drills_of_the_table(self):
        self.assertEqual(re.search("--drill {(.*?)}", run_drill("--help").out)[1].split(","), [*drills.DRILLS])


def nothing(gradient):
    return gradient


class TestWrongDrills(unittest.TestCase):
    """A drill that does not show what it promises says so, with another exit code: its own check can fail."""

    def in_process(self, name: str, **changes) -> tuple[int, str, str]:
        table = drills.DRILLS | {name: dataclasses.replace(drills.DRILLS[name], **changes)}
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(drills, "DRILLS", table),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            return drills.drill(name, 2), out.getvalue(), err.getvalue()

    def test_a_run_that_does_not_fail(self):
        code, out, err = self.in_process("raise", fault=nothing)
        self.assertEqual((code, err), (3, "drill raise: the run ended without a failure\n"))
        self.assertNotIn("how to read this", out)

    def test_another_failure(self):
        code, _, err = self.in_process("kill", fault=drills.raised)
        self.assertEqual(code, 3)
        self.assertIn("RankError: rank 1 raised KeyError: 2", err)  # the report is shown all the same
        self.assertIn("this is not the failure to be shown: exit code 1, not -9; the reason does not match", err)

    def test_each_field_is_compared(self):
        drill = drills.DRILLS["raise"]
        right = {"rank": 1, "exitcode": 1, "reason": "raised KeyError: 2", "collective": drill.collective}
        self.assertEqual(drills.differences(drill, RankError(**right), 2), [])
        for field, value, words in (
            ("rank", 0, "rank 0 is blamed, not rank 1"),
            ("exitcode", None, "exit code None, not 1"),
            ("reason", "raised KeyError: 3", "the reason does not match '^raised KeyError: 2$'"),
            ("collective", "in communication 1 (x)", "it was in communication 1 (x), not after communication 2"),
        ):
            (found,) = drills.differences(drill, RankError(**right | {field: value}), 2)
            self.assertIn(words, found)

    def test_the_circle_must_close(self):
        drill = drills.DRILLS["deadlock"]
        for circle, count in (
            ("0 waited for rank 1 waited for rank 0", 0),
            ("0 waited for rank 1 waited for rank 2", 1),
        ):
            error = RankError(0, 1, f"raised x\ndeadlock: rank {circle}", drill.collective)
            self.assertEqual(len(drills.differences(drill, error, 3)), count)


if __name__ == "__main__":
    unittest.main()
