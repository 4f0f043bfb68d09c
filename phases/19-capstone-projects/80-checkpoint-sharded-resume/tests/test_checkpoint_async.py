"""An asynchronous save: copied before the call returns, written later, waited for by the next call."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from asyncsave import AsyncSaver
from bitwise import same, small_states
from checkpoint import load_shard, load_sharded, save_sharded
from comm import TorchComm
from manifest import CheckpointError, read_manifest
from ranks import RankError, run_ranks
from rotation import latest_checkpoint
from storage import Crash, CrashingStorage, Storage

DEADLINE = 60.0
CODE = list(Path(__file__).resolve().parents[3].glob("*/*/code"))


class GatedStorage(CrashingStorage):
    """A disk that stops before an operation until it is let through."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.arrived, self.gate = operation, threading.Event(), threading.Event()

    def perform(self, operation, path, action):
        if operation == self.operation:
            self.arrived.set()
            if not self.gate.wait(DEADLINE):
                raise TimeoutError("nobody opened the gate")
        return super().perform(operation, path, action)


class OneProcess(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.parent = Path(temporary.name)

    def test_the_state_is_that_of_the_call(self):
        disk, states = GatedStorage("create"), small_states(2)
        saver = AsyncSaver.of_one_process(2, storage=disk)
        saver.save(states, self.parent / "step_5", 5, wall_clock_seconds=1.5)
        self.assertTrue(disk.arrived.wait(DEADLINE))
        for state in states:  # training goes on, in the same memory
            state["flat"].fill_(-1)
            state["own"].fill_(-1)
            state["steps"] = state["layout"] = None
        self.assertFalse(any((self.parent / "step_5").glob("*.bin")), "nothing has been written yet")
        disk.gate.set()
        manifest = saver.wait()
        self.assertEqual((manifest.step, manifest.wall_clock_seconds), (5, 1.5))
        self.assertTrue(same(load_sharded(self.parent / "step_5", 2)[1], small_states(2)))
        self.assertIs(saver.wait(), manifest, "asking again is no error")

    def test_every_kind_of_tensor_is_copied(self):
        base = torch.arange(24.0).view(4, 6)
        tied = torch.arange(5)
        state = {"t": base.t(), "part": base[1:3, ::2], "bits": base.view(torch.int32), "zero": torch.tensor(True),
                 "none": torch.empty(0, 3), "conj": torch.tensor([1 + 2j]).conj(), "a": tied, "b": tied,
                 "bf": torch.tensor([1.5, -2], dtype=torch.bfloat16)}  # fmt: skip
        expected = {name: tensor.clone().resolve_conj() for name, tensor in state.items()}
        with AsyncSaver.of_one_process(1, storage=CrashingStorage()) as saver:
            saver.save([state], self.parent / "a", 1)
            base.zero_()
            tied.zero_()
        loaded = load_sharded(self.parent / "a", 1)[1][0]
        self.assertTrue(same(loaded, expected))
        self.assertIs(loaded["a"], loaded["b"])

    def test_the_next_save_waits_and_copies_only_then(self):
        disk = GatedStorage("rename")
        saver = AsyncSaver.of_one_process(2, storage=disk)
        saver.save(small_states(2), self.parent / "step_5", 5)
        self.assertTrue(disk.arrived.wait(DEADLINE))
        copy, threads = saver._buffers.copy, []

        def watched(tensor):
            threads.append(threading.enumerate())
            return copy(tensor)

        first, saver._buffers.copy = saver._thread, watched
        opener = threading.Timer(0.05, disk.gate.set)
        opener.start()
        saver.save(small_states(2, 50), self.parent / "step_10", 10)
        self.assertTrue(threads and not any(first in alive for alive in threads), "copied while the first was written")
        saver.close()
        opener.join()
        self.assertTrue(same(load_sharded(self.parent / "step_5", 2)[1], small_states(2)))
        self.assertTrue(same(load_sharded(self.parent / "step_10", 2)[1], small_states(2, 50)))

    def test_the_copy_is_kept_in_the_same_memory(self):
        with AsyncSaver.of_one_process(2, storage=CrashingStorage()) as saver:
            saver.save(small_states(2), self.parent / "step_1", 1)
            saver.wait()
            before = [buffer.data_ptr() for buffer in saver._buffers._buffers]
            for step in (2, 3):
                saver.save(small_states(2, float(step)), self.parent / f"step_{step}", step)
        self.assertEqual([buffer.data_ptr() for buffer in saver._buffers._buffers], before)
        self.assertEqual(sum(map(len, saver._buffers._buffers)), (10 + 2) * 4, "bytes held: one copy of the tensors")
        for step in (2, 3):
            self.assertTrue(same(load_sharded(self.parent / f"step_{step}", 2)[1], small_states(2, float(step))))

    def test_an_error_surfaces_at_the_next_call_once_and_that_call_does_nothing(self):
        for next_call in ("save", "wait", "close"):
            with self.subTest(next_call):
                disk = GatedStorage("fsync")
                saver = AsyncSaver.of_one_process(2, storage=disk)
                disk.at, disk.when = 4, "before"
                disk._die_if = lambda now: (
                    (_ for _ in ()).throw(OSError(28, "No space left on device")) if now else None
                )
                disk.gate.set()
                folder = self.parent / next_call
                saver.save(small_states(2), folder / "step_5", 5)
                call = {"save": lambda f=folder, s=saver: s.save(small_states(2), f / "step_6", 6)}
                with self.assertRaisesRegex(CheckpointError, r"(?=.*\b5\b)(?=.*step_5)(?=.*No space left)"):
                    call.get(next_call, getattr(saver, next_call))()
                self.assertFalse((folder / "step_6").exists())
                self.assertEqual(list((folder / "step_5").iterdir()), [], "no stray files")
                self.assertIsNone(saver.wait())
                disk.at = None
                saver.save(small_states(2), folder / "step_6", 6)
                saver.close()
                self.assertTrue(same(load_sharded(folder / "step_6", 2)[1], small_states(2)))

    def test_a_state_that_cannot_be_saved_is_refused_at_once(self):
        saver = AsyncSaver.of_one_process(2)
        for states, step, message in [([{}, {"x": {1}}], 1, "rank 1 failed: x: cannot save"), ([{}, {}], -1, "step:")]:
            with self.assertRaisesRegex(CheckpointError, message):
                saver.save(states, self.parent / "bad", step)
        for states in ([{}], {}, None):
            with self.assertRaisesRegex(CheckpointError, "state: expected a list of 2 states, one a rank"):
                saver.save(states, self.parent / "bad", 1)
        self.assertIsNone(saver.wait())
        self.assertFalse((self.parent / "bad").exists())
        for world_size in (0, -1, 2.0):
            with self.assertRaisesRegex(CheckpointError, "world_size: expected a whole number of at least 1"):
                AsyncSaver.of_one_process(world_size)

    def test_a_save_that_does_not_end_is_reported_and_goes_on(self):
        disk = GatedStorage("rename")
        saver = AsyncSaver.of_one_process(1, timeout=0.01, storage=disk)
        saver.save([{"a": 1}], self.parent / "slow", 3)
        with self.assertRaisesRegex(CheckpointError, r"(?=.*\b3\b)(?=.*slow)(?=.*\b0\.01\b)"):
            saver.wait()
        disk.gate.set()
        saver.timeout = DEADLINE
        self.assertEqual(saver.wait().step, 3)

    def test_a_crash_in_the_thread_keeps_the_previous_checkpoint(self):
        rehearsal = CrashingStorage()
        (self.parent / "rehearsal").mkdir()
        save_sharded(small_states(2), self.parent / "rehearsal" / "step_9", 9, storage=rehearsal)
        publish = rehearsal.log.index("rename manifest.json")
        for at in range(len(rehearsal.log)):
            parent = self.parent / str(at)
            save_sharded(small_states(2), parent / "step_5", 5, storage=CrashingStorage())
            saver = AsyncSaver.of_one_process(2, storage=CrashingStorage(at))
            saver.save(small_states(2, 50), parent / "step_9", 9)
            with self.assertRaises(Crash):
                saver.wait()
            found = latest_checkpoint(parent)
            self.assertEqual(found.name, "step_9" if at > publish else "step_5")
            self.assertTrue(same(load_sharded(found, 2)[1], small_states(2, 50 if at > publish else 0.0)))


SCRIPT = """
import torch
from asyncsave import AsyncSaver
saver = AsyncSaver.of_one_process(1)
state = {{"w": torch.arange(500_000.0)}}
saver.save([state], {folder!r}, {step})
state["w"].zero_()
"""


class Exit(unittest.TestCase):
    def run_script(self, folder, step=7):
        script = SCRIPT.format(folder=str(folder), step=step)
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, CODE))}
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, env=found
        )

    def test_the_interpreter_waits_for_a_save_in_flight(self):
        with tempfile.TemporaryDirectory() as parent:
            done = self.run_script(Path(parent) / "step_7")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(same(load_sharded(Path(parent) / "step_7", 1)[1][0], {"w": torch.arange(500_000.0)}))

    def test_where_no_new_thread_can_start_any_more(self):
        """Python 3.12 refuses it from the moment at which the interpreter begins to end."""
        refusal = RuntimeError("can't create new thread at interpreter shutdown")
        with tempfile.TemporaryDirectory() as parent, mock.patch("threading.Thread.start", side_effect=refusal):
            disk = CrashingStorage()
            save_sharded(small_states(2), Path(parent) / "step_5", 5, storage=disk)
            self.assertIn("fsync rank1.bin", disk.log)
            self.assertTrue(same(load_sharded(Path(parent) / "step_5", 2)[1], small_states(2)))
            with self.assertRaises(Crash):
                save_sharded(small_states(2), Path(parent) / "step_6", 6, storage=CrashingStorage(6))

    def test_an_error_that_nobody_asked_for_is_printed(self):
        with tempfile.NamedTemporaryFile() as file:
            done = self.run_script(Path(file.name) / "step_7")
            self.assertIn("the save of step 7 into", done.stderr)
            self.assertIn("nobody waited to hear it", done.stderr)


class FailingOnRank1(Storage):
    def __init__(self, rank):
        self.rank = rank

    def perform(self, operation, path, action):
        def failing():
            raise OSError(30, "Read-only file system")

        return super().perform(operation, path, failing if self.rank == 1 and operation == "create" else action)


def train_and_save(rank, world_size, parent):
    """Training's own collectives go on while the threads agree among themselves."""
    comm, log = TorchComm(), {}
    state = small_states(world_size)[rank]
    saver = AsyncSaver(comm, storage=Storage())
    control, sums = comm.counters.control_calls, []
    with saver:
        for step in range(1, 4):
            saver.save(state, Path(parent) / f"step_{step}", step)
            for _ in range(50):
                x = torch.tensor([float(rank + step)])
                comm.unchecked().all_reduce(x)
                sums.append(x.item())
            state["flat"] += 100
    log["control"] = comm.counters.control_calls - control
    log["own"] = saver_calls(saver)
    log["sums"] = sums
    log["loaded"] = [load_shard(Path(parent) / f"step_{step}", comm) for step in range(1, 4)]
    broken = AsyncSaver(comm, storage=FailingOnRank1(rank))
    broken.save(state, Path(parent) / "step_4", 4)
    try:
        broken.save(state, Path(parent) / "step_5", 5)
    except CheckpointError as error:
        log["error"] = str(error)
    return log


def saver_calls(saver):
    return saver.team.agree.__self__.counters.control_calls


class KillingStorage(Storage):
    def perform(self, operation, path, action):
        if operation == "rename":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perform(operation, path, action)


def be_killed(rank, world_size, parent):
    saver = AsyncSaver(TorchComm(), storage=KillingStorage() if rank == 0 else Storage())
    saver.save(small_states(world_size, 50)[rank], Path(parent) / "step_9", 9)
    saver.close()


def leave_early(rank, world_size, parent):
    saver = AsyncSaver(TorchComm())
    saver.save(small_states(world_size, 50)[rank], Path(parent) / "step_9", 9)


def save_alone(rank, world_size, folder):
    with AsyncSaver() as saver:
        saver.save([torch.tensor(4), {"a": 1}], folder, 3)
    return load_shard(folder)


class Processes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.parent = Path(temporary.name) / "checkpoints"
        cls.logs = run_ranks(train_and_save, 3, str(cls.parent), timeout=2 * DEADLINE)

    def test_each_save_has_the_state_of_its_own_call(self):
        for rank, log in enumerate(self.logs):
            for i, loaded in enumerate(log["loaded"]):
                expected = small_states(3)[rank]
                expected["flat"] = expected["flat"] + 100 * i
                self.assertTrue(same(loaded, expected), (rank, i))

    def test_trainings_messages_are_not_mixed_up(self):
        expected = [3.0 * step + 3 for step in range(1, 4) for _ in range(50)]
        self.assertEqual([log["sums"] for log in self.logs], [expected] * 3)
        self.assertEqual([log["control"] for log in self.logs], [0] * 3, "saves agree over their own group")
        self.assertEqual([log["own"] for log in self.logs], [3 * 5] * 3, "five agreements a save, as always")

    def test_a_rank_that_fails_alone_is_heard_of_on_every_rank(self):
        errors = {log["error"] for log in self.logs}
        self.assertEqual(len(errors), 1)
        self.assertRegex(
            errors.pop(), "^the save of step 4 into .* failed: rank 1 failed: .*rank1.bin: Read-only file system$"
        )
        self.assertFalse((self.parent / "step_5").exists())
        self.assertEqual(list((self.parent / "step_4").iterdir()), [])

    def test_a_group_of_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            loaded = run_ranks(save_alone, 1, folder, timeout=DEADLINE)[0]
            self.assertTrue(same(loaded, [torch.tensor(4), {"a": 1}]))

    @unittest.skipUnless(hasattr(signal, "SIGKILL"), "needs SIGKILL")
    def test_a_process_killed_in_the_middle_loses_that_save_only(self):
        with tempfile.TemporaryDirectory() as parent:
            save_sharded(small_states(2), Path(parent) / "step_5", 5)
            with self.assertRaises(RankError) as caught:
                run_ranks(be_killed, 2, parent, timeout=DEADLINE)
            self.assertEqual((caught.exception.rank, caught.exception.exitcode), (0, -signal.SIGKILL))
            self.assertEqual(latest_checkpoint(parent).name, "step_5")

    def test_ranks_that_leave_without_closing_lose_that_save_as_a_whole_or_not_at_all(self):
        with tempfile.TemporaryDirectory() as parent:
            save_sharded(small_states(2), Path(parent) / "step_5", 5)
            run_ranks(leave_early, 2, parent, timeout=DEADLINE)
            newest = latest_checkpoint(parent)
            base = {"step_5": 0.0, "step_9": 50}[newest.name]
            self.assertTrue(same(load_sharded(newest, 2)[1], small_states(2, base)))
            self.assertEqual(read_manifest(newest).step, 5 if base == 0 else 9)


if __name__ == "__main__":
    unittest.main()
