import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import subprocess
import tempfile
from unittest import mock

import comm
import arena
import bucket
import ddp
import ddp_bench
import demo
import torch
from ranks import run_ranks
from shared_comm import SharedComm

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
spec = importlib.util.spec_from_file_location("main_77", MAIN)
main_77 = importlib.util.module_from_spec(spec)
sys.modules["main_77"] = main_77
spec.loader.exec_module(main_77)
ORIGINAL = {name: getattr(main_77, name) for name in ("train", "watch", "accumulate")}
DEADLINE = 120.0


def run_main(*flags):
    """Run main.py's main() in this process; return (exit code, what it printed)."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["main.py", *flags]), contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(err):
            code = main_77.main()
    return code, out.getvalue() + err.getvalue()


# Plausible wrong versions. Each is put in place inside the ranks, so that it works however they are started.


def sum_instead_of_mean():
    average = comm.TorchComm.all_reduce
    comm.TorchComm.all_reduce = lambda self, x, op="sum", async_op=False: average(self, x, "sum", async_op)


def a_bucket_is_skipped():
    launch = bucket.Bucket.launch

    def skipping(self, channel):
        if self.slots[0].name == "layers.0.weight":
            self.work = comm.Work("nothing")
        else:
            launch(self, channel)

    bucket.Bucket.launch = skipping


def models_begin_as_rank_1s():
    sync = ddp.sync_module
    ddp.sync_module = lambda module, channel: sync(module, channel, src=channel.world_size - 1)


def models_are_not_synchronised():
    ddp.sync_module = lambda module, channel: None


def everything_is_sent_twice():
    launch = bucket.Bucket.launch

    def twice(self, channel):
        launch(self, channel)
        self.work.wait()
        launch(self, channel)

    bucket.Bucket.launch = twice


def buckets_wait_for_the_end():
    launch_full = ddp.Reducer._launch_full

    def late(self, everything=False):
        if everything:
            launch_full(self, everything)

    ddp.Reducer._launch_full = late


def no_sync_does_nothing():
    ddp.DistributedDataParallel.no_sync = contextlib.nullcontext


def broken(breakage, worker, *args):
    """Be a rank of the demonstration with a fault in it."""
    breakage()
    return ORIGINAL[worker](*args)


def in_the_heap(rank, world_size, heap):
    """Say whether the one bucket of the toy is in this rank's part of the arena."""
    wrapped = ddp.DistributedDataParallel(ddp_bench.mini_mlp(), 25, SharedComm(heap))
    (only,) = wrapped.reducer.buckets
    start = heap.heap(rank).data_ptr()
    return start <= only.memory.data_ptr() < start + heap.heap_bytes


class TestDemonstration(unittest.TestCase):
    def test_it_holds_for_every_number_of_ranks(self):
        for world_size in (1, 2, 3, 4):
            with self.subTest(world_size):
                code, text = run_main("--world-size", str(world_size), "--steps", "3")
                self.assertEqual(code, 0, text)
                self.assertIn(f"DDP on {world_size} ranks is the same training as in one process -- 9 of 9", text)
                self.assertEqual(text.count("ok  "), 9)

    def test_our_own_collectives_and_another_seed(self):
        code, text = run_main("--world-size", "2", "--collectives", "ours", "--seed", "11", "--steps", "2")
        self.assertEqual(code, 0, text)

    def test_from_another_folder_and_under_torchrun(self):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        for start in ([sys.executable], torchrun):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [*start, str(MAIN), "--steps", "2", "--world-size", "2"],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=DEADLINE,
                    check=False,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(done.stdout.count("9 of 9 claims hold"), 1)  # rank 0 alone speaks
                self.assertEqual(os.listdir(folder), [])


class TestWrongVersions(unittest.TestCase):
    """The demonstration must notice each of these: a FAIL row that says what is wrong, and exit code 1."""

    def assert_noticed(self, worker, breakage, *claims):
        replaced = {worker: functools.partial(broken, breakage, worker)}
        if worker == "train":  # the other two parts have no interest in it
            replaced |= {"check_overlap": mock.Mock(), "check_accumulation": mock.Mock()}
        with mock.patch.multiple(main_77, **replaced):
            code, text = run_main("--world-size", "2", "--steps", "2")
        self.assertEqual(code, 1, text)
        for claim in claims:
            self.assertIn(f"FAIL  {claim}", text)

    def test_sum_instead_of_mean(self):
        self.assert_noticed("train", sum_instead_of_mean, "gradients equal one process's", "one process with the whole")

    def test_a_bucket_is_skipped(self):
        claims = (
            "gradients equal one process's",
            "after every step all ranks hold the same bits",
            "one all-reduce a bucket",
        )
        self.assert_noticed("train", a_bucket_is_skipped, *claims)

    def test_wrong_source(self):
        self.assert_noticed("train", models_begin_as_rank_1s, "wrapping gave every rank rank 0's")

    def test_no_synchronisation_of_models(self):
        self.assert_noticed("train", models_are_not_synchronised, "wrapping gave every rank rank 0's")

    def test_twice_the_traffic(self):
        self.assert_noticed("train", everything_is_sent_twice, "one all-reduce a bucket", "their payload is")

    def test_no_overlap(self):
        self.assert_noticed("watch", buckets_wait_for_the_end, "the first all-reduce leaves before")

    def test_no_sync_that_synchronises(self):
        self.assert_noticed("accumulate", no_sync_does_nothing, "4 microbatches, 3 under no_sync")


class TestPublicNames(unittest.TestCase):
    def test_all(self):
        for name in main_77.__all__:
            self.assertTrue(hasattr(main_77, name), name)

    def test_run_ddp_and_the_reference_agree(self):
        for world_size in (1, 3):
            results = main_77.run_ddp(world_size, 6)
            losses, norm = main_77.reference_single_process(world_size, 6)
            self.assertEqual(sorted(results), list(range(world_size)))
            self.assertEqual(len({norm for _, norm in results.values()}), 1)  # bit for bit
            self.assertEqual([len(found) for found, _ in results.values()], [6] * world_size)
            torch.testing.assert_close(results[0][0], losses, rtol=1e-5, atol=0)
            self.assertAlmostEqual(results[0][1], norm, delta=1e-5 * norm)
            if world_size > 1:
                self.assertNotEqual(results[0][0], results[1][0])  # each rank's losses are its own

    def test_both_collectives_give_two_ranks_the_same_bits(self):
        self.assertEqual(main_77.run_ddp(2, 4), main_77.run_ddp(2, 4, collectives="ours"))


class TestBench(unittest.TestCase):
    def test_rows_and_claims(self):
        models = {"toy": (ddp_bench.mini_mlp, ddp_bench.rows_of, (4, 16), 6, 1)}
        out = io.StringIO()
        with mock.patch.multiple(ddp_bench, MODELS=models, TARGETS={}), contextlib.redirect_stdout(out):
            code = ddp_bench.bench(argparse.Namespace(world_size=2, backend="gloo"))
        text = out.getvalue()
        self.assertEqual(code, 0, text)
        self.assertIn("3 of 3 claims hold", text)
        shared = () if arena.why_not() else (ddp_bench.SHARED,)
        ours = (ddp_bench.OURS, ddp_bench.LATE, ddp_bench.SMALL)
        for row in (*shared, *ours, ddp_bench.DEFAULT, ddp_bench.TUNED, ddp_bench.NAIVE, ddp_bench.ALONE):
            self.assertIn(f"\n{row} ", text)

    def test_the_gpt_has_ten_million_parameters_and_takes_its_input(self):
        build, feed, shape, *_ = ddp_bench.MODELS["MiniGPT"]
        module = build()
        self.assertEqual(sum(p.numel() for p in module.parameters()), 10_540_160)
        self.assertEqual(module(feed((1, 8), 0)).shape, (1, 8, 1024))
        self.assertFalse(torch.equal(feed(shape, 0), feed(shape, 1)))

    @unittest.skipIf(arena.why_not(), arena.why_not())
    def test_gradients_live_in_shared_memory(self):
        models = {"toy": (ddp_bench.mini_mlp,)}
        heap = ddp_bench.heap_for(models, 2)
        self.assertEqual(run_ranks(in_the_heap, 2, heap, timeout=DEADLINE), [True, True])

    def verdict(self, fast=1.0, **changes):
        times = {ddp_bench.OURS: [1.0] * 9, ddp_bench.DEFAULT: [0.8] * 4 + [fast] * 5}
        found = {"times": times, "within": True, "equal": True, "checks": 0} | changes
        claims = demo.Claims()
        targets = {(ddp_bench.OURS, ddp_bench.DEFAULT): {"toy": 0.95}, (ddp_bench.SHARED, "x"): {"toy": 9}}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ddp_bench.report(claims, "title", "toy", [found, found], targets)
            return claims.verdict("x")

    def test_a_target_is_missed_when_the_whole_interval_is_below(self):
        self.assertEqual(self.verdict(fast=0.95), 0)
        self.assertEqual(self.verdict(fast=0.94), 1)

    def test_other_faults_count_too(self):
        for change in ({"within": False}, {"equal": False}, {"checks": 2}):
            self.assertEqual(self.verdict(**change), 1)

    def test_the_demonstration_leads_to_it(self):
        with mock.patch.object(main_77, "bench", return_value=5) as bench:
            self.assertEqual(run_main("--bench")[0], 5)
            self.assertEqual(bench.call_args[0][0].world_size, 2)


if __name__ == "__main__":
    unittest.main()
