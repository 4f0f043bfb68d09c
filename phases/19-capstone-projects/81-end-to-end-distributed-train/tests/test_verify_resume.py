"""A claim about bits: numbers that are equal may differ, and numbers that are not equal may be the same."""

import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from checkpoint import save_sharded

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
spec = importlib.util.spec_from_file_location("main_81_for_bits", MAIN)
main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main)


class TestBits(unittest.TestCase):
    def test_the_sign_of_zero_and_nan(self):
        saved = [torch.tensor([0.0, float("nan"), 1.0 + rank]) for rank in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            save_sharded([{"optimizer": {"state": {"unit": {"master": master}}}} for master in saved], folder, 10)
            self.assertIs(main.verify_resume(folder, 2, saved), True)
            for rank in range(2):
                other = [master.clone() for master in saved]
                other[rank][0] = -0.0
                self.assertIs(main.verify_resume(folder, 2, other), False)


if __name__ == "__main__":
    unittest.main()
