"""Saved by N ranks, continued by M: the same run, for every pair of N and M."""

import shutil
import sys
import tempfile
import threading
import unittest
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import train
from checkpoint import load_sharded
from corpus import Batches, synthetic
from determinism import noise_seed
from e2e_runs import DoubleJob, outcomes, virtual
from job import Job
from mesh_comm import MeshComm
from ranks import RankError, run_ranks
from virtual import VirtualCluster

RANKS = (1, 2, 3, 4, 8)
SAVED, STEPS, ROWS = 4, 8, 13  # 13 rows: no number of ranks above 1 deals them equally
SMALL = {"dim": 8, "heads": 2, "blocks": 1}
CORPUS = synthetic(7, 1_120)  # 62 windows: steps 1-4 draw 52 of them, step 5 the last 10 and 3 of the next epoch
WINDOWS = {tuple(row.tolist()): i for i, row in enumerate(Batches(CORPUS.train, 1, 16, 7).windows)}
JOB = Job(CORPUS, steps=STEPS, rows=ROWS, model=SMALL, dropout=0.0, decay=12, exam_every=1000)


def my_rank() -> int:
    """The virtual rank that calls."""
    return int(threading.current_thread().name.removeprefix("rank "))


@contextmanager
def watching(world_size: int):
    """Record what the ranks really read, (step, rank) -> windows, and what they hold after `load`, rank by rank."""
    read, held, counts = {}, [None] * world_size, Counter()

    def watched_backward(model, sequences, *args):
        rank = my_rank()
        read[counts[rank], rank] = [WINDOWS[tuple(row)] for row in sequences.tolist()]
        counts[rank] += 1
        return backward(model, sequences, *args)

    def watched_load(trainer, folder):
        position = load(trainer, folder)
        optimizer = trainer.state(position)["optimizer"]
        held[trainer.rank] = {
            unit: {name: tensor.clone() for name, tensor in tensors.items()}
            for unit, tensors in optimizer["state"].items()
        }
        return position

    backward, load = train.backward, train.Trainer.load
    with (
        mock.patch.object(train, "backward", watched_backward),
        mock.patch.object(train.Trainer, "load", watched_load),
    ):
        yield read, held


def by_step(read: dict) -> list[list[int]]:
    """The windows of each step, of all ranks in their order."""
    steps = 1 + max(step for step, _ in read)
    return [[w for (at, _), windows in sorted(read.items()) if at == step for w in windows] for step in range(steps)]


def joined(states: list[dict]) -> dict[str, torch.Tensor]:
    """All ranks' ranges of each flat buffer, end to end."""
    return {
        f"{unit} {name}": torch.cat([state[unit][name] for state in states])
        for unit in states[0]
        for name in states[0][unit]
    }


def run(world_size: int, job: Job) -> tuple[list[dict], list[list[int]], list]:
    """Return logs, the windows read by step, and what was held after a load."""
    with watching(world_size) as (read, held):
        logs = virtual(world_size, job)
    return logs, by_step(read), held


class Pairs(unittest.TestCase):
    """Runs that save once a number of ranks, and what the comparisons need."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def saving(self, job: Job, n: int) -> Job:
        return replace(job, save_at=(SAVED,), folder=self.folder / f"by_{n}")

    def resuming(self, job: Job, n: int, **changes) -> Job:
        return replace(job, resume=self.folder / f"by_{n}" / f"step_{SAVED}", **changes)

    def assert_close(self, rows: list[dict], expected: list[dict], dtype=torch.float32):
        """Two orders of a sum over T tokens differ by at most 2 (T - 1) eps sum|x|: so do two means, relatively."""
        bound = 2 * ROWS * JOB.seq * torch.finfo(dtype).eps  # of 13 rows, also where there are more
        self.assertEqual([row["step"] for row in rows], [row["step"] for row in expected])
        for row, want in zip(rows, expected, strict=True):
            self.assertAlmostEqual(row["loss"], want["loss"], delta=bound * want["loss"], msg=f"step {row['step']}")
            self.assertAlmostEqual(row["norm"], want["norm"], delta=bound * max(1, want["norm"]))

    def assert_holds_what_was_saved(self, held: list[dict], n: int):
        """Masters and both moments, end to end: the same bits, however they are cut."""
        _, states = load_sharded(self.folder / f"by_{n}" / f"step_{SAVED}", n)
        saved, found = joined([state["optimizer"]["state"] for state in states]), joined(held)
        self.assertEqual(found.keys(), saved.keys())
        for name, tensor in saved.items():
            self.assertEqual((found[name].dtype, found[name].tolist()), (tensor.dtype, tensor.tolist()), name)


class TestAllPairs(Pairs):
    def check(self, job: Job, ranks: tuple[int, ...], dtype=torch.float32):
        whole = {n: run(n, self.saving(job, n)) for n in ranks}
        for n, (logs, read, _) in whole.items():
            self.assertEqual(read, whole[ranks[0]][1], "all numbers of ranks read the same")
            for m in ranks:
                with self.subTest(f"{n} -> {m}"):
                    again, rest, held = run(m, self.resuming(job, n))
                    self.assertEqual(rest, read[SAVED:], "nothing is repeated or left out")
                    self.assert_holds_what_was_saved(held, n)
                    self.assert_close(again[0]["rows"], logs[0]["rows"][SAVED:], dtype)
                    self.assertEqual({log["rows"][-1]["digest"] for log in again}, {again[0]["rows"][-1]["digest"]})
                    if n == m:
                        self.assertEqual(outcomes(again[0]), outcomes(logs[0])[SAVED:])

    def test_saved_by_any_continued_by_any(self):
        self.check(JOB, RANKS)

    def test_saved_by_4_at_10_continued_by_2_to_20(self):
        job = replace(JOB, steps=20, rows=16)
        logs = virtual(4, replace(job, save_at=(10,), folder=self.folder))
        again = virtual(2, replace(job, resume=self.folder / "step_10"))
        self.assertEqual([log["start"] for log in again], [10, 10])
        self.assert_close(again[0]["rows"], logs[0]["rows"][10:])

    def test_in_fp64_it_is_2_to_the_29_closer(self):
        self.check(DoubleJob(**vars(JOB)), (1, 3, 8), torch.float64)

    def test_every_stage_of_zero_with_microbatches(self):
        for stage in (2, 3):
            with self.subTest(stage=stage):
                self.check(replace(JOB, stage=stage, microbatches=2), (1, 2, 4))

    def test_fewer_rows_than_ranks(self):
        """Five of eight ranks read nothing, with every stage; theirs weighs nothing, and no rank waits."""
        for stage in (1, 2, 3):
            job = replace(JOB, rows=3, stage=stage, steps=3)
            one, eight = (virtual(n, job)[0]["rows"] for n in (1, 8))
            self.assert_close(eight, one)


class TestTheTestsNotice(Pairs):
    """Wrong versions of dealing rows and of restoring."""

    def differs(self, n: int, m: int) -> bool:
        logs, _, _ = run(n, self.saving(JOB, n))
        with self.broken():
            again, _, held = run(m, self.resuming(JOB, n))
        try:
            self.assert_holds_what_was_saved(held, n)
            self.assert_close(again[0]["rows"], logs[0]["rows"][SAVED:])
        except AssertionError:
            return True
        return False

    def test_a_mean_of_the_ranks_means(self):
        def unweighted(model, sequences, microbatches, weight, *args):
            return backward(model, sequences, microbatches, None, *args)

        backward = train.backward
        self.broken = lambda: mock.patch.object(train, "backward", unweighted)
        self.assertTrue(self.differs(2, 3))

    def test_moments_that_are_lost(self):
        def forgetful(optimizer, saved):
            load(optimizer, saved)
            optimizer.shards[0].exp_avg.zero_()

        load = train.ZeroOptimizer.load_state_dict
        self.broken = lambda: mock.patch.object(train.ZeroOptimizer, "load_state_dict", forgetful)
        self.assertTrue(self.differs(4, 2))

    def test_the_right_version(self):
        self.broken = nullcontext
        self.assertFalse(self.differs(2, 3))


class TestData(Pairs):
    """Over three epochs, with a change of ranks in the middle of the second."""

    def drawn(self, *runs: tuple[int, Job]) -> list[int]:
        return [window for n, job in runs for step in run(n, job)[1] for window in step]

    def test_each_epoch_visits_every_window_once(self):
        job = replace(JOB, steps=15)  # 195 samples: three epochs of 62, and 9
        first = replace(job, steps=7, save_at=(7,), folder=self.folder)  # 91: the second has 33 left
        rest = replace(job, resume=self.folder / "step_7")
        found = self.drawn((3, first), (2, rest))
        self.assertEqual(found, self.drawn((1, job)))
        for epoch in range(3):
            self.assertEqual(sorted(found[62 * epoch : 62 * (epoch + 1)]), list(range(62)))

    def test_with_another_number_of_rows_the_stream_goes_on(self):
        """The position counts samples, not batches."""
        first = replace(JOB, steps=7, save_at=(7,), folder=self.folder)
        rest = replace(JOB, steps=17, rows=10, resume=self.folder / "step_7", may_change=("rows",))
        found = self.drawn((2, first), (4, rest))
        self.assertEqual(len(found), 7 * 13 + 10 * 10)
        for epoch in range(3):
            self.assertEqual(sorted(found[62 * epoch : 62 * (epoch + 1)]), list(range(62)))

    def test_other_rows_must_be_allowed(self):
        run(2, self.saving(JOB, 2))
        with self.assertRaisesRegex(RankError, "saved by another job: rows was 13, is 12"):
            virtual(3, self.resuming(JOB, 2, rows=12))

    def test_another_seed_cannot_be_allowed(self):
        """It would be another stream: the place in it says nothing."""
        run(2, self.saving(JOB, 2))
        with self.assertRaisesRegex(RankError, "the data's position: seed was 7, is 8"):
            virtual(3, self.resuming(JOB, 2, seed=8, may_change=("seed",)))

    def test_what_was_drawn_counts_and_not_the_step(self):
        """Samples that were drawn and not trained on are not drawn again."""

        def skip_some(mesh):
            trainer = train.Trainer(JOB, mesh.rank, 2, MeshComm(mesh))
            trainer.step(1)
            trainer.drawn += 5
            train.save_shard(trainer.state(1), self.folder, 1, trainer.comm)

        VirtualCluster(2).run(skip_some)
        _, rest, _ = run(3, replace(JOB, resume=self.folder))
        self.assertEqual(rest[0], Batches(CORPUS.train, ROWS, 16, 7).indices(18).tolist())


class TestNoise(Pairs):
    def setUp(self):
        super().setUp()
        self.job = replace(JOB, dropout=0.3)
        self.logs = virtual(2, self.saving(self.job, 2))

    def noise_of(self, m: int, **changes) -> list[tuple[int, torch.Tensor]]:
        """Each rank's (position, random state) right after `load`."""

        def load(mesh):
            trainer = train.Trainer(replace(self.job, **changes), mesh.rank, m, MeshComm(mesh))
            return trainer.load(self.folder / "by_2" / f"step_{SAVED}"), torch.get_rng_state()

        return VirtualCluster(m).run(load)

    def test_the_same_ranks_go_on_where_their_noise_stood(self):
        _, states = load_sharded(self.folder / "by_2" / f"step_{SAVED}", 2)
        for (_, found), state in zip(self.noise_of(2), states, strict=True):
            self.assertTrue(torch.equal(found, state["random"]["cpu"]))
        again = virtual(2, self.resuming(self.job, 2))
        self.assertEqual(outcomes(again[1]), outcomes(self.logs[1])[SAVED:])

    def test_other_ranks_begin_noise_that_seed_step_and_rank_decide(self):
        for rank, (position, found) in enumerate(self.noise_of(3)):
            expected = torch.Generator().manual_seed(noise_seed(7, SAVED, rank)).get_state()
            self.assertEqual(position, SAVED)
            self.assertTrue(torch.equal(found, expected), rank)
        first, second = (virtual(3, self.resuming(self.job, 2)) for _ in range(2))
        self.assertEqual(outcomes(first[2]), outcomes(second[2]))

    def test_no_two_ranks_or_steps_share_a_seed(self):
        seeds = [noise_seed(7, step, rank) for step in range(300) for rank in range(300)]
        self.assertEqual(len(set(seeds)), len(seeds))


class TestTrainer(Pairs):
    """A trainer can go back while it runs, and a checkpoint that does not fit changes nothing."""

    def test_back_to_a_checkpoint_after_a_step_that_failed(self):
        """The steps after it are what they were: in every stage, noise included."""
        for stage in (1, 2, 3):
            job = replace(JOB, dropout=0.2, stage=stage, microbatches=2)
            folder = self.folder / f"stage_{stage}"

            def fail_and_go_back(mesh, job=job, folder=folder):
                trainer = train.Trainer(job, mesh.rank, 3, MeshComm(mesh))
                first = [trainer.step(step) for step in range(1, 6) if step != 3 or self.save(trainer, folder)]
                trainer.job = replace(job, inject_nan=(6, 1))
                with self.assertRaisesRegex(train.NonFiniteError, r"(?=.*\b6\b)(?=.*\b1\b)(?=.*gradient)"):
                    trainer.step(6)
                trainer.job = job
                self.assertEqual(trainer.load(folder), 2)
                return first[2:], [trainer.step(step) for step in range(3, 6)]

            for before, after in VirtualCluster(3).run(fail_and_go_back):
                with self.subTest(stage=stage):
                    self.assertEqual(outcomes({"rows": after}), outcomes({"rows": before}))

    @staticmethod
    def save(trainer, folder: Path) -> bool:
        train.save_shard(trainer.state(2), folder, 2, trainer.comm)
        return True

    def test_a_checkpoint_of_another_stage(self):
        run(2, self.saving(JOB, 2))
        with self.assertRaisesRegex(RankError, "saved by another job: stage was 1, is 3"):
            virtual(3, self.resuming(JOB, 2, stage=3))
        with self.assertRaisesRegex(RankError, "missing unit 'optimizer/state/unit0'|has .* elements"):
            virtual(3, self.resuming(JOB, 2, stage=3, may_change=("stage",)))

    def test_stages_2_and_3_are_cut_alike(self):
        logs, _, _ = run(2, self.saving(replace(JOB, stage=2), 2))
        again, _, held = run(3, self.resuming(JOB, 2, stage=3, may_change=("stage",)))
        self.assert_holds_what_was_saved(held, 2)
        self.assert_close(again[0]["rows"], logs[0]["rows"][SAVED:])


class TestProcesses(Pairs):
    """In real processes, saved while training goes on."""

    @classmethod
    def setUpClass(cls):
        cls.shared = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.job = replace(JOB, dropout=0.0, stage=2, microbatches=2)
        saving = replace(cls.job, save_at=(SAVED,), folder=cls.shared / "by_4", background=True)
        cls.logs = run_ranks(train.train, 4, saving)

    def test_the_step_recorded_is_that_of_the_call(self):
        manifest, states = load_sharded(self.shared / "by_4" / f"step_{SAVED}", 4)
        self.assertEqual(manifest.step, SAVED)
        for log, state in zip(self.logs, states, strict=True):
            self.assertEqual((state["position"], state["optimizer"]["steps"]), (SAVED, SAVED))
            self.assertEqual(state["data"]["samples"], SAVED * ROWS)
            self.assertTrue(torch.equal(train.held_masters(state), log["masters"][SAVED]))

    def test_continued_by_as_many_and_by_others(self):
        self.folder = self.shared
        for m in (4, 2, 3):
            again = run_ranks(train.train, m, self.resuming(self.job, 4))
            self.assert_close(again[0]["rows"], self.logs[0]["rows"][SAVED:])
            if m == 4:
                self.assertEqual(outcomes(again[3]), outcomes(self.logs[3])[SAVED:])

    def test_a_save_in_the_background_that_fails_is_heard(self):
        job = replace(JOB, save_at=(SAVED,), folder=self.folder / "file", background=True)
        job.folder.write_text("a file stands where the folder should be")
        with self.assertRaisesRegex(RankError, f"the save of step {SAVED} into .* failed"):
            run_ranks(train.train, 2, job)


if __name__ == "__main__":
    unittest.main()
