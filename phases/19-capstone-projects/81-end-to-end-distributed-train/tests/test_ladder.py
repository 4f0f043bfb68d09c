import contextlib
import io
import json
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import grid_train
import ladder
import part
import torch
import torch.nn.functional as F
from ladder import CHOSEN, climb, compare, golden, is_bitwise
from ladder_cases import SHORT, TIED, run
from mesh_comm import MeshComm
from plan import parse_plan
from recipe import IGNORED, Reader, Recipe
from virtual import VirtualCluster


def setUpModule():
    torch.set_num_threads(1)


class TestGolden(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.log = golden(Recipe(), 1, "float32")

    def test_30_steps_that_learn_without_dropout(self):
        self.assertEqual(len(self.log), 30)
        self.assertEqual(Recipe().dropout, 0)
        self.assertLess(self.log[-1]["loss"], self.log[0]["loss"] - 0.7)

    def test_clipping_and_partial_windows_matter(self):
        clipped = [row["norm"] > Recipe().clip for row in self.log]
        self.assertIn(True, clipped)
        self.assertIn(False, [row["norm"] > 1 for row in self.log])
        self.assertLess(len(Reader(Recipe()).batch(30)[0]), len(Reader(Recipe()).batch(29)[0]))

    def test_accumulation_over_4_microbatches_is_one_big_batch(self):
        whole, parts = (golden(SHORT, m, "float64") for m in (1, 4))
        for a, b in zip(whole, parts, strict=True):
            self.assertAlmostEqual(a["loss"], b["loss"], places=12)
            for x, y in zip(a["squares"], b["squares"], strict=True):
                self.assertAlmostEqual(x, y, places=12)

    def test_the_first_loss_is_the_mean_over_all_tokens(self):
        tokens, targets = Reader(SHORT).batch(1)
        losses = F.cross_entropy(SHORT.build()(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        kept = targets.flatten() != IGNORED
        self.assertAlmostEqual(golden(SHORT, 1, "float32")[0]["loss"], losses[kept].double().mean().item(), places=6)

    def test_a_tied_matrix_in_bfloat16_has_no_bound_for_its_norms(self):
        """The golden run itself, its rows counted in another order, is further off than any bound that would tell."""
        one, three = (golden(Recipe(tied=True), count, "bfloat16") for count in (1, 3))
        off = max(abs(a["norm"] - b["norm"]) / max(b["norm"], 1) for a, b in zip(three, one, strict=True))
        self.assertGreater(off, 2**-3)
        self.assertLess(max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(three, one, strict=True)), 2**-5)


class TestAccumulation(unittest.TestCase):
    """Microbatches of unequal token counts, a last window of fewer: one divisor, known before the first backward."""

    def test_4_microbatches_are_one_big_batch(self):
        recipe = replace(SHORT, last_rows=7)  # 2 microbatches of 4 rows, of which one is padding
        whole, parts = (run(f"zero1 {m} float64", recipe)[0]["rows"] for m in ("m1", "m4"))
        for step, (a, b) in enumerate(zip(whole, parts, strict=True), 1):
            self.assertAlmostEqual(a["loss"], b["loss"], places=12, msg=f"step {step}")
            for x, y in zip(a["squares"], b["squares"], strict=True):
                self.assertAlmostEqual(x, y, places=12, msg=f"step {step}")

    def test_microbatches_have_other_numbers_of_tokens(self):
        _, targets = Reader(SHORT).batch(1)
        self.assertGreater(len({(part != IGNORED).sum().item() for part in targets.split(6)}), 2)


class TestChosenPlans(unittest.TestCase):
    """What CI runs of the ladder: values against the golden run, bytes sent and held against the formulas."""

    def test_virtual_ranks(self):
        for plan in CHOSEN:
            with self.subTest(plan=str(plan)):
                rung = compare(plan, SHORT, run(str(plan)))
                self.assertEqual(rung.faults, [])
                self.assertEqual(rung.bitwise, is_bitwise(plan, SHORT))  # dp 2 could have them by luck
                self.assertEqual((rung.sent, rung.held), (rung.sent_predicted, rung.held_predicted))
                self.assertGreater(rung.sent, 0) if plan.world_size > 1 else self.assertEqual(rung.sent, 0)

    def test_an_axis_alone_and_all_three(self):
        for plan in map(parse_plan, ("dp2 zero2", "pp2 m4", "tp2", "dp2 pp2 tp2 zero1 m2")):
            self.assertEqual(compare(plan, SHORT, run(str(plan))).faults, [], str(plan))

    def test_fp64_is_2_to_the_29_closer(self):
        """Nothing but rounding: in fp64 the differences shrink as eps does."""
        for text in ("dp3 zero1 m2", "tp4 zero2", "pp2 tp2 m2", "dp2 pp2 zero3 m2", "dp5", "dp2 tp2 zero3"):
            plan = parse_plan(text + " float64")
            rung = compare(plan, SHORT, run(str(plan)))
            self.assertEqual(rung.faults, [], text)
            self.assertLess(max(rung.loss_off, rung.norm_off), 1e-13)

    def test_a_tied_embedding(self):
        for text in ("m2", "zero3 m2", "dp2 zero3", "pp2 m4", "pp4 zero1 m2", "pp2 zero2", "dp2 pp2 tp2 zero3 m2"):
            plan = parse_plan(text + " float64")
            rung = compare(plan, TIED, run(str(plan), TIED))
            self.assertEqual(rung.faults, [], text)
            self.assertLess(rung.loss_off, 1e-13)
            self.assertEqual(rung.sent, rung.sent_predicted)

    def test_bfloat16(self):
        """One replica has the bits of a plain loop in bfloat16 with masters; the others are near it, tied or not."""
        for recipe in (SHORT, TIED):
            for text in ("zero1", "zero3 m4", "pp4 zero2 m2", "dp2 zero2", "tp2 zero1", "dp2 pp2 tp2 zero3 m2"):
                plan = parse_plan(text + " bfloat16")
                rung = compare(plan, recipe, run(str(plan), recipe))
                self.assertEqual((rung.faults, rung.bitwise), ([], is_bitwise(plan, recipe)), (text, recipe.tied))
                self.assertEqual((rung.sent, rung.held), (rung.sent_predicted, rung.held_predicted))

    def test_processes(self):
        for text, tied in (("dp2 zero3 m2", False), ("pp2 tp2 m2", True)):
            rung = climb(parse_plan(text), replace(SHORT, steps=3, tied=tied), processes=True)
            self.assertEqual((rung.faults, rung.where), ([], "processes"))
            self.assertEqual(rung.sent, rung.sent_predicted)

    def test_all_orders_of_events_give_the_same_bits(self):
        plan = parse_plan("dp2 pp2 tp2 zero1 m2")
        recipe, found = replace(SHORT, steps=2), []
        for seed in range(3):
            cluster = VirtualCluster(plan.world_size, seed, buffered=seed > 0)
            logs = cluster.run(lambda mesh: grid_train.train_on_grid(MeshComm(mesh), plan, recipe))
            found.append([row["squares"] for row in logs[0]["rows"]])
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])


class TestCommand(unittest.TestCase):
    def main(self, *argv: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = ladder.main(list(argv))
            except SystemExit as error:
                code = error.code
        return code, out.getvalue(), err.getvalue()

    def test_a_table(self):
        code, out, err = self.main("--only", "pp2 m2", "--only", "dp2", "--steps", "2")
        lines = out.splitlines()
        self.assertEqual((code, len(lines)), (0, 4))
        self.assertIn("bitwise", lines[2])
        self.assertIn("off", lines[3])
        self.assertIn("2 plans run: 1 bitwise, 0 failed", err)

    def test_all_plans_in_one_dtype(self):
        with mock.patch.object(ladder, "CHOSEN", tuple(map(parse_plan, ("m2", "zero3 m2")))):
            code, out, err = self.main("--quick", "--tied", "--dtype", "bfloat16", "--steps", "1", "--json")
        plans = [(rung["plan"], rung["where"]) for rung in json.loads(out)]
        dp2, both = "dp2 pp1 tp1 zero3 m1 bfloat16", "dp2 pp2 tp2 zero1 m2 bfloat16"
        virtual = ("dp1 pp1 tp1 zero3 m2 bfloat16", "virtual")
        self.assertEqual((code, plans), (0, [virtual, (dp2, "processes"), (both, "processes")]), err)

    def test_json(self):
        code, out, _ = self.main("--only", "zero3 m4", "--steps", "2", "--json")
        (rung,) = json.loads(out)
        self.assertEqual((code, rung["plan"], rung["bitwise"], rung["faults"]), (0, "dp1 pp1 tp1 zero3 m4", True, []))

    def test_a_failure_is_told_and_ends_with_1(self):
        with mock.patch.object(part, "is_split", lambda name: True):
            code, out, err = self.main("--only", "tp2", "--steps", "1")
        self.assertEqual(code, 1)
        self.assertIn("FAIL", out)
        self.assertIn("1 failed", err)

    def test_what_cannot_be_run(self):
        for argv, message in [
            (["--only", "dp2 xx3"], "a plan is written like"),
            (["--only", "zero7"], "zero must be from 0 to 3"),
            (["--only", "tp3"], "4 heads cannot be shared by 3"),
            (["--steps", "0"], "at least 1"),
            (["--quick", "--only", "dp2"], "--quick has chosen plans, --only your own: one of them"),
            (["--only", "dp1000000"], "1000000 ranks: the ladder runs at most 64 on one machine"),
            (["--only", "m25"], "24 sequences cannot be 25 microbatches"),
            (["--dtype", "bfloat16", "--only", "zero1"], "a plan says its dtype itself"),
            (
                ["--only", "dp3 zero1 bfloat16", "--steps", "31"],
                "bfloat16 has bounds for 30 steps at most, got --steps 31",
            ),
            (["--dtype", "float16"], "invalid choice: 'float16'"),
        ]:
            code, _, err = self.main(*argv)
            self.assertEqual(code, 2)
            self.assertIn(message, err)


if __name__ == "__main__":
    unittest.main()
