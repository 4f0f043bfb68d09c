import itertools
import random
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import balance
import torch
from balance import balanced_bounds, equal_bounds, profile_layers, stage_sums
from schedule import make_schedule
from simulator import simulate
from torch import nn


def all_bounds(layers, stages):
    """Every way to cut."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        yield [*itertools.pairwise(edges)]


class TestBalance(unittest.TestCase):
    def test_no_cut_has_a_faster_slowest_stage(self):
        generator = random.Random(5)
        for layers in range(1, 9):
            for stages in range(1, layers + 1):
                times = [generator.randint(1, 20) for _ in range(layers)]
                best = min(max(stage_sums(times, bounds)) for bounds in all_bounds(layers, stages))
                found = balanced_bounds(times, stages)
                self.assertIn(found, list(all_bounds(layers, stages)))
                self.assertEqual(max(stage_sums(times, found)), best, (times, stages))

    def test_given_times_by_hand(self):
        self.assertEqual(balanced_bounds([1, 1, 1, 1, 4], 2), [(0, 4), (4, 5)])
        self.assertEqual(balanced_bounds([5, 1, 1, 1, 1, 5], 3), [(0, 1), (1, 5), (5, 6)])
        self.assertEqual(balanced_bounds([0, 0, 3], 3), [(0, 1), (1, 2), (2, 3)])  # each stage has a layer
        self.assertEqual(balanced_bounds([2], 1), [(0, 1)])

    def test_the_step_before_and_after(self):
        """8 layers of 1 and a head of 8: 4 + 4 layers and the head make stages of 4 and 12, balanced both have 8."""
        layers, schedule = [1] * 8 + [8], make_schedule("1f1b", 2, 6)
        steps = {}
        for cut in (equal_bounds, balanced_bounds):
            bounds = cut(9, 2) if cut is equal_bounds else cut(layers, 2)
            sums = stage_sums(layers, bounds)
            steps[cut] = simulate(schedule, sums, sums, sums).step  # F, and the two gradients: each takes as long
        self.assertEqual(steps[equal_bounds], 3 * (6 * 12 + 4))
        self.assertEqual(steps[balanced_bounds], 3 * (6 * 8 + 8))

    def test_equal_bounds(self):
        self.assertEqual(equal_bounds(9, 4), [(0, 2), (2, 4), (4, 6), (6, 9)])
        for layers in range(1, 9):
            for stages in range(1, layers + 1):
                sizes = [last - first for first, last in equal_bounds(layers, stages)]
                self.assertEqual((sum(sizes), max(sizes) - min(sizes) <= 1), (layers, True))

    def test_refusals(self):
        for function, arguments, message in (
            (equal_bounds, (3, 4), "4 stages, but the model has only 3 layers"),
            (balanced_bounds, ([1, 2], 3), r"(?=.*\b3\b)(?=.*\b2\b)"),
            (balanced_bounds, ([1, 2], 0), r"\b0\b"),
            (balanced_bounds, ([], 1), r"\b0\b"),
            (balanced_bounds, ([1, -2], 1), r"(?=.*\b1\b)(?=.*-2)"),
            (balanced_bounds, ([float("nan")], 1), r"(?=.*\b0\b)(?=.*nan)"),
            (balanced_bounds, ([1, "2"], 1), r"(?=.*\b1\b)(?=.*'2')"),
            (balanced_bounds, ([None], 1), r"(?=.*\b0\b)(?=.*None)"),
            (profile_layers, ([], torch.zeros(1), 0), "repeats must be a whole number of at least 1"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                function(*arguments)


class Tick(torch.autograd.Function):
    """The identity, for which forward takes `cost` on a clock and backward three times as much."""

    @staticmethod
    def forward(ctx, x, cost, clock):
        ctx.cost, ctx.clock = cost, clock
        clock[0] += cost
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock[0] += 3 * ctx.cost
        return gradient, None, None


class Costly(nn.Module):
    def __init__(self, cost, clock):
        super().__init__()
        self.cost, self.clock, self.layer = cost, clock, nn.Linear(6, 6)

    def forward(self, x):
        return Tick.apply(self.layer(x), self.cost, self.clock)


class TestProfile(unittest.TestCase):
    def test_each_layer_is_timed_alone_and_nothing_is_changed(self):
        clock = [0.0]
        layers = [nn.Embedding(10, 6), Costly(2, clock), Costly(5, clock), nn.ReLU()]
        with mock.patch.object(balance, "_now", lambda _: clock[0]):
            found = profile_layers(layers, torch.arange(10), repeats=3)
        self.assertEqual(found, ([0, 2, 5, 0], [0, 6, 15, 0]))
        self.assertTrue(all(p.grad is None for layer in layers for p in layer.parameters()))


if __name__ == "__main__":
    unittest.main()
