"""What all demonstrations share: flags, tables, a verdict that must be earned; and fair timing."""

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo
import sidebyside

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}


def printed(call, *args, **options):
    """(what the call printed, what it returned)"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        result = call(*args, **options)
    return out.getvalue(), result


class TestFlags(unittest.TestCase):
    def parse(self, *argv: str) -> argparse.Namespace:
        return demo.parse(demo.parser("what it shows"), 80, list(argv))

    def test_defaults(self):
        args = self.parse()
        self.assertEqual(
            vars(args), {"world_size": 4, "backend": "gloo", "out": Path("outputs/80"), "seed": 7, "bench": False}
        )

    def test_values(self):
        args = self.parse("--world-size", "2", "--backend", "nccl", "--out", "x", "--seed", "1", "--bench")
        self.assertEqual(vars(args), {"world_size": 2, "backend": "nccl", "out": Path("x"), "seed": 1, "bench": True})

    def test_bad_values_end_the_program_with_a_reason(self):
        for value in ("0", "-1", "two", "1.5", ""):
            with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
                self.parse("--world-size", value)
            self.assertIn(f"expected a whole number of at least 1, got {value!r}", err.getvalue())

    def test_a_seed_is_one_that_every_generator_takes(self):
        for value in ("-1", "2147483648", "99999999999999999999", "1.5", "x", ""):
            with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
                self.parse("--seed", value)
            self.assertIn("expected a whole number from 0 to 2147483647", err.getvalue())
        self.assertEqual(self.parse("--seed", "2147483647").seed, 2147483647)

    def test_an_output_folder_that_cannot_be_made(self):
        with tempfile.NamedTemporaryFile() as file:
            args = self.parse("--out", str(Path(file.name, "below")))
            with self.assertRaisesRegex(SystemExit, "--out .*below: cannot be made"):
                demo.out_dir(args)

    def test_torchrun_sets_the_world_size_but_a_stray_variable_does_not(self):
        with mock.patch.dict(os.environ, TORCHRUN):
            self.assertEqual(self.parse().world_size, 3)
        with mock.patch.dict(os.environ, WORLD_SIZE="3"):
            self.assertEqual(self.parse().world_size, 4)

    def test_a_bench_runs_on_2_ranks_unless_told_otherwise(self):
        self.assertEqual(self.parse("--bench").world_size, 2)
        self.assertEqual(self.parse("--bench", "--world-size", "3").world_size, 3)

    def test_the_output_folder_is_made_when_it_is_needed(self):
        with tempfile.TemporaryDirectory() as folder:
            args = self.parse("--out", str(Path(folder, "a", "b")))
            self.assertFalse(args.out.exists())
            self.assertTrue(demo.out_dir(args).is_dir())
            self.assertEqual(demo.out_dir(args), args.out)


class TestTable(unittest.TestCase):
    def test_columns_are_aligned_numbers_to_the_right(self):
        text, _ = printed(demo.table, ["name", "bytes", "loss"], [["a", 1234, 0.5], ["longer", 7, 12.0]], title="Sizes")
        self.assertEqual(
            text.splitlines(),
            [
                "",
                "Sizes",
                "name    bytes     loss",
                "------  -----  -------",
                "a       1,234   0.5000",
                "longer      7  12.0000",
            ],
        )

    def test_cells(self):
        cells = [demo._cell(value) for value in (True, 1e-9, 123456.0, 0.0, 1000000, None, float("nan"))]
        self.assertEqual(cells, ["True", "1e-09", "1.235e+05", "0", "1,000,000", "None", "nan"])

    def test_a_row_of_another_length_is_refused(self):
        with self.assertRaises(ValueError):
            printed(demo.table, ["a", "b"], [[1]])

    def test_only_rank_0_prints(self):
        with mock.patch.dict(os.environ, TORCHRUN):
            self.assertEqual(printed(demo.say, "hello")[0], "")
            self.assertEqual(printed(demo.table, ["a"], [[1]])[0], "")
        with mock.patch.dict(os.environ, TORCHRUN | {"RANK": "0"}):
            self.assertEqual(printed(demo.say, "hello")[0], "hello\n")
        with mock.patch.dict(os.environ, RANK="1"):  # a stray variable
            self.assertEqual(printed(demo.say, "hello")[0], "hello\n")


class TestClaims(unittest.TestCase):
    def verdict(self, *checks):
        claims = demo.Claims()
        lines = [printed(claims.check, *check)[0].strip() for check in checks]
        text, code = printed(claims.verdict, "LESSON 99")
        return lines, text.strip(), code

    def test_all_hold(self):
        lines, text, code = self.verdict(("a", True), ("b", 1, "3 = 3"))
        self.assertEqual((lines, text, code), (["ok    a", "ok    b: 3 = 3"], "LESSON 99 -- 2 of 2 claims hold", 0))

    def test_one_fails(self):
        lines, text, code = self.verdict(("a", True), ("b", False, "3 is not 4"))
        self.assertEqual(lines[1], "FAIL  b: 3 is not 4")
        self.assertEqual((text, code), ("LESSON 99 -- 1 of 2 claims hold", 1))

    def test_nothing_checked_is_no_success(self):
        self.assertEqual(self.verdict()[1:], ("LESSON 99 -- 0 of 0 claims hold", 1))

    def test_check_returns_what_it_was_told(self):
        self.assertEqual([printed(demo.Claims().check, "a", holds)[1] for holds in (True, False)], [True, False])


class TestSideBySide(unittest.TestCase):
    def test_a_ratio_above_1_means_that_the_first_is_faster(self):
        ours, theirs = sidebyside.compare({"ours": lambda: 1.0, "theirs": lambda: 2.0}, pairs=6)
        self.assertEqual(ours, sidebyside.Row("ours", 1.0, 1.0, 1.0, 1.0))
        self.assertEqual(theirs, sidebyside.Row("theirs", 2.0, 2.0, 2.0, 2.0))

    def test_contenders_take_turns_and_no_one_is_always_second(self):
        calls = []
        contenders = {name: lambda name=name: calls.append(name) or 1.0 for name in "abc"}
        sidebyside.compare(contenders, pairs=6, warmup=1)
        self.assertEqual(len(calls), 21)
        self.assertEqual({"".join(calls[i : i + 3]) for i in range(0, 21, 3)}, {"abc", "cba"})

    def test_warm_up_is_not_counted(self):
        times = itertools.chain([100.0], itertools.repeat(1.0))
        self.assertEqual(sidebyside.compare({"ours": lambda: next(times)}, pairs=6)[0].seconds, 1.0)

    def test_a_call_that_returns_nothing_is_timed(self):
        clock = itertools.count()
        with mock.patch.object(sidebyside.time, "perf_counter", lambda: next(clock)):
            self.assertEqual(sidebyside.compare({"ours": lambda: None}, pairs=6)[0].seconds, 1)

    def test_a_call_is_as_slow_as_its_slowest_rank(self):
        comm = mock.Mock()
        comm.device.type = "cpu"
        comm.agree.side_effect = lambda own: [own, 0.5]  # rank 1 took half a second a call
        clock = itertools.count()
        with mock.patch.object(sidebyside.time, "perf_counter", lambda: next(clock)):
            self.assertEqual(sidebyside.slowest(lambda: None, comm), 1.0)
            self.assertEqual(sidebyside.slowest(lambda: None, comm, repeats=4), 0.5)

    def test_the_interval_holds_the_median_with_95_percent(self):
        for pairs, dropped in ((6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (25, 7)):
            row = sidebyside.summary("x", [float(i) for i in range(pairs)], [1.0] * pairs)
            self.assertEqual((row.low, row.high), (dropped, pairs - 1 - dropped), pairs)
            self.assertEqual(row.ratio, statistics.median(range(pairs)))

    def test_too_few_pairs(self):
        with self.assertRaisesRegex(ValueError, "needs 6 pairs or more, got 5"):
            sidebyside.compare({"ours": lambda: 1.0}, pairs=5)


if __name__ == "__main__":
    unittest.main()
