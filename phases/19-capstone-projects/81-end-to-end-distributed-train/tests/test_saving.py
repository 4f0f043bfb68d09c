import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from checkpoint import load_shard, save_sharded
from comm import TorchComm
from manifest import MANIFEST, CheckpointError
from mesh_comm import MeshComm
from publish import DELETED
from ranks import run_ranks
from resume import saved_job
from rotation import complete_checkpoints
from saving import Checkpoints, take_back
from virtual import VirtualCluster

RANKS = 2


def state(rank: int, position: int) -> dict:
    """A rank's state after `position` steps."""
    return {"position": position, "values": torch.arange(5) + 100 * position + 1000 * rank}


def on_disk(folder: Path) -> list[int]:
    """The steps of which there is a complete checkpoint."""
    return [position for position, _ in complete_checkpoints(folder)]


class TestCheckpoints(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "new" / "checkpoints"

    def run_ranks(self, work, **settings) -> list:
        """Call work(checkpoints, comm) on virtual ranks; return what each returns."""

        def be_a_rank(mesh):
            comm = MeshComm(mesh)
            with Checkpoints(self.folder, comm, **settings) as checkpoints:
                return work(checkpoints, comm)

        return VirtualCluster(RANKS).run(be_a_rank)

    def save(self, checkpoints, comm, *positions) -> None:
        for position in positions:
            checkpoints.save(state(comm.rank, position), position)

    def test_each_rank_finds_what_it_saved(self):
        def work(checkpoints, comm):
            self.save(checkpoints, comm, 0, 4, 8)
            return load_shard(checkpoints.path(4), comm)

        for rank, found in enumerate(self.run_ranks(work, keep_last=3)):
            self.assertEqual(found["position"], 4)
            self.assertTrue(torch.equal(found["values"], state(rank, 4)["values"]))

    def test_the_oldest_go(self):
        def work(checkpoints, comm):
            seen = []
            for position in range(0, 24, 4):
                self.save(checkpoints, comm, position)
                seen.append((list(checkpoints.positions), comm.agree(on_disk(self.folder))[0]))
            return seen

        for seen in self.run_ranks(work, keep_last=2):
            for position, (listed, found) in zip(range(0, 24, 4), seen, strict=True):
                self.assertEqual(listed, list(range(0, 24, 4))[max(0, position // 4 - 2) : position // 4 + 1])
                self.assertEqual(listed, found, "what is listed is there")
        self.assertEqual(on_disk(self.folder), [16, 20])

    def test_going_back_and_on(self):
        def work(checkpoints, comm):
            self.save(checkpoints, comm, 0, 4, 8, 12)
            folder = checkpoints.go_back(4)
            seen = [list(checkpoints.positions), comm.agree(on_disk(self.folder))[0], load_shard(folder, comm)]
            self.save(checkpoints, comm, 8)
            return [*seen, list(checkpoints.positions), load_shard(checkpoints.path(8), comm)]

        for rank, (listed, found, four, later, eight) in enumerate(self.run_ranks(work, keep_last=3)):
            self.assertEqual((listed, found, later), ([0, 4], [0, 4], [0, 4, 8]))
            self.assertTrue(torch.equal(four["values"], state(rank, 4)["values"]))
            self.assertTrue(torch.equal(eight["values"], state(rank, 8)["values"]))
        self.assertFalse((self.folder / "step_12").exists(), "of what will not be, nothing is left")

    def test_what_is_there_is_found(self):
        self.run_ranks(lambda checkpoints, comm: self.save(checkpoints, comm, 4, 9, 10))
        self.assertEqual(self.run_ranks(lambda checkpoints, comm: checkpoints.positions), [[9, 10]] * RANKS)

    def test_a_crash_while_a_checkpoint_is_taken_back(self):
        self.run_ranks(lambda checkpoints, comm: self.save(checkpoints, comm, 4, 8), keep_last=5)
        take_back(self.folder / "step_8")
        self.assertFalse((self.folder / "step_8" / MANIFEST).exists())
        self.assertTrue((self.folder / "step_8" / DELETED).exists())

        def work(checkpoints, comm):
            before = list(checkpoints.positions)
            self.save(checkpoints, comm, 8)
            return before, load_shard(checkpoints.path(8), comm)["position"]

        self.assertEqual(self.run_ranks(work, keep_last=5), [([4], 8)] * RANKS)
        self.assertEqual(on_disk(self.folder), [4, 8])

    def test_a_folder_of_another_name_is_an_error_on_every_rank(self):
        save_sharded([state(0, 7)], self.folder / "best", 7)

        def work(mesh):
            with self.assertRaisesRegex(CheckpointError, r"best: not named as checkpoints of a run are: step_<n>"):
                Checkpoints(self.folder, MeshComm(mesh))
            return True

        self.assertEqual(VirtualCluster(RANKS).run(work), [True] * RANKS)

    def test_damage_to_the_newest_is_no_reason_to_go_on_from_an_older_one(self):
        self.run_ranks(lambda checkpoints, comm: self.save(checkpoints, comm, 4, 8), keep_last=5)
        manifest, shard = self.folder / "step_8" / MANIFEST, self.folder / "step_8" / "rank1.bin"

        def work(mesh):
            with self.assertRaisesRegex(CheckpointError, r"step_8.*\(to go on from an older checkpoint, move this"):
                Checkpoints(self.folder, MeshComm(mesh))
            return True

        for path, content in [(manifest, b"{"), (manifest, b'{"format": 0}'), (shard, b"short"), (shard, None)]:
            with self.subTest(path=path.name, content=content):
                before = path.read_bytes()
                path.unlink() if content is None else path.write_bytes(content)
                self.assertEqual(VirtualCluster(RANKS).run(work), [True] * RANKS)
                path.write_bytes(before)
        for name in (MANIFEST, "rank0.bin"):  # damage to one that is not the newest does not stop the run
            (self.folder / "step_4" / name).write_bytes(b"{")
            self.assertEqual(self.run_ranks(lambda checkpoints, comm: checkpoints.positions), [[8]] * RANKS)

    def test_a_folder_that_cannot_be_made_is_too(self):
        self.folder.parent.parent.mkdir(exist_ok=True)
        self.folder.parent.write_text("a file")

        def work(mesh):
            with self.assertRaises(CheckpointError):
                Checkpoints(self.folder, MeshComm(mesh))
            return True

        self.assertEqual(VirtualCluster(RANKS).run(work), [True] * RANKS)

    def test_steps_and_minutes(self):
        def work(mesh):
            now = [0.0]
            checkpoints = Checkpoints(
                self.folder, MeshComm(mesh), every_steps=5, every_minutes=2.0, clock=lambda: now[0]
            )
            due, seen = [step for step in range(1, 13) if checkpoints.is_due(step)], []
            for seconds in (0.0, 119.0, 120.0, 500.0):
                now[0] = seconds
                seen.append(checkpoints.is_time())
            checkpoints.save(state(mesh.rank, 3), 3)
            seen.append(checkpoints.is_time())
            now[0] = 620.0
            return due, [*seen, checkpoints.is_time()]

        expected = [5, 10], [False, False, True, True, False, True]
        self.assertEqual(VirtualCluster(RANKS).run(work), [expected] * RANKS)

    def test_never(self):
        def work(checkpoints, comm):
            return checkpoints.is_due(1), checkpoints.is_time()

        self.assertEqual(self.run_ranks(work, clock=iter(range(0, 10**9, 10**6)).__next__), [(False, False)] * RANKS)


def in_the_background(rank: int, world_size: int, folder: str) -> list:
    """Save so much that the next call comes before it is written; go back at once."""
    comm, seen = TorchComm(), []
    with Checkpoints(Path(folder), comm, keep_last=2) as checkpoints:
        for position in (0, 4, 8):
            values = torch.full((2_000_000,), position + rank)
            checkpoints.save({"values": values}, position)
            values.fill_(-1)  # training goes on
        checkpoints.go_back(4)
        seen.append(list(checkpoints.positions))
        seen.append(comm.agree(on_disk(checkpoints.folder))[0])
        found = load_shard(checkpoints.path(4), comm)["values"]
        seen.append(bool((found == 4 + rank).all()))
        checkpoints.save({"values": found}, 6)
    return [*seen, comm.agree(on_disk(checkpoints.folder))[0], os.path.exists(checkpoints.path(8))]


class TestInTheBackground(unittest.TestCase):
    def test_what_is_under_way_is_waited_for(self):
        with tempfile.TemporaryDirectory() as folder:
            seen = run_ranks(in_the_background, RANKS, folder)
        self.assertEqual(seen, [[[0, 4], [0, 4], True, [4, 6], False]] * RANKS)


class TestWhoseCheckpointItIs(unittest.TestCase):
    @unittest.skipUnless(hasattr(os, "mkfifo"), "needs named pipes")
    def test_a_pipe_in_the_place_of_a_shard(self):
        """A run that resumes reads rank 0's shard first, to see whose it is; a pipe would let it wait for ever."""
        with tempfile.TemporaryDirectory() as folder:
            save_sharded([state(rank, 4) for rank in range(RANKS)], folder, 4)
            os.unlink(Path(folder, "rank0.bin"))
            os.mkfifo(Path(folder, "rank0.bin"))
            with self.assertRaisesRegex(OSError, "expected a plain file, found a special file: .*rank0.bin"):
                saved_job(folder)


if __name__ == "__main__":
    unittest.main()
