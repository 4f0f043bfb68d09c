"""The tree all-reduce: values, bytes and rounds for N = 1-16, and what is refused."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import wire
from collectives import ring_allreduce
from ranks import RankError
from tree import reduce, tree_allreduce
from virtual import VirtualCluster


def values(rank: int, length: int = 5) -> torch.Tensor:
    return torch.arange(length).double() + 1000 * rank


def run(world_size: int, work, **options):
    """(results, counters of each rank)"""
    pairs = VirtualCluster(world_size, **options).run(lambda mesh: (work(mesh), mesh.counters))
    return [result for result, _ in pairs], [counters for _, counters in pairs]


class TestReduce(unittest.TestCase):
    def test_value_bytes_and_rounds_to_every_root(self):
        for n in range(1, 17):
            for dst in {0, 1 % n, n // 2, n - 1}:
                with self.subTest(n=n, dst=dst):
                    results, counters = run(n, lambda mesh, dst=dst: reduce(mesh, values(mesh.rank), dst))
                    for rank, result in enumerate(results):
                        if rank != dst:
                            self.assertIsNone(result)
                        else:
                            self.assertTrue(torch.equal(result, sum(map(values, range(n)))))
                    self.assertEqual(
                        [count.bytes_sent for count in counters], [40 * (rank != dst) for rank in range(n)]
                    )
                    self.assertEqual(max(count.rounds for count in counters), (n - 1).bit_length())

    def test_mean_and_maximum(self):
        for op, expected in (("avg", values(1)), ("max", values(2))):
            results, _ = run(3, lambda mesh, op=op: reduce(mesh, values(mesh.rank), 1, op))
            self.assertTrue(torch.equal(results[1], expected))

    def test_a_root_that_does_not_exist(self):
        for dst in (-1, 3, True):
            with self.assertRaisesRegex(RankError, "must be a rank from 0 to 2"):
                run(3, lambda mesh, dst=dst: reduce(mesh, values(0), dst))


class TestTreeAllReduce(unittest.TestCase):
    def test_value_bytes_and_rounds(self):
        for n in range(1, 17):
            with self.subTest(n=n):
                results, counters = run(n, lambda mesh: tree_allreduce(mesh, values(mesh.rank)))
                for result in results:
                    self.assertTrue(torch.equal(result, sum(map(values, range(n)))))
                depth = (n - 1).bit_length()
                self.assertEqual(sum(count.bytes_sent for count in counters), 2 * 40 * (n - 1))
                self.assertEqual(max(count.bytes_sent for count in counters), 40 * depth)
                self.assertEqual(max(count.rounds for count in counters), 2 * depth)

    def test_all_ranks_hold_the_same_bits(self):
        for n in range(2, 17):
            inputs = torch.randn(n, 9, generator=torch.Generator().manual_seed(n))
            results, _ = run(n, lambda mesh, inputs=inputs: tree_allreduce(mesh, inputs[mesh.rank], "avg"))
            self.assertEqual(len({wire.tensor_to_bytes(result) for result in results}), 1)
            self.assertTrue(torch.allclose(results[0], inputs.mean(0), atol=1e-5))

    def test_inputs_of_any_kind_stay_what_they_were(self):
        def work(mesh):
            column = values(mesh.rank, 8).view(4, 2)[:, 1]
            others = [torch.tensor(mesh.rank), torch.ones(3, 0), torch.tensor([mesh.rank == 1, False])]
            before = [wire.tensor_to_bytes(x) for x in (column, *others)]
            results = [tree_allreduce(mesh, x).tolist() for x in (column, *others)]
            return results, before == [wire.tensor_to_bytes(x) for x in (column, *others)]

        for seed in range(5):
            for results, unchanged in run(3, work, seed=seed, buffered=False)[0]:
                self.assertEqual(results, [[3003.0, 3009.0, 3015.0, 3021.0], 3, [[], [], []], [True, False]])
                self.assertTrue(unchanged)

    def test_ranks_that_chose_differently_are_refused(self):
        def work(mesh):
            try:
                (tree_allreduce if mesh.rank else ring_allreduce)(mesh, values(0))
            except ValueError as error:
                return str(error), mesh.counters.bytes_sent

        first, second = VirtualCluster(2).run(work)
        self.assertEqual(first, second)
        self.assertRegex(first[0], '(?=.*"all_reduce")(?=.*"tree_all_reduce")')
        self.assertEqual(first[1], 0)


if __name__ == "__main__":
    unittest.main()
