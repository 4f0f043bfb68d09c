import contextlib
import io
import json
import sys
import unittest
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import grid_train
import ladder
import part
import shard
import tensor_parallel
import torch
import torch.nn.functional as F
from ladder import CHOSEN, climb, compare, golden, is_bitwise, run_virtual
from mesh_comm import MeshComm
from plan import Plan, parse_plan
from ranks import RankError
from recipe import IGNORED, Reader, Recipe
from tied import TiedWeight
from train import NonFiniteError
from virtual import VirtualCluster

SHORT = Recipe(steps=4, warmup=2)  # the last step's window is a partial one
TIED = replace(SHORT, tied=True)


def setUpModule():
    torch.set_num_threads(1)


@lru_cache
def run(text: str, recipe: Recipe = SHORT):
    """A plan's logs, run once."""
    return run_virtual(parse_plan(text), recipe)


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


class TestTheLadderCanFail(unittest.TestCase):
    """Wrong versions, each a mistake that someone has made: the comparison must see every one."""

    def assert_seen(self, text: str, recipe: Recipe = SHORT):
        plan = parse_plan(text)
        self.assertTrue(compare(plan, recipe, run_virtual(plan, recipe)).faults)

    def test_what_is_whole_on_all_tp_ranks_counts_twice_in_the_norm(self):
        with mock.patch.object(part, "is_split", lambda name: True):
            self.assert_seen("tp2")

    def test_what_is_cut_counts_only_on_the_first_rank(self):
        with mock.patch.object(part, "is_split", lambda name: False):
            self.assert_seen("tp2")

    def test_no_all_reduce_in_backward(self):
        with mock.patch.object(tensor_parallel._CopyToRanks, "backward", staticmethod(lambda ctx, g: (g, None))):
            self.assert_seen("tp2")

    def test_a_row_bias_that_every_rank_adds(self):
        def forward(layer, x):
            return tensor_parallel._SumOverRanks.apply(F.linear(x, layer.weight, layer.bias), layer.comm)

        with mock.patch.object(tensor_parallel.RowLinear, "forward", forward):
            self.assert_seen("tp2")

    def test_qkv_cut_as_one_matrix(self):
        original = tensor_parallel.own_slice
        with mock.patch.object(tensor_parallel, "own_slice", lambda whole, comm, groups=1: original(whole, comm)):
            self.assert_seen("tp2")

    def test_a_mean_of_means(self):
        def loss(self, logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

        with mock.patch.object(part.Part, "_loss", loss):
            for text in ("m4", "dp2"):
                self.assert_seen(text)

    def test_a_partial_window_with_a_full_ones_divisor(self):
        original = part.Part._loss

        def loss(self, logits, targets):
            return original(self, logits, targets) * (0.5 if len(targets) == 5 else 1.0)  # full ones have 6 rows

        with mock.patch.object(part.Part, "_loss", loss):
            self.assert_seen("dp2 m2", replace(SHORT, last_rows=10))

    def test_a_learning_rate_that_moves_with_microbatches(self):
        original = Recipe.learning_rate
        for wrong in (lambda recipe, step: original(recipe, 2 * step), lambda recipe, step: recipe.lr):
            golden(SHORT, 2, "float32")  # the golden run is computed with the right one
            with mock.patch.object(Recipe, "learning_rate", wrong):
                self.assert_seen("m2")

    def test_no_clipping(self):
        with mock.patch.object(part.Part, "scale_gradients", lambda self, factor: None):
            self.assert_seen("dp2 zero1")

    def test_masters_that_are_no_better_than_the_parameters(self):
        with mock.patch.object(shard, "adopt", lambda written, master: master.copy_(written)):
            self.assert_seen("zero1 bfloat16")

    def test_a_norm_of_this_ranks_shard_only(self):
        def totals(self, share):
            loss, squares = original(self, share)
            return loss, [square / self.plan.dp for square in squares]

        original = part.Part.totals
        with mock.patch.object(part.Part, "totals", totals):
            self.assert_seen("dp2 zero1")

    def test_tied_copies_that_drift(self):
        with mock.patch.object(TiedWeight, "sum_gradients", lambda self: None):
            self.assert_seen("pp2 m2", TIED)

    def test_one_message_more_and_one_buffer_more(self):
        original = part.Part.totals

        def chatty(self, share):
            self.grid.dp.all_reduce(torch.zeros(1))
            return original(self, share)

        with mock.patch.object(part.Part, "totals", chatty):
            self.assert_seen("dp2")
        memory = part.Part.memory
        with mock.patch.object(part.Part, "memory", lambda self: {k: n + 4 for k, n in memory(self).items()}):
            self.assert_seen("dp2")

    def test_ranks_that_report_other_losses(self):
        logs = json.loads(json.dumps(run("dp2")))
        logs[1]["rows"][2]["loss"] += 1e-9
        self.assertIn("ranks report different losses or norms", compare(Plan(dp=2), SHORT, logs).faults)

    def test_one_bit_of_one_gradient(self):
        logs = json.loads(json.dumps(run("zero3 m2")))
        self.assertEqual(compare(parse_plan("zero3 m2"), SHORT, logs).faults, [])
        logs[0]["rows"][3]["squares"][7] *= 1 + 2**-52
        self.assertEqual(compare(parse_plan("zero3 m2"), SHORT, logs).faults, ["not the golden run's bits"])


class TestDropout(unittest.TestCase):
    def test_replicas_draw_other_noise_and_tp_ranks_stay_one_model(self):
        recipe = replace(SHORT, dropout=0.3)
        losses = {}
        for text in ("dp1", "dp2", "tp2", "pp2 m2"):
            plan, logs = parse_plan(text), run(text, recipe)
            losses[text] = [row["loss"] for row in logs[0]["rows"]]
            for log in logs:
                self.assertEqual([row["loss"] for row in log["rows"]], losses[text])
            gold = golden(SHORT, plan.microbatches, "float32")
            self.assertNotAlmostEqual(losses[text][1], gold[1]["loss"], places=4)  # it is on
            self.assertAlmostEqual(losses[text][-1], gold[-1]["loss"], delta=0.3)  # and it trains
        self.assertEqual(len({tuple(each) for each in losses.values()}), 4)

    def test_what_tp_ranks_hold_alike_stays_alike(self):
        parts, original = {}, grid_train.Part

        def keep(grid, plan, recipe):
            parts[grid.rank] = original(grid, plan, recipe)
            return parts[grid.rank]

        with mock.patch.object(grid_train, "Part", keep):
            run_virtual(parse_plan("tp2"), replace(SHORT, dropout=0.3))
        first, second = (dict(parts[rank].stage.named_parameters()) for rank in (0, 1))
        kinds = Counter()
        for name, param in first.items():
            split = tensor_parallel.is_split(name)
            self.assertEqual(torch.equal(param, second[name]), not split, name)
            kinds[split] += 1
        self.assertGreater(min(kinds.values()), 10)


class TestFailures(unittest.TestCase):
    def test_ranks_must_start_the_same(self):
        def start(mesh):
            plan = Plan(dp=2, zero=mesh.rank)
            with self.assertRaisesRegex(ValueError, "ranks disagree on plan and recipe: zero: rank 0 has 0; rank 1"):
                grid_train.train_on_grid(MeshComm(mesh), plan, SHORT)

        VirtualCluster(2).run(start)

    def test_a_model_that_cannot_be_cut_is_refused_before_anything_is_sent(self):
        def start(mesh):
            comm = MeshComm(mesh)
            with self.assertRaisesRegex(ValueError, "4 heads cannot be shared by 3"):
                grid_train.train_on_grid(comm, Plan(tp=3), SHORT)
            return comm.counters.control_calls

        self.assertEqual(VirtualCluster(3).run(start), [0, 0, 0])

    def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_step(self):
        original = part.Part.backward

        def poisoned(self, tokens, targets):
            share = original(self, tokens, targets)
            if self.grid.rank == 3:
                self.gradients()[0][1][0] = float("nan")
            return share

        def start(mesh):
            with self.assertRaisesRegex(NonFiniteError, "step 1: the gradient of .* is not finite; no parameter"):
                grid_train.train_on_grid(MeshComm(mesh), parse_plan("dp2 pp2 zero1 m2"), SHORT)

        with mock.patch.object(part.Part, "backward", poisoned):
            VirtualCluster(4).run(start)

    def test_a_rank_that_raises_ends_the_run_and_is_named(self):
        def totals(self, share):
            if self.grid.rank == 1:
                raise OSError("disk")
            return original(self, share)

        original = part.Part.totals
        with mock.patch.object(part.Part, "totals", totals), self.assertRaisesRegex(RankError, "rank 1 raised OSError"):
            run_virtual(parse_plan("dp2 pp2 m2"), SHORT)


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
            (["--dtype", "float16"], "invalid choice: 'float16'"),
        ]:
            code, _, err = self.main(*argv)
            self.assertEqual(code, 2)
            self.assertIn(message, err)


if __name__ == "__main__":
    unittest.main()
