import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from ddp_cases import Branches, ThreeLayers, backward, data, grads, virtual
from flat import gather_flat_grads
from naive import flat_sync, naive_sync
from torch import nn


class TestNaiveWays(unittest.TestCase):
    def test_both_give_the_mean_and_cost_what_they_say(self):
        def rank(comm, sync):
            module = ThreeLayers()
            backward(module, comm.rank)
            local = gather_flat_grads(module)
            sync(module, comm)
            return (
                local,
                gather_flat_grads(module),
                comm.counters.calls["all_reduce"],
                comm.counters.bytes["all_reduce"],
            )

        for sync, calls in ((naive_sync, 6), (flat_sync, 1)):
            results = virtual(2, rank, sync)
            mean = (results[0][0] + results[1][0]) / 2
            for _, found, count, sent in results:
                self.assertTrue(torch.equal(found, mean))
                self.assertEqual((count, sent), (calls, 4 * 123))

    def branches(self, sync):
        """Rank 0 uses branch a, rank 1 branch b, both of the same shape; return (local, synchronised) of each rank."""

        def rank(comm):
            module = Branches()
            module(data(comm.rank), "a" if comm.rank == 0 else "b").backward()
            local = grads(module)
            sync(module, comm)
            return local, grads(module)

        return virtual(2, rank)

    def test_naive_mixes_different_parameters_without_an_error(self):
        """The defect, kept: rank 0's gradient of a is averaged with rank 1's of b, and the replicas drift apart."""
        (a, first), (b, second) = self.branches(naive_sync)
        self.assertTrue(torch.equal(first["a.weight"], (a["a.weight"] + b["b.weight"]) / 2))
        self.assertTrue(torch.equal(second["b.weight"], first["a.weight"]))
        self.assertIsNone(second["a.weight"])

    def test_flat_does_not(self):
        (a, first), (_, second) = self.branches(flat_sync)
        for name in first:
            self.assertTrue(torch.equal(first[name], second[name]))
        self.assertTrue(torch.equal(first["a.weight"], a["a.weight"] / 2))

    def test_flat_gives_zeros_to_what_nobody_used_and_knows_one_dtype(self):
        def rank(comm, module):
            flat_sync(module, comm)
            return [param.grad.tolist() for param in module.parameters()]

        self.assertEqual(virtual(2, rank, nn.Linear(2, 1)), [[[[0, 0]], [0]]] * 2)
        with self.assertRaisesRegex(ValueError, "one dtype"):
            flat_sync(nn.ParameterList([torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]), None)


if __name__ == "__main__":
    unittest.main()
