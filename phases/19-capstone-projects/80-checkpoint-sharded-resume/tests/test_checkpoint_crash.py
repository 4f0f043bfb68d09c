"""A save is interrupted at every file operation, in every way: afterwards the newest complete checkpoint loads."""

import errno
import os
import re
import signal
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from bitwise import same, small_states
from checkpoint import load_sharded, save_shard, save_sharded
from mesh_comm import MeshComm
from manifest import MANIFEST, CheckpointError, read_manifest
from ranks import RankError, run_ranks
from rotation import latest_checkpoint
from storage import Crash, CrashingStorage, Storage
from virtual import VirtualCluster

RANKS = 2
OLD, NEW = small_states(RANKS), small_states(RANKS, 50)
KINDS = {  # name: (folder, step) of the checkpoint that exists, (folder, step) of the save that is interrupted
    "first save": (None, ("step_5", 5)),
    "later save": (("step_5", 5), ("step_10", 10)),
    "same step again": (("step_5", 5), ("step_5", 5)),
}


def newest(parent, world_size=RANKS):
    """Which checkpoint loads, bit for bit."""
    folder = latest_checkpoint(parent)
    if folder is None:
        return "none"
    states = load_sharded(folder, world_size)[1]
    known = {"old": small_states(world_size), "new": small_states(world_size, 50)}
    return next((name for name, saved in known.items() if same(states, saved)), "wrong")


def moments(operation):
    return ("before", "during", "after") if operation.startswith("write") else ("before", "after")


class Interrupted(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root, self.count = Path(temporary.name), 0

    def prepare(self, before):
        """A fresh folder of checkpoints, with the old one in it."""
        self.count += 1
        parent = self.root / str(self.count) / "checkpoints"
        parent.mkdir(parents=True)
        if before:
            save_sharded(OLD, parent / before[0], before[1], storage=CrashingStorage())
        return parent

    def check_next_save(self, parent, save):
        manifest = save_sharded(NEW, parent / save[0], save[1], storage=CrashingStorage())
        self.assertEqual(newest(parent), "new")
        names = {path.name for path in (parent / save[0]).iterdir()}
        self.assertEqual(names, {MANIFEST, *(shard.path for shard in manifest.shards)}, "stray files")


class EveryOperation(Interrupted):
    def test_crash_before_during_and_after_each(self):
        for kind, (before, save) in KINDS.items():
            rehearsal = CrashingStorage()
            save_sharded(NEW, self.prepare(before) / save[0], save[1], storage=rehearsal)
            publish = rehearsal.log.index(f"rename {MANIFEST}")
            for at, operation in enumerate(rehearsal.log):
                for when in moments(operation):
                    with self.subTest(kind, operation=operation, when=when):
                        parent = self.prepare(before)
                        with self.assertRaises(Crash):
                            save_sharded(NEW, parent / save[0], save[1], storage=CrashingStorage(at, when))
                        published = at > publish or (at == publish and when == "after")
                        expected = "new" if published else "old" if before else "none"
                        self.assertEqual(newest(parent), expected)
                        self.check_next_save(parent, save)

    def test_an_error_at_each(self):
        class Failing(CrashingStorage):
            def perform(self, operation, path, action):
                if len(self.log) != self.at:
                    return super().perform(operation, path, action)
                self.log.append(operation)
                return Storage.perform(self, operation, path, failing)

        def failing():
            raise OSError(errno.EIO, "Input/output error")

        for kind, (before, save) in KINDS.items():
            rehearsal = CrashingStorage()
            save_sharded(NEW, self.prepare(before) / save[0], save[1], storage=rehearsal)
            publish = rehearsal.log.index(f"rename {MANIFEST}")
            for at, operation in enumerate(rehearsal.log):
                with self.subTest(kind, operation=operation):
                    parent = self.prepare(before)
                    if operation.startswith("delete"):  # saved and on disk; the old file is swept next time
                        save_sharded(NEW, parent / save[0], save[1], storage=Failing(at, "error"))
                    else:
                        name = re.sub(r"[0-9a-f]{32}", ".*", operation.split()[-1])
                        with self.assertRaisesRegex(CheckpointError, f"/{name}: Input/output error"):
                            save_sharded(NEW, parent / save[0], save[1], storage=Failing(at, "error"))
                    expected = "new" if at > publish else "old" if before else "none"
                    self.assertEqual(newest(parent), expected)
                    if at <= publish and (parent / save[0]).exists():
                        left = {path.name for path in (parent / save[0]).iterdir()}
                        self.assertLessEqual(left, {MANIFEST, "rank0.bin", "rank1.bin"} if before == save else set())
                    self.check_next_save(parent, save)

    def test_the_order_of_operations(self):
        log = CrashingStorage()
        save_sharded(NEW, self.prepare(None) / "step_5", 5, storage=log)
        temporary = log.log[-5].split()[1]
        shards = [
            [f"create rank{r}.bin", *[f"write rank{r}.bin"] * 3, f"fsync rank{r}.bin", "fsync folder step_5"]
            for r in range(2)
        ]
        self.assertEqual(
            log.log,
            ["mkdir step_5", "fsync folder checkpoints", *shards[0], *shards[1]]
            + [f"{operation} {temporary}" for operation in ("create", "write", "fsync")]
            + [f"rename {MANIFEST}", "fsync folder step_5"],
        )
        self.assertRegex(temporary, r"^manifest\.json\.[0-9a-f]{32}\.tmp$")

    def test_a_dead_process_does_nothing_more(self):
        parent, disk = self.prepare(None), CrashingStorage(3, "after")
        for _ in range(2):
            with self.assertRaises(Crash):
                save_sharded(NEW, parent / "step_5", 5, storage=disk)
        self.assertEqual(len(disk.log), 4)


class PowerCutStorage(CrashingStorage):
    """Dies like its parent, and knows what of its writes an unlucky disk would still have.

    A file's bytes are safe after fsync of the file, a name after fsync of the folder; until then they may be lost.
    """

    syncs = True

    def __init__(self, root, at=None, when="before"):
        super().__init__(at, when)
        self.root, self.names_now, self.names_safe, self.bytes_now, self.bytes_safe = root, {}, {}, {}, {}

    def perform(self, operation, path, action):
        result = super().perform(operation, path, action)
        inode = os.stat(path).st_ino if operation in ("create", "write", "fsync") else None
        if operation == "create":
            self.names_now[path], self.bytes_now[inode], self.bytes_safe[inode] = inode, b"", b""
        elif operation == "write":
            self.bytes_now[inode] = path.read_bytes()
        elif operation == "fsync" and self.syncs:
            self.bytes_safe[inode] = self.bytes_now[inode]
        elif operation == "fsync folder" and self.syncs:
            elsewhere = {name: i for name, i in self.names_safe.items() if name.parent != path}
            self.names_safe = elsewhere | {name: i for name, i in self.names_now.items() if name.parent == path}
        elif operation == "delete":
            del self.names_now[path]
        return result

    def rename(self, source, target):
        super().rename(source, target)
        self.names_now[target] = self.names_now.pop(source)

    def after_power_cut(self, target):
        """Write every kind of disk that may be found into folders below `target`; yield them."""
        only_manifests = {name: inode for name, inode in self.names_now.items() if name.name == MANIFEST}
        only_deletions = {name: inode for name, inode in self.names_safe.items() if name in self.names_now}
        possible = []
        for names in (self.names_safe, self.names_now, self.names_safe | only_manifests, only_deletions):
            for unsafe in ("lost", "zeros", "there"):
                files = {name.relative_to(self.root): self.data(inode, unsafe) for name, inode in names.items()}
                if files not in possible:
                    possible.append(files)
        for i, files in enumerate(possible):
            (target / str(i)).mkdir(parents=True)
            for name, data in files.items():
                (target / str(i) / name).parent.mkdir(exist_ok=True)
                (target / str(i) / name).write_bytes(data)
            yield target / str(i)

    def data(self, inode, unsafe):
        safe, now = self.bytes_safe[inode], self.bytes_now[inode]
        return {"lost": safe, "zeros": safe + bytes(len(now) - len(safe)), "there": now}[unsafe]


class ForgetfulStorage(PowerCutStorage):
    """A disk that ignores fsync."""

    syncs = False


class PowerCut(Interrupted):
    def outcomes(self, before, save, at, when, kind_of_disk=PowerCutStorage):
        self.count += 1
        root = self.root / f"live{self.count}"
        root.mkdir()
        disk = kind_of_disk(root)
        if before:
            save_sharded(OLD, root / before[0], before[1], storage=disk)
        disk.at, disk.when = (None if at is None else len(disk.log) + at), when
        try:
            save_sharded(NEW, root / save[0], save[1], storage=disk)
        except Crash:
            pass
        return {newest(found) for found in disk.after_power_cut(self.root / f"found{self.count}")}

    def test_at_every_operation_a_complete_checkpoint_is_on_the_disk(self):
        for kind, (before, save) in KINDS.items():
            rehearsal = CrashingStorage()
            save_sharded(NEW, self.prepare(before) / save[0], save[1], storage=rehearsal)
            for at, operation in enumerate(rehearsal.log):
                for when in moments(operation):
                    with self.subTest(kind, operation=operation, when=when):
                        found = self.outcomes(before, save, at, when)
                        self.assertLessEqual(found, {"old", "new"} if before else {"none", "new"})

    def test_what_a_finished_save_wrote_is_safe(self):
        for kind, (before, save) in KINDS.items():
            with self.subTest(kind):
                self.assertEqual(self.outcomes(before, save, None, ""), {"new"})

    def test_the_test_would_notice_missing_fsyncs(self):
        before, save = KINDS["same step again"]
        self.assertIn("none", self.outcomes(before, save, None, "", ForgetfulStorage))


class OneRankOfMany(Interrupted):
    def test_each_rank_dies_at_each_operation(self):
        """The others are in the middle of the same save, on their own disks' operations, and die with the job."""
        rehearsals = self.save_on_ranks(self.prepare_three(), [CrashingStorage() for _ in range(3)])
        self.assertEqual([len(disk.log) for disk in rehearsals], [14, 6, 6])
        for rank, rehearsal in enumerate(rehearsals):
            for at, operation in enumerate(rehearsal.log):
                for when in moments(operation):
                    with self.subTest(rank=rank, operation=operation, when=when):
                        parent = self.prepare_three()
                        disks = [CrashingStorage(at, when) if r == rank else CrashingStorage() for r in range(3)]
                        with self.assertRaisesRegex(RankError, f"rank {rank} raised Crash"):
                            self.save_on_ranks(parent, disks, seed=at)
                        published = f"rename {MANIFEST}" in rehearsal.log[: at + (when == "after")]
                        self.assertEqual(newest(parent, 3), "new" if published else "old")
                        self.save_on_ranks(parent, [CrashingStorage() for _ in range(3)])
                        self.assertEqual(newest(parent, 3), "new")
                        self.assertEqual(len(list((parent / "step_5").iterdir())), 4, "stray files")

    def prepare_three(self):
        self.count += 1
        save_sharded(small_states(3), self.root / str(self.count) / "step_5", 5, storage=CrashingStorage())
        return self.root / str(self.count)

    def save_on_ranks(self, parent, disks, seed=0):
        def rank_main(mesh):
            state = small_states(3, 50)[mesh.rank]
            save_shard(state, parent / "step_5", 5, MeshComm(mesh), storage=disks[mesh.rank])

        VirtualCluster(3, seed).run(rank_main)
        return disks


class SuicidalStorage(Storage):
    """Kills its process, with a signal that cannot be caught, when the operation comes."""

    def __init__(self, operation, when):
        self.operation, self.when = operation, when

    def perform(self, operation, path, action):
        now = f"{operation} {path.name}" == self.operation
        if now and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().perform(operation, path, action)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def save_and_be_killed(rank, world_size, folder, victim, operation, when):
    disk = SuicidalStorage(operation, when) if rank == victim else Storage()
    save_shard(small_states(world_size, 50)[rank], folder, 10, storage=disk)


@unittest.skipUnless(hasattr(signal, "SIGKILL"), "needs SIGKILL")
class Killed(Interrupted):
    def test_real_processes_killed_at_the_turning_points(self):
        for victim, operation, when, expected in [
            (1, "write rank1.g1.bin", "after", "old"),
            (0, f"rename {MANIFEST}", "before", "old"),
            (0, f"rename {MANIFEST}", "after", "new"),
        ]:
            with self.subTest(victim=victim, operation=operation, when=when):
                parent = self.prepare(("step_10", 10))
                with self.assertRaises(RankError) as caught:
                    run_ranks(save_and_be_killed, 2, str(parent / "step_10"), victim, operation, when, timeout=60)
                self.assertEqual((caught.exception.rank, caught.exception.exitcode), (victim, -signal.SIGKILL))
                self.assertEqual(newest(parent), expected)
                self.check_next_save(parent, ("step_10", 10))  # the dead process's lock is gone too


class LeftBehind(Interrupted):
    def test_a_half_written_folder_is_not_a_checkpoint_and_is_saved_over(self):
        parent = self.prepare(("step_5", 5))
        with self.assertRaises(Crash):
            save_sharded(NEW, parent / "step_10", 10, storage=CrashingStorage(9, "during"))
        self.assertEqual(newest(parent), "old")
        with self.assertRaisesRegex(CheckpointError, "step_10/manifest.json: missing"):
            read_manifest(parent / "step_10")
        self.check_next_save(parent, ("step_10", 10))

    def test_what_a_dead_save_left_is_swept_before_more_is_written(self):
        parent = self.prepare(("step_5", 5))  # the disk may be full of it
        with self.assertRaises(Crash):
            save_sharded(NEW, parent / "step_5", 5, storage=CrashingStorage(9, "during"))
        disk = CrashingStorage()
        save_sharded(NEW, parent / "step_5", 5, storage=disk)
        self.assertEqual(disk.log[:3], ["delete rank0.g1.bin", "delete rank1.g1.bin", "create rank0.g1.bin"])

    def test_a_folder_in_the_place_of_the_manifest_is_refused_before_anything_is_written(self):
        parent = self.prepare(("step_5", 5))
        (parent / "step_6" / MANIFEST).mkdir(parents=True)
        disk = CrashingStorage()
        with self.assertRaisesRegex(CheckpointError, "step_6/manifest.json: a folder is in the place of the manifest"):
            save_sharded(NEW, parent / "step_6", 6, storage=disk)
        self.assertEqual(disk.log, [])


if __name__ == "__main__":
    unittest.main()
