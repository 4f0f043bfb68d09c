import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import os
import signal
import subprocess

import torch
from comm import TorchComm
from mesh_comm import MeshComm
from ddp import DistributedDataParallel
from ddp_cases import Everything, ThreeLayers, backward, data
from flat import gather_flat_grads, gather_flat_params
from ranks import RankError, run_ranks
from torch import nn
from torch_mesh import TorchMesh
from toy import sgd_step

STEPS = 4
DEADLINE = 60.0


def steps_of(model, module, rank):
    """Train; return the flat gradients and parameters of every step."""
    log = []
    for step in range(STEPS):
        backward(model, rank, step)
        mean = gather_flat_grads(module)
        sgd_step(module, 0.1)
        log.append((mean, gather_flat_params(module)))
    return log


def ours_and_theirs(rank, world_size, with_torch):
    """Train the same model on the same data in each way; return {way: log}, and what ours has sent."""
    comm, logs = TorchComm(), {}
    for name, cap in (("ours", 25), ("ours, a bucket a parameter", 1e-9)):
        module = Everything(seed=1)
        logs[name] = steps_of(DistributedDataParallel(module, cap, comm), module, rank)
    module = Everything(seed=1)
    logs["our collectives"] = steps_of(DistributedDataParallel(module, 25, MeshComm(TorchMesh())), module, rank)
    if with_torch:
        from torch.nn.parallel import DistributedDataParallel as TorchDDP

        for name, options in (("torch", {}), ("tuned", {"gradient_as_bucket_view": True, "static_graph": True})):
            module = Everything(seed=1)
            logs[name] = steps_of(TorchDDP(module, **options), module, rank)
    return logs, comm.counters.calls["all_reduce"], comm.counters.control_calls


class Mixed(nn.Module):
    """Layers of three dtypes, one of them tied, so buckets of three dtypes."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first = nn.Linear(5, 5)
            self.narrow = nn.Linear(5, 5).bfloat16()
            self.wide = nn.Linear(5, 5).double()
            self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.narrow(torch.tanh(self.first(x)).bfloat16())
        return self.last(torch.tanh(self.wide(x.double())).float())


def mixed_dtypes(rank, world_size):
    """Train in ours and in torch's; return ([each step's gradients and parameters] of ours, of torch's, buckets)."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    logs, buckets = [], []
    for wrap in (DistributedDataParallel, TorchDDP):
        module, log = Mixed(), []
        model = wrap(module)
        if wrap is DistributedDataParallel:
            buckets = [bucket.dtype for bucket in model.reducer.buckets]
        for step in range(STEPS):
            model(data(rank, step)).square().mean().backward()
            log += [p.grad.clone() for p in module.parameters()]
            sgd_step(module, 0.1)
            log += [p.detach().clone() for p in module.parameters()]
        logs.append(log)
    return *logs, len(set(buckets)) == len(buckets) == 3


def batch_norm(rank, world_size):
    """One step with different data a rank; return rank's state afterwards."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    backward(DistributedDataParallel(module), rank)
    return module.state_dict()


def subgroup(rank, world_size):
    """Ranks 1 and 2 of three train as a group of their own; return the rank's parameters and gradients."""
    sub = TorchComm().split(color=0 if rank == 0 else 1)
    module = ThreeLayers(seed=rank)
    if rank > 0:
        backward(DistributedDataParallel(module, 25, sub), rank)
    return gather_flat_params(module), gather_flat_grads(module), sub.rank, sub.world_size


def differing(rank, world_size):
    """Wrap models that differ; return the error."""
    module = nn.Linear(5, 2 + rank)
    before = gather_flat_params(module)
    try:
        DistributedDataParallel(module)
    except ValueError as error:
        return str(error), torch.equal(before, gather_flat_params(module))


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no gradient here")


def fails_in_backward(rank, world_size):
    """Rank 1's backward raises in the middle, after its first bucket has left; the others wait for its second."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-9)
    hidden = ddp.module[0](data(rank))
    ddp.module[1](Explodes.apply(hidden) if rank == 1 else hidden).sum().backward()


def misses_its_backward(rank, world_size):
    """Rank 1 never computes gradients, so the others wait for it."""
    ddp = DistributedDataParallel(ThreeLayers())
    if rank != 1:
        backward(ddp, rank)


def is_killed(rank, world_size):
    """Rank 1 is killed after a step, in the middle of training."""
    ddp = DistributedDataParallel(ThreeLayers())
    for step in range(3):
        if (rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        backward(ddp, rank, step)


def modules_loaded(rank, world_size):
    """Wrap, train, and say whether what takes torch 1.2 s to import came along."""
    module = ThreeLayers()
    steps_of(DistributedDataParallel(module), module, rank)
    return "torch._dynamo" in sys.modules


class TestAgainstTorch(unittest.TestCase):
    """Gloo, two processes, a model with tied, frozen and 0-dim parameters."""

    @classmethod
    def setUpClass(cls):
        cls.results = run_ranks(ours_and_theirs, 2, True, timeout=DEADLINE)

    def test_every_way_gives_the_same_bits_at_every_step(self):
        expected = self.results[0][0]["torch"]
        for logs, _, _ in self.results:
            self.assertEqual(len(logs), 5)
            for name, log in logs.items():
                for step in range(STEPS):
                    with self.subTest(way=name, step=step):
                        self.assertTrue(torch.equal(log[step][0], expected[step][0]))
                        self.assertTrue(torch.equal(log[step][1], expected[step][1]))

    def test_it_trains(self):
        log = self.results[0][0]["ours"]
        self.assertFalse(torch.equal(log[0][1], log[-1][1]))

    def test_calls(self):
        for _, calls, control in self.results:
            self.assertEqual(calls, STEPS * 1 + STEPS * 5)
            self.assertEqual(control, 2 * 2)  # two wrappers: size of buckets, model. None in a step


class TestMixedDtypesAgainstTorch(unittest.TestCase):
    def test_the_same_bits_at_every_step(self):
        for ours, theirs, in_buckets_of_their_own in run_ranks(mixed_dtypes, 2, timeout=DEADLINE):
            self.assertTrue(in_buckets_of_their_own)
            self.assertEqual(len(ours), STEPS * 2 * 7)
            for a, b in zip(ours, theirs, strict=True):
                self.assertEqual(a.dtype, b.dtype)
                self.assertTrue(torch.equal(a, b))


class TestMoreRanks(unittest.TestCase):
    def test_ranks_hold_the_same_bits_at_every_step(self):
        results = run_ranks(ours_and_theirs, 3, False, timeout=DEADLINE)
        for logs, _, _ in results:
            for name, log in logs.items():
                for (mean, params), (first_mean, first_params) in zip(log, results[0][0][name], strict=True):
                    self.assertTrue(torch.equal(mean, first_mean))
                    self.assertTrue(torch.equal(params, first_params))

    def test_batch_norm(self):
        first, *others = run_ranks(batch_norm, 3, timeout=DEADLINE)
        self.assertEqual(first["1.num_batches_tracked"].item(), 1)
        self.assertFalse(torch.equal(first["1.running_mean"], torch.zeros(4)))
        for other in others:
            for name in first:
                self.assertTrue(torch.equal(other[name], first[name]), name)

    def test_subgroup(self):
        results = run_ranks(subgroup, 3, timeout=DEADLINE)
        self.assertEqual([result[2:] for result in results], [(0, 1), (0, 2), (1, 2)])
        expected = []
        for rank in (1, 2):
            module = ThreeLayers(seed=1)  # the subgroup's rank 0 is rank 1 of the world
            backward(module, rank)
            expected.append(gather_flat_grads(module))
        for params, flat, *_ in results[1:]:
            self.assertTrue(torch.equal(params, gather_flat_params(ThreeLayers(seed=1))))
            self.assertTrue(torch.equal(flat, (expected[0] + expected[1]) / 2))

    def test_models_that_differ(self):
        results = run_ranks(differing, 2, timeout=DEADLINE)
        self.assertEqual(results[0], results[1])
        message, unchanged = results[0]
        self.assertTrue(unchanged)
        self.assertIn("ranks disagree on the model: weight: rank 0 has", message)


class TestFailures(unittest.TestCase):
    def test_a_rank_whose_backward_raises_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(fails_in_backward, 3, timeout=DEADLINE)
        self.assertEqual(caught.exception.rank, 1)
        self.assertIn("ArithmeticError: no gradient here", str(caught.exception))
        self.assertIn("in backward", caught.exception.traceback)

    def test_a_rank_without_a_backward_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(misses_its_backward, 3, timeout=DEADLINE, collective_timeout=2.0)
        self.assertEqual(caught.exception.rank, 1)

    @unittest.skipUnless(hasattr(signal, "SIGKILL"), "there is no SIGKILL here")
    def test_a_rank_that_is_killed_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(is_killed, 3, timeout=DEADLINE)
        self.assertEqual((caught.exception.rank, caught.exception.exitcode), (1, -signal.SIGKILL))


class TestStartUp(unittest.TestCase):
    def test_nothing_slow_is_imported(self):
        code = "import test_ddp_processes as t; print(t.run_ranks(t.modules_loaded, 2, timeout=t.DEADLINE))"
        folder = Path(__file__).parent
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        self.assertEqual((done.stdout.strip(), done.returncode), ("[False, False]", 0), done.stderr)


if __name__ == "__main__":
    unittest.main()
