import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import plan_cost
import torch
from flat import flat_param_numel
from ladder import CHOSEN, all_plans
from plan import Plan, parse_plan
from recipe import IGNORED, Reader, Recipe, deal
from stages import layers_of, take_layers

RECIPE = Recipe()


class TestPlan(unittest.TestCase):
    def test_refusals(self):
        for settings, message in [
            ({"dp": 0}, "dp must be a whole number of at least 1, got 0"),
            ({"pp": 1.5}, "pp must be a whole number"),
            ({"tp": True}, "tp must be a whole number"),
            ({"microbatches": 0}, "microbatches must be"),
            ({"zero": 4}, "zero must be from 0 to 3, got 4"),
            ({"zero": -1}, "zero must be a whole number of at least 0"),
            ({"dtype": "float16"}, "dtype must be one of float32, float64, bfloat16, got 'float16'"),
            ({"dtype": "bfloat16"}, "bfloat16 parameters need fp32 masters"),
        ]:
            with self.assertRaisesRegex(ValueError, message):
                Plan(**settings)

    def test_a_model_that_cannot_be_cut_so(self):
        for plan, recipe, message in [
            (Plan(tp=3), RECIPE, "4 heads cannot be shared by 3 tensor parallel ranks"),
            (Plan(pp=5), RECIPE, "5 stages, but the model has only 4 layers"),
            (Plan(tp=8), Recipe(dim=24, heads=8), None),
        ]:
            if message is None:
                plan.check(recipe)
            else:
                with self.assertRaisesRegex(ValueError, message):
                    plan.check(recipe)

    def test_written_and_read(self):
        for plan in [*all_plans(RECIPE), *CHOSEN]:
            self.assertEqual(parse_plan(str(plan)), plan)
        self.assertEqual(parse_plan("tp2,m4"), Plan(tp=2, microbatches=4))
        for text in ("", "dp", "3", "dp2 dp3", "qp2", "dp-2", "float32 float64", "dp2x"):
            with self.assertRaisesRegex(ValueError, "a plan is written like"):
                parse_plan(text)

    def test_all_plans_are_all_that_fit(self):
        plans = all_plans(RECIPE)
        grids = {(p.dp, p.pp, p.tp) for p in plans}
        fit = [(d, p, t) for d in range(1, 9) for p in range(1, 5) for t in (1, 2, 4) if d * p * t <= 8]
        self.assertEqual(grids, set(fit))
        for grid in fit:
            self.assertEqual({p.zero for p in plans if (p.dp, p.pp, p.tp) == grid}, {0, 1, 2, 3}, grid)
        self.assertEqual(len(plans), len(set(plans)))

    def test_windows(self):
        for plan, rows, expected in [
            (Plan(), 24, (1, 24)),
            (Plan(), 12, (1, 12)),
            (Plan(microbatches=4), 24, (4, 6)),
            (Plan(microbatches=4), 12, (2, 6)),  # a partial window: fewer microbatches
            (Plan(dp=5, microbatches=2), 24, (2, 3)),  # 30 places for 24 rows
            (Plan(dp=5, microbatches=2), 12, (1, 3)),
        ]:
            self.assertEqual(plan.window(rows, RECIPE), expected)

    def test_the_program_is_plain_data_in_which_everything_is_done_once(self):
        for plan in CHOSEN:
            program = plan.program(RECIPE)
            self.assertEqual(len(program), plan.world_size)
            done = [
                (layer, head, row)
                for rank in program
                for layer in rank["layers"]
                for head in range(*rank["heads"])
                for row in range(*rank["rows"])
            ]
            self.assertEqual(len(done), len(set(done)))
            self.assertEqual(len(done), 6 * RECIPE.heads * RECIPE.rows)


class TestStages(unittest.TestCase):
    def test_stages_are_the_model(self):
        tokens = torch.arange(16).view(2, 8)
        expected = RECIPE.build()(tokens)
        for pp in range(1, 5):
            x, names = tokens, []
            for stage in range(pp):
                layers = take_layers(RECIPE.build(), layers_of(4, stage, pp))
                x, names = layers(x), names + [name for name, _ in layers.named_parameters()]
            self.assertTrue(torch.equal(x, expected))
            self.assertEqual(names, [n for n, _ in take_layers(RECIPE.build(), layers_of(4)).named_parameters()])


class TestRecipe(unittest.TestCase):
    def test_warm_up_then_half_a_cosine(self):
        recipe = Recipe(steps=30, warmup=5, lr=2.0, floor=0.1)
        rates = [recipe.learning_rate(step) for step in range(1, 31)]
        self.assertEqual(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0])
        self.assertAlmostEqual(rates[-1], 0.2)
        middle = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 10 / 25)))
        self.assertAlmostEqual(rates[14], middle)
        self.assertEqual(rates[4:], sorted(rates[4:], reverse=True))
        self.assertEqual(Recipe(steps=2, warmup=5, lr=1.0).learning_rate(2), 0.4)
        self.assertEqual(Recipe(steps=2, warmup=0, lr=1.0, floor=0.0).learning_rate(2), 0.0)

    def test_batches(self):
        reader = Reader(RECIPE)
        for step in (1, 2, 30):
            tokens, targets = reader.batch(step)
            again = Reader(RECIPE).batch(step)
            self.assertTrue(torch.equal(tokens, again[0]) and torch.equal(targets, again[1]))
            self.assertEqual(tokens.shape, (12 if step == 30 else 24, 8))
            lengths = (targets != IGNORED).sum(1)
            self.assertGreater(len(set(lengths.tolist())), 3)  # rows have other numbers of tokens
            self.assertGreaterEqual(lengths.min().item(), 1)
            kept = targets != IGNORED
            self.assertTrue(torch.equal(targets[:, :-1][kept[:, :-1]], tokens[:, 1:][kept[:, :-1]]))

    def test_deal(self):
        tokens = torch.arange(1, 23).view(11, 2)
        for replicas in range(1, 8):
            for count in range(1, 4):
                dealt = [deal(tokens, tokens, replicas, r, count) for r in range(replicas)]
                self.assertEqual({len(part) for pair in dealt for part in pair}, {count})
                self.assertEqual(len({part.shape for pair in dealt for side in pair for part in side}), 1)
                targets = torch.cat([part for _, side in dealt for part in side])
                self.assertTrue(torch.equal(targets[:11], tokens))
                self.assertTrue(bool((targets[11:] == IGNORED).all()))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "the last step has 30 rows, the others only 24"):
            Recipe(last_rows=30)
        with self.assertRaisesRegex(ValueError, "steps must be"):
            Recipe(steps=0)


class TestFormulas(unittest.TestCase):
    """Numbers worked out by hand; that runs cost what the formulas say is what the ladder tests."""

    def test_elements_of_a_rank(self):
        for tied in (False, True):
            recipe = Recipe(tied=tied)
            whole = plan_cost.layer_sizes(Plan(), recipe, 0)
            self.assertEqual(sum(whole.values()), flat_param_numel(recipe.build()))
        stage = plan_cost.layer_sizes(Plan(pp=4, tp=2), RECIPE, 3)
        self.assertEqual(stage, {"block3": (12 * 256 + 7 * 16) // 2 + 6 * 16, "head": 64 * 16 + 2 * 16})

    def test_payload_of_a_small_plan(self):
        found = plan_cost.payload(Plan(dp=2, pp=2, tp=2, zero=1, microbatches=2), RECIPE, {"pp": 0}, 24, 53)
        activation = 4 * 6 * 8 * 16  # bytes x rows x seq x dim
        own = 64 * 16 + 8 * 16 + 2 * (3184 // 2 + 96)
        expected = {
            "world all_reduce": 8 * 54,
            "pp broadcast": 8 * 2,
            "pp exchange": 2 * activation,
            "tp all_reduce": 4 * 2 * 2 * activation,  # two each way, blocks, microbatches
            "dp reduce_scatter": 4 * own,
            "dp all_reduce": 4 * (1 + 2),
            "dp all_gather": 4 * own,
        }
        self.assertEqual(found, expected)

    def test_on_the_wire(self):
        payloads = [{"dp all_reduce": 100, "tp all_gather": 60, "pp exchange": 7, "pp broadcast": 8}] * 4
        together = plan_cost.together(Plan(dp=2, tp=2), payloads)
        self.assertEqual(together, 4 * 100 + 2 * 60 + 4 * 7 + 0)

    def test_bytes_held(self):
        p = flat_param_numel(RECIPE.build())
        place = {"pp": 0}
        self.assertEqual(
            plan_cost.held(Plan(), RECIPE, place), {"parameters": 4 * p, "gradients": 4 * p, "optimizer": 8 * p}
        )
        self.assertEqual(plan_cost.held(Plan(dp=2, zero=1), RECIPE, place)["optimizer"], 4 * p)  # p is even
        bf16 = plan_cost.held(Plan(zero=1, dtype="bfloat16"), RECIPE, place)
        self.assertEqual(bf16, {"parameters": 2 * p, "gradients": 2 * p, "optimizer": 12 * p})


if __name__ == "__main__":
    unittest.main()
