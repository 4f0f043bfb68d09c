"""The norm of a gradient that lies in several flat units."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from shard import ROW, row_norms
from torch import nn
from zero_cases import known_gradient, optimizer_for, put_gradients, virtual


class TestClippingUnits(unittest.TestCase):
    def test_norms_of_units_combine_as_those_of_ranks_do(self):
        sizes = (7, 1, 12, 5)

        def rank(comm, norm_type):
            module = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
            optimizer = optimizer_for(module, comm, bucket_cap_mb=1e-9)  # a unit for each
            put_gradients(module, comm.rank, 0)
            return len(optimizer.units), optimizer.clip_grad_norm_(0.1, norm_type)

        for n in (1, 3):
            mean = torch.stack([known_gradient(sum(sizes), each, 0) for each in range(n)]).mean(0)
            for norm_type in (1, 2, 3, float("inf")):
                for units, norm in virtual(n, rank, norm_type):
                    self.assertEqual(units, len(sizes))
                    torch.testing.assert_close(norm, torch.linalg.vector_norm(mean, norm_type))

    def test_the_norm_of_many_elements_is_as_exact_as_that_of_few(self):
        """One sum of 4 million squares is off by 1e-4 on a CPU, and so would be what is clipped."""
        size = 1 << 23

        def rank(comm, norm_type):
            module = nn.Linear(size, 1, bias=False)
            optimizer = optimizer_for(module, comm)
            torch.manual_seed(comm.rank)
            module.weight.grad.copy_(torch.rand(1, size))
            return optimizer.clip_grad_norm_(0.5, norm_type), torch.cat([s.grad.double() for s in optimizer.shards])

        parts = []
        for each in range(2):
            torch.manual_seed(each)
            parts.append(torch.rand(size))
        mean = torch.stack(parts).mean(0).double()
        for norm_type in (1, 2, float("inf")):
            expected = torch.linalg.vector_norm(mean, norm_type).item()
            found = virtual(2, rank, norm_type)
            for norm, _ in found:
                self.assertLess(abs(norm.item() / expected - 1), 1e-6)
            clipped = torch.cat([shard for _, shard in found])
            self.assertLess(abs(torch.linalg.vector_norm(clipped, norm_type).item() - 0.5), 1e-6)

    def test_rows(self):
        flat = torch.arange(1.0, 2 * ROW + 4)
        norms = row_norms(flat, 1.0, torch.float64)
        self.assertEqual(norms.tolist(), [ROW * (ROW + 1) / 2, ROW * (3 * ROW + 1) / 2, 3 * (2 * ROW + 2)])
        self.assertEqual(row_norms(flat[:2], 2.0, torch.float32).shape, (1,))


if __name__ == "__main__":
    unittest.main()
