"""The demonstration: what it exposes, prints and claims, and that a claim that does not hold shows in its exit code."""

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from runs_76 import CODE, main_76, run


class TestFlags(unittest.TestCase):
    def test_one_that_would_do_nothing_is_refused(self):
        for flags, words in {
            "--max-size 4096": "--max-size: not used by this lesson without another program",
            "--bench --seed 3": "--seed: not used by --bench",
            "--trace --max-size 64": "--max-size: not used by --trace",
            "--cluster --seed 1": "--seed: not used by --cluster",
            "--drill kill --seed 0": "--seed: not used by --drill",
            "--explain --transport queues": "--transport goes with --cost",
        }.items():
            with self.subTest(flags):
                code, text = run(*flags.split())
                self.assertEqual(code, 2)
                self.assertIn(words, text)

    def test_flags_that_do_not_go_together_are_refused(self):
        for argv, words in (
            (("--trace", "--cost"), "one at a time: --trace, --cost"),
            (("--cluster", "--explain"), "one at a time: --explain, --cluster"),
            (("--size", "5"), "--size goes with --explain or --cluster"),
            (("--explain", "--transport", "queues"), "--transport goes with --cost"),
        ):
            code, out = run(*argv)
            self.assertEqual(code, 2)
            self.assertIn(words, out)


class TestRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.code, cls.out = run("--world-size", "3")

    def test_all_claims_hold(self):
        self.assertEqual(self.code, 0, self.out)
        self.assertEqual(len(re.findall("^ok  ", self.out, re.M)), 6)
        self.assertNotIn("FAIL", self.out)
        self.assertIn("LESSON 76: COLLECTIVES FROM SCRATCH -- 6 of 6 claims hold", self.out)

    def test_it_shows_what_it_claims(self):
        self.assertIn("rank 1 has received [1.0, 2.0, 3.0]", self.out)
        self.assertRegex(self.out, r"bfloat16 +same bits +same bits +same bits +(same bits|within)")
        self.assertRegex(self.out, r"0-dim +same bits +same bits +same bits +-")
        self.assertIn("8  7000 = 7000, 14 = 14", self.out)
        self.assertIn("rank 0 waits for rank 1 (receive from rank 1), rank 1 waits for rank 0", self.out)
        self.assertIn("rank 2 was killed by", self.out)


class TestOptions(unittest.TestCase):
    def test_trace(self):
        with tempfile.TemporaryDirectory() as folder:
            code, out = run("--trace", "--out", folder)
            self.assertGreater((Path(folder) / "traffic.jsonl").stat().st_size, 10_000)
        self.assertEqual(code, 0, out)
        self.assertIn("halving                 6 = 6    1,792 = 1,792       1,024 = 1,024", out)
        rows = [line.split() for line in out.splitlines() if re.match(r" +\d ", line)]
        self.assertEqual(len(rows), 6)
        self.assertEqual(rows[0], ["1", "chunk", "1:", "0", "chunk", "2:", "1", "chunk", "3:", "2", "chunk", "0:", "3"])
        self.assertEqual(rows[3][3::3], ["0+1+2+3"] * 4)

    def test_nccl_and_torchrun_are_refused(self):
        code, out = run("--backend", "nccl")
        self.assertEqual((code, "compares with gloo" in out), (2, True))
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"):
            self.assertEqual(run()[0], 2)


class TestFailingClaims(unittest.TestCase):
    """Each claim can fail."""

    def failing(self, name: str, *args) -> bool:
        claims = main_76.demo.Claims()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            getattr(main_76, name)(claims, *args)
            return claims.verdict("x") == 1

    def test_a_message_that_differs(self):
        with mock.patch.object(main_76, "run_ranks", return_value=["", "rank 1 has received []"]):
            self.assertTrue(self.failing("first_program"))

    def test_a_result_that_differs(self):
        honest = main_76.verify_cases

        def one_wrong(n, cases):
            verdicts = honest(n, cases)
            return [*verdicts[:-1], dataclasses.replace(verdicts[-1], match=False)]

        with mock.patch.object(main_76, "verify_cases", one_wrong):
            self.assertTrue(self.failing("equals_gloo", 1, 7))

    def test_a_cost_that_differs(self):
        honest = main_76.predicted
        wrong = lambda op, n, numel: (honest(op, n, numel)[0] + 4 * (n == 8), honest(op, n, numel)[1])  # noqa: E731
        with mock.patch.object(main_76, "predicted", wrong):
            self.assertTrue(self.failing("costs"))

    def test_no_deadlock_or_death(self):
        with mock.patch.object(main_76.VirtualCluster, "run", return_value=None):
            self.assertTrue(self.failing("deadlock"))
        with mock.patch.object(main_76, "run_ranks", return_value=None):
            self.assertTrue(self.failing("killed", 2))


class TestModule(unittest.TestCase):
    def test_public_names(self):
        for name in main_76.__all__:
            self.assertTrue(hasattr(main_76, name), name)

    def test_ranks_that_import_the_program_again_do_not_run_it_again(self):
        run = subprocess.run(
            [sys.executable, CODE / "hello.py"],
            env=os.environ | {"RANKS_START_METHOD": "spawn"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(run.stdout, "rank 0 has sent\nrank 1 has received [1.0, 2.0, 3.0]\n", run.stderr)


if __name__ == "__main__":
    unittest.main()
