"""Tensors as bytes: every dtype and layout, memory of their own, and functions that are found again."""

import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import wire

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize]
PLAIN = [dtype for dtype in DTYPES if "q" not in str(dtype).removeprefix("torch.") and not str(dtype).endswith("bits")]


def some(dtype: torch.dtype) -> torch.Tensor:
    """Six distinct elements of any dtype, made from bytes."""
    return torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(2, 3)


class TestDtypes(unittest.TestCase):
    def test_names_and_back(self):
        self.assertEqual(wire.dtype_name(torch.float32), "float32")
        for dtype in set(DTYPES):
            self.assertIs(wire.dtype_of(wire.dtype_name(dtype)), dtype)

    def test_other_names_are_refused(self):
        for name in ("float33", "Tensor", "torch.float32", "float", "half", "", None, 32, torch.float32, "nn"):
            with self.assertRaisesRegex(ValueError, "is not the name of a torch dtype"):
                wire.dtype_of(name)


class TestBytes(unittest.TestCase):
    def test_every_dtype_there_and_back(self):
        self.assertGreater(len(set(PLAIN)), 15)
        for dtype in set(PLAIN):
            data = bytes(range(6 * dtype.itemsize)) if dtype != torch.bool else b"\0\1\0\1\1\0"
            back = wire.tensor_from_bytes(data, dtype, (2, 3))
            self.assertEqual((back.dtype, back.shape), (dtype, (2, 3)))
            self.assertEqual(wire.tensor_to_bytes(back), data, dtype)

    def test_row_major_order_whatever_the_strides(self):
        base = torch.arange(6, dtype=torch.uint8).view(2, 3)
        self.assertEqual(wire.tensor_to_bytes(base.t()), bytes([0, 3, 1, 4, 2, 5]))
        self.assertEqual(wire.tensor_to_bytes(base[:, 1]), bytes([1, 4]))
        self.assertEqual(wire.tensor_to_bytes(base[:1, :1].expand(2, 2)), bytes(4))
        self.assertEqual(wire.tensor_to_bytes(base[1, 2]), bytes([5]))

    def test_lazy_conjugates_and_negatives_are_carried_out(self):
        x = torch.tensor([1 + 2j, 3 - 4j])
        for lazy in (x.conj(), x.conj().imag):
            self.assertTrue(lazy.is_conj() or lazy.is_neg())
            back = wire.tensor_from_bytes(wire.tensor_to_bytes(lazy), lazy.dtype, lazy.shape)
            self.assertEqual(back.tolist(), lazy.tolist())

    def test_empty_and_0_dim(self):
        for shape in ((0,), (3, 0), (0, 2, 4), ()):
            x = torch.ones(shape, dtype=torch.float64)
            back = wire.tensor_from_bytes(wire.tensor_to_bytes(x), x.dtype, x.shape)
            self.assertEqual((back.shape, back.dtype, back.tolist()), (x.shape, x.dtype, x.tolist()))

    def test_a_leaf_that_needs_a_gradient(self):
        self.assertEqual(wire.tensor_to_bytes(torch.nn.Parameter(torch.zeros(2))), bytes(8))

    def test_sizes_must_match(self):
        for size, shape in ((7, (2,)), (9, (2,)), (0, (1,)), (4, (0,)), (12, (2, 2))):
            with self.assertRaisesRegex(ValueError, f"{size} bytes do not hold shape"):
                wire.tensor_from_bytes(bytes(size), torch.float32, shape)

    def test_the_memory_is_its_own_and_writable(self):
        data = bytearray(8)
        x = wire.tensor_from_bytes(data, torch.float32, (2,))
        x += 1
        self.assertEqual(data, bytes(8))
        self.assertEqual(x.tolist(), [1.0, 1.0])


class TestValues(unittest.TestCase):
    def test_tensors_inside_other_values_arrive_by_value(self):
        x = torch.arange(3.0)
        back = wire.loads(wire.dumps({"a": [x, x], "b": (x[::2], 4)}))
        self.assertEqual([t.tolist() for t in (*back["a"], back["b"][0])], [[0, 1, 2], [0, 1, 2], [0, 2]])
        self.assertIs(back["a"][0], back["a"][1])  # what was one object stays one
        back["a"][0].zero_()
        self.assertEqual(x.tolist(), [0, 1, 2])

    def test_modules_keep_parameters_and_ties(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        back = wire.loads(wire.dumps(model))
        self.assertIs(back[1].weight, back[0].weight)
        self.assertEqual([p.requires_grad for p in back.parameters()], [True, False, True])
        for (name, mine), theirs in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
            self.assertTrue(torch.equal(mine, theirs), name)

    def test_no_memory_is_shared_through_file_descriptors(self):
        for value in (torch.ones(4), torch.nn.Parameter(torch.ones(4)), torch.ones(4).to_sparse()):
            with mock.patch("torch.multiprocessing.reductions.reduce_tensor", side_effect=AssertionError("shared")):
                with mock.patch(
                    "torch.multiprocessing.reductions.reduce_storage", side_effect=AssertionError("shared")
                ):
                    back = wire.loads(wire.dumps(value))
            self.assertTrue(torch.equal(back.to_dense(), value.to_dense()))


class TestFunctions(unittest.TestCase):
    SOURCE = (
        "class Box:\n    @staticmethod\n    def work(x):\n        return x + 1\n\ndef top(x):\n    return Box.work(x)\n"
    )

    def test_a_module_loaded_by_path_is_loaded_again_where_it_is_not_known(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lesson.py")
            path.write_text(self.SOURCE)
            spec = importlib.util.spec_from_file_location("main_of_a_lesson", path)
            module = importlib.util.module_from_spec(spec)
            with mock.patch.dict(sys.modules, {"main_of_a_lesson": module}):
                spec.loader.exec_module(module)
                data = wire.dumps((module.top, module.Box, module.Box.work, module.Box()))
            self.assertNotIn("main_of_a_lesson", sys.modules)
            with mock.patch.dict(sys.modules):
                top, box, method, instance = wire.loads(data)
                self.assertEqual((top(1), box.work(2), method(3), instance.work(4)), (2, 3, 4, 5))
                self.assertIsNot(top, module.top)

    def test_others_go_by_name(self):
        for value in (wire.dumps, Path, torch.nn.Linear, len, type(self)):
            self.assertIs(wire.loads(wire.dumps(value)), value)

    def test_what_has_no_name_is_refused(self):
        with self.assertRaisesRegex(Exception, "[pP]ickle"):
            wire.dumps(lambda: None)


if __name__ == "__main__":
    unittest.main()
