import sys
import unittest
from itertools import pairwise
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import torch.nn.functional as F
from comm import TorchComm
from instructions import Compute
from measured import measure_worker, predict
from mesh_comm import MeshComm
from meter import MeteredPipeline
from one_process import full_batch_gradients, whole_batch, whole_numbers
from pipeline import Pipeline
from pipeline_bench import _their_step, bench_worker, same_gradients
from pipeline_data import StageGradients, split_grid
from pipeline_deeper import grid_worker
from ranks import RankError, run_ranks
from schedule import SCHEDULES, make_orders, make_schedule, stages_per_rank
from simulator import Slot, summarise
from split_backward import WeightsLater, add_weight_gradients
from stage_mlp import StageMLP, build_pipeline, make_batch, stage_shapes
from stopwatch import stage_times
from tied import TiedWeight
from tied_toy import DIM, TiedStage, token_loss, tokens, whole_model
from torch import nn
from torch.nn.functional import mse_loss
from virtual import VirtualCluster


def setUpModule():
    torch.set_num_threads(1)  # as in a rank: the same kernels, the same bits


def grads_of(module):
    return [p.grad for p in module.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestSplitBackward(unittest.TestCase):
    def run_both(self, module, x):
        """(gradients at once, gradients after the first part, after the second); input gradients must be equal."""
        found, inputs = [], []
        for later in (None, []):
            module.zero_grad()
            leaf = x.clone().requires_grad_(x.is_floating_point())
            if later is None:
                module(leaf).square().sum().backward()
            else:
                with WeightsLater(later):
                    y = module(leaf)
                y.square().sum().backward()
                found.append([None if g is None else g.clone() for g in grads_of(module)])
                self.assertTrue(later)
                add_weight_gradients(later)
                self.assertEqual(later, [])
            found.append(grads_of(module))
            inputs.append(leaf.grad)
        self.assertTrue(inputs[0] is inputs[1] is None or torch.equal(*inputs))
        return found

    def test_linear_layers_bit_for_bit(self):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.ReLU())
        for shape in ((4, 5), (2, 3, 5), (5,)):
            whole, first, both = self.run_both(module, torch.randn(shape))
            self.assertEqual(first, [None] * 3)  # the first part computes no weight gradient
            self.assertTrue(equal(both, whole), shape)

    def test_what_is_not_linear_is_not_split(self):
        module = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 4))
        whole, first, both = self.run_both(module, torch.randint(9, (3, 5)))
        self.assertEqual([g is None for g in first], [False, False, False, True, True])
        self.assertTrue(equal(both, whole))

    def test_a_weight_used_twice_and_a_frozen_one(self):
        torch.manual_seed(1)
        shared, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        frozen.weight.requires_grad_(False)
        whole, _, both = self.run_both(nn.Sequential(shared, nn.Tanh(), shared, frozen), torch.randn(3, 4))
        self.assertIsNone(both[2])
        self.assertTrue(
            all(a is b is None or torch.allclose(a, b, atol=1e-6) for a, b in zip(both, whole, strict=True))
        )

    def test_a_weight_that_is_no_parameter_is_left_to_autograd(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return F.linear(x, 2 * self.weight, self.bias)

        module = nn.Sequential(Scaled(3, 3), nn.Linear(3, 3))
        whole, first, both = self.run_both(module, torch.randn(2, 3))
        self.assertEqual([g is None for g in first], [False, False, True, True])
        self.assertTrue(equal(both, whole))

    def test_under_autocast_it_does_not_split(self):
        later, layer = [], nn.Linear(4, 4)
        with WeightsLater(later), torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(2, 4)).sum().backward()
        self.assertEqual(later, [])
        self.assertIsNotNone(layer.weight.grad)

    def test_input_gradients_come_before_any_weight_gradient(self):
        """In ZB-H1's run: what has a gradient when the last rank has done its first B? Nothing of a linear layer."""

        def run(mesh):
            pipeline, seen = build_pipeline(MeshComm(mesh), 2, 4, "zb-h1"), []
            original = pipeline._run["B"]

            def backward(work, gradient):
                result = original(work, gradient)
                seen.append(sum(g is not None for g in grads_of(pipeline.stages[mesh.rank])))
                return result

            pipeline._run["B"] = backward
            x, target = make_batch(0, 8)
            pipeline.step(x.chunk(4), target.chunk(4))
            return seen

        first, last = VirtualCluster(2).run(run)
        self.assertEqual(first, [0, 8, 8, 8])  # rank 0 does W0 right after B0
        self.assertEqual(last, [0, 0, 8, 8])  # rank 1 puts one off


def tied_step(mesh, name, m, steps=1, dtype=torch.float32, whole=False):
    """Run steps on a virtual rank without zeroing; return ({stage: gradients}, control calls, all-reduces)."""
    comm, count = MeshComm(mesh), mesh.world_size * stages_per_rank(name)
    stages = [TiedStage(stage, count).to(dtype) for stage in range(mesh.rank, count, mesh.world_size)]
    if count > 1 and mesh.world_size == 1:
        stages[-1].matrix = stages[0].matrix  # both on one rank: one parameter
    copies = [stage.matrix for stage in stages if stage.matrix is not None]
    tied = TiedWeight(copies[0] if copies else None, comm)
    shapes = [(2, 5), *[(2, 5, DIM)] * (count - 1)]
    pipeline = Pipeline(stages, make_schedule(name, mesh.world_size, m), token_loss, shapes, dtype, comm, tied=tied)
    for step in range(steps):
        pipeline.step(*(part.chunk(m) for part in tokens(step, 2 * m)))
    return {i: grads_of(stage) for i, stage in pipeline.stages.items()}, copies


class TestTied(unittest.TestCase):
    def test_gradients_are_those_of_one_process(self):
        for n in (1, 2, 3):
            for name in SCHEDULES:
                model = whole_model(n * stages_per_rank(name)).double()
                x, target = tokens(0, 8)
                for part, its_target in zip(x.chunk(4), target.chunk(4), strict=True):
                    (token_loss(model(part), its_target) / 4).backward()
                results = VirtualCluster(n).run(tied_step, name, 4, 1, torch.float64)
                by_stage = {i: grads for found, _ in results for i, grads in found.items()}
                for i, stage in enumerate(model):
                    for found, expected in zip(by_stage[i], grads_of(stage), strict=True):
                        self.assertLess((found - expected).abs().max(), 1e-14, (n, name, i))
                copies = [c.grad for _, own in results for c in own]
                self.assertTrue(all(torch.equal(c, copies[0]) for c in copies))

    def test_gradients_accumulate_over_steps(self):
        """Two steps without zeroing: what was summed in the first must not be summed again."""
        model = whole_model(3).double()
        for step in range(2):
            x, target = tokens(step, 8)
            token_loss(model(x), target).backward()
        results = VirtualCluster(3).run(tied_step, "1f1b", 4, 2, torch.float64)
        for _, copies in results:
            for copy in copies:
                self.assertLess((copy.grad - model[0].matrix.grad).abs().max(), 1e-13)

    def test_copies_begin_equal(self):
        results = VirtualCluster(3).run(tied_step, "gpipe", 2)
        first, middle, last = ([c.detach() for c in copies] for _, copies in results)
        self.assertEqual(middle, [])
        self.assertTrue(torch.equal(first[0], last[0]))
        self.assertTrue(torch.equal(first[0], TiedStage(0, 3).matrix))

    def test_copies_that_do_not_fit_are_refused_on_every_rank(self):
        def build(mesh, *shapes):
            shape = shapes[mesh.rank]
            try:
                TiedWeight(None if shape is None else nn.Parameter(torch.zeros(shape)), MeshComm(mesh))
            except ValueError as error:
                return str(error)

        for shapes, message in (
            (((3, 2), None, (2, 3)), "float32 (3, 2) on rank 0 and float32 (2, 3) on rank 2"),
            ((None, None, None), "no rank holds the tied weight"),
        ):
            found = VirtualCluster(3).run(build, *shapes)
            self.assertEqual(len(set(found)), 1)
            self.assertIn(message, found[0])

    def test_a_rank_that_forgot_it(self):
        def build(mesh):
            comm = MeshComm(mesh)
            tied = TiedWeight(nn.Parameter(torch.zeros(2)), comm)
            options = {"tied": tied} if mesh.rank == 0 else {}
            try:
                build_pipeline(comm, 2, 2, **options)
            except ValueError as error:
                return str(error)

        found = VirtualCluster(2).run(build)
        self.assertEqual(len(set(found)), 1)
        self.assertIn("ranks disagree on the pipeline: tied", found[0])


class Dropping(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x):
        return self.layers(x)


class TestCheckpointing(unittest.TestCase):
    def test_the_same_bits_also_with_dropout(self):
        def run(mesh, name, checkpoint):
            stages = [Dropping(mesh.rank + i) for i in range(stages_per_rank(name))]
            shapes = [(2, 4)] * (2 * len(stages))
            schedule = make_schedule(name, 2, 3)
            pipeline = Pipeline(stages, schedule, mse_loss, shapes, comm=MeshComm(mesh), checkpoint=checkpoint)
            x, target = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(1))
            torch.manual_seed(9 + mesh.rank)
            losses = pipeline.step(x, target)
            return losses, [g for stage in stages for g in grads_of(stage)], torch.rand(1)

        for name in SCHEDULES:
            kept, again = (VirtualCluster(2).run(run, name, checkpoint) for checkpoint in (False, True))
            for (losses, grads, after), (its_losses, its_grads, its_after) in zip(kept, again, strict=True):
                self.assertTrue(torch.equal(losses, its_losses), name)
                self.assertTrue(equal(grads, its_grads), name)
                self.assertTrue(torch.equal(after, its_after))  # and the random numbers go on as without
            self.assertTrue(any(g.abs().sum() > 0 for g in kept[0][1]))

    def peaks(self, name, m, checkpoint, n=3, layers=4):
        """The peak of each rank in tensors of one activation."""

        def run(mesh):
            stage = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())))
            options = {"comm": MeshComm(mesh), "checkpoint": checkpoint}
            pipeline = MeteredPipeline(stage, make_schedule(name, n, m), mse_loss, [(2, 8)] * n, **options)
            pipeline.step(*torch.randn(2, m, 2, 8))
            self.assertEqual(pipeline.meter.alive, 0)  # all is given back
            return pipeline.meter.peak / 64

        return VirtualCluster(n).run(run)

    def test_bytes_held(self):
        """L + 1 tensors a microbatch; with checkpointing 1, and L more in the backward pass of one."""
        for m in (4, 8):
            self.assertEqual(self.peaks("gpipe", m, False)[:2], [5 * m, 5 * m])
            self.assertEqual(self.peaks("gpipe", m, True)[:2], [m + 4, m + 4])
            self.assertEqual(self.peaks("1f1b", m, False)[:2], [3 * 5, 2 * 5])
            self.assertEqual(self.peaks("1f1b", m, True)[:2], [3 + 4, 2 + 4])


class TestStopwatch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.found = run_ranks(measure_worker, 2, 3, 4, 16, 7, timeout=120)

    def test_every_computation_is_measured_once_in_its_ranks_order(self):
        self.assertEqual(self.found[0], self.found[1])  # all ranks know all
        for name, slots in self.found[0].items():
            for rank, order in make_orders(name, 2, 3).items():
                own = [slot for slot in slots if slot.rank == rank]
                self.assertEqual([slot.compute for slot in own], order)
                for before, after in pairwise(own):
                    self.assertLessEqual(before.end, after.start)
                self.assertTrue(all(0 <= slot.start < slot.end for slot in own))

    def test_the_prediction_is_simulated_from_the_measured_times(self):
        for slots in self.found[0].values():
            predicted, times = predict(slots), stage_times(slots)
            self.assertEqual({s.compute for s in predicted.slots}, {s.compute for s in slots})
            for slot in predicted.slots:
                expected = times[slot.compute.kind][slot.compute.stage]
                self.assertAlmostEqual(slot.end - slot.start, expected, 9)
            self.assertTrue(0 <= summarise(slots).bubble < 1)

    def test_a_stages_time_is_its_median(self):
        work = [Compute(kind, stage, m) for stage in range(2) for m in range(3) for kind in "FB"]
        length = {("F", 0): (1, 2, 9), ("B", 0): (3, 8, 4), ("F", 1): (5, 5, 6), ("B", 1): (7, 1, 1)}
        slots = [Slot(10, 10 + length[w.kind, w.stage][w.microbatch], w.stage, w) for w in work]
        self.assertEqual(stage_times(slots), {"B": [4, 1], "F": [2, 5]})


def grid_step(mesh, name, num_stages, m):
    """One step in a grid of virtual ranks, whole numbers: ({stage: gradients}, [computations done at each launch])."""
    pipe, data = split_grid(MeshComm(mesh), num_stages)
    count = num_stages * stages_per_rank(name)
    stages = [whole_numbers(StageMLP(stage, count)) for stage in range(pipe.rank, count, num_stages)]
    launched, done = [], []
    shapes = stage_shapes(count, 8 // (data.world_size * m))
    schedule = make_schedule(name, num_stages, m)
    pipeline = Pipeline(stages, schedule, mse_loss, shapes, torch.float64, pipe)
    gradients = StageGradients(pipeline.stages, data)

    def launch(stage):
        launched.append((stage, done[-1]))
        return gradients.launch(stage)

    pipeline.on_gradients = launch
    for kind, run in [*pipeline._run.items()]:
        pipeline._run[kind] = lambda work, x, run=run: (done.append(work), run(work, x))[1]
    x, target = (part.chunk(data.world_size)[data.rank] for part in whole_batch(8))
    before = data.counters.calls["all_reduce"]
    pipeline.step(x.chunk(m), target.chunk(m))
    calls = data.counters.calls["all_reduce"] - before
    return {i: grads_of(stage) for i, stage in pipeline.stages.items()}, launched, calls, done


class TestGrid(unittest.TestCase):
    def test_two_dimensions_have_one_processs_gradients_exactly(self):
        x, target = whole_batch(8)
        expected = full_batch_gradients(whole_numbers(StageMLP(0, 1)), x, target)
        for name in SCHEDULES:
            for world, stages, m in ((4, 2, 2), (4, 2, 4), (4, 4, 2), (4, 1, 2), (2, 1, 4)):
                results = VirtualCluster(world).run(grid_step, name, stages, m)
                for replica in range(world // stages):
                    ranks = results[replica * stages : (replica + 1) * stages]
                    by_stage = {i: grads for found, *_ in ranks for i, grads in found.items()}
                    found = [g for i in sorted(by_stage) for g in by_stage[i]]
                    self.assertTrue(equal(found, expected), (name, world, stages, m))

    def test_replicas_begin_with_replica_0s_parameters(self):
        def build(mesh):
            pipe, data = split_grid(MeshComm(mesh), 2)
            stage = StageMLP(pipe.rank, 2, seed=1 + data.rank)  # another model on each replica
            StageGradients({pipe.rank: stage}, data)
            return [p.detach() for p in stage.parameters()]

        for rank, found in enumerate(VirtualCluster(4).run(build)):
            self.assertTrue(equal(found, list(StageMLP(rank % 2, 2, seed=1).parameters())), rank)

    def test_each_stage_leaves_at_its_own_last_backward_once(self):
        for name in SCHEDULES:
            for _, launched, calls, done in VirtualCluster(4).run(grid_step, name, 2, 4):
                kind = "W" if name == "zb-h1" else "B"
                self.assertEqual(calls, len(launched))
                for stage, work in launched:
                    own = [c for c in done if c.stage == stage and c.kind == kind]
                    self.assertEqual(work, own[-1])
                if name == "interleaved":  # the rank's upper stage leaves while its lower one is at work
                    self.assertLess(done.index(launched[0][1]), len(done) - 1)

    def test_over_processes(self):
        found = run_ranks(grid_worker, 4, "1f1b", 2, 2, timeout=120)
        for stage in (0, 1):
            a, b = (found[rank]["parameters"][stage] for rank in (stage, stage + 2))
            self.assertTrue(equal(a, b))
        self.assertNotEqual(found[0]["losses"], found[2]["losses"])  # other rows
        self.assertEqual([rank["replica"] for rank in found], [0, 0, 1, 1])

    def test_ranks_that_cannot_be_dealt_out(self):
        for stages, message in ((3, r"(?=.*\b4\b)(?=.*\b3\b)"), (0, r"\b0\b")):
            with self.assertRaisesRegex(RankError, message):
                VirtualCluster(4).run(lambda mesh, n=stages: split_grid(MeshComm(mesh), n))


def torch_worker(rank, world_size, m):
    """{schedule: are our gradients torch.distributed.pipelining's, bit by bit where M is a power of two?}"""
    found, comm = {}, TorchComm()
    x, target = make_batch(0, 2 * m)
    for name in SCHEDULES:
        pipeline = build_pipeline(comm, 2, m, name)
        pipeline.step(x.chunk(m), target.chunk(m))
        count = world_size * stages_per_rank(name)
        theirs = [StageMLP(stage, count) for stage in range(rank, count, world_size)]
        _their_step(comm, name, theirs, (x, target), m)()
        ours = [g for stage in pipeline.stages.values() for g in grads_of(stage)]
        pairs = zip(ours, (g for stage in theirs for g in grads_of(stage)), strict=True)
        found[name] = all(same_gradients(a, b, m) for a, b in pairs)
    return found


class TestBesideTorch(unittest.TestCase):
    def test_gradients_have_the_bits_of_torchs_own_pipelining(self):
        for found in run_ranks(torch_worker, 2, 4, timeout=120):
            self.assertEqual(found, dict.fromkeys(SCHEDULES, True))

    def test_where_division_by_m_rounds_they_are_equal_but_for_that(self):
        for found in run_ranks(torch_worker, 2, 6, timeout=120):
            self.assertEqual(found, dict.fromkeys(SCHEDULES, True))
        one = torch.ones(3)
        self.assertFalse(same_gradients(one, one * (1 + 1e-6), 4))
        self.assertTrue(same_gradients(one, one * (1 + 1e-6), 6))
        self.assertFalse(same_gradients(one, one * 1.001, 6))

    def test_the_bench_measures_what_it_says(self):
        for found in run_ranks(bench_worker, 2, 4, 7, 6, 2, (2, 8), timeout=120):
            self.assertEqual(list(found), list(SCHEDULES))
            for row in found.values():
                self.assertTrue(row["same"])
                ours, theirs, ratio, low, high = row["times"]
                self.assertTrue(ours > 0 and theirs > 0 and low <= ratio <= high)
                self.assertEqual(list(row["bubbles"]), [8, 16])
                for simulated, measured, low, high in row["bubbles"].values():
                    self.assertTrue(0 <= low <= measured <= high < 1 and 0 <= simulated < 1)


if __name__ == "__main__":
    unittest.main()
