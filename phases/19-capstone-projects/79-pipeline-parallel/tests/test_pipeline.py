import os
import signal
import sys
import unittest
import weakref
from pathlib import Path
from typing import ClassVar

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from comm import TorchComm
from mesh_comm import MeshComm
from one_process import full_batch_gradients, train_one_process, whole_batch, whole_numbers
from pipeline import Pipeline
from ranks import RankError, run_ranks
from instructions import Compute
from schedule import SCHEDULES, add_messages, make_schedule, stages_per_rank
from schedule_check import check_schedule
from stage_mlp import SIZES, StageMLP, build_pipeline, make_batch, run_pipeline, stage_shapes, train_stage
from torch import nn
from torch.nn.functional import mse_loss
from virtual import VirtualCluster


def setUpModule():
    torch.set_num_threads(1)  # as in a rank: the same kernels, the same bits


def gradients(mesh, schedule, batch, m, **options):
    """One step on one virtual rank: (losses, {stage: gradients}, its pipeline)."""
    pipeline = build_pipeline(MeshComm(mesh), batch, m, schedule, **options)
    x, target = make_batch(0, batch * m)
    losses = pipeline.step(x.chunk(m), target.chunk(m))
    return losses, {i: [p.grad for p in stage.parameters()] for i, stage in pipeline.stages.items()}, pipeline


def joined(results):
    """The gradients of all stages of all ranks, in the order of stages."""
    by_stage = {i: grads for _, found, _ in results for i, grads in found.items()}
    return [g for i in sorted(by_stage) for g in by_stage[i]]


def reference(batch, m):
    """The same step in one process, microbatch after microbatch: (losses, gradients)."""
    model, losses = StageMLP(0, 1), []
    x, target = make_batch(0, batch * m)
    for microbatch, its_target in zip(x.chunk(m), target.chunk(m), strict=True):
        losses.append(mse_loss(model(microbatch), its_target))
        (losses[-1] / m).backward()
    return torch.stack(losses).double().detach(), [p.grad for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_error(n, fn, *args):
    """Run a worker in which every rank must raise the same ValueError; return its text."""

    def catch(mesh):
        comm = MeshComm(mesh)
        try:
            fn(comm, *args)
        except ValueError as error:
            return str(error), comm.counters.calls["exchange"]
        return None, 0

    results = VirtualCluster(n).run(catch)
    assert len(set(results)) == 1 and results[0][0] and results[0][1] == 0, results
    return results[0][0]


class TestStages(unittest.TestCase):
    def test_the_stages_together_are_the_model_bit_for_bit(self):
        whole = StageMLP(0, 1)
        x = torch.randn(5, SIZES[0])
        for n in range(1, 9):
            stages = [StageMLP(stage, n) for stage in range(n)]
            self.assertTrue(equal([p for s in stages for p in s.parameters()], list(whole.parameters())))
            shapes, y = [], x
            for stage in stages:
                shapes.append(tuple(y.shape))
                y = stage(y)
            self.assertTrue(torch.equal(y, whole(x)))
            self.assertEqual(shapes, stage_shapes(n, 5))

    def test_seeds_and_steps_give_different_data(self):
        self.assertFalse(equal(StageMLP(0, 1, seed=1).parameters(), StageMLP(0, 1, seed=2).parameters()))
        self.assertEqual(
            len({layer.weight[0, 0].item() / layer.in_features**-0.5 for layer in StageMLP(0, 1).layers}), 8
        )
        batches = [make_batch(step, 4, seed)[0] for step in range(3) for seed in (1, 2)]
        self.assertEqual(len({batch.sum().item() for batch in batches}), 6)
        self.assertTrue(equal(make_batch(2, 4, 1), make_batch(2, 4, 1)))

    def test_stages_that_do_not_exist(self):
        for stage, n in ((-1, 2), (2, 2), (True, 2), (0.0, 2), (0, 0), (0, True), (0, 9)):
            with self.assertRaises(ValueError):
                StageMLP(stage, n)
        with self.assertRaisesRegex(ValueError, "9 stages, but the model has only 8 layers"):
            StageMLP(0, 9)


class TestGradients(unittest.TestCase):
    def test_every_size_has_the_bits_of_one_process(self):
        """All N and M from 1 to 8, each schedule: losses on every rank, gradients of every stage."""
        for m in range(1, 9):
            losses, expected = reference(2, m)
            for n in range(1, 9):
                for name in SCHEDULES if n <= 4 else ("gpipe", "1f1b", "zb-h1"):  # 8 layers, two stages a rank
                    results = VirtualCluster(n, seed=n * m).run(gradients, name, 2, m)
                    self.assertTrue(all(torch.equal(r[0], losses) for r in results), (name, n, m))
                    self.assertTrue(equal(joined(results), expected), (name, n, m))
                    limit = [*check_schedule(make_schedule(name, n, m)).peak_live.values()]
                    self.assertEqual([r[2].peak_live for r in results], limit, (name, n, m))

    def test_any_interleaving_of_ranks_gives_the_same_bits(self):
        _, expected = reference(2, 5)
        for seed in range(10):
            for name in ("1f1b", "interleaved", "zb-h1"):
                self.assertTrue(equal(joined(VirtualCluster(4, seed=seed).run(gradients, name, 2, 5)), expected), seed)

    def test_8_rows_cut_in_any_way_have_the_full_batchs_gradients(self):
        """The mean over microbatches is the mean over the batch, not the sum. In double precision, to 9 digits."""
        x, target = (t.double() for t in make_batch(0, 8))
        full = full_batch_gradients(StageMLP(0, 1).double(), x, target)
        for m in (1, 2, 4, 8):
            for name in SCHEDULES:
                found = double_run(3, name, m, x, target, False)
                for g, f in zip(found, full, strict=True):
                    self.assertLess((g - f).abs().max(), 1e-9 * f.abs().max(), (name, m))

    def test_whole_numbers_are_exact(self):
        """Sums of whole numbers do not depend on their order: the full batch's gradients, bit for bit."""
        x, target = whole_batch(8)
        full = full_batch_gradients(whole_numbers(StageMLP(0, 1)), x, target)
        self.assertTrue(all(torch.equal(g * 64, (g * 64).round()) and g.abs().max() > 0 for g in full))
        for n in (1, 2, 4):
            for m in (1, 2, 4, 8):
                for name in SCHEDULES:
                    found = double_run(n, name, m, x, target, True)
                    self.assertTrue(equal(found, full), (name, n, m))

    def test_training_stays_equal(self):
        losses, norm, model = train_one_process(4, 3, 5)

        def train(mesh):
            pipeline = build_pipeline(MeshComm(mesh), 3, 5, "1f1b")
            return *train_stage(pipeline, 4), list(pipeline.stages[mesh.rank].parameters())

        results = VirtualCluster(3).run(train)
        self.assertTrue(all(r[0] == losses for r in results))
        self.assertEqual(len(losses), 4 * 5)
        self.assertTrue(equal([p for r in results for p in r[2]], list(model.parameters())))
        self.assertEqual(len({r[1] for r in results}), 1)
        self.assertLess(abs(results[0][1] - norm), 1e-12 * norm)


def double_run(n, name, m, x, target, whole):
    """One step in double precision on n virtual ranks: the gradients of all stages."""
    results = VirtualCluster(n).run(double_gradients, name, m, x, target, whole)
    return joined([(None, by_stage, None) for by_stage in results])


def double_gradients(mesh, name, m, x, target, whole):
    n, count = mesh.world_size, mesh.world_size * stages_per_rank(name)
    stages = [StageMLP(stage, count).double() for stage in range(mesh.rank, count, n)]
    stages = [whole_numbers(stage) for stage in stages] if whole else stages
    shapes = stage_shapes(count, len(x) // m)
    pipeline = Pipeline(stages, make_schedule(name, n, m), mse_loss, shapes, torch.float64, MeshComm(mesh))
    pipeline.step(x.chunk(m), target.chunk(m))
    return {i: [p.grad for p in stage.parameters()] for i, stage in pipeline.stages.items()}


class TestMessages(unittest.TestCase):
    def test_bytes_and_calls(self):
        """Each boundary carries M activations and M gradients of batch x width floats; one broadcast of M losses."""
        batch, m, n = 3, 5, 4
        for name in SCHEDULES:
            stages = n * stages_per_rank(name)
            widths = [shape[1] for shape in stage_shapes(stages, batch)]
            results = VirtualCluster(n).run(gradients, name, batch, m)
            for rank, (_, _, pipeline) in enumerate(results):
                counters = pipeline.comm.counters
                sent = sum(widths[s + 1] for s in pipeline.stages if s < stages - 1)
                sent += sum(widths[s] for s in pipeline.stages if s > 0)
                self.assertEqual(counters.bytes["exchange"], m * batch * sent * 4, (name, rank))
                self.assertEqual((counters.calls["broadcast"], counters.bytes["broadcast"]), (1, 8 * m))
                self.assertEqual(
                    sum(counters.calls[op] for op in counters.calls if op not in ("exchange", "broadcast")), 0
                )
                self.assertEqual(counters.control_calls, 1)  # the plan, agreed once

    def test_the_loss_is_known_on_every_rank(self):
        for losses, _, _ in VirtualCluster(3).run(gradients, "1f1b", 2, 4):
            self.assertEqual((losses.shape, losses.dtype), ((4,), torch.float64))
            self.assertEqual(len(set(losses.tolist())), 4)
            self.assertTrue(torch.equal(losses, reference(2, 4)[0]))

    def test_two_ranks_that_are_neighbours_on_both_sides(self):
        """Four stages on two ranks: activations and gradients of several stages between the same two ranks."""
        n, m, batch = 2, 4, 3
        order = {r: [Compute("F", c * n + r, i) for c in range(2) for i in range(m)] for r in range(n)}
        order = {r: f + [Compute("B", c.stage, m - 1 - c.microbatch) for c in f[::-1]] for r, f in order.items()}
        _, expected = reference(batch, m)

        def run(mesh):
            stages = [StageMLP(stage, 4) for stage in range(mesh.rank, 4, n)]
            pipeline = Pipeline(stages, add_messages(order), mse_loss, stage_shapes(4, batch), comm=MeshComm(mesh))
            x, target = make_batch(0, batch * m)
            pipeline.step(x.chunk(m), target.chunk(m))
            return [[p.grad for p in stage.parameters()] for stage in stages]

        results = VirtualCluster(n).run(run)
        self.assertTrue(equal([g for stage in range(4) for g in results[stage % n][stage // n]], expected))


class TestOneRank(unittest.TestCase):
    """No messages: the graph is cut and sewn together on one rank."""

    def test_one_stage(self):
        for m in (1, 3):
            losses, expected = reference(2, m)
            for name in SCHEDULES:
                results = ((found, _, pipeline),) = VirtualCluster(1).run(gradients, name, 2, m)
                self.assertTrue(torch.equal(found, losses) and equal(joined(results), expected), (name, m))
                live = {"gpipe": m, "interleaved": 2}.get(name, 1)
                self.assertEqual(pipeline.peak_live, live)

    def test_several_stages_on_one_rank_send_nothing(self):
        m, batch = 3, 2
        forward = [Compute("F", stage, i) for stage in range(3) for i in range(m)]
        order = {0: forward + [Compute("B", stage, i) for stage in (2, 1, 0) for i in range(m)]}

        def run(mesh):
            stages = [StageMLP(stage, 3) for stage in range(3)]
            pipeline = Pipeline(stages, add_messages(order), mse_loss, stage_shapes(3, batch), comm=MeshComm(mesh))
            x, target = make_batch(0, batch * m)
            pipeline.step(x.chunk(m), target.chunk(m))
            return [p.grad for stage in stages for p in stage.parameters()], pipeline.comm.counters.calls["exchange"]

        (found, calls), *_ = VirtualCluster(1).run(run)
        self.assertTrue(equal(found, reference(batch, m)[1]))
        self.assertEqual(calls, 0)


class Counted(torch.autograd.Function):
    """The identity; knows how many of its graphs are alive on each rank."""

    alive: ClassVar[dict] = {}
    peak: ClassVar[dict] = {}

    @staticmethod
    def forward(ctx, x, rank):
        token = type("Token", (), {})()  # lives as long as the graph does
        ctx.token = token
        Counted.alive[rank] = Counted.alive.get(rank, 0) + 1
        Counted.peak[rank] = max(Counted.peak.get(rank, 0), Counted.alive[rank])
        weakref.finalize(token, Counted.gone, rank)
        return x.clone()

    @staticmethod
    def gone(rank):
        Counted.alive[rank] -= 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class CountedStage(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.layer = rank, nn.Linear(4, 4)

    def forward(self, x):
        return Counted.apply(self.layer(x), self.rank)


class CountedPipeline(Pipeline):
    """Knows how many received tensors were alive at once."""

    def step(self, *batch):
        self.alive, self.peak_buffers, self.peak_sends = 0, 0, 0
        return super().step(*batch)

    def _exchange(self, exchange):
        super()._exchange(exchange)
        self.peak_sends = max(self.peak_sends, len(self._in_flight))

    def _buffer(self, feeds):
        buffer = super()._buffer(feeds)
        self.alive += 1
        self.peak_buffers = max(self.peak_buffers, self.alive)
        weakref.finalize(buffer, self._gone)
        return buffer

    def _gone(self):
        self.alive -= 1


class TestMemory(unittest.TestCase):
    def run_counted(self, name, n, m):
        Counted.alive, Counted.peak = {}, {}

        def run(mesh):
            schedule = make_schedule(name, n, m)
            stage = CountedStage(mesh.rank)
            pipeline = CountedPipeline(stage, schedule, mse_loss, [(2, 4)] * n, comm=MeshComm(mesh))
            x, target = torch.randn(2, m, 2, 4)
            pipeline.step(x, target)
            self.assertFalse(pipeline._in_flight)  # every send is done: nobody reads this memory any more
            return pipeline.peak_live, pipeline.peak_buffers, pipeline.peak_sends

        return VirtualCluster(n).run(run)

    def test_live_graphs_of_1f1b_do_not_grow_with_m(self):
        buffers = []
        for m in (4, 8, 32):
            results = self.run_counted("1f1b", 3, m)
            self.assertEqual(Counted.peak, {0: 3, 1: 2, 2: 1})  # graphs that are really alive
            self.assertEqual([live for live, _, _ in results], [3, 2, 1])
            self.assertEqual(set(Counted.alive.values()), {0})  # and none after the step
            buffers.append([peak for _, peak, _ in results])
            self.assertEqual([sends for *_, sends in results], [3, 3, 3])  # N sends are in flight, never M
        self.assertEqual(buffers[1], buffers[2])  # nor does the memory for messages grow
        self.assertLessEqual(max(buffers[2]), 3 + 4)

    def test_zb_h1_frees_a_graph_at_b_though_its_weight_gradients_wait(self):
        for m in (4, 8):
            self.assertEqual([live for live, _, _ in self.run_counted("zb-h1", 3, m)], [3] * 3)
            self.assertEqual(Counted.peak, {0: 3, 1: 2, 2: 1})
            self.assertEqual(set(Counted.alive.values()), {0})

    def test_gpipe_holds_them_all(self):
        for m in (4, 8):
            self.assertEqual([live for live, _, _ in self.run_counted("gpipe", 3, m)], [m] * 3)
            self.assertEqual(Counted.peak, {0: m, 1: m, 2: m})


class TestRefusals(unittest.TestCase):
    def test_an_unequal_last_microbatch_is_refused_before_any_send(self):
        def run(comm):
            pipeline = build_pipeline(comm, 3, 3)
            x, target = make_batch(0, 8)
            pipeline.step(x.split(3), target.split(3))

        self.assertIn("microbatch 2 is (2, 16), agreed was (3, 16)", same_error(3, run))

    def test_other_batches_that_do_not_fit(self):
        x, target = (t.chunk(3) for t in make_batch(0, 6))
        cases = (
            (x[:2], target, "the schedule has 3 microbatches, got 2 microbatches"),
            (x, target[:2], "the schedule has 3 microbatches, got 2 targets"),
            (x, [*target[:2], target[2][:1]], "target 2 is (1, 4), target 0 (2, 4)"),
            ([t[:1] for t in x], target, "microbatch 0 is (1, 16), agreed was (2, 16)"),
        )
        for microbatches, targets, message in cases:
            found = same_error(3, lambda comm, a=microbatches, b=targets: build_pipeline(comm, 2, 3).step(a, b))
            self.assertIn(message, found)

    def test_ranks_that_disagree_learn_it_before_any_data_flies(self):
        def build(comm, dtypes=(torch.float32,) * 3, widths=(32,) * 3, names=("gpipe",) * 3):
            n, r = comm.world_size, comm.rank
            shapes = [(2, 16), (2, widths[r]), (2, 40)]
            Pipeline(StageMLP(r, n), make_schedule(names[r], n, 4), mse_loss, shapes, dtypes[r], comm)

        found = same_error(3, build, (torch.float32, torch.float32, torch.int32))
        self.assertIn("ranks disagree on the pipeline: dtype", found)
        self.assertIn('rank 0, 1 has "float32"; rank 2 has "int32"', found)
        self.assertIn("shapes", same_error(3, build, (torch.float32,) * 3, (32, 32, 24)))
        self.assertIn("schedule", same_error(3, build, (torch.float32,) * 3, (32,) * 3, ("gpipe", "1f1b", "gpipe")))

    def test_plans_that_do_not_fit(self):
        def build(comm, n=3, shapes=((2, 16), (2, 32), (2, 40)), dtype=torch.float32, stages=1):
            modules = [nn.Identity()] * stages
            Pipeline(modules, make_schedule("gpipe", n, 4), mse_loss, shapes, dtype, comm)

        self.assertIn("the schedule is for 4 ranks, there are 3", same_error(3, build, 4))
        self.assertIn("3 stages need as many input shapes, got 2", same_error(3, build, 3, ((2, 16), (2, 3))))
        self.assertIn("floating-point", same_error(3, build, 3, ((2, 16),) * 3, torch.int64))
        self.assertIn(
            "2 stages on each of 3 ranks, the schedule has 3", same_error(3, build, 3, ((2, 16),) * 3, torch.float32, 2)
        )

    def test_a_wrong_schedule_never_runs(self):
        def build(comm):
            schedule = make_schedule("1f1b", 2, 3)
            schedule[1].remove(Compute("B", 1, 1))
            Pipeline(StageMLP(comm.rank, 2), schedule, mse_loss, stage_shapes(2, 2), comm=comm)

        self.assertIn("rank 1 (B1 of stage 1): is missing", same_error(2, build))

    def test_a_stage_that_breaks_its_promise(self):
        def run(mesh):
            stage = nn.Linear(16, 31) if mesh.rank == 0 else nn.Linear(32, 4)
            pipeline = Pipeline(stage, make_schedule("gpipe", 2, 2), mse_loss, [(2, 16), (2, 32)], comm=MeshComm(mesh))
            pipeline.step(torch.randn(2, 2, 16), torch.randn(2, 2, 4))

        with self.assertRaisesRegex(RankError, r"rank 0 .*F0 of stage 0 made \(2, 31\).* promised \(2, 32\)"):
            VirtualCluster(2).run(run)

    def test_stages_and_losses_without_a_usable_result_name_the_computation(self):
        class Wrapped(nn.Linear):
            def forward(self, x):
                return (super().forward(x),)

        class Detached(nn.Linear):
            def forward(self, x):
                return super().forward(x).detach()

        def run(mesh, kind, where, loss_fn, name):
            torch.manual_seed(mesh.rank)
            stage = kind(4, 4) if mesh.rank == where else nn.Linear(4, 4)
            pipeline = Pipeline(stage, make_schedule(name, 2, 2), loss_fn, [(2, 4)] * 2, comm=MeshComm(mesh))
            pipeline.step(*torch.randn(2, 2, 2, 4))

        for kind, where, loss_fn, message in (
            (Wrapped, 0, mse_loss, "rank 0 .*F0 of stage 0 made a tuple, where one tensor was expected"),
            (Wrapped, 1, mse_loss, "rank 1 .*F0 of stage 1 made a tuple"),
            (nn.Linear, 0, lambda y, t: (y - t) ** 2, r"F0 of stage 1 made losses \(2, 4\), where loss_fn must"),
            (nn.Linear, 0, lambda y, t: 1.0, "F0 of stage 1 made a float"),
            (nn.Linear, 0, lambda y, t: mse_loss(y, t).detach(), "B0 of stage 1 has no graph to go back through"),
            (Detached, 0, mse_loss, "B0 of stage 0 has no graph to go back through"),
        ):
            for name in SCHEDULES.keys() - {"interleaved"}:
                with self.assertRaisesRegex(RankError, message):
                    VirtualCluster(2).run(run, kind, where, loss_fn, name)

    def test_shapes_and_batches_that_are_none(self):
        def build(comm, shape, dtype=torch.float32):
            Pipeline(nn.Identity(), make_schedule("gpipe", 2, 2), mse_loss, [(2, 4), shape], dtype, comm)

        for size in (0, -1, 2.0, True, "2"):
            found = same_error(2, build, (size, 4))
            self.assertIn("the input shape of stage 1 must be whole numbers of at least 1, got", found)
        self.assertIn("floating-point", same_error(2, build, (2, 4), "float32"))

        def step(comm):
            build_pipeline(comm, 2, 2).step([torch.zeros(2, 16), None], torch.zeros(2, 2, 4))

        self.assertIn("microbatches must be tensors, number 1 is a NoneType", same_error(2, step))
        with self.assertRaisesRegex(RankError, r"a stage must be a module, got \['int'\]"):
            VirtualCluster(1).run(
                lambda mesh: Pipeline([3], make_schedule("gpipe", 1, 1), mse_loss, [(1, 1)], comm=MeshComm(mesh))
            )
        for call in (make_batch, lambda _, rows: stage_shapes(2, rows)):
            for bad in (0, -1, True, 1.5, None, "2"):
                with self.assertRaisesRegex(ValueError, "must be a whole number of at least 1"):
                    call(0, bad)

    def test_run_pipeline_refuses_before_it_starts_a_process(self):
        good = {"steps": 1, "batch": 2, "microbatches": 2, "num_stages": 2}
        for name in good:
            for bad in (0, -1, True, 1.5, None):
                with self.assertRaisesRegex(ValueError, f"{name} must be a whole number of at least 1"):
                    run_pipeline(**{**good, name: bad})
        with self.assertRaisesRegex(ValueError, "9 stages, but the model has only 8 layers"):
            run_pipeline(1, 2, 2, num_stages=9)
        with self.assertRaisesRegex(ValueError, "10 stages, but the model has only 8 layers"):
            run_pipeline(1, 2, 2, num_stages=5, schedule="interleaved")
        with self.assertRaisesRegex(ValueError, "schedule must be one of gpipe, 1f1b, interleaved, zb-h1, got 'zb'"):
            run_pipeline(1, 2, 2, schedule="zb")


class Forgetful(nn.Module):
    """A stage whose output does not depend on its input."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.bias.expand(x.shape).clone()


class TestUnusualStages(unittest.TestCase):
    def run_stages(self, make):
        def run(mesh):
            stage = make(mesh.rank)
            pipeline = Pipeline(stage, make_schedule("1f1b", 3, 4), mse_loss, [(2, 4)] * 3, comm=MeshComm(mesh))
            generator = torch.Generator().manual_seed(1)
            x, target = torch.randn(2, 4, 2, 4, generator=generator)
            pipeline.step(x, target)
            return [p.grad for p in stage.parameters()]

        return VirtualCluster(3).run(run)

    def test_a_frozen_first_stage(self):
        first, _, last = self.run_stages(lambda rank: nn.Linear(4, 4).requires_grad_(rank > 0))
        self.assertEqual(first, [None, None])
        self.assertTrue(all(g.abs().sum() > 0 for g in last))

    def test_a_stage_that_ignores_its_input(self):
        first, middle, _ = self.run_stages(lambda rank: Forgetful() if rank == 1 else nn.Linear(4, 4))
        self.assertTrue(all(torch.equal(g, torch.zeros_like(g)) for g in first))
        self.assertTrue(middle[0].abs().sum() > 0)

    def test_a_strided_output(self):
        def make(rank):
            torch.manual_seed(rank)
            return Turned()

        torch.manual_seed(0)
        found = [g for grads in self.run_stages(make) for g in grads]
        model = nn.Sequential(*(make(rank) for rank in range(3)))
        generator = torch.Generator().manual_seed(1)
        for x, target in zip(*torch.randn(2, 4, 2, 4, generator=generator), strict=True):
            (mse_loss(model(x), target) / 4).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])


class Turned(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x).t().contiguous().t()  # the same numbers, column by column


def dying_worker(rank, world_size):
    pipeline = build_pipeline(TorchComm(), 2, 4, "1f1b")
    original = pipeline._run["B"]

    def backward(work, gradient):
        if rank == 1 and work.microbatch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(work, gradient)

    pipeline._run["B"] = backward
    train_stage(pipeline, 3)


class TestProcesses(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.results = {
            (2, 8): run_pipeline(3, 2, 4),
            (4, 8): run_pipeline(3, 2, 4, num_stages=4, schedule="1f1b"),
            (3, 1): run_pipeline(3, 8, 1, num_stages=3, schedule="1f1b"),  # the same rows, as one microbatch
        }
        cls.alone = {4: train_one_process(3, 2, 4), 1: train_one_process(3, 8, 1)}

    def test_losses_and_norms_are_those_of_one_process(self):
        for (n, m), results in self.results.items():
            losses, norm, _ = self.alone[4 if m == 8 else 1]
            self.assertEqual(sorted(results), list(range(n)))
            for found, its_norm in results.values():
                self.assertEqual(found, losses)
                self.assertLess(abs(its_norm - norm), 1e-12 * norm)
            self.assertEqual(len({its_norm for _, its_norm in results.values()}), 1)

    def test_cutting_the_batch_in_microbatches_changes_nothing_but_rounding(self):
        split, whole = self.results[2, 8][0], self.results[3, 1][0]
        self.assertEqual((len(split[0]), len(whole[0])), (3 * 4, 3))
        self.assertLess(abs(split[1] - whole[1]), 1e-5 * whole[1])
        for step, loss in enumerate(whole[0]):
            self.assertLess(abs(sum(split[0][4 * step : 4 * step + 4]) / 4 - loss), 1e-5 * loss)

    @unittest.skipUnless(hasattr(signal, "SIGKILL"), "no SIGKILL on this platform")
    def test_a_rank_that_is_killed_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(dying_worker, 3, timeout=60)
        self.assertEqual((caught.exception.rank, caught.exception.exitcode), (1, -signal.SIGKILL))


if __name__ == "__main__":
    unittest.main()
