"""The choice of an all-reduce by size: the fastest of the candidates, on all ranks the same, and the words for it."""

import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from choose import allreduce, choose, crossover_bytes, explain
from cost import ALLREDUCE, Link
from virtual import VirtualCluster

LINKS = (Link(1e-4, 1e-9), Link(3e-5, 2e-9), Link(1e-6, 1e-11))
TWO = ("ring", "tree")


class TestSwitch(unittest.TestCase):
    def test_small_tensors_take_the_tree_and_large_ones_the_ring(self):
        link = Link(1.0, 0.01)
        for n in (4, 7, 8, 16):
            at = crossover_bytes(n, link) / 4  # elements of float32
            self.assertEqual(choose(n, 4 * (math.ceil(at) - 2), link, TWO), "tree")
            self.assertEqual(choose(n, 4 * (math.ceil(at) + 4 * n), link, TWO), "ring")

    def test_at_the_crossover_both_take_as_long(self):
        for link in LINKS:
            for n in range(4, 65):
                size, depth = crossover_bytes(n, link), (n - 1).bit_length()
                ring = 2 * (n - 1) * link.alpha + 2 * (n - 1) / n * size * link.beta
                self.assertAlmostEqual(ring / (2 * depth * (link.alpha + size * link.beta)), 1.0, places=9)

    def test_up_to_three_ranks_the_ring_is_never_slower_than_the_tree(self):
        self.assertEqual([crossover_bytes(n) for n in (1, 2, 3)], [0.0, 0.0, 0.0])
        for n in (1, 2, 3):
            self.assertEqual(choose(n, 4), "ring")

    def test_the_fastest_is_chosen_and_of_equals_the_simplest(self):
        for link in LINKS:
            for n in range(1, 40):
                for size in (0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 28):
                    name = choose(n, size, link)
                    times = {key: cost(n, size).seconds(link) for key, cost in ALLREDUCE.items()}
                    self.assertEqual(times[name], min(times.values()))
                    before = [*times][: [*times].index(name)]
                    self.assertTrue(all(times[other] > times[name] for other in before))
        self.assertEqual([choose(2, 1 << 20), choose(16, 0)], ["ring", "tree"])  # as fast as halving

    def test_where_n_is_a_power_of_two_nothing_is_faster_than_halving(self):
        for n in (4, 8, 16, 64, 1024):
            self.assertEqual(crossover_bytes(n, few_rounds="halving"), math.inf)
            self.assertEqual([choose(n, size) for size in (1 << 13, 1 << 20, 1 << 30)], ["halving"] * 3)
        for n in (5, 6, 12, 24, 1000):
            at = crossover_bytes(n, few_rounds="halving")
            self.assertEqual([choose(n, int(at * x) // 4 * 4) for x in (0.9, 1.1)], ["halving", "ring"])

    def test_links_that_cost_nothing(self):
        self.assertEqual(crossover_bytes(8, Link(0.0, 1e-9)), 0.0)
        self.assertEqual(crossover_bytes(8, Link(1e-4, 0.0)), math.inf)
        self.assertEqual(choose(8, 1 << 20, Link(0.0, 0.0)), "ring")

    def test_bad_names(self):
        for among in ((), ("star",), ("ring", "star")):
            with self.assertRaisesRegex(ValueError, "all-reduces are ring, tree, halving, got"):
                choose(4, 4, among=among)
        with self.assertRaisesRegex(ValueError, "got 'star', 'ring'"):
            crossover_bytes(4, few_rounds="star")


class TestAllReduce(unittest.TestCase):
    def rounds(self, n: int, numel: int, **options) -> int:
        def work(mesh):
            result = allreduce(mesh, torch.arange(numel) + 1.0 + mesh.rank, **options)
            self.assertTrue(torch.equal(result, n * (torch.arange(numel) + 1.0) + n * (n - 1) / 2))
            return mesh.counters.rounds

        return max(VirtualCluster(n).run(work))

    def test_it_runs_what_is_chosen(self):
        link = Link(1.0, 0.01)
        at = int(crossover_bytes(8, link) / 4)
        self.assertEqual(self.rounds(8, at - 1, link=link, among=TWO), 6)
        self.assertEqual(self.rounds(8, at + 1, link=link, among=TWO), 14)
        self.assertEqual(self.rounds(6, 8), 6)  # halving, with guests
        self.assertEqual(self.rounds(6, 500, link=Link(1e-9, 1.0)), 10)  # the ring

    def attempts(self, n: int, call) -> set:
        def work(mesh):
            try:
                call(mesh)
            except ValueError as error:
                return str(error), mesh.counters.messages_sent

        return set(VirtualCluster(n).run(work))

    def test_ranks_that_choose_differently_are_refused(self):
        found = self.attempts(2, lambda m: allreduce(m, torch.ones(2), among=(("ring", "tree")[m.rank],)))
        words = 'ranks disagree on a collective: operation: rank 0 has "all_reduce"; rank 1 has "tree_all_reduce"'
        self.assertEqual(found, {(words, 0)})

    def test_bad_calls_are_refused(self):
        self.assertEqual(
            self.attempts(2, lambda m: allreduce(m, torch.ones(2), "min")),
            {("op must be one of sum, avg, max, got 'min'", 0)},
        )
        self.assertEqual(self.attempts(2, lambda m: allreduce(m, [1.0])), {("allreduce needs a tensor, got list", 0)})


class TestExplain(unittest.TestCase):
    def test_each_candidate_with_its_numbers_and_one_that_wins(self):
        lines = explain(12, 1_200_000, Link(1e-4, 1e-9))
        self.assertEqual(
            lines[0], "all-reduce of 1,200,000 bytes, N = 12; a message costs 100 us, a byte 1 ns (1 GB/s)"
        )
        table = {line.split()[0]: line for line in lines[3:6]}
        self.assertEqual([*table], ["ring", "tree", "halving"])
        self.assertRegex(table["ring"], r"ring +22 +2,200,000 +2\.2 ms +\+ +2\.2 ms = +4\.4 ms  <- chosen")
        self.assertRegex(table["tree"], r"tree +8 +9,600,000 .* 2\.36 times as long")  # (0.8 + 9.6) / 4.4
        self.assertRegex(table["halving"], r"halving +8 +4,500,000 .* 1\.20 times as long")
        self.assertEqual(sum("chosen" in line for line in lines), 1)

    def test_the_crossovers(self):
        text = "\n".join(explain(12, 4))
        self.assertIn(f"the ring is faster than the tree from {crossover_bytes(12):,.0f} bytes on", text)
        self.assertIn("the ring is faster than the halving from 730,435 bytes on", text)
        self.assertIn("the ring is faster than the halving at no size", "\n".join(explain(8, 4)))
        self.assertIn("the ring is never slower than the tree", "\n".join(explain(2, 4)))

    def test_nothing_to_send_and_free_links_can_be_explained(self):
        for n, size, link in ((1, 0, LINKS[0]), (1, 100, LINKS[0]), (8, 100, Link(0.0, 0.0)), (8, 0, Link(1.0, 0.0))):
            self.assertEqual(sum("chosen" in line for line in explain(n, size, link)), 1)


if __name__ == "__main__":
    unittest.main()
