import json
import sys
import unittest
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import grid_train
import part
import shard
import tensor_parallel
import torch
import torch.nn.functional as F
from ladder import compare, golden, run_virtual
from ladder_cases import SHORT, TIED, run
from mesh_comm import MeshComm
from plan import Plan, parse_plan
from ranks import RankError
from recipe import IGNORED, Recipe
from tied import TiedWeight
from train import NonFiniteError
from virtual import VirtualCluster


def setUpModule():
    torch.set_num_threads(1)


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


if __name__ == "__main__":
    unittest.main()
