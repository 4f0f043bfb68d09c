import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from unittest import mock

import step_split
import torch
from flat import gather_flat_params
from naive_zero import NaiveZero
from step_split import PARTS, split_step
from zero_cases import LR, Odd, optimizer_for, put_gradients, same, virtual


def train(comm, naive):
    """Be one rank for three steps; returns parameters after each, the calls and bytes of a step, bytes of state."""
    module, params = Odd(seed=comm.rank), []
    optimizer = NaiveZero(module, LR, comm) if naive else optimizer_for(module, comm)
    for step in range(3):
        before = comm.counters.calls.copy(), comm.counters.bytes.copy()
        put_gradients(module, comm.rank, step)
        if step == 1:
            module.first.bias.grad = None
        optimizer.step()
        params.append(gather_flat_params(module))
    cost = dict(comm.counters.calls - before[0]), dict(comm.counters.bytes - before[1])
    return params, cost, optimizer.shard_bytes()


class TestNaiveZero(unittest.TestCase):
    """`Odd` has 4 parameters: scale (1), first.weight (15), first.bias (5), left.weight (25, tied)."""

    def test_it_is_the_same_training(self):
        for n in (1, 2, 3, 5):
            naive, flat = virtual(n, train, True), virtual(n, train, False)
            for log in naive:
                self.assertTrue(same(log[0], naive[0][0]))
                torch.testing.assert_close(log[0], flat[0][0], rtol=1e-6, atol=1e-6)
            if n <= 2:  # the mean of two has one order only
                self.assertTrue(same(naive[0][0], flat[0][0]))

    def test_two_collectives_a_parameter_in_place_of_two_a_step(self):
        for _, (calls, sent), _ in virtual(3, train, True):
            self.assertEqual(calls, {"all_reduce": 4, "broadcast": 4})
            self.assertEqual(sent, {"all_reduce": 4 * 46, "broadcast": 4 * 46})
        for _, (calls, _), _ in virtual(3, train, False):
            self.assertEqual(calls, {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1})

    def test_shards_are_as_unequal_as_the_parameters(self):
        self.assertEqual([log[2] for log in virtual(3, train, True)], [8 * (1 + 25), 8 * 15, 8 * 5])
        self.assertEqual([log[2] for log in virtual(5, train, True)], [8 * 1, 8 * 15, 8 * 5, 8 * 25, 0])
        self.assertEqual([log[2] for log in virtual(3, train, False)], [12 * 16] * 3)


class Clock:
    """A clock that stands still, except where a test moves it."""

    now = 0.0

    def perf_counter(self):
        return self.now


class TestSplit(unittest.TestCase):
    def split(self, bad=False):
        """Let each part take a known time: 8, 4, 2 + 1 seconds, and 16 for the gather."""

        def worker(comm):
            clock, module = Clock(), Odd()
            optimizer = optimizer_for(module, comm)

            def slow(owner, name, seconds):
                real = getattr(owner, name)

                def method(*args):
                    clock.now += seconds
                    return real(*args)

                setattr(owner, name, method)

            slow(optimizer.gradients, "launch", 4.0)
            slow(optimizer, "_any_bad", 2.0)
            slow(optimizer.gradients, "start_round", 1.0)
            real = type(optimizer)._gather

            def gather(its, shard):
                clock.now += 16.0
                return real(its, shard)

            def loss():
                clock.now += 8.0
                return module(torch.ones(2, 3)).sum() * (float("nan") if bad else 1.0)

            with mock.patch.object(step_split, "time", clock):
                with mock.patch.object(type(optimizer), "_gather", gather):
                    found = split_step(optimizer, loss)
            return found, optimizer.steps, "_gather" in vars(optimizer)

        return virtual(1, worker)[0]

    def test_each_part_has_its_own_seconds(self):
        found, steps, left_over = self.split()
        self.assertEqual(found, dict(zip(PARTS, (8.0, 4.0, 3.0, 16.0), strict=True)))
        self.assertEqual((steps, left_over), (1, False))

    def test_a_skipped_step_gathers_nothing(self):
        found, steps, left_over = self.split(bad=True)
        self.assertEqual(found, dict(zip(PARTS, (8.0, 4.0, 3.0, 0.0), strict=True)))
        self.assertEqual((steps, left_over), (0, False))


if __name__ == "__main__":
    unittest.main()
