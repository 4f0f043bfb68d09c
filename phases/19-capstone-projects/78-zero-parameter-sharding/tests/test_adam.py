import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from adam import BLOCK, AdamSettings, adam_step, fused_adam_steps
from zero_cases import TorchAdam, known_gradient

LENGTHS = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def start(numel, dtype=torch.float32):
    """Return parameters that differ by element, and moments of zero."""
    param = torch.linspace(-2, 3, numel, dtype=dtype)
    return param, torch.zeros_like(param), torch.zeros_like(param)


class TestAdamStep(unittest.TestCase):
    def compare(self, numel, steps=4, dtype=torch.float32, **settings):
        param, exp_avg, exp_avg_sq = start(numel, dtype)
        theirs = TorchAdam(param, **({"lr": 1e-2} | settings))
        for step in range(1, steps + 1):
            grad = known_gradient(numel, 0, step).to(dtype)
            kept = grad.clone()
            adam_step(param, grad, exp_avg, exp_avg_sq, step, AdamSettings(**({"lr": 1e-2} | settings)))
            with self.subTest(numel=numel, step=step, **settings):
                self.assertTrue(torch.equal(param, theirs.step(kept)))
                self.assertTrue(torch.equal(exp_avg, theirs.exp_avg))
                self.assertTrue(torch.equal(exp_avg_sq, theirs.exp_avg_sq))
                self.assertTrue(torch.equal(grad, kept))  # the gradient is only read

    def test_bits_are_torchs_at_every_length_around_a_block(self):
        for numel in LENGTHS:
            self.compare(numel)

    def test_bits_are_torchs_for_other_settings(self):
        self.compare(1000, weight_decay=0.1)
        self.compare(1000, betas=(0.5, 0.9), eps=1e-3)
        self.compare(1000, betas=(0.0, 0.0))
        self.compare(1000, lr=0.0, weight_decay=0.3)
        self.compare(1000, lr=0.7, betas=(0.95, 0.99), eps=0.0, weight_decay=0.01)
        self.compare(1000, dtype=torch.float64)

    def test_settings_at_the_ends_of_their_ranges(self):
        AdamSettings(0, (0, 0.0), 0.0, 0).check()
        AdamSettings(1e9, [0.999999, 0.5], 1.0, 2.0).check()  # a list is what JSON makes of a tuple
        for bad in ({"lr": -1e-9}, {"betas": (0.9, 1)}, {"eps": float("inf")}, {"weight_decay": float("nan")}):
            self.assertRaisesRegex(ValueError, next(iter(bad)), AdamSettings(**({"lr": 0.1} | bad)).check)

    def test_a_rate_that_changes_from_step_to_step(self):
        param, exp_avg, exp_avg_sq = start(100)
        theirs = TorchAdam(param)
        for step, lr in enumerate((1e-3, 0.0, 0.5, 1e-2), 1):
            grad = known_gradient(100, 1, step)
            theirs.options["lr"] = lr
            adam_step(param, grad, exp_avg, exp_avg_sq, step, AdamSettings(lr))
            self.assertTrue(torch.equal(param, theirs.step(grad)))

    def test_where_it_is_cut_makes_no_difference(self):
        """What a shard computes alone is what the whole computes: nothing but elementwise arithmetic."""
        settings, numel = AdamSettings(1e-2, weight_decay=0.1), 1000
        whole, parts = start(numel), start(numel)
        for step in range(1, 4):
            grad = known_gradient(numel, 0, step)
            adam_step(whole[0], grad, *whole[1:], step, settings)
            for begin, end in ((0, 1), (1, 334), (334, 1000)):
                adam_step(parts[0][begin:end], grad[begin:end], *(m[begin:end] for m in parts[1:]), step, settings)
        for one, other in zip(whole, parts, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_a_bf16_gradient_is_widened_before_it_is_squared(self):
        grad = known_gradient(100, 0, 0).bfloat16()
        narrow, wide = start(100), start(100)
        adam_step(narrow[0], grad, *narrow[1:], 1, AdamSettings(1e-2))
        adam_step(wide[0], grad.float(), *wide[1:], 1, AdamSettings(1e-2))
        for one, other in zip(narrow, wide, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_the_first_step_is_lr_whatever_the_gradients_scale(self):
        """Why a sum instead of a mean goes unnoticed: the step hardly depends on the gradient's size."""
        for scale in (1.0, 8.0):
            param, exp_avg, exp_avg_sq = torch.zeros(3), torch.zeros(3), torch.zeros(3)
            adam_step(param, scale * torch.tensor([1e-2, -1.0, 5.0]), exp_avg, exp_avg_sq, 1, AdamSettings(0.1))
            torch.testing.assert_close(param, torch.tensor([-0.1, 0.1, -0.1]), rtol=1e-5, atol=0)


class TestFused(unittest.TestCase):
    """The fused kernel does the same arithmetic in another order: about ten operations, each with a rounding."""

    def step(self, tensors, grad, step, settings, skip=None):
        columns = [[tensor] for tensor in (tensors[0], grad, *tensors[1:])]
        fused_adam_steps(*columns, torch.tensor(float(step)), settings, skip)

    def test_from_the_same_state_it_is_within_rounding_of_the_plain_one(self):
        """The bound: 4 roundings of the parameter, and 16 of a step, which is at most lr / sqrt(1 - beta2) or so."""
        eps, plain = torch.finfo(torch.float32).eps, start(10_000)
        settings, largest = AdamSettings(1e-2, weight_decay=0.1), 0.0
        for step in range(1, 20):
            grad, fused = known_gradient(10_000, 0, step), [tensor.clone() for tensor in plain]
            before = plain[0].clone()
            self.step(fused, grad, step, settings)
            adam_step(plain[0], grad, *plain[1:], step, settings)
            moved = (plain[0] - before).abs()
            gap = (plain[0] - fused[0]).abs()
            self.assertTrue((gap <= 4 * eps * before.abs() + 16 * eps * moved).all())
            for one, other, size in zip(plain[1:], fused[1:], (grad.abs(), grad.square()), strict=True):
                self.assertTrue(((one - other).abs() <= 4 * eps * (one.abs() + size)).all())
            largest = max(largest, gap.max().item())
        self.assertGreater(largest, 0.0)  # it is another arithmetic: bits are not compared with it

    def test_it_is_what_torchs_class_does(self):
        ours, theirs = start(1000), torch.nn.Parameter(start(1000)[0])
        optimizer = torch.optim.AdamW([theirs], 1e-2, weight_decay=0.1, fused=True)
        for step in range(1, 5):
            theirs.grad = known_gradient(1000, 0, step)
            optimizer.step()
            self.step(ours, known_gradient(1000, 0, step), step, AdamSettings(1e-2, weight_decay=0.1))
            self.assertTrue(torch.equal(ours[0], theirs.detach()))

    def test_skip_leaves_everything_as_it_is(self):
        tensors = start(100)
        self.step(tensors, known_gradient(100, 0, 1), 1, AdamSettings(1e-2))
        before = [tensor.clone() for tensor in tensors]
        self.step(tensors, torch.full((100,), float("nan")), 2, AdamSettings(1e-2, weight_decay=0.1), torch.ones(1))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)))
        self.step(tensors, known_gradient(100, 0, 2), 2, AdamSettings(1e-2), torch.zeros(1))
        self.assertFalse(torch.equal(tensors[0], before[0]))

    def test_a_bf16_gradient_is_widened(self):
        grad, narrow, wide = known_gradient(100, 0, 0).bfloat16(), start(100), start(100)
        self.step(narrow, grad, 1, AdamSettings(1e-2))
        self.step(wide, grad.float(), 1, AdamSettings(1e-2))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True)))


if __name__ == "__main__":
    unittest.main()
