import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from memory import live_bytes
from residency import Absence, allocate, is_absent, release
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
            Absence([param]).begin()
            release(flat)
            allocate(flat)
            flat.copy_(torch.tensor([5.0, 7.0, 8.0, 9.0]))
            param.data = view
            loss.backward()
            other = torch.ones(2, requires_grad=True)
            use(other, torch.tensor([[5.0, 7.0], [8.0, 9.0]])).sum().backward()
            self.assertTrue(torch.equal(x.grad, other.grad))
            self.assertTrue(param.grad.isfinite().all())


class TestAbsence(unittest.TestCase):
    def absence(self, *shapes, dtype=torch.float32):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        return params, Absence(params)

    def test_it_keeps_shape_dtype_and_grad_and_all_have_one_element(self):
        shapes = ((), (1,), (1, 1), (3, 4))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            params, absence = self.absence(*shapes, dtype=dtype)
            self.assertFalse(any(map(is_absent, params)))
            absence.begin()
            self.assertTrue(all(map(is_absent, params)))
            self.assertEqual(absence.written(), [])
            self.assertEqual([(p.shape, p.dtype, p.requires_grad) for p in params], [(s, dtype, True) for s in shapes])
            self.assertTrue(all(param.isnan().all() for param in params))
            self.assertEqual(live_bytes(params), dtype.itemsize)

    def test_replacing_is_noticed_and_named(self):
        for value in (1.0, float("nan")):
            params, absence = self.absence((), (2, 3), (2, 3))
            absence.begin()
            params[1].data = torch.full((2, 3), value)
            self.assertEqual(absence.written(), [1])

    def test_filling_is_noticed(self):
        writes = lambda p: p.data.fill_(1.0), lambda p: p.data.zero_(), lambda p: nn.init.zeros_(p)
        for index in range(3):
            for write in writes:
                params, absence = self.absence((), (1,), (2, 3))
                _, other = self.absence((2,))
                absence.begin()
                other.begin()
                write(params[index])
                self.assertIn(index, absence.written())
                self.assertEqual(other.written(), [])

    def test_other_writes_are_refused_by_torch(self):
        params, absence = self.absence((2, 3))
        absence.begin()
        with torch.no_grad():
            for write in (lambda p: p.mul_(2), lambda p: p.copy_(torch.ones(2, 3)), lambda p: p.normal_()):
                self.assertRaises(RuntimeError, write, params[0])
        self.assertEqual(absence.written(), [])


if __name__ == "__main__":
    unittest.main()
