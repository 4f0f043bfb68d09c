"""Loading without a copy: equal to the ordinary load, nothing read twice, the file never changed, and what it costs."""

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import unittest
import weakref
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import test_checkpoint
import test_checkpoint_malformed
import torch
from asyncsave import AsyncSaver
from bitwise import same, small_states
from checkpoint import load_shard, load_sharded, save_sharded
from damage import mend_hashes
from manifest import CheckpointError
from mesh_comm import MeshComm
from restore import tensors_of
from rotation import rotate_checkpoints
from shardheader import parse_header
from storage import CrashingStorage, Storage
from virtual import VirtualCluster


class CountingStorage(Storage):
    """Counts what is read, and keeps the mappings in sight without keeping them alive."""

    def __init__(self):
        self.read_bytes, self.mapped, self.begin = 0, [], {}

    def read_into(self, file, target):
        self.read_bytes += len(target)
        return super().read_into(file, target)

    def map(self, file, size):
        mapping = super().map(file, size)
        self.mapped.append(weakref.ref(mapping))
        self.begin[Path(file.name).name] = torch.frombuffer(memoryview(mapping), dtype=torch.uint8).data_ptr()
        return mapping

    def open_maps(self):
        return sum(ref() is not None and not ref().closed for ref in self.mapped)


class MappedRoundTrip(test_checkpoint.RoundTrip):
    """The tests of the ordinary load, by mapping."""

    def round_trip(self, state):
        save_sharded([state], self.folder, 10)
        before = (self.folder / "rank0.bin").read_bytes()
        self.addCleanup(lambda: self.assertEqual((self.folder / "rank0.bin").read_bytes(), before, "the file changed"))
        return load_sharded(self.folder, 1, mapped=True)[1][0]


class MappedDamage(test_checkpoint_malformed.ShardFile):
    """Every damage that the ordinary load refuses, with the same words."""

    def load(self, **options):
        return load_sharded(self.folder, 2, mapped=True, **options)


class Mapped(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "step_10"
        self.disk = CountingStorage()

    def save(self, states, folder=None, step=10):
        return save_sharded(states, folder or self.folder, step, storage=CrashingStorage())

    def map(self, world_size):
        return load_sharded(self.folder, world_size, mapped=True, storage=self.disk)[1]

    def header(self, rank=0):
        """Return (where the tensors begin, offset of each) of a file."""
        data = (self.folder / f"rank{rank}.bin").read_bytes()
        end = 16 + int.from_bytes(data[8:16], "little")
        expected = {name: json.loads(data[16:end])[name] for name in ("rank", "world_size", "step")}
        return parse_header(data[16:end], expected, len(data) - end)

    def place(self, tensor, rank=0):
        """Return the byte of the file at which a mapped tensor begins, or None if it lies elsewhere: a copy."""
        at = tensor.data_ptr() - self.disk.begin[f"rank{rank}.bin"]
        return at if 0 <= at < (self.folder / f"rank{rank}.bin").stat().st_size else None

    def test_only_the_header_is_read_and_the_tensors_are_the_pages(self):
        states = [{"w": torch.arange(300_000.0) + rank, "b": torch.ones(5) * rank} for rank in range(3)]
        self.save(states)
        loaded = self.map(3)
        self.assertTrue(same(loaded, states))
        headers = [self.header(rank) for rank in range(3)]
        self.assertEqual(self.disk.read_bytes, sum(header.size for header in headers))
        self.assertEqual(len(self.disk.mapped), 3)
        for rank, state in enumerate(loaded):
            self.assertEqual(headers[rank].size % 64, 0)
            self.assertEqual(self.place(state["w"], rank), headers[rank].size)
            self.assertEqual(self.place(state["b"], rank), headers[rank].size + 1_200_000)

    def test_each_rank_maps_its_own_file_and_agrees_twice(self):
        states = small_states(3)
        self.save(states)
        disks = [CountingStorage() for _ in range(3)]

        def rank_main(mesh):
            comm = MeshComm(mesh)
            loaded = load_shard(self.folder, comm, mapped=True, storage=disks[mesh.rank])
            return same(loaded, states[mesh.rank]), comm.counters.control_calls

        self.assertEqual(VirtualCluster(3).run(rank_main), [(True, 2)] * 3)
        self.assertEqual([list(disk.begin) for disk in disks], [["rank0.bin"], ["rank1.bin"], ["rank2.bin"]])

    def test_a_rank_may_map_while_another_reads(self):
        states = small_states(3)
        self.save(states)

        def rank_main(mesh):
            return load_shard(self.folder, MeshComm(mesh), mapped=mesh.rank == 1, storage=self.disk)

        self.assertTrue(same(VirtualCluster(3).run(rank_main), states))
        self.assertEqual(list(self.disk.begin), ["rank1.bin"])

    def test_one_open_file_a_mapping(self):
        class Watching(Storage):
            opened, ours = [], []

            def open(self, path):
                self.opened.append(super().open(path))
                return self.opened[-1]

            def map(self, file, size):
                self.ours.append(sum(not each.closed for each in self.opened))
                return super().map(file, size)

        self.save(small_states(4))
        load_sharded(self.folder, 4, mapped=True, storage=Watching())
        self.assertEqual(Watching.ours, [1] * 4, "files stay open that have been mapped")

    def test_a_tensor_that_is_written_to_changes_neither_the_file_nor_another_load(self):
        states = small_states(2)
        self.save(states)
        first, second = self.map(2), self.map(2)
        for _, tensor in tensors_of(first):
            tensor.fill_(-1)
        self.assertTrue(bool((first[1]["flat"] == -1).all()))
        self.assertTrue(same(second, states))
        self.assertTrue(same(load_sharded(self.folder, 2)[1], states))

    def test_the_mapping_lives_as_long_as_a_tensor(self):
        self.save([{"a": torch.arange(4.0), "b": torch.arange(3), "empty": torch.empty(0, 3)}])
        loaded = self.map(1)[0]
        a, empty = loaded["a"][1:], loaded["empty"]
        del loaded
        self.assertEqual(self.disk.open_maps(), 1)
        with self.assertRaises(BufferError, msg="pages under a living tensor could be taken away"):
            self.disk.mapped[0]().close()
        self.assertEqual(a.tolist(), [1, 2, 3])
        del a
        self.assertEqual(self.disk.open_maps(), 0)
        self.assertEqual(empty.shape, (0, 3))

    @unittest.skipIf(os.name == "nt", "Windows does not let a mapped file be deleted")
    def test_the_tensors_outlive_rotation_deletion_and_the_next_save(self):
        states = small_states(2)
        for outlived in (
            lambda: rotate_checkpoints(self.folder.parent, keep_last=1),
            lambda: shutil.rmtree(self.folder),
            lambda: self.save(small_states(2, 50)),
        ):
            self.save(states)
            self.save(states, self.folder.parent / "step_11", 11)
            loaded, names = self.map(2), {path.name for path in self.folder.glob("rank*")}
            outlived()
            remaining = {path.name for path in self.folder.glob("rank*")}
            self.assertFalse(names & remaining, "the files are still there")
            torch.full((1 << 18,), 7.0)  # memory that was given back would be taken again
            self.assertTrue(same(loaded, states))

    @unittest.skipIf(os.name == "nt", "Windows does not let a mapped file be deleted")
    def test_mapped_tensors_are_saved_again_into_the_folder_that_they_come_from(self):
        states = [{"w": torch.arange(300_000) * (rank + 1), "x": torch.ones(3) * rank} for rank in range(2)]
        self.save(states)
        loaded = self.map(2)
        self.save(loaded, step=11)
        self.assertTrue(same(load_sharded(self.folder, 2)[1], states))
        loaded[1]["x"] += 1
        with AsyncSaver.of_one_process(2, storage=CrashingStorage()) as saver:
            saver.save(loaded, self.folder, 12)
        states[1]["x"] += 1
        self.assertTrue(same(load_sharded(self.folder, 2)[1], states))

    def test_damage_leaves_nothing_mapped(self):
        self.save(small_states(3))
        data = bytearray((self.folder / "rank1.bin").read_bytes())
        data[-1] ^= 1
        (self.folder / "rank1.bin").write_bytes(data)
        with self.assertRaisesRegex(CheckpointError, "^rank 1 failed: .*rank1.bin: sha256 mismatch") as caught:
            self.map(3)
        self.assertEqual((len(self.disk.mapped), self.disk.open_maps()), (3, 0), caught.exception)

    def test_damage_is_the_same_error_on_every_rank(self):
        self.save(small_states(3))
        data = bytearray((self.folder / "rank2.bin").read_bytes())
        data[-1] ^= 1
        (self.folder / "rank2.bin").write_bytes(data)

        def rank_main(mesh):
            with self.assertRaises(CheckpointError) as ordinary:
                load_shard(self.folder, MeshComm(mesh))
            with self.assertRaises(CheckpointError) as mapped:
                load_shard(self.folder, MeshComm(mesh), mapped=True)
            return str(ordinary.exception), str(mapped.exception)

        messages = {message for pair in VirtualCluster(3).run(rank_main) for message in pair}
        self.assertEqual(len(messages), 1)
        self.assertRegex(*messages, "^rank 2 failed: .*rank2.bin: sha256 mismatch")

    def test_live_tensors_and_a_mapping_exclude_each_other_on_every_rank(self):
        self.save(small_states(2))
        live = small_states(2, 50)

        def rank_main(mesh):
            comm = MeshComm(mesh)
            with self.assertRaises(ValueError) as caught:
                load_shard(self.folder, comm, into=live[mesh.rank], mapped=mesh.rank == 1, storage=self.disk)
            return str(caught.exception), comm.counters.control_calls

        messages = VirtualCluster(2).run(rank_main)
        self.assertEqual(messages[0], messages[1])
        self.assertRegex(messages[0][0], "^rank 1 failed: into, mapped: only one of them")
        self.assertEqual(messages[0][1], 1)
        self.assertEqual(self.disk.mapped, [])
        self.assertTrue(same(live, small_states(2, 50)))

    def test_a_tensor_that_is_not_aligned_is_copied_alone(self):
        state = {
            "first": torch.arange(5, dtype=torch.float64),
            "odd": torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16),
            "copied": torch.arange(7.0),
            "bytes": torch.arange(3, dtype=torch.uint8),
            "bits": torch.tensor([5, 6], dtype=torch.int16),
            "complex": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
        }
        state["tied"] = state["copied"].view(7, 1)
        self.save([state])
        (loaded,), begin = self.map(1), self.header().size
        self.assertTrue(same(loaded, state))
        found = {name: self.place(tensor) for name, tensor in loaded.items()}
        mapped = {"first": begin, "odd": begin + 40, "bytes": begin + 74}
        self.assertEqual(found, dict.fromkeys(state) | mapped)
        loaded["copied"][2] = -1
        self.assertEqual(loaded["tied"][2, 0], -1)

    def test_a_file_without_padding_as_they_were_once(self):
        states = [{"w": torch.arange(1000.0) + rank, "half": torch.ones(3).bfloat16() * rank} for rank in range(2)]
        self.save(states)
        for unpadded in range(1, 9):  # lengths of every alignment
            for rank in range(2):
                path = self.folder / f"rank{rank}.bin"
                data, end = path.read_bytes(), self.header(rank).size
                header = data[16:end].rstrip() + b" " * unpadded
                path.write_bytes(data[:8] + len(header).to_bytes(8, "little") + header + data[end:])
            mend_hashes(self.folder)
            self.assertTrue(same(load_sharded(self.folder, 2)[1], states))
            loaded = self.map(2)
            self.assertTrue(same(loaded, states))
            for rank in range(2):
                begin = self.header(rank).size
                self.assertEqual(self.place(loaded[rank]["w"], rank), None if begin % 4 else begin)

    @unittest.skipUnless(sys.platform == "linux", "what a lost page does is the system's choice")
    def test_what_is_given_up_a_file_cut_off_in_place_ends_the_process(self):
        self.save([{"w": torch.arange(100_000.0)}])
        (loaded,) = self.map(1)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            os.truncate(self.folder / "rank0.bin", 100)
            loaded["w"].sum()
            os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), -signal.SIGBUS)


if __name__ == "__main__":
    unittest.main()
