"""Real processes die at every file operation, on every rank in turn; disks that fail; two writers."""

import errno
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from bitwise import same, small_states
from checkpoint import load_sharded, save_shard, save_sharded
from forked import DIED_WITH_ANOTHER, run_forked
from manifest import MANIFEST, CheckpointError
from mesh_comm import MeshComm
from rotation import latest_checkpoint
from storage import DISK, CrashingStorage, Storage
from virtual import VirtualCluster

RANKS, KILLED = 3, 86
OLD, NEW = small_states(RANKS), small_states(RANKS, 50)
KINDS = {  # name: (folder, step) of the checkpoint that exists, (folder, step) of the save that is interrupted
    "first save": (None, ("step_5", 5)),
    "later save": (("step_5", 5), ("step_10", 10)),
    "same step again": (("step_5", 5), ("step_5", 5)),
}
needs_fork = unittest.skipUnless(hasattr(os, "fork"), "needs fork")


class DeadlyStorage(CrashingStorage):
    """Its process ends, at once and without any clean-up, when the operation comes."""

    def _die_if(self, now):
        if now:
            os._exit(KILLED)


def newest(parent):
    folder = latest_checkpoint(parent)
    if folder is None:
        return "none"
    states = load_sharded(folder, RANKS)[1]
    return next((name for name, saved in {"old": OLD, "new": NEW}.items() if same(states, saved)), "wrong")


def save_and_log(comm, folder, step):
    disk = CrashingStorage()
    save_shard(NEW[comm.rank], folder, step, comm, storage=disk)
    return disk.log


def save_and_die(comm, folder, step, victim, at, when):
    disk = DeadlyStorage(at, when) if comm.rank == victim else CrashingStorage()
    save_shard(NEW[comm.rank], folder, step, comm, storage=disk)


class InFolders(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root, self.count = Path(temporary.name), 0

    def prepare(self, before):
        self.count += 1
        parent = self.root / str(self.count)
        parent.mkdir()
        if before:
            save_sharded(OLD, parent / before[0], before[1], storage=CrashingStorage())
        return parent

    def check_next_save(self, parent, save):
        manifest = save_sharded(NEW, parent / save[0], save[1], storage=CrashingStorage())
        self.assertEqual(newest(parent), "new")
        names = {path.name for path in (parent / save[0]).iterdir()}
        self.assertEqual(names, {MANIFEST, *(shard.path for shard in manifest.shards)}, "stray files")


@needs_fork
class EveryOperationOfEveryRank(InFolders):
    def test_first_save(self):
        self.die_at_each("first save", operations=[13, 6, 6])

    def test_later_save(self):
        self.die_at_each("later save", operations=[13, 6, 6])

    def test_same_step_again(self):
        self.die_at_each("same step again", operations=[14, 6, 6])

    def die_at_each(self, kind, operations):
        before, save = KINDS[kind]
        logs = [log for code, log in run_forked(save_and_log, RANKS, self.prepare(before) / save[0], save[1])]
        self.assertEqual([len(log) for log in logs], operations)
        for victim, log in enumerate(logs):
            publish = log.index(f"rename {MANIFEST}") if victim == 0 else len(log)
            for at, operation in enumerate(log):
                for when in ("before", "during", "after") if operation.startswith("write") else ("before", "after"):
                    with self.subTest(rank=victim, operation=operation, when=when):
                        parent = self.prepare(before)
                        ended = run_forked(save_and_die, RANKS, parent / save[0], save[1], victim, at, when)
                        codes = [code for code, _ in ended]
                        self.assertEqual(codes.pop(victim), KILLED)
                        self.assertEqual(set(codes), {DIED_WITH_ANOTHER}, "a survivor went on alone")
                        published = at > publish or (at == publish and when == "after")
                        self.assertEqual(newest(parent), "new" if published else "old" if before else "none")
                        self.check_next_save(parent, save)


class FailingStorage(CrashingStorage):
    """The k-th operation fails, as the system would fail it; all others work."""

    def __init__(self, at, code):
        super().__init__(at)
        self.code = code

    def perform(self, operation, path, action):
        number = len(self.log)
        if number != self.at:
            return super().perform(operation, path, action)
        self.log.append(operation)
        return Storage.perform(self, operation, path, self.fail)

    def fail(self):
        raise OSError(self.code, os.strerror(self.code))


class OneRankFailsAlone(InFolders):
    """Virtual ranks: the disk of one of them is full, read-only, or broken, at each operation in turn."""

    def save(self, folder, step, disks):
        def rank_main(mesh):
            try:
                return save_shard(NEW[mesh.rank], folder, step, MeshComm(mesh), storage=disks[mesh.rank])
            except CheckpointError as error:
                return str(error)

        return VirtualCluster(RANKS).run(rank_main)

    def test_every_rank_hears_the_same_and_the_old_checkpoint_stays(self):
        codes = [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT]
        for kind, (before, save) in KINDS.items():
            rehearsal = [CrashingStorage() for _ in range(RANKS)]
            self.save(self.prepare(before) / save[0], save[1], rehearsal)
            for victim, log in enumerate(disk.log for disk in rehearsal):
                publish = log.index(f"rename {MANIFEST}") if victim == 0 else len(log)
                for at, operation in enumerate(log):
                    code = codes[at % len(codes)]
                    with self.subTest(kind, rank=victim, operation=operation, error=os.strerror(code)):
                        parent = self.prepare(before)
                        disks = [FailingStorage(at, code) if r == victim else CrashingStorage() for r in range(RANKS)]
                        outcomes = self.save(parent / save[0], save[1], disks)
                        self.assertEqual(len(set(map(str, outcomes))), 1, "the ranks heard different things")
                        if operation.startswith("delete"):  # published; the old file is swept by the next save
                            self.assertEqual(outcomes[0].step, save[1])
                        else:
                            self.assertRegex(outcomes[0], f"^rank {victim} failed: .*: {os.strerror(code)}$")
                        self.assertEqual(newest(parent), "new" if at > publish else "old" if before else "none")
                        self.check_next_save(parent, save)


def save_unprivileged(comm, folder):
    """Be nobody, if this is root: root may write everywhere."""
    if os.geteuid() == 0:
        os.setuid(65534)
    return message_of(comm, folder)


def save_with_small_files(comm, folder):
    """On rank 1 the system refuses to let a file grow beyond a page."""
    import resource

    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return message_of(comm, folder, {"large": torch.zeros(5000)})


def message_of(comm, folder, state=None):
    try:
        save_shard({"rank": comm.rank} if state is None else state, folder, 5, comm)
    except CheckpointError as error:
        return str(error)


@needs_fork
class RealDisks(InFolders):
    def test_a_read_only_folder(self):
        for path in (self.root, self.root / "parent", self.root / "parent" / "step_5"):
            path.mkdir(exist_ok=True)
        save_sharded(OLD, self.root / "parent" / "step_5", 5)
        self.root.chmod(0o755)
        (self.root / "parent" / "step_5").chmod(0o555)
        (self.root / "parent").chmod(0o555)
        for folder, name in [("step_5", r"rank\d.g1.bin"), ("step_6", "step_6")]:
            (_, first), *others = run_forked(save_unprivileged, RANKS, self.root / "parent" / folder)
            self.assertRegex(first, f"{name}: Permission denied")
            self.assertEqual({message for _, message in others}, {first})
        self.assertEqual(newest(self.root / "parent"), "old")

    def test_a_disk_that_takes_no_more(self):
        parent = self.prepare(("step_5", 5))
        (_, first), *others = run_forked(save_with_small_files, RANKS, parent / "step_5")
        self.assertRegex(first, "^rank 1 failed: .*rank1.g1.bin: File too large$")
        self.assertEqual({message for _, message in others}, {first})
        self.assertEqual(newest(parent), "old")
        self.assertEqual(len(list((parent / "step_5").iterdir())), 4, "the half-written file is gone")


def save_often(comm, folder, times):
    """Each process is a job of its own: it saves all ranks' states, and checks that one job's checkpoint is there."""
    for i in range(times):
        save_sharded(small_states(RANKS, 1000.0 * comm.rank + i), folder, 5, storage=CrashingStorage())
    return "done"


def save_while_locked(comm, folder):
    class Impatient(Storage):
        lock_seconds = 0.05

    try:
        save_shard(OLD[comm.rank], folder, 5, comm, storage=Impatient())
    except CheckpointError as error:
        return str(error)


@needs_fork
class TwoJobs(InFolders):
    def test_they_take_turns_and_nothing_is_mixed(self):
        folder = self.root / "step_5"
        ended = run_forked(save_often, 3, folder, 20)
        self.assertEqual(ended, [(0, "done")] * 3)
        states = load_sharded(folder, RANKS)[1]
        self.assertTrue(any(same(states, small_states(RANKS, 1000.0 * job + 19)) for job in range(3)))
        self.assertEqual(len(list(folder.iterdir())), RANKS + 1)

    def test_a_lock_that_is_never_released_is_an_error_on_every_rank(self):
        parent = self.prepare(("step_5", 5))
        with DISK.lock(parent / "step_5"):
            (_, first), *others = run_forked(save_while_locked, RANKS, parent / "step_5")
        self.assertRegex(first, "^rank 0 failed: .*step_5: another save holds its lock, for more than 0.05 s$")
        self.assertEqual({message for _, message in others}, {first})
        self.assertEqual(newest(parent), "old")
        self.check_next_save(parent, ("step_5", 5))


if __name__ == "__main__":
    unittest.main()
