"""The cost formulas: what the counters say, for N = 1-16 and for lengths that N divides and does not divide."""

import sys
import unittest
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import alltoall
import barrier
import collectives
import cost
import torch
import tree
from cost import Cost, Link
from halving import halving_allreduce
from hierarchical import hierarchical_allreduce
from pipelined import pipelined_broadcast
from virtual import VirtualCluster, VirtualMesh

RANKS = range(1, 17)
RUN = {  # name of the formula -> the code that it is about
    "ring": collectives.ring_allreduce,
    "tree": tree.tree_allreduce,
    "halving": halving_allreduce,
    "broadcast": collectives.broadcast,
    "pipelined_broadcast": pipelined_broadcast,
    "reduce": tree.reduce,
    "reduce_scatter": collectives.reduce_scatter,
    "allgather": collectives.allgather,
    "alltoall": alltoall.alltoall,
    "barrier": lambda mesh, tensor, check: barrier.barrier(mesh),
}


def count(n: int, call, numel: int) -> tuple[Cost, list]:
    """Run on `numel` float32 elements a rank; return (what the transport counted, all ranks' counters)."""
    largest = defaultdict(int)  # round -> bytes of the largest message that was received in it

    def work(mesh):
        def recv(src, tag=0):
            tensor = VirtualMesh.recv(mesh, src, tag)
            arrived = mesh._port.received  # later than it was sent, where two ranks send to one at once
            largest[arrived] = max(largest[arrived], tensor.numel() * tensor.element_size())
            return tensor

        mesh.recv = recv
        call(mesh, torch.ones(numel), check=False)
        return mesh.counters

    counters = VirtualCluster(n).run(work)
    link = max(max(each.bytes_to.values(), default=0) for each in counters)
    sent = max(each.bytes_sent for each in counters)
    return Cost(max(each.rounds for each in counters), sent, link, sum(largest.values())), counters


class TestFormulas(unittest.TestCase):
    def test_every_algorithm_has_one(self):
        self.assertEqual(set(RUN), {*cost.ALLREDUCE, *cost.OTHERS})

    def test_rounds_busiest_rank_busiest_link_and_path_where_all_chunks_are_equal(self):
        for name, call in RUN.items():
            for n in RANKS:
                with self.subTest(name=name, n=n):
                    numel = 16 * n  # N and every power of two up to N divide it
                    formula = (cost.ALLREDUCE | cost.OTHERS)[name](n, 4 * numel)
                    self.assertEqual(formula, count(n, call, numel)[0])

    def test_the_docstrings_table(self):
        for n in (2, 3, 8, 13, 16):
            size, depth, core = 64 * n, (n - 1).bit_length(), 1 << (n.bit_length() - 1)
            more = (n > core) * size
            chain, half = size * (n - 1) // n, 2 * size * (core - 1) // core
            expected = {
                "ring": Cost(2 * (n - 1), 2 * chain, 2 * chain, 2 * chain),
                "tree": Cost(2 * depth, depth * size, size, 2 * depth * size),
                "halving": Cost(2 * (core.bit_length() - 1) + 2 * (n > core), half + more, size, half + 2 * more),
                "broadcast": Cost(depth, depth * size, size, depth * size),
                "pipelined_broadcast": Cost(8 + n - 2, size, size, size + (n - 2) * size // 8),
                "reduce": Cost(depth, size, size, depth * size),
                "reduce_scatter": Cost(n - 1, chain, chain, chain),
                "allgather": Cost(n - 1, size * (n - 1), size * (n - 1), size * (n - 1)),
                "alltoall": Cost(n - 1, chain, size // n, chain),
                "barrier": Cost(depth, 0, 0, 0),
            }
            for name, formula in (cost.ALLREDUCE | cost.OTHERS).items():
                self.assertEqual(formula(n, size), expected[name], f"{name}, N={n}")

    def test_any_length(self):
        for n in RANKS:
            for numel in (0, 1, 7, 33):
                with self.subTest(n=n, numel=numel):
                    for name in ("ring", "tree", "broadcast", "pipelined_broadcast", "reduce", "allgather"):
                        formula = (cost.ALLREDUCE | cost.OTHERS)[name](n, 4 * numel)
                        self.assertEqual(formula, count(n, RUN[name], numel)[0], name)
                    formula, found = cost.halving(n, 4 * numel), count(n, halving_allreduce, numel)[0]
                    self.assertEqual(formula, replace(found, path=formula.path))
                    self.assertLessEqual(abs(formula.path - found.path), 4 * n.bit_length())

    def test_any_number_of_chunks(self):
        for n in (1, 2, 3, 6):
            for chunks in (1, 2, 5, 12, 40):
                call = partial(pipelined_broadcast, chunks=chunks)
                self.assertEqual(cost.pipelined_broadcast(n, 4 * 33, chunks), count(n, call, 33)[0])

    def test_bytes_that_are_no_whole_elements_are_rounded_up(self):
        self.assertEqual(cost.ring(2, 5), cost.ring(2, 8))


class TestTwoLevels(unittest.TestCase):
    RANKS = range(1, 9)  # each with all sizes of a node

    @staticmethod
    @cache
    def counted(n: int, node_size: int):
        nodes, last = -(-n // node_size), n % node_size or node_size
        numel = nodes * node_size * last
        return 4 * numel, *count(n, partial(hierarchical_allreduce, node_size=node_size), numel)

    def test_full_nodes(self):
        for n in self.RANKS:
            for node_size in (s for s in range(1, n + 1) if n % s == 0):
                with self.subTest(n=n, node_size=node_size):
                    size, found, _ = self.counted(n, node_size)
                    self.assertEqual(cost.hierarchical(n, size, node_size), found)
                    nodes = n // node_size
                    inside, between = cost.hierarchical_parts(n, size, node_size)
                    self.assertEqual((inside.rounds, between.rounds), (2 * (node_size - 1), 2 * (nodes - 1)))
                    self.assertEqual(inside.sent, 2 * size * (node_size - 1) // node_size)
                    self.assertEqual(between.sent, 2 * size * (nodes - 1) // (nodes * node_size))

    def test_a_smaller_last_node(self):
        for n in self.RANKS:
            for node_size in (s for s in range(1, n + 1) if n % s):
                with self.subTest(n=n, node_size=node_size):
                    size, found, _ = self.counted(n, node_size)
                    formula = cost.hierarchical(n, size, node_size)
                    self.assertEqual(formula, replace(found, path=formula.path))
                    self.assertLessEqual(formula.path, found.path)
                    self.assertGreater(formula.path, 0.5 * found.path)

    def test_bytes_that_leave_a_node(self):
        for n in (n for n in self.RANKS if n > 1):
            for node_size in range(1, n + 1):
                size, _, counters = self.counted(n, node_size)
                nodes = -(-n // node_size)
                leaving = [0] * nodes
                for rank, each in enumerate(counters):
                    for dst, sent in each.bytes_to.items():
                        leaving[rank // node_size] += sent * (dst // node_size != rank // node_size)
                self.assertEqual(leaving, [2 * size * (nodes - 1) // nodes] * nodes, (n, node_size))


class TestTwoLevelsOfMoreRanks(TestTwoLevels):
    RANKS = (9, 12, 16)

    def test_a_ring_sends_more_out_of_a_node_and_one_rank_sends_it_all(self):
        n, node_size, numel = 12, 4, 24
        _, counters = count(n, collectives.ring_allreduce, numel)
        leaving = [
            sum(sent for dst, sent in each.bytes_to.items() if dst // node_size != rank // node_size)
            for rank, each in enumerate(counters)
        ]
        self.assertEqual(leaving, [2 * 96 * 11 // 12, 0, 0, 0] * 3)
        self.assertGreater(max(leaving), 2 * 96 * 2 // 3)


class TestSeconds(unittest.TestCase):
    def test_rounds_times_alpha_and_path_times_beta(self):
        self.assertEqual(Cost(3, 0, 0, 10).seconds(Link(2.0, 0.5)), 11.0)
        self.assertEqual(Link(2.0, 0.5).seconds(10), 7.0)

    def test_bad_links(self):
        for bad in (-1.0, float("nan"), float("inf"), True, "1", None):
            for name in ("alpha", "beta"):
                with self.assertRaisesRegex(ValueError, f"{name} must be a finite number of seconds, at least 0, got"):
                    Link(**{"alpha": 1.0, "beta": 1.0, name: bad})

    def test_bad_sizes(self):
        for formula in (*cost.ALLREDUCE.values(), *cost.OTHERS.values()):
            for n in (0, -1, True, 1.5, "2"):
                with self.assertRaisesRegex(ValueError, "world_size must be a whole number of at least 1"):
                    formula(n, 4)
            for nbytes in (-1, 1.0, True, "4", None):
                with self.assertRaisesRegex(ValueError, "nbytes must be a whole number of at least 0, got"):
                    formula(2, nbytes)
        with self.assertRaisesRegex(ValueError, "node_size must be"):
            cost.hierarchical(4, 4, 5)
        with self.assertRaisesRegex(ValueError, "chunks must be"):
            cost.pipelined_broadcast(4, 4, 0)


class TestBestChunks(unittest.TestCase):
    def test_no_other_number_is_faster(self):
        for n in (3, 4, 8, 33):
            for numel in (1, 10, 720):
                for link in (Link(1e-4, 1e-9), Link(1e-4, 1e-6), Link(1e-6, 1e-6), Link(1e-3, 1e-5)):

                    def seconds(chunks, n=n, size=4 * numel, link=link):
                        return (chunks + n - 2) * link.alpha + (size + (n - 2) * size / chunks) * link.beta

                    best = cost.best_chunks(n, 4 * numel, link)
                    self.assertAlmostEqual(seconds(best), min(map(seconds, range(1, numel + 1))))

    def test_it_is_the_square_root(self):
        self.assertEqual(cost.best_chunks(18, 100_000_000, Link(1e-4, 1e-9)), 126)  # sqrt(16 * 0.1 / 1e-4) = 126.5

    def test_the_limits(self):
        self.assertEqual(cost.best_chunks(2, 1 << 20, Link(1e-6, 1.0)), 1)  # nobody passes anything on
        self.assertEqual(cost.best_chunks(1, 1 << 20, Link(0.0, 1.0)), 1)
        self.assertEqual(cost.best_chunks(8, 40, Link(0.0, 1.0)), 10)  # the elements
        self.assertEqual(cost.best_chunks(8, 40, Link(1e-300, 1e9)), 10)
        self.assertEqual(cost.best_chunks(8, 40, Link(0.0, 0.0)), 1)
        self.assertEqual(cost.best_chunks(8, 0, Link(0.0, 1.0)), 1)


if __name__ == "__main__":
    unittest.main()
