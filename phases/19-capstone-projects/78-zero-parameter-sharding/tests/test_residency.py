import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from memory import live_bytes
from residency import allocate, is_absent, make_absent, release
from torch import nn


class TestMemory(unittest.TestCase):
    def test_views_stay_and_see_what_is_allocated_anew(self):
        flat = torch.arange(6.0)
        view = flat[2:].view(2, 2)
        release(flat)
        self.assertEqual(live_bytes([flat, view]), 0)
        self.assertEqual(view.shape, (2, 2))
        allocate(flat)
        self.assertEqual(live_bytes([flat, view]), 24)
        flat.copy_(torch.arange(6.0))
        self.assertEqual(view.tolist(), [[2, 3], [4, 5]])

    def test_twice_does_nothing(self):
        flat = torch.arange(6.0, dtype=torch.bfloat16)
        allocate(flat)
        self.assertEqual(flat.tolist(), [0, 1, 2, 3, 4, 5])
        release(flat)
        release(flat)
        self.assertEqual(live_bytes([flat]), 0)

    def test_what_autograd_has_saved_sees_parameters_that_were_gathered_anew(self):
        """It saves the parameter itself, or views of it; both must have the new numbers."""
        for use in (lambda x, param: x * param, lambda x, param: x @ param.t(), lambda x, param: x.view(1, 2) @ param):
            flat = torch.tensor([2.0, 3.0, 4.0, 6.0])
            param = nn.Parameter(torch.empty(2, 2))  # a view of `flat` would share its count of changes
            param.data = view = flat.view(2, 2)
            x = torch.ones(2, requires_grad=True)
            loss = use(x, param).sum()
            make_absent(param)
            release(flat)
            allocate(flat)
            flat.copy_(torch.tensor([5.0, 7.0, 8.0, 9.0]))
            param.data = view
            loss.backward()
            other = torch.ones(2, requires_grad=True)
            use(other, torch.tensor([[5.0, 7.0], [8.0, 9.0]])).sum().backward()
            self.assertTrue(torch.equal(x.grad, other.grad))
            self.assertTrue(param.grad.isfinite().all())


class TestAbsent(unittest.TestCase):
    def test_it_keeps_shape_dtype_and_grad_and_has_one_element(self):
        for shape in ((), (1,), (1, 1), (3, 4)):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                param = nn.Parameter(torch.ones(shape, dtype=dtype))
                self.assertFalse(is_absent(param))
                make_absent(param)
                self.assertTrue(is_absent(param))
                self.assertEqual((param.shape, param.dtype, param.requires_grad), (shape, dtype, True))
                self.assertTrue(param.isnan().all())
                self.assertEqual(live_bytes([param]), param.element_size())

    def test_writing_is_noticed(self):
        writes = (
            lambda p: p.data.fill_(1.0),
            lambda p: p.data.zero_(),
            lambda p: setattr(p, "data", torch.ones(p.shape)),
            lambda p: setattr(p, "data", torch.full(p.shape, float("nan"))),
        )
        for shape in ((), (1,), (2, 3)):
            for write in writes:
                param, other = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
                make_absent(param)
                make_absent(other)
                write(param)
                self.assertEqual((is_absent(param), is_absent(other)), (False, True))


if __name__ == "__main__":
    unittest.main()
