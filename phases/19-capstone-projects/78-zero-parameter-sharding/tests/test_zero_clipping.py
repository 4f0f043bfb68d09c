"""The norm of a gradient that lies in several flat units."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
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


if __name__ == "__main__":
    unittest.main()
