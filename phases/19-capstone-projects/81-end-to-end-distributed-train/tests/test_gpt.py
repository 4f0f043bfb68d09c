import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from flat import flat_param_numel
from gpt import MiniGPT

TOKENS = torch.arange(48).view(3, 16)  # (batch, seq), every token different


def parameter_count(vocab, dim, blocks, seq) -> int:
    """Embeddings and head, then a block's four matrices (12 dim^2), their biases (9 dim) and two norms (4 dim)."""
    return 2 * vocab * dim + seq * dim + blocks * (12 * dim**2 + 13 * dim) + 2 * dim


class TestForward(unittest.TestCase):
    def test_a_later_token_never_changes_an_earlier_logit(self):
        model = MiniGPT()
        before = model(TOKENS)
        for place in range(16):
            changed = TOKENS.clone()
            changed[:, place] = (changed[:, place] + 7) % 64
            after = model(changed)
            self.assertTrue(torch.equal(after[:, :place], before[:, :place]), place)
            rest = (after[:, place:] - before[:, place:]).abs().amax(dim=(0, 2))
            self.assertTrue(bool((rest > 0).all()), f"token {place} must change every logit from its own place on")

    def test_rows_do_not_see_each_other(self):
        model = MiniGPT().double()
        alone = torch.cat([model(TOKENS[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(model(TOKENS), alone, rtol=0, atol=1e-14)

    def test_a_token_means_something_else_in_another_place(self):
        logits = MiniGPT()(torch.zeros(1, 16, dtype=torch.long))
        self.assertGreater((logits[0, 0] - logits[0, 1]).abs().max().item(), 1e-3)

    def test_shorter_sequences_give_the_first_logits(self):
        model = MiniGPT().double()
        torch.testing.assert_close(model(TOKENS[:, :5]), model(TOKENS)[:, :5], rtol=0, atol=1e-14)

    def test_shapes_that_do_not_fit(self):
        for shape in ((1, 17), (16,), (1, 1, 16), ()):
            with self.assertRaisesRegex(ValueError, "at most 16"):
                MiniGPT()(torch.zeros(shape, dtype=torch.long))

    def test_the_loss_is_the_mean_of_minus_log_p_of_the_target(self):
        model, targets = MiniGPT().double(), TOKENS.flip(1)
        p = model(TOKENS).softmax(-1)  # (batch, seq, vocab)
        expected = -sum(p[b, s, targets[b, s]].log() for b in range(3) for s in range(16)) / 48
        self.assertAlmostEqual(model.loss(TOKENS, targets).item(), expected.item(), places=12)

    def test_before_training_it_guesses(self):
        self.assertAlmostEqual(MiniGPT().loss(TOKENS, TOKENS.flip(1)).item(), math.log(64), delta=0.05)


class TestParameters(unittest.TestCase):
    def test_the_head_is_not_the_embedding(self):
        model = MiniGPT()
        self.assertIsNot(model.head.weight, model.tokens.weight)
        self.assertNotEqual(model.head.weight.data_ptr(), model.tokens.weight.data_ptr())
        self.assertFalse(torch.equal(model.head.weight, model.tokens.weight))

    def test_the_number_of_parameters(self):
        self.assertEqual(flat_param_numel(MiniGPT()), 30_080)
        for vocab, dim, heads, blocks, seq in ((64, 32, 4, 2, 16), (3, 6, 3, 1, 2), (100, 48, 2, 5, 7)):
            count = flat_param_numel(MiniGPT(vocab, dim, heads, blocks, seq))
            self.assertEqual(count, parameter_count(vocab, dim, blocks, seq))

    def test_a_layer_norm_has_a_gain_and_a_bias_and_remembers_nothing(self):
        model = MiniGPT()
        self.assertEqual([name for name, _ in model.blocks[0].norm1.named_parameters()], ["weight", "bias"])
        self.assertEqual(list(model.named_buffers()), [])

    def test_every_parameter_gets_a_gradient(self):
        model = MiniGPT()
        model.loss(TOKENS, TOKENS.flip(1)).backward()
        for name, param in model.named_parameters():
            self.assertGreater(param.grad.abs().max().item(), 0, name)

    def test_sizes_that_do_not_fit(self):
        for wrong in ({"vocab": 0}, {"dim": -1}, {"heads": 0}, {"blocks": 0}, {"seq": 0}):
            with self.assertRaisesRegex(ValueError, f"{next(iter(wrong))} must be at least 1"):
                MiniGPT(**wrong)
        with self.assertRaisesRegex(ValueError, "5 heads, dim 32"):
            MiniGPT(heads=5)


class TestRandomness(unittest.TestCase):
    def test_a_seed_gives_one_model(self):
        for (name, a), b, other in zip(
            MiniGPT(seed=3).named_parameters(), MiniGPT(seed=3).parameters(), MiniGPT(seed=4).parameters(), strict=True
        ):
            self.assertTrue(torch.equal(a, b), name)
            if a.dim() == 2:
                self.assertFalse(torch.equal(a, other), name)

    def test_building_one_draws_nothing_from_the_global_generator(self):
        before = torch.get_rng_state()
        MiniGPT()
        self.assertTrue(torch.equal(torch.get_rng_state(), before))

    def test_dropout_acts_in_training_only(self):
        model = MiniGPT(dropout=0.5)
        torch.manual_seed(0)
        self.assertFalse(torch.equal(model(TOKENS), model(TOKENS)))
        model.eval()
        self.assertTrue(torch.equal(model(TOKENS), model(TOKENS)))
        self.assertTrue(torch.equal(model(TOKENS), MiniGPT()(TOKENS)), "without dropout it is the same model")

    def test_dropout_of_zero_draws_nothing(self):
        model, before = MiniGPT(dropout=0.0), torch.get_rng_state()
        model(TOKENS)
        self.assertTrue(torch.equal(torch.get_rng_state(), before))


if __name__ == "__main__":
    unittest.main()
