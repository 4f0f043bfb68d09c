import itertools
import math
import statistics
import sys
import tempfile
import threading
import unittest
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import inject
import operate as operating
import torch
import train
from corpus import synthetic
from e2e_runs import DoubleJob, plain_loop, virtual
from inject import Drill, Drills, parse_drill
from job import Job
from manifest import CheckpointError
from mesh_comm import MeshComm
from metrics import read_metrics
from operate import Operations, operate
from rotation import complete_checkpoints
from saving import alone_in
from team import Team
from train import NonFiniteError, Trainer, digest
from virtual import VirtualCluster

CORPUS = synthetic(7, 8_000)
SMALL = {"dim": 8, "heads": 2, "blocks": 1}
HOUR = 3600.0


def my_rank() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


class Runs(unittest.TestCase):
    """Each test has a folder of its own."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.job = Job(CORPUS, steps=20, model=SMALL, exam_every=1000, folder=self.folder / "checkpoints")
        self.operations = Operations(checkpoint_every_steps=4, digests=True)
        torch.set_num_threads(1)

    def operate(self, world_size: int = 2, job: Job | None = None, clocks=None, **changes) -> list[dict]:
        """Run on virtual ranks; return each rank's log. `clocks` are the ranks' own."""
        operations = replace(self.operations, **changes)
        clocks = clocks or [lambda: 0.0] * world_size

        def be_a_rank(mesh):
            return operate(mesh.rank, world_size, job or self.job, operations, MeshComm(mesh), clocks[mesh.rank])

        return VirtualCluster(world_size).run(be_a_rank)

    def assert_refused(self, kind, message: str, world_size: int = 2, job: Job | None = None, **changes) -> None:
        """Every rank raises such an error."""

        def fail(mesh):
            operations = replace(self.operations, **changes)
            with self.assertRaisesRegex(kind, message or "^"):
                operate(mesh.rank, world_size, job or self.job, operations, MeshComm(mesh), lambda: 0.0)
            return True

        self.assertEqual(VirtualCluster(world_size).run(fail), [True] * world_size)

    def uninterrupted(self, world_size: int = 2) -> list[dict]:
        return virtual(world_size, replace(self.job, folder=None))

    def assert_same_run(self, logs: list[dict], rows: list[dict]) -> None:
        """All that the ranks have done, step by step, is what `rows` say."""
        for log in logs:
            for row, expected in zip(log["rows"], rows, strict=True):
                self.assertEqual([row[name] for name in KEPT], [expected[name] for name in KEPT])

    def saved(self) -> list[int]:
        return [position for position, _ in complete_checkpoints(self.job.folder)]


KEPT = ("step", "loss", "norm", "digest")  # of a row: what it computed


class TestOperated(Runs):
    """Nothing happens: then it is the run that `train` does, at the same cost, with checkpoints beside it."""

    def test_the_same_bits(self):
        for world_size in (1, 2, 3):
            self.job = replace(self.job, folder=self.folder / str(world_size))
            logs = self.operate(world_size)
            self.assert_same_run(logs, self.uninterrupted(world_size)[0]["rows"])
            self.assertEqual(self.saved(), [12, 16, 20])
            for log in logs:
                self.assertEqual((log["start"], log["position"], log["stopped"], log["rollbacks"]), (0, 20, False, []))

    def test_a_step_costs_no_agreement_more(self):
        """The wish to stop or to save, the losses and the look for NaN are one message."""

        def calls(run, steps: int):
            comms = []

            def be_a_rank(mesh):
                comms.append(MeshComm(mesh))
                run(mesh.rank, replace(self.job, steps=steps), comms[-1])

            VirtualCluster(2).run(be_a_rank)
            return [(comm.counters.control_calls, comm.counters.calls.total()) for comm in comms]

        def operated(rank, job, comm):
            folder = self.folder / f"{job.steps}"
            operate(rank, 2, replace(job, folder=folder), Operations(checkpoint_every_steps=None), comm, lambda: 0.0)

        def bare(rank, job, comm):
            trainer = Trainer(job, rank, 2, comm)
            for step in range(1, job.steps + 1):
                trainer.step(step)

        def of_a_step(run):
            more, fewer = calls(run, 12), calls(run, 7)
            return [[(a - b) / 5 for a, b in zip(*pair, strict=True)] for pair in zip(more, fewer, strict=True)]

        self.assertEqual(of_a_step(operated), of_a_step(bare))
        self.assertEqual(of_a_step(bare)[0][1], 3.0)

    def test_each_rank_reads_other_numbers_than_the_others_and_they_are_one_run(self):
        logs = self.operate(3)
        for name in ("step", "loss", "norm", "digest", "learning_rate", "bytes"):
            self.assertEqual(*([row[name] for row in log["rows"]] for log in logs[:2]), name)


class TestMetrics(Runs):
    def run_with_metrics(self, **changes) -> list[dict]:
        self.operate(metrics=self.folder / "m.jsonl", **changes)
        return read_metrics(self.folder / "m.jsonl")

    def test_the_gradient_norm_recomputed(self):
        """By a plain loop in one process. Bounds as in test_train.py: two orders of a sum over T tokens."""
        self.job = DoubleJob(CORPUS, steps=10, dropout=0.0, model=SMALL, exam_every=1000, folder=self.job.folder)
        rows = self.run_with_metrics()
        losses, norms, _ = plain_loop(self.job, 2)
        self.assertEqual([row["step"] for row in rows], list(range(1, 11)))
        for row, loss, norm in zip(rows, losses, norms, strict=True):
            bound = 2 * (4 * 16 * 2) * torch.finfo(torch.float64).eps
            self.assertAlmostEqual(row["loss"], loss, delta=bound * loss)
            self.assertAlmostEqual(row["norm"], norm, delta=bound * max(norm, 1))
        self.assertGreater(len({round(norm, 3) for norm in norms}), 5, "they are different numbers")

    def test_what_a_line_says(self):
        parameters = 2 * 64 * 8 + 16 * 8 + (12 * 64 + 13 * 8) + 2 * 8
        for row in self.run_with_metrics():
            self.assertEqual(row["learning_rate"], self.job.learning_rate(row["step"]))
            self.assertAlmostEqual(row["tokens_per_second"] * row["seconds"], 2 * 4 * 16, places=6)
            self.assertEqual(row["ranks"], 2)
            self.assertEqual(
                row["bytes"], 2 * 4 * parameters + 4 * (1 + 2), "reduce-scatter, all-gather; norm, checksums"
            )

    def test_no_step_twice_over_a_rollback_and_a_resume(self):
        first = self.run_with_metrics(job=replace(self.job, steps=20), inject=(Drill("nan", 14),))
        self.assertEqual([row["step"] for row in first], list(range(1, 21)))
        for newer in (16, 20):  # as if it had been killed after step 15
            self.rename_away(newer)
        again = self.run_with_metrics()
        self.assertEqual([row["step"] for row in again], list(range(1, 21)))
        self.assertEqual(*([[row[name] for name in KEPT] for row in rows] for rows in (first, again)))
        self.assertEqual(again[:12], first[:12], "lines that stay, stay as they are")
        self.assertNotEqual(again[12]["seconds"], first[12]["seconds"])

    def rename_away(self, position: int) -> None:
        (self.job.folder / f"step_{position}" / "manifest.json").rename(self.folder / f"{position}.json")

    def test_a_file_that_cannot_be_opened_is_an_error_of_every_rank(self):
        (self.folder / "m.jsonl").mkdir()
        self.assert_refused(CheckpointError, "m.jsonl: Is a directory", metrics=self.folder / "m.jsonl")

    def test_tensorboard(self):
        from test_metrics import scalars

        self.operate(tensorboard=self.folder / "events", inject=(Drill("nan", 14),))
        (path,) = (self.folder / "events").iterdir()
        steps = [step for step, _ in scalars(path)]
        self.assertEqual(steps, [*range(1, 14), *range(13, 21)], "from step 12 on anew")
        self.assertLess({"loss", "norm", "learning_rate", "bytes"}, scalars(path)[0][1].keys())


class TestRollback(Runs):
    """A fault that does not come again: after the rollback it is the run without the fault, bit for bit."""

    def assert_rolled_back(self, logs: list[dict], step: int, position: int, why: str, rows: list[dict]) -> None:
        for log in logs:
            (rollback,) = log["rollbacks"]
            self.assertEqual((rollback["step"], rollback["position"]), (step, position))
            self.assertRegex(rollback["why"], why or r"\b14\b")
            self.assertEqual(rollback["digest"], rows[position - 1]["digest"], "the parameters are the checkpoint's")
        self.assert_same_run(logs, rows)

    def test_a_spike(self):
        for world_size in (1, 2, 3):
            self.job = replace(self.job, folder=self.folder / str(world_size))
            logs = self.operate(world_size, inject=(parse_drill("spike@11"),))
            rows = self.uninterrupted(world_size)[0]["rows"]
            median = statistics.median(row["loss"] for row in rows[:11])
            why = rf"(?=.*\b12\b)(?=.*\b2\b)(?=.*\b{median:.4f}\b)"
            self.assert_rolled_back(logs, 12, 8, why, rows)
            self.assertEqual(self.saved(), [12, 16, 20])

    def test_a_spike_in_the_last_step_before_a_save(self):
        """The newest checkpoint holds the spoilt parameters: it is the one before that helps."""
        logs = self.operate(inject=(parse_drill("spike@12"),))
        self.assert_rolled_back(logs, 13, 8, r"\b13\b", self.uninterrupted()[0]["rows"])

    def test_a_nan(self):
        for rank in (0, 1):
            self.job = replace(self.job, folder=self.folder / str(rank))
            logs = self.operate(inject=(Drill("nan", 14, rank),))
            why = rf"(?=.*\b14\b)(?=.*\b{rank}\b)(?=.*gradient)"
            self.assert_rolled_back(logs, 14, 12, why, self.uninterrupted()[0]["rows"])

    def test_sharded_gradients_and_parameters(self):
        for stage in (2, 3):
            for drill in ("spike@13", "nan@14"):
                self.job = replace(self.job, stage=stage, folder=self.folder / f"{stage}{drill}", microbatches=2)
                logs = self.operate(inject=(parse_drill(drill),))
                self.assert_rolled_back(logs, 14, 12, "", self.uninterrupted()[0]["rows"])

    def test_a_norm_that_is_not_finite(self):
        """Every gradient is finite, their sum is not: seen when gradients are mixed already, but no parameter is."""
        backward = train.backward
        for stage in (1, 2, 3):
            left = [13, 13]  # steps of each rank until its gradient is huge

            def huge(model, *args, left=left):
                left[my_rank()] -= 1
                weight = next(model.parameters())
                hook = weight.register_hook(lambda gradient: gradient + 1e308) if left[my_rank()] == 0 else None
                try:
                    return backward(model, *args)
                finally:
                    if hook is not None:
                        hook.remove()

            self.job = DoubleJob(CORPUS, steps=20, model=SMALL, stage=stage, folder=self.folder / str(stage))
            with mock.patch.object(train, "backward", huge):
                logs = self.operate()
            why = r"(?=.*\b13\b)(?=.*\b(inf|nan)\b)"
            self.assert_rolled_back(logs, 13, 8, why, self.uninterrupted()[0]["rows"])

    def test_before_the_first_checkpoint_it_is_the_beginning(self):
        logs = self.operate(inject=(Drill("nan", 1),))
        self.assertEqual([rollback["position"] for rollback in logs[0]["rollbacks"]], [0])
        self.assert_same_run(logs, self.uninterrupted()[0]["rows"])

    def test_several_faults(self):
        """Each is past, once there is a checkpoint beyond it: they are no row of rollbacks."""
        logs = self.operate(inject=tuple(map(parse_drill, ("nan@3", "spike@9", "nan@18:0"))), most_rollbacks=1)
        found = [(rollback["step"], rollback["position"]) for rollback in logs[1]["rollbacks"]]
        self.assertEqual(found, [(3, 0), (10, 8), (18, 16)])
        self.assert_same_run(logs, self.uninterrupted()[0]["rows"])

    def test_no_rollbacks_allowed(self):
        why = r"(?=.*\b14\b)(?=.*\b1\b)(?=.*\b0\b)"
        self.assert_refused(NonFiniteError, why, most_rollbacks=0, inject=(Drill("nan", 14),))

    def test_the_guard_knows_the_losses_before_a_resume(self):
        """What a loss is compared with is in the checkpoint: a resume is no moment of weakness."""
        rows = self.operate(job=replace(self.job, steps=12))[0]["rows"]
        logs = self.operate(inject=(parse_drill("spike@13"),))
        median = statistics.median(row["loss"] for row in [*rows, *logs[0]["rows"][:1]])
        self.assertRegex(logs[0]["rollbacks"][0]["why"], rf"(?=.*\b14\b)(?=.*\b{median:.4f}\b)")


class TestLeftOut(Runs):
    """A fault that comes again: the data from the checkpoint to the fault are left out."""

    def always(self, kind: str, *steps: int):
        """Drills that happen each time these steps are taken."""

        def before(drills, step, job):
            return replace(job, inject_nan=(step, 1)) if step in steps else job

        return mock.patch.object(Drills, "before", before)

    def by_hand(self, steps: list[int]) -> list[dict]:
        """The same steps with nothing but a Trainer."""

        def be_a_rank(mesh):
            trainer, rows = Trainer(self.job, mesh.rank, 2, MeshComm(mesh)), []
            for step in steps:
                trainer.drawn = (step - 1) * trainer.batches.rows
                rows.append(trainer.step(step) | {"digest": digest(trainer.optimizer)})
            return rows

        return VirtualCluster(2).run(be_a_rank)[0]

    def test_the_steps_from_the_checkpoint_to_the_fault(self):
        with self.always("nan", 14):
            logs = self.operate(metrics=self.folder / "m.jsonl")
        self.assertEqual([(each["step"], each["position"]) for each in logs[0]["rollbacks"]], [(14, 12)] * 2)
        steps = [*range(1, 13), *range(15, 21)]
        self.assert_same_run(logs, self.by_hand(steps))
        self.assertEqual([row["step"] for row in read_metrics(self.folder / "m.jsonl")], steps)

    def test_resumed_in_between_it_is_the_same_run(self):
        with self.always("nan", 14):
            expected = self.operate()[0]["rows"]
            self.job = replace(self.job, folder=self.folder / "again")
            with mock.patch.object(operating.Run, "go_back", side_effect=InterruptedError):
                self.assert_refused(InterruptedError, "")
            logs = self.operate()
        self.assertEqual(logs[0]["start"], 12)
        self.assert_same_run(logs, expected[12:])

    def test_what_never_ends_is_an_error_of_every_rank(self):
        with self.always("nan", *range(13, 21)):
            self.assert_refused(NonFiniteError, r"(?=.*\b1[3-9]\b)(?=.*\b5\b)")
        self.assertEqual(self.saved(), [0, 4, 8])

    def test_a_run_does_not_end_by_leaving_out_its_last_steps(self):
        self.job = replace(self.job, steps=11)
        again = r"step 11: .* it came again: steps 6 to 11 would be left out, and none is left after them"
        with self.always("nan", 11):
            self.assert_refused(NonFiniteError, again, checkpoint_every_steps=5, metrics=self.folder / "m.jsonl")
        self.assertEqual(self.saved(), [0, 5, 10])
        self.assertEqual([row["step"] for row in read_metrics(self.folder / "m.jsonl")], list(range(1, 11)))
        logs = self.operate(checkpoint_every_steps=5)  # the fault is mended
        self.assertEqual((logs[0]["start"], logs[0]["position"], self.saved()), (10, 11, [5, 10, 11]))

    def test_nor_when_steps_before_them_were_left_out(self):
        """10 fails twice: 6 to 10 are left out. Then 11 fails twice."""
        self.job = replace(self.job, steps=11)
        with self.always("nan", 10, 11):
            self.assert_refused(NonFiniteError, "step 11: .* steps 6 to 11 would be", checkpoint_every_steps=5)
        self.assertEqual(self.saved(), [0, 5])


class TestMinutes(Runs):
    """Rank 0's clock counts, and all ranks save after the same step."""

    def test_whichever_comes_first(self):
        ticks = [0]

        def clock():  # rank 0's: a minute each time somebody looks
            ticks[0] += 1
            return 60.0 * ticks[0]

        kept = []
        save = operating.Checkpoints.save

        def spy(checkpoints, state, position):
            kept.append((my_rank(), position, ticks[0]))
            save(checkpoints, state, position)

        with mock.patch.object(operating.Checkpoints, "save", spy):
            self.operate(clocks=[clock, lambda: 1e9 * HOUR], checkpoint_every_steps=None, checkpoint_every_minutes=3.0)
        of_0, of_1 = ([position for rank, position, _ in kept if rank == each] for each in (0, 1))
        self.assertEqual(of_0, of_1)
        self.assertEqual(of_0[0], 0)
        self.assertEqual(of_0[-1], 20)
        self.assertTrue({after - before for before, after in itertools.pairwise(of_0[1:-1])} <= {2, 3}, of_0)

    def test_another_ranks_clock_does_not_count(self):
        late = iter(range(0, 10**12, 10**6))
        self.operate(clocks=[lambda: 5.0, lambda: float(next(late))], checkpoint_every_steps=None, keep_last=20)
        self.assertEqual(self.saved(), [0, 20])

    def test_by_steps_alone(self):
        ticks = iter(range(0, 10**12, 10**6))
        self.operate(clocks=[lambda: float(next(ticks)), lambda: 0.0], checkpoint_every_minutes=None, keep_last=20)
        self.assertEqual(self.saved(), [0, 4, 8, 12, 16, 20])


class TestStop(Runs):
    """One rank is asked to stop; all save after the same step, and a resume is the uninterrupted run."""

    def asked(self, rank: int, step: int):
        """Ask a rank while it takes a step."""
        take = operating.Run.take

        def ask(run, at):
            if (my_rank(), at) == (rank, step):
                self.stops[rank].request()
            return take(run, at)

        class Stop(operating.StopSignals):
            def __init__(stop):
                super().__init__()
                self.stops[my_rank()] = stop

        self.stops = {}
        return mock.patch.multiple(operating, StopSignals=Stop), mock.patch.object(operating.Run, "take", ask)

    def test_all_ranks_stop_after_the_next_step(self):
        rows = self.uninterrupted()[0]["rows"]
        for rank in (0, 1):
            self.job = replace(self.job, folder=self.folder / str(rank))
            signals, take = self.asked(rank, 6)
            with signals, take:
                logs = self.operate()
            for log in logs:
                self.assertEqual((log["stopped"], log["position"], len(log["rows"])), (True, 7, 7))
            self.assertEqual(self.saved(), [0, 4, 7])
            again = self.operate()
            self.assertEqual([log["start"] for log in again], [7, 7])
            self.assert_same_run(again, rows[7:])

    def test_asked_while_it_starts(self):
        def start(job, rank, *args):
            if rank == 1:
                self.stops[rank].request()
            return Trainer(job, rank, *args)

        signals, _ = self.asked(1, 0)
        with signals, mock.patch.object(operating, "Trainer", start):
            log = self.operate()[0]
        self.assertEqual((log["position"], log["stopped"], self.saved()), (1, True, [0, 1]))

    def test_asked_before_the_first_step(self):
        signals, take = self.asked(1, 1)
        with signals, take:
            self.assertEqual(self.operate()[0]["position"], 2)

    def test_asked_in_the_last_step(self):
        signals, take = self.asked(1, 20)
        with signals, take:
            log = self.operate()[0]
        self.assertEqual((log["position"], log["stopped"]), (20, False), "it was over anyway")

    def test_asked_before_the_last_step(self):
        signals, take = self.asked(1, 19)
        with signals, take:
            log = self.operate()[0]
        self.assertEqual((log["position"], log["stopped"]), (20, False), "nothing is left to go on with")

    def test_asked_in_a_step_that_fails(self):
        signals, take = self.asked(0, 14)
        with signals, take:
            log = self.operate(inject=(Drill("nan", 14),))[0]
        self.assertEqual((log["position"], log["stopped"]), (13, True), "rolled back to 12, then one step")


class TestResume(Runs):
    def test_what_is_finished_stays_so(self):
        self.operate()
        for log in self.operate():
            self.assertEqual((log["start"], log["position"], log["rows"]), (20, 20, []))

    def test_of_another_job(self):
        self.operate(job=replace(self.job, steps=8))
        for steps in (8, 20):
            with self.subTest(steps=steps):
                job = replace(self.job, steps=steps, lr=1)
                self.assert_refused(CheckpointError, "another job: lr was 0.005, is 1", job=job)

    def test_of_a_longer_run(self):
        self.operate()
        why = "saved after 20 steps, and the run has only 9"
        self.assert_refused(CheckpointError, why, job=replace(self.job, steps=9))

    def test_unless_it_shall_not(self):
        self.operate(job=replace(self.job, steps=8))
        why = "step_8: there is a checkpoint, and the run shall not resume"
        self.assert_refused(CheckpointError, why, resume=False)
        self.assertEqual(self.saved(), [0, 4, 8])
        self.job = replace(self.job, folder=self.folder / "empty")
        self.assertEqual(self.operate(resume=False)[0]["position"], 20)

    def test_one_run_at_a_time_in_a_folder(self):
        self.operate(job=replace(self.job, steps=8))
        with alone_in(self.job.folder, Team.of_one_process(1)):  # another process, say
            with mock.patch.object(operating, "alone_in", partial(alone_in, seconds=0.0)):
                self.assert_refused(CheckpointError, "checkpoints: another run is going on here; end it")
        self.assertEqual(self.saved(), [0, 4, 8])
        self.assertEqual(self.operate()[0]["start"], 8)

    def test_where_folders_have_no_locks_nobody_is_kept_out(self):
        alone, folder = Team.of_one_process(1), self.job.folder
        with mock.patch("storage.fcntl", None), alone_in(folder, alone), alone_in(folder, alone, seconds=0.0):
            self.assertEqual(self.operate(job=replace(self.job, steps=4))[0]["position"], 4)

    def test_a_run_that_fails_lets_the_next_one_in(self):
        self.operate(job=replace(self.job, steps=8))
        self.assert_refused(CheckpointError, "saved by another job", job=replace(self.job, lr=1.0))
        self.assertEqual(self.operate()[0]["start"], 8)

    def test_on_another_number_of_ranks(self):
        """Rows are those of the whole batch, so that it is the same job; sums are of another order."""
        self.job = replace(self.job, rows=12, dropout=0.0)
        whole = self.uninterrupted(2)[0]["rows"]
        self.operate(2, job=replace(self.job, steps=8))
        for row, expected in zip(self.operate(3)[0]["rows"], whole[8:], strict=True):
            self.assertAlmostEqual(row["loss"], expected["loss"], places=4)


class TestRefused(Runs):
    def test_operations_that_make_no_sense(self):
        for changes, message in [
            ({"checkpoint_every_steps": 0}, "checkpoint_every_steps must be a whole number of at least 1, got 0"),
            ({"checkpoint_every_steps": 2.5}, "checkpoint_every_steps must be a whole number of at least 1, got 2.5"),
            ({"checkpoint_every_minutes": 0}, "checkpoint_every_minutes must be a positive number"),
            ({"checkpoint_every_minutes": math.nan}, "checkpoint_every_minutes must be a positive number"),
            ({"keep_last": 1}, "keep_last must be a whole number of at least 2, got 1"),
            ({"spike_factor": 1.0}, "factor must be a number above 1, got 1.0"),
            ({"spike_window": 0}, "window must be a whole number of at least 1, got 0"),
            ({"most_rollbacks": -1}, "most must be a whole number of at least 0, got -1"),
        ]:
            with self.subTest(changes), self.assertRaisesRegex(ValueError, message):
                Operations(**changes)

    def test_jobs_that_make_no_sense(self):
        for changes, message in [
            ({"folder": None}, "an operated job needs a folder"),
            ({"save_at": (3,)}, "save_at, resume and inject_nan are not for an operated job"),
            ({"resume": Path("x")}, "save_at, resume and inject_nan are not for an operated job"),
            ({"inject_nan": (3, 0)}, "save_at, resume and inject_nan are not for an operated job"),
        ]:
            with self.subTest(changes), self.assertRaisesRegex(ValueError, message):
                operate(0, 2, replace(self.job, **changes), self.operations)

    def test_drills_that_cannot_be(self):
        for drill, message in [
            ("nan@21", "nan@21: there are only 20 steps"),
            ("spike@20", "spike@20: the next step's loss would show it, and there are only 20 steps"),
            ("kill@3:2", "there are only 2 ranks"),
        ]:
            with self.assertRaisesRegex(ValueError, message):
                operate(0, 2, self.job, replace(self.operations, inject=(parse_drill(drill),)))

    def test_ranks_with_different_operations(self):
        def fail(mesh):
            operations = replace(self.operations, keep_last=3 + mesh.rank)
            with self.assertRaisesRegex(
                ValueError, "ranks disagree on operations: keep_last: rank 0 has 3; rank 1 has 4"
            ):
                operate(mesh.rank, 2, self.job, operations, MeshComm(mesh))
            return True

        self.assertEqual(VirtualCluster(2).run(fail), [True, True])
        self.assertFalse(self.job.folder.exists())


class TestDrills(unittest.TestCase):
    def test_texts(self):
        for text, drill in {
            "spike@12": Drill("spike", 12),
            "nan@3:0": Drill("nan", 3, 0),
            "kill@12:1": Drill("kill", 12, 1),
            "sigterm@1": Drill("sigterm", 1),
        }.items():
            self.assertEqual(parse_drill(text), drill)
            self.assertEqual(str(drill), text)
        for text in (
            "",
            "spike",
            "spike@",
            "spike@0",
            "spike@-1",
            "spike@3:1",
            "fire@3",
            "nan@3:",
            "nan@3:x",
            "nan@1.5",
        ):
            with self.assertRaisesRegex(ValueError, "expected spike, nan, kill or sigterm, @STEP"):
                parse_drill(text)

    def test_what_they_change(self):
        job = Job(CORPUS, lr=0.25)
        drills = Drills((Drill("spike", 3), Drill("nan", 4), Drill("nan", 5, 0)), rank=1, world_size=3)
        self.assertIs(drills.before(2, job), job)
        self.assertEqual(drills.before(3, job), replace(job, lr=0.25 * inject.SPIKE))
        self.assertIs(drills.before(3, job), job, "once")
        self.assertEqual(drills.before(4, job).inject_nan, (4, 2))
        self.assertEqual(drills.before(5, job).inject_nan, (5, 0))

    def test_signals_are_for_one_rank(self):
        import signal

        with mock.patch.object(inject.os, "kill") as kill:
            for rank in range(3):
                drills = Drills((Drill("kill", 3, 1), Drill("sigterm", 4)), rank, world_size=3)
                for step in (3, 4, 3, 4):
                    drills.before(step, Job(CORPUS))
        sent = [call.args[1] for call in kill.call_args_list]
        self.assertEqual(sent, [signal.SIGKILL, signal.SIGTERM])

    def test_not_in_a_process_that_torchrun_started_again(self):
        for count, left in (("0", 1), ("1", 0), ("2", 0)):
            with mock.patch.dict(inject.os.environ, TORCHELASTIC_RESTART_COUNT=count):
                self.assertEqual(len(Drills((Drill("nan", 3),), 0, 1).left), left)


if __name__ == "__main__":
    unittest.main()
