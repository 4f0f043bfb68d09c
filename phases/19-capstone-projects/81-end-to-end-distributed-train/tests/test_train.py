import ast
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import threading
import unittest
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import corpus
import damage
import determinism
import gpt
import job
import learning_rate
import resume
import torch
import train
from checkpoint import load_sharded, save_sharded
from mesh_comm import MeshComm
from corpus import synthetic
from flat import gather_flat_params
from e2e_runs import DoubleJob, Keeping, outcomes, plain_loop, virtual
from memory import model_state_bytes
from spike_guard import SpikeError
from train import Job, NonFiniteError
from virtual import VirtualCluster
from zero import ZeroOptimizer

CORPUS = synthetic(7, 8_000)
SMALL = {"dim": 8, "heads": 2, "blocks": 1}
P = 2 * 64 * 8 + 16 * 8 + (12 * 64 + 13 * 8) + 2 * 8  # parameters of the small model: 2,040, which 7 does not divide
ONE_EXAM = 1000  # exam_every: after the last step only


def column(log: dict, name: str) -> list:
    return [row[name] for row in log["rows"]]


def my_rank() -> int:
    """The virtual rank that calls."""
    return int(threading.current_thread().name.removeprefix("rank "))


def naming(*values) -> str:
    """A pattern for a text that names all of these, in any words and any order."""
    return "".join(rf"(?=.*\b{value}\b)" for value in values)


def errors_of_ranks(world_size: int, job: Job, kind=Exception) -> list[str]:
    """Run the job, which must fail on every rank; return each rank's message."""

    def fail(mesh):
        try:
            train.train(mesh.rank, world_size, job, MeshComm(mesh))
        except kind as error:
            return str(error)

    return VirtualCluster(world_size).run(fail)


class TestEqualsAPlainLoop(unittest.TestCase):
    """N ranks are one process that reads the global batch and calls torch's own Adam.

    The loss of a step is a sum over T tokens, divided by T. Two orders of a sum of T numbers differ by at most
    2 (T - 1) eps sum|x|, so the means differ by at most 2 T eps times the loss. That is derived for the first step;
    that it suffices for all of them shows that nothing grows. (Adam moves a parameter by up to lr where its gradient is
    nothing but rounding; but such a parameter does not change the loss.)
    """

    @classmethod
    def setUpClass(cls):
        cls.runs = {}
        for kind, world_size, steps in [
            (Job, 1, 20),
            (Job, 2, 20),
            (Job, 3, 12),
            (Job, 4, 12),
            (Job, 8, 6),
            (DoubleJob, 1, 12),
            (DoubleJob, 2, 12),
            (DoubleJob, 3, 12),
            (DoubleJob, 4, 12),
        ]:
            job = kind(CORPUS, steps=steps, dropout=0.0, exam_every=ONE_EXAM)
            cls.runs[kind, world_size] = virtual(world_size, job), plain_loop(job, world_size)

    def test_losses_and_gradient_norms(self):
        for (kind, world_size), (logs, (losses, norms, _)) in self.runs.items():
            eps = torch.finfo(torch.float64 if kind is DoubleJob else torch.float32).eps
            tokens = 4 * 16 * world_size
            for log in logs:
                for row, loss, norm in zip(log["rows"], losses, norms, strict=True):
                    where = f"{kind.__name__}, {world_size} ranks, step {row['step']}"
                    self.assertAlmostEqual(row["loss"], loss, delta=2 * tokens * eps * loss, msg=where)
                    self.assertAlmostEqual(row["norm"], norm, delta=2 * tokens * eps * max(norm, 1), msg=where)

    def test_one_rank_has_the_same_bits(self):
        for kind in (Job, DoubleJob):
            (log,), (losses, norms, _) = self.runs[kind, 1]
            self.assertEqual(column(log, "loss"), losses)
            self.assertEqual(column(log, "norm"), norms)

    def test_it_learns(self):
        for logs, (losses, *_) in self.runs.values():
            self.assertLess(losses[-1], losses[0] - 0.1)
            self.assertLess(logs[0]["rows"][-1]["exam"], logs[0]["initial_exam"] - 0.1)

    def test_gradients_were_clipped_in_some_steps_and_not_in_others(self):
        norms = [norm for _, (_, norms, _) in self.runs.values() for norm in norms]
        self.assertLess(min(norms), 1.0)
        self.assertGreater(max(norms), 1.0)

    def test_all_ranks_agree(self):
        for logs, _ in self.runs.values():
            for log in logs[1:]:
                self.assertEqual(outcomes(log), outcomes(logs[0]))


class TestTheLoss(unittest.TestCase):
    def test_it_is_the_mean_over_all_tokens_of_all_ranks_and_not_the_last_ranks(self):
        seen = {}

        def spy(model, sequences, *args):
            loss = backward(model, sequences, *args)
            seen.setdefault(my_rank(), []).append((loss, sequences))
            return loss

        backward, job = train.backward, DoubleJob(CORPUS, steps=2, dropout=0.0, model=SMALL, exam_every=ONE_EXAM)
        with mock.patch.object(train, "backward", spy):
            logs = virtual(3, job)
        model = job.build()
        everything = torch.cat([seen[rank][0][1] for rank in range(3)])
        expected = model.loss(everything[:, :-1], everything[:, 1:]).item()
        for log in logs:
            self.assertAlmostEqual(log["rows"][0]["loss"], expected, places=13)
        own = [seen[rank][0][0] for rank in range(3)]
        self.assertEqual(len({*own, expected}), 4, "each rank's own loss is another number")

    def test_ranks_read_different_sequences(self):
        with mock.patch.object(train, "backward", mock.Mock(wraps=train.backward)) as backward:
            virtual(4, Job(CORPUS, steps=5, model=SMALL, exam_every=ONE_EXAM))
        rows = [tuple(row.tolist()) for call in backward.call_args_list for row in call.args[1]]
        self.assertEqual((len(rows), len(set(rows))), (5 * 4 * 4, 5 * 4 * 4))


class TestBackward(unittest.TestCase):
    def setUp(self):
        self.model = DoubleJob(CORPUS, dropout=0.0, model=SMALL).build()
        self.rows = CORPUS.train[:68].view(4, 17)

    def gradient(self, *args) -> tuple[float, torch.Tensor]:
        self.model.zero_grad()
        loss = train.backward(self.model, *args)
        return loss, torch.cat([param.grad.reshape(-1) for param in self.model.parameters()])

    def test_four_microbatches_are_one_big_batch(self):
        loss, gradient = self.gradient(self.rows, 1)
        for parts in (2, 3, 4):  # three parts of four rows: 2, 1 and 1
            its_loss, its_gradient = self.gradient(self.rows, parts)
            self.assertAlmostEqual(its_loss, loss, places=14)
            torch.testing.assert_close(its_gradient, gradient, rtol=0, atol=1e-15)

    def test_unequal_parts_count_by_their_tokens(self):
        """Parts of 3 and 1 sequences: the mean of their means is another loss."""
        loss, _ = self.gradient(self.rows, 1)
        three, one = (self.gradient(part, 1)[0] for part in self.rows.split(3))
        self.assertAlmostEqual((3 * three + one) / 4, loss, places=14)
        self.assertGreater(abs((three + one) / 2 - loss), 1e-4)

    def test_gradients_add_up(self):
        once = self.gradient(self.rows, 1)[1]
        train.backward(self.model, self.rows, 1)
        twice = torch.cat([param.grad.reshape(-1) for param in self.model.parameters()])
        torch.testing.assert_close(twice, 2 * once, rtol=0, atol=1e-15)

    def test_a_run_with_microbatches_is_the_same_run(self):
        job = DoubleJob(CORPUS, steps=4, dropout=0.0, model=SMALL, exam_every=ONE_EXAM)
        whole, parts = virtual(2, job)[0], virtual(2, replace(job, microbatches=3))[0]
        for a, b in zip(whole["rows"], parts["rows"], strict=True):
            self.assertAlmostEqual(a["loss"], b["loss"], places=12)
            self.assertAlmostEqual(a["norm"], b["norm"], places=12)
        self.assertEqual(whole["calls"], parts["calls"], "one communication a step, however many parts it has")


class TestJob(unittest.TestCase):
    def test_counts_that_are_none(self):
        for name in ("steps", "batch", "microbatches", "seq", "exam_every"):
            for wrong in (0, -1, 2.0, True):
                with self.assertRaisesRegex(ValueError, f"{name} must be a whole number of at least 1"):
                    Job(CORPUS, **{name: wrong})
        with self.assertRaisesRegex(ValueError, "2 sequences cannot be 3 microbatches"):
            Job(CORPUS, batch=2, microbatches=3)

    def test_warm_up_is_a_function_of_the_step(self):
        job = Job(CORPUS, lr=1.0, warmup=10)
        self.assertEqual([job.learning_rate(step) for step in (1, 5, 10, 11, 1000)], [0.1, 0.5, 1.0, 1.0, 1.0])
        self.assertEqual(Job(CORPUS, lr=1.0, warmup=0).learning_rate(1), 1.0)

    def test_after_warm_up_half_a_cosine(self):
        job = Job(CORPUS, lr=2.0, warmup=10, decay=30, floor=0.1)
        self.assertEqual([job.learning_rate(step) for step in (5, 10, 30, 31, 1000)], [1.0, 2.0, 0.2, 0.2, 0.2])
        self.assertAlmostEqual(job.learning_rate(20), 2.0 * (0.1 + 0.9 / 2))
        self.assertAlmostEqual(job.learning_rate(15), 2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2))
        self.assertEqual(Job(CORPUS, lr=2.0, warmup=0, decay=1, floor=0.5).learning_rate(1), 1.0)

    def test_settings_that_contradict_each_other(self):
        for wrong, message in [
            ({"rows": 0}, "rows must be a whole number of at least 1"),
            ({"rows": 2, "microbatches": 3}, "2 sequences cannot be 3 microbatches"),
            ({"stage": 4}, "stage must be 1, 2 or 3, got 4"),
            ({"stage": True}, "stage must be 1, 2 or 3, got True"),
            ({"warmup": 4, "decay": 4}, "rises until step 4, so it cannot be down at step 4"),
            ({"decay": -1}, "decay must be a whole number"),
            ({"may_change": ("lr", "speed")}, "may_change: there is no speed in rows, microbatches"),
        ]:
            with self.assertRaisesRegex(ValueError, message):
                Job(CORPUS, **wrong)

    def test_rows_are_those_of_all_ranks(self):
        self.assertEqual([Job(CORPUS, batch=4).rows_of(n) for n in (1, 3)], [4, 12])
        self.assertEqual([Job(CORPUS, rows=13).rows_of(n) for n in (1, 3)], [13, 13])

    def test_a_checkpoint_can_hold_the_identity(self):
        identity = Job(CORPUS).identity(2)
        self.assertEqual(json.loads(json.dumps(identity)), identity)

    def test_what_defines_the_run_is_in_its_identity_or_its_plan(self):
        names = {field.name for field in dataclasses.fields(Job)}
        known = Job(CORPUS).identity(2).keys() | Job(CORPUS).plan().keys()
        self.assertEqual(names - known, {"batch", "folder", "inject_nan"})


class TestLearningRate(unittest.TestCase):
    """One step of the schedule for a step of the optimizer, whatever the number of ranks, and across a resume."""

    def rates(self, world_size: int, job: Job) -> list[float]:
        used = []

        def step(optimizer, *args):
            if my_rank() == 0:
                used.append(optimizer.param_groups[0]["lr"])
            return real(optimizer, *args)

        real = ZeroOptimizer.step
        with mock.patch.object(ZeroOptimizer, "step", step):
            virtual(world_size, job)
        return used

    def test_warm_up_10_stopped_at_15_and_in_the_middle(self):
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                CORPUS, steps=20, model=SMALL, warmup=10, exam_every=ONE_EXAM, save_at=(5, 15), folder=Path(folder)
            )
            uninterrupted = self.rates(2, job)
            self.assertEqual(uninterrupted, [job.learning_rate(step) for step in range(1, 21)])
            for stop in (5, 15):
                resumed = self.rates(2, replace(job, save_at=(), resume=Path(folder) / f"step_{stop}"))
                self.assertEqual(resumed, uninterrupted[stop:])

    def test_the_same_for_any_number_of_ranks(self):
        job = Job(CORPUS, steps=6, model=SMALL, warmup=5, exam_every=ONE_EXAM)
        one, two, four = (self.rates(n, job) for n in (1, 2, 4))
        self.assertEqual(one, two)
        self.assertEqual(one, four)


class TestGuard(unittest.TestCase):
    def setUp(self):
        self.job = Keeping(CORPUS, steps=5, model=SMALL, dropout=0.0, exam_every=ONE_EXAM)

    def assert_one_error(self, job: Job, *named):
        """All three ranks stop with one message, which names these."""
        errors = errors_of_ranks(3, job, NonFiniteError)
        self.assertEqual(errors, [errors[0]] * 3)
        self.assertRegex(errors[0] or "no error", naming(*named))

    def assert_stopped(self, job: Job, *named, steps_done: int = 0):
        """They do, and hold the parameters that they held before the step."""
        Keeping.models.clear()
        if steps_done:
            virtual(3, replace(self.job, steps=steps_done))
        else:
            job.build()
        expected = gather_flat_params(Keeping.models[0])
        Keeping.models.clear()
        self.assert_one_error(job, *named)
        for model in Keeping.models:
            self.assertTrue(torch.equal(gather_flat_params(model), expected))

    def test_a_gradient_that_is_no_number(self):
        for rank, step in ((0, 1), (2, 1), (1, 3)):
            with self.subTest(rank=rank, step=step):
                job = replace(self.job, inject_nan=(step, rank))
                self.assert_stopped(job, step, rank, "gradient", steps_done=step - 1)

    def test_a_gradient_that_backward_leaves_so(self):
        """In a later step, too: gradients must be where the guard looks for them."""
        backward, calls = train.backward, Counter()

        def broken(model, sequences, *args):
            loss = backward(model, sequences, *args)
            calls[my_rank()] += 1
            if my_rank() == 2 and calls[2] == 3:
                list(model.parameters())[-1].grad[0, 0] = math.inf
            return loss

        with mock.patch.object(train, "backward", broken):
            self.assert_one_error(self.job, 3, 2, "gradient")

    def test_a_loss_that_is_no_number(self):
        backward = train.backward
        for value, text in ((math.nan, "nan"), (math.inf, "inf")):

            def broken(model, sequences, *args, value=value):
                loss = backward(model, sequences, *args)
                return value if my_rank() == 2 else loss

            with self.subTest(text), mock.patch.object(train, "backward", broken):
                self.assert_stopped(self.job, 1, 2, "loss", text)

    def test_finite_gradients_whose_mean_is_not(self):
        def huge(model, sequences, *args):
            loss = backward(model, sequences, *args)
            next(model.parameters()).grad[0, 0] = 1e308
            return loss

        backward = train.backward
        with mock.patch.object(train, "backward", huge):
            self.assert_stopped(self.job, 1, "inf")


class TestSpikes(unittest.TestCase):
    """What counts as a spike is not the trainer's business: whoever listens hears every loss, and may stop the run."""

    class Listener:
        def __init__(self, last: int):
            self.last, self.heard, self.losses = last, [], []

        def check(self, step: int, loss: float) -> None:
            self.heard.append((step, loss))
            if step > self.last:
                raise SpikeError(f"step {step}")

    def test_every_rank_hears_the_mean_loss_and_can_stop_the_step_before_a_parameter_changes(self):
        for stage in (1, 2, 3):
            job = Job(CORPUS, steps=5, model=SMALL, stage=stage)

            def until_it_stops(mesh, job=job):
                trainer = train.Trainer(job, mesh.rank, 2, MeshComm(mesh))
                trainer.spikes = self.Listener(last=2)
                rows = [trainer.step(step) for step in (1, 2)]
                before = train.digest(trainer.optimizer)
                with self.assertRaisesRegex(SpikeError, "^step 3$"):
                    trainer.step(3)
                self.assertEqual(train.digest(trainer.optimizer), before)
                return rows, trainer.spikes.heard

            for rows, heard in (found := VirtualCluster(2).run(until_it_stops)):
                self.assertEqual(heard[:2], [(row["step"], row["loss"]) for row in rows])
                self.assertEqual([step for step, _ in heard], [1, 2, 3])
                self.assertEqual(heard, found[0][1], "all ranks hear the same")


class TestCosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.steps = 3
        cls.logs = {n: virtual(n, Job(CORPUS, steps=cls.steps, model=SMALL)) for n in (1, 2, 7)}

    def test_bytes_held(self):
        for n, logs in self.logs.items():
            formula, padding = model_state_bytes(P, n, stage=1, master=False), 4 * (-P % n)
            for log in logs:
                held = {"parameters": formula["parameters"] + padding, "gradients": formula["gradients"] + padding}
                for kind, expected in (held | {"optimizer": formula["optimizer"]}).items():
                    self.assertEqual(log["memory"][kind], (expected, expected), f"{n} ranks, {kind}")
                self.assertEqual(log["shard_bytes"], 12 * math.ceil(P / n))
                self.assertEqual(log["parameters"], P)

    def test_a_step_is_one_reduce_scatter_one_all_gather_and_a_norm(self):
        for n, logs in self.logs.items():
            padded = 4 * math.ceil(P / n) * n
            for log in logs:
                calls = {"reduce_scatter": self.steps, "all_gather": self.steps, "all_reduce": self.steps}
                self.assertEqual(log["calls"], calls)
                self.assertEqual(log["bytes"]["reduce_scatter"], self.steps * padded)
                self.assertEqual(log["bytes"]["all_gather"], self.steps * padded)
                self.assertEqual(log["bytes"]["all_reduce"], self.steps * 4 * (1 + n))

    def test_exams_are_due_when_asked_and_after_the_last_step(self):
        log = virtual(2, Job(CORPUS, steps=7, model=SMALL, exam_every=3))[0]
        self.assertEqual([row["step"] for row in log["rows"] if row["exam"] is not None], [3, 6, 7])

    def test_the_exam_is_one_loss_however_many_ranks_read_it(self):
        exams = [logs[0]["initial_exam"] for logs in self.logs.values()]
        rows = corpus.Batches(CORPUS.held_out, 49, 16, 0).batch(0)  # all 49: fewer than an exam's 128
        model = Job(CORPUS, model=SMALL).build().eval()
        for exam in exams:
            self.assertAlmostEqual(exam, model.loss(rows[:, :-1], rows[:, 1:]).item(), places=5)

    def test_an_exam_of_fewer_rows_than_ranks(self):
        logs = virtual(3, Job(synthetic(7, 400), steps=1, model=SMALL))  # two windows held out
        self.assertTrue(math.isfinite(logs[2]["rows"][0]["exam"]))


class TestRanksMustStartTheSameJob(unittest.TestCase):
    def test_one_error_on_every_rank(self):
        ours = Job(CORPUS, steps=3, model=SMALL)
        for theirs, message in [
            (replace(ours, seed=8), "seed: rank 0 has 7; rank 1 has 8"),
            (replace(ours, steps=4), "steps: rank 0 has 3; rank 1 has 4"),
            (replace(ours, corpus=synthetic(8, 8_000)), "corpus: rank 0 has"),
            (replace(ours, resume=Path("elsewhere")), 'resume: rank 0 has null; rank 1 has "elsewhere"'),
        ]:

            def start(mesh, theirs=theirs):
                with self.assertRaises(ValueError) as caught:
                    train.train(mesh.rank, 2, theirs if mesh.rank else ours, MeshComm(mesh))
                return str(caught.exception)

            errors = VirtualCluster(2).run(start)
            self.assertEqual(errors[0], errors[1])
            self.assertIn(message, errors[0])


class TestResume(unittest.TestCase):
    """10 -> 20 equals 0 -> 20, bit for bit: with dropout, and in the middle of the second epoch."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        parent = Path(cls.folder.name)
        small = synthetic(7, 1_120)  # 62 windows to train on: with 2 x 4 rows, 7 steps an epoch
        cls.job = Job(small, steps=20, model=SMALL, dropout=0.3, save_at=(3, 10), folder=parent, exam_every=5)
        cls.logs = virtual(2, cls.job)
        cls.again = {stop: virtual(2, cls.resumed(stop)) for stop in (3, 10)}

    @classmethod
    def resumed(cls, stop: int) -> Job:
        return replace(cls.job, save_at=(), resume=cls.job.folder / f"step_{stop}")

    def test_it_stops_mid_epoch(self):
        per_epoch = corpus.Batches(self.job.corpus.train, 8, 16, 7).per_epoch  # samples; a step draws 8
        self.assertEqual((per_epoch, [divmod(8 * stop, per_epoch) for stop in (3, 10)]), (62, [(0, 24), (1, 18)]))

    def test_the_same_bits(self):
        for stop, again in self.again.items():
            for log, new in zip(self.logs, again, strict=True):
                self.assertEqual(outcomes(new), outcomes(log)[stop:])
                self.assertEqual((new["start"], new["parameter_norm"]), (stop, log["parameter_norm"]))

    def test_another_interleaving_of_the_ranks_changes_nothing(self):
        self.assertEqual(outcomes(virtual(2, self.resumed(10), seed=5)[1]), outcomes(self.logs[1])[10:])

    def test_batches_equal_the_uninterrupted_runs(self):
        def batches_read(job: Job) -> list[list]:
            with mock.patch.object(train, "backward", mock.Mock(wraps=train.backward)) as backward:
                virtual(1, job)
            return [call.args[1].tolist() for call in backward.call_args_list]

        with tempfile.TemporaryDirectory() as folder:
            job = replace(self.job, batch=8, steps=14, save_at=(10,), folder=Path(folder))
            everything = batches_read(job)
            rest = batches_read(replace(job, save_at=(), resume=Path(folder) / "step_10"))
        self.assertEqual(rest, everything[10:])
        second_epoch = [tuple(row) for batch in everything[:10] + rest for row in batch][62:]
        self.assertEqual(len(set(second_epoch)), 50, "nothing repeated, nothing left out")

    def test_without_the_random_state_it_would_be_another_run(self):
        with mock.patch.object(train, "set_random_state", lambda saved: None):
            new = virtual(2, self.resumed(10))
        self.assertEqual(new[0]["initial_exam"], self.logs[0]["rows"][9]["exam"], "it begins with the same parameters,")
        self.assertNotEqual(column(new[0], "loss")[0], column(self.logs[0], "loss")[10], "and goes another way")

    def test_with_other_moments_it_would_be_another_run(self):
        with self.copy_of_checkpoint() as folder:
            manifest, states = load_sharded(folder, 2)
            states[1]["optimizer"]["state"]["unit0"]["exp_avg_sq"].mul_(1.001)
            save_sharded(states, folder, manifest.step)
            new = virtual(2, replace(self.job, save_at=(), resume=folder))
        self.assertNotEqual(column(new[0], "digest")[0], column(self.logs[0], "digest")[10])

    def test_dropout_draws_other_noise_on_each_rank(self):
        _, states = load_sharded(self.job.folder / "step_10", 2)
        self.assertFalse(torch.equal(states[0]["random"]["cpu"], states[1]["random"]["cpu"]))

    def test_the_shards_together_are_all_parameters(self):
        _, states = load_sharded(self.job.folder / "step_10", 2)
        self.assertEqual(sum(len(train.held_masters(state)) for state in states), P)
        for rank, state in enumerate(states):
            self.assertTrue(torch.equal(train.held_masters(state), self.logs[rank]["masters"][10]))
            self.assertEqual(state["position"], 10)
            self.assertEqual(state["optimizer"]["steps"], 10)

    @contextmanager
    def copy_of_checkpoint(self):
        with tempfile.TemporaryDirectory() as parent:
            yield Path(shutil.copytree(self.job.folder / "step_10", Path(parent) / "copy"))

    def assert_refused(self, job: Job, message: str, world_size: int = 2):
        """Every rank raises the same CheckpointError, and neither parameters nor noise have moved."""
        Keeping.models.clear()
        states = {}

        def load(*args):
            states.setdefault(my_rank(), torch.get_rng_state())
            return read_checkpoint(*args)

        def fail(mesh):
            with self.assertRaises(train.CheckpointError) as caught:
                train.train(mesh.rank, world_size, job, MeshComm(mesh))
            return str(caught.exception), torch.equal(torch.get_rng_state(), states[mesh.rank])

        read_checkpoint = train.read_checkpoint
        with mock.patch.object(train, "read_checkpoint", load), mock.patch.object(Job, "build", keep(Job.build)):
            found = VirtualCluster(world_size).run(fail)
        self.assertEqual([same_noise for _, same_noise in found], [True] * world_size)
        self.assertEqual(len({text for text, _ in found}), 1)
        self.assertRegex(found[0][0], message)
        for model in Keeping.models:
            self.assertTrue(torch.equal(gather_flat_params(model), gather_flat_params(job.build())))

    def test_another_number_of_ranks_with_as_many_rows_each(self):
        for n, rows in ((1, 4), (3, 12)):
            self.assert_refused(self.resumed(10), f"saved by another job: rows was 8, is {rows}", n)

    def test_another_job(self):
        job = self.resumed(10)
        for name, value in {
            "rows": 9,
            "microbatches": 2,
            "stage": 2,
            "seq": 15,
            "model": SMALL | {"blocks": 2},
            "dropout": 0.2,
            "lr": 1e-3,
            "warmup": 5,
            "decay": 30,
            "floor": 0.2,
            "clip": 2.0,
            "seed": 8,
            "corpus": synthetic(8, 1_120),
        }.items():
            with self.subTest(name):
                self.assert_refused(replace(job, **{name: value}), f"saved by another job: {name} was .*, is ")

    def test_the_identity_holds_nothing_else(self):
        self.assertEqual(len(self.job.identity(2)), 13)

    def test_a_run_that_is_over_already(self):
        for steps in (9, 10):
            job = replace(self.resumed(10), steps=steps)
            self.assert_refused(job, f"saved after 10 steps, and the run has only {steps}")

    def test_no_checkpoint_at_all(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assert_refused(replace(self.job, save_at=(), resume=Path(folder)), "manifest.json: missing")
            self.assert_refused(
                replace(self.job, save_at=(), resume=Path(folder) / "nowhere"), "manifest.json: missing"
            )

    def test_a_damaged_one(self):
        for ruin, message in [(damage.flip_a_bit, "sha256 mismatch"), (damage.swap_shards, "rank: expected 0")]:
            with self.copy_of_checkpoint() as folder:
                ruin(folder)
                self.assert_refused(replace(self.job, save_at=(), resume=folder), message)

    def test_one_that_another_program_has_saved(self):
        def change(rank: int | None, path: list, value):
            """On one rank, or on all."""

            def edit(states):
                for target in states if rank is None else [states[rank]]:
                    *parents, last = path
                    for key in parents:
                        target = target[key]
                    if value is None:
                        del target[last]
                    else:
                        target[last] = value

            return edit

        def move_on(samples: int):
            """Far enough for no seed to be left."""

            def edit(states):
                for state in states:
                    epoch, place = divmod(samples, state["data"]["windows"])
                    state["data"].update(samples=samples, epoch=epoch, place=place)

            return edit

        for edit, message in [
            (change(None, ["position"], None), "not a checkpoint of this training loop: KeyError"),
            (change(None, ["position"], True), "not a checkpoint of this training loop"),
            (change(1, ["position"], None), "missing key position on rank 1"),
            (change(1, ["position"], 11), "position: rank 0 has 10, rank 1 has 11"),
            (change(0, ["job"], [1, 2]), "not a checkpoint of this training loop"),
            (change(1, ["job"], [1, 2]), "job: rank 0 has dict, rank 1 has list"),
            (change(None, ["data", "samples"], 81), "the data's position: place was 18, is 19"),
            (change(None, ["data", "tokens"], "other"), "the data's position: tokens was 'other', is"),
            (change(None, ["data"], None), "not a checkpoint of this training loop: KeyError"),
            (move_on(10**40), "not a checkpoint of this training loop: ValueError"),
            (change(None, ["losses"], ["low"]), "losses: expected finite numbers, found ..low"),
            (change(None, ["losses"], [1.0, math.nan]), "losses: expected finite numbers, found .*nan"),
            (change(None, ["optimizer", "steps"], 10**400), "the optimizer has counted 10+ .* of 10 steps"),
            (change(None, ["optimizer", "skipped_steps"], 1), "the optimizer has counted 10 . 1 of 10 steps"),
            (change(1, ["random", "cpu"], torch.zeros(3, dtype=torch.uint8)), "^rank 1 failed: .*random state: exp"),
            (
                change(1, ["random", "cpu"], torch.zeros_like(torch.get_rng_state())),
                "^rank 1 failed: .*random state .+cpu.+ is none that a generator can have",
            ),
            (change(0, ["random"], {}), "random state: expected"),
            (change(0, ["job", "device"], "cuda"), "device was 'cuda', is 'cpu'"),
        ]:
            with self.subTest(message), self.copy_of_checkpoint() as folder:
                manifest, states = load_sharded(folder, 2)
                edit(states)
                save_sharded(states, folder, manifest.step)
                self.assert_refused(replace(self.job, save_at=(), resume=folder), message)

    def test_an_optimizer_state_that_does_not_fit(self):
        with self.copy_of_checkpoint() as folder:
            manifest, states = load_sharded(folder, 2)
            del states[1]["optimizer"]["state"]["unit0"]["exp_avg"]
            save_sharded(states, folder, manifest.step)
            errors = errors_of_ranks(2, replace(self.job, save_at=(), resume=folder), ValueError)
        self.assertEqual(errors[0], errors[1])
        self.assertIn("rank 1", errors[0])

    def test_an_optimizer_state_of_another_kind(self):
        def double(unit):
            unit["exp_avg"] = unit["exp_avg"].double()

        for message, change in [
            ("KeyError: 'names'", lambda optimizer: optimizer.pop("names")),
            ("'exp_avg': ..torch.float64'", lambda optimizer: double(optimizer["state"]["unit0"])),
        ]:
            with self.copy_of_checkpoint() as folder:
                manifest, states = load_sharded(folder, 2)
                for state in states:
                    change(state["optimizer"])
                save_sharded(states, folder, manifest.step)
                self.assert_refused(replace(self.job, save_at=(), resume=folder), f"{folder}.*{message}")


def keep(build):
    """Wrap `Job.build` so that the models can be looked at afterwards."""

    def kept(job):
        Keeping.models.append(build(job))
        return Keeping.models[-1]

    return kept


class TestSource(unittest.TestCase):
    """The loop is short because others communicate: its source names no collective and no rendezvous."""

    FORBIDDEN = frozenset(
        "all_reduce allreduce ring_allreduce reduce_scatter all_gather allgather broadcast gather scatter exchange "
        "send recv isend irecv sendrecv barrier reduce all_to_all distributed dist init_process_group new_group "
        "FileStore TCPStore MASTER_ADDR MASTER_PORT RANK WORLD_SIZE run_ranks multiprocessing mp fork spawn".split()
    )

    def names_in(self, source: str) -> set[str]:
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.update(node.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                names.update((node.module or "").split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # os.environ["RANK"]
        return names

    def test_no_collective_and_no_rendezvous(self):
        for module in (train, job, resume, determinism, learning_rate, gpt, corpus):
            names = self.names_in(Path(module.__file__).read_text())
            self.assertEqual(names & self.FORBIDDEN, set(), module.__name__)

    def test_the_search_finds_what_it_looks_for(self):
        for source, name in [
            ("comm.all_reduce(x)", "all_reduce"),
            ("import torch.distributed as d", "distributed"),
            ("from torch import distributed", "distributed"),
            ("from collectives import ring_allreduce as r", "ring_allreduce"),
            ("os.environ['RANK']", "RANK"),
            ("getattr(comm, 'broadcast')(x)", "broadcast"),
        ]:
            self.assertIn(name, self.names_in(source) & self.FORBIDDEN)

    def test_each_piece_is_another_lessons(self):
        lessons = Path(train.__file__).parents[2]
        for name, lesson in [
            ("AsyncSaver", "80"),
            ("save_shard", "80"),
            ("ZeroOptimizer", "78"),
            ("TorchComm", "76"),
            ("must_agree", "76"),
        ]:
            source = Path(sys.modules[getattr(train, name).__module__].__file__)
            self.assertTrue(source.relative_to(lessons).parts[0].startswith(lesson), name)


if __name__ == "__main__":
    unittest.main()
