import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import contextlib
import functools
import importlib.util
import io
import tempfile
from unittest import mock

import bucket
import ddp
import ddp_deeper
import ddp_experiments
import hooks
import notes
import timeline
import torch
import ways
from ddp_cases import Fails, ThreeLayers, data, virtual
from naive import flat_sync, naive_sync
from ranks import run_ranks
from torch import nn

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
spec = importlib.util.spec_from_file_location("main_77_more", MAIN)
main_77 = importlib.util.module_from_spec(spec)
sys.modules["main_77_more"] = main_77
spec.loader.exec_module(main_77)
ORIGINAL = {name: getattr(ddp_deeper, name) for name in ("train_unevenly", "spoil", "drifting", "compress")}
TINY = 1e-9  # megabytes: every parameter a bucket of its own


def run_main(*flags):
    """Run main.py's main() in this process; return (exit code, what it printed)."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", ["main.py", *flags]), contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(out):
            code = main_77.main()
    return code, out.getvalue()


class TestWrappedTwice(unittest.TestCase):
    def test_a_second_wrapper_is_refused_while_the_first_lives(self):
        def rank(comm):
            module = ThreeLayers()
            first = ddp.DistributedDataParallel(module, 25, comm)
            words = []
            for again in (module, first):
                try:
                    ddp.DistributedDataParallel(again, 25, comm)
                except ValueError as error:
                    words.append(str(error))
            del first, again
            ddp.DistributedDataParallel(module, 25, comm)
            return words

        for words in virtual(2, rank):
            self.assertEqual(len(words), 2)
            self.assertTrue(all("belongs to another wrapper" in each for each in words), words)


class TestFaultOfOneRank(unittest.TestCase):
    def test_every_rank_learns_of_it(self):
        def frozen(comm):
            return ddp.DistributedDataParallel(ThreeLayers().requires_grad_(comm.rank != 1), 25, comm)

        def unhooked(comm):
            return ddp.DistributedDataParallel(ThreeLayers(), 25, comm, hook=None if comm.rank == 1 else hooks.average)

        def rank(comm, build):
            try:
                build(comm)
            except ValueError as error:
                return str(error)

        for build in (frozen, unhooked):
            words = virtual(3, rank, build)
            self.assertEqual(len(set(words)), 1)
            self.assertIn("rank 1", words[0])


class TestAfterAnError(unittest.TestCase):
    def test_a_wrapper_whose_backward_failed_does_not_go_on(self):
        def rank(comm):
            module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            wrapped, x = ddp.DistributedDataParallel(module, TINY, comm), torch.ones(1, 3)
            try:
                module[1](Fails.apply(module[0](x))).sum().backward()
            except MemoryError:
                pass
            module.zero_grad()
            try:
                wrapped(x)
            except RuntimeError as error:
                return str(error)

        for words in virtual(2, rank):
            self.assertIn("an earlier backward ended with an error", words)

    def test_sync_grads_after_no_sync_alone(self):
        def rank(comm):
            module = ThreeLayers()
            wrapped = ddp.DistributedDataParallel(module, 25, comm)
            with wrapped.no_sync():
                wrapped(data(comm.rank)).square().mean().backward()
            wrapped.sync_grads()
            return comm.counters.calls["all_reduce"], [param.grad.clone() for param in module.parameters()]

        (calls, grads), (_, others) = virtual(2, rank)
        self.assertEqual(calls, 1)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(grads, others, strict=True)))

    def test_flags_are_written_anew_in_each_step(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = (nn.Linear(2, 2, bias=False) for _ in "ab")

            def forward(self, x, names):
                return sum(getattr(self, name)(x).sum() for name in names)

        def rank(comm):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                module = Two()
            wrapped = ddp.DistributedDataParallel(module, 25, comm)
            wrapped(torch.ones(1, 2), "a").backward()  # nobody uses b
            module.zero_grad()
            wrapped(torch.ones(1, 2) * (comm.rank + 1), "ab" if comm.rank == 0 else "a").backward()
            return module.b.weight.grad

        for grad in virtual(2, rank):
            self.assertEqual(grad.tolist(), [[0.5] * 2] * 2)


class TestDrift(unittest.TestCase):
    def test_a_barrier_alone_lets_ranks_drift_apart_from_the_first_step(self):
        for n in (2, 3, 4):
            results = virtual(n, ddp_experiments.drift, 5, ddp_experiments.barrier_only)
            for found in results:
                self.assertEqual(found, results[0])
                self.assertEqual(len(found), 5)
                self.assertGreater(min(found), 1e-3)

    def test_averaging_keeps_every_bit(self):
        for sync in (naive_sync, flat_sync):
            self.assertEqual(virtual(3, ddp_experiments.drift, 4, sync), [[0.0] * 4] * 3)

    def test_a_barrier_changes_no_gradient_and_is_no_payload(self):
        def rank(comm):
            module = ThreeLayers()
            module(data(comm.rank)).square().mean().backward()
            before = [p.grad.clone() for p in module.parameters()]
            ddp_experiments.barrier_only(module, comm)
            same = all(torch.equal(p.grad, old) for p, old in zip(module.parameters(), before, strict=True))
            return same, dict(comm.counters.calls), comm.counters.control_calls

        self.assertEqual(virtual(3, rank), [(True, {}, 1)] * 3)

    def test_the_distance_is_the_largest_of_all_ranks(self):
        def only_the_last_differs(module, comm):
            for p in module.parameters():
                p.grad.fill_(1.0 if comm.rank == comm.world_size - 1 else 0.0)

        for found in virtual(3, ddp_experiments.drift, 2, only_the_last_differs, 0.25):
            torch.testing.assert_close(found, [0.25, 0.5], rtol=1e-5, atol=0)


class TestCallsAStep(unittest.TestCase):
    def test_calls_are_buckets(self):
        def rank(comm, cap):
            wrapped = ddp.DistributedDataParallel(ThreeLayers(), cap, comm)
            calls = [ddp_experiments.calls_a_step(wrapped, data(comm.rank, step), comm.counters) for step in range(3)]
            return calls, len(wrapped.reducer.buckets)

        for cap, buckets in ((25, 1), (TINY, 6), (200 / 2**20, 3)):
            self.assertEqual(virtual(2, rank, cap), [([buckets] * 3, buckets)] * 2)


class TestShareOfSync(unittest.TestCase):
    """With a clock of our own: a forward takes a second a row, a backward two, an all-reduce three."""

    def share(self, comm, rows, steps=3):
        now = [0.0]

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                now[0] += len(x)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                now[0] += 2 * len(grad)
                return grad

        class Model(nn.Linear):
            def forward(self, x):
                return Slow.apply(super().forward(x))

        def slow_hook(comm, memory):
            now[0] += 3
            return hooks.average(comm, memory)

        wrapped = ddp.DistributedDataParallel(Model(5, 5), TINY, comm, hook=slow_hook)
        found = ddp_experiments.share_of_sync(wrapped, torch.ones(rows, 5), steps, lambda: now[0])
        return found, comm.counters.calls["all_reduce"], now[0]

    def test_share(self):
        for rows in (1, 16, 256):
            for found, calls, seconds in virtual(2, self.share, rows):
                self.assertEqual(found, 6 / (6 + 3 * rows))  # two buckets
                self.assertEqual(calls, 2 * 3)
                self.assertEqual(seconds, 3 * (6 + 3 * rows))


class TestTrace(unittest.TestCase):
    def test_communication_counts_overlapping_messages_once(self):
        trace = {"last": 5.0, "spans": [(1.0, 3.0), (2.0, 4.0), (2.5, 3.5), (4.5, 7.0), (8.0, 9.0)]}
        self.assertEqual(timeline.communication(trace), (6.5, 3.5))
        self.assertEqual(timeline.early(trace), 4)
        self.assertEqual(timeline.communication({"last": 1.0, "spans": [(2.0, 3.0)]}), (1.0, 0.0))

    def test_picture_and_claims(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(timeline, "STEPS", 1):
            code, text = run_main("--trace", "--world-size", "2", "--out", folder)
            self.assertEqual(code, 0, text)
            self.assertIn("8 of 8 claims hold", text)
            self.assertIn("naive                    48  12,636,160", text)
            self.assertEqual((Path(folder) / "timeline.png").read_bytes()[:4], b"\x89PNG")

    def test_spans_have_an_end_and_lie_in_the_step(self):
        for found in run_ranks(timeline.trace_way, 2, ways.OVERLAP, 1, timeout=60.0):
            (trace,) = found["traces"]
            self.assertLess(trace["forward"], 0)
            self.assertLess(trace["last"], trace["end"])
            self.assertEqual(len(trace["spans"]), found["calls"])
            for begin, end in trace["spans"]:
                self.assertTrue(0 < begin <= end)

    def test_nothing_hidden_is_no_share(self):
        self.assertEqual(timeline.shares_of({"forward": -1.0, "last": 2.0, "end": 3.0, "spans": []}), (0.0, 0.0))

    def test_not_on_gpus(self):
        for flag in ("--trace", "--deeper"):
            with self.assertRaises(SystemExit):
                run_main(flag, "--backend", "nccl")


class TestFlags(unittest.TestCase):
    def test_one_that_would_do_nothing_is_refused(self):
        for flags, words in {
            "--bucket-mb 5": "--bucket-mb: not used by this lesson without --bench",
            "--bench --steps 3": "--steps: not used by --bench without --size",
            "--bench --batch 4": "--batch: not used by --bench without --size",
            "--bench --size tiny --seed 3": "--seed: not used by --bench --size",
            "--trace --collectives ours": "--collectives: not used by --trace",
            "--deeper --steps 5 --seed 0": "--seed, --steps: not used by --deeper",
            "--size tiny": "--size goes with --bench",
        }.items():
            with self.subTest(flags), contextlib.redirect_stderr(io.StringIO()) as said:
                with mock.patch.object(sys, "argv", ["main.py", *flags.split()]), self.assertRaises(SystemExit) as end:
                    main_77.main()
                self.assertEqual(end.exception.code, 2)
                self.assertIn(words, said.getvalue())

    @unittest.skipIf(torch.cuda.is_available(), "there are GPUs")
    def test_without_gpus_nccl_is_refused_in_a_line(self):
        code, text = run_main("--backend", "nccl")
        self.assertEqual((code, text.count("\n")), (1, 1), text)
        self.assertTrue(text.startswith("stopped: "), text)


class TestMissingGradients(unittest.TestCase):
    def verdicts(self, world_size, name):
        true = ways.true_means(world_size)
        ranks = run_ranks(ways.missing_gradients, world_size, name, timeout=60.0)
        return [[timeline.same(found[layer], true[layer]) for found in ranks] for layer in ("a", "b", "idle")]

    def test_what_each_way_makes_of_them(self):
        self.assertEqual(self.verdicts(2, ways.NAIVE), [[False] * 2, [False] * 2, [True] * 2])
        self.assertEqual(self.verdicts(2, ways.FLAT), [[True] * 2, [True] * 2, [False] * 2])
        self.assertEqual(self.verdicts(2, ways.OVERLAP), [[True] * 2] * 3)


def counts_are_ignored():
    notes.check_weight = lambda weight: 1.0


def without_data_counts_as_zeros():
    def synchronise(self):
        self.reducer.armed = True
        self.reducer.synchronise()

    ddp.DistributedDataParallel.without_data = synchronise


def totals_are_not_divided_by():
    bucket.Bucket.mean_weight = lambda self: None


def nothing_is_checked():
    ddp.finite.check_buckets = lambda buckets: None


def everything_is_a_barrier():
    drift = ddp_deeper.drift
    ddp_deeper.drift = lambda comm, steps, sync=None: drift(comm, steps, ddp_experiments.barrier_only)


def gradients_lose_bits():
    take = bucket.Bucket.take_grads

    def rough(self, indices):
        take(self, indices)
        for index in indices:
            self.views[index].copy_((self.views[index] * 64).round() / 64)

    bucket.Bucket.take_grads = rough


class TestDeeper(unittest.TestCase):
    def test_it_holds_for_every_number_of_ranks(self):
        for n in (1, 2, 3):
            code, text = run_main("--deeper", "--world-size", str(n))
            self.assertEqual(code, 0, text)
            self.assertIn("10 of 10 claims hold", text)

    def assert_noticed(self, check, worker, breakage, *claims):
        """Run one part of the demonstration with a fault inside the ranks: it must say what is wrong."""
        verdict, out = ddp_deeper.demo.Claims(), io.StringIO()
        with mock.patch.object(ddp_deeper, worker, functools.partial(broken, breakage, worker)):
            with contextlib.redirect_stdout(out):
                getattr(ddp_deeper, check)(verdict, 2)
        for claim in claims:
            self.assertIn(f"FAIL  {claim}", out.getvalue())

    def test_wrong_versions_are_noticed(self):
        for breakage in (counts_are_ignored, without_data_counts_as_zeros, totals_are_not_divided_by):
            with self.subTest(breakage.__name__):
                self.assert_noticed("check_uneven", "train_unevenly", breakage, "weighted by rows")
        self.assert_noticed("check_nan", "spoil", nothing_is_checked, "check_finite: all ranks raise")
        self.assert_noticed("check_drift", "drifting", everything_is_a_barrier, "with an all-reduce they hold")
        self.assert_noticed("check_hook", "compress", gradients_lose_bits, "each element is within")


def broken(breakage, worker, *args):
    """Be a rank of the demonstration with a fault in it."""
    breakage()
    return ORIGINAL[worker](*args)


if __name__ == "__main__":
    unittest.main()
