"""Loading straight into live tensors: no second copy, and nothing live changes before all headers have been read."""

import copy
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from bitwise import same, small_states
from checkpoint import load_shard, save_sharded
from manifest import CheckpointError
from mesh_comm import MeshComm
from restore import load_into
from storage import CrashingStorage, Storage
from virtual import VirtualCluster


def state_of(rank, value):
    """A state of every kind of live tensor; two calls with the same value are equal but share nothing."""
    base = torch.full((4, 6), float(value)) + torch.arange(24.0).view(4, 6) * (rank + 1)
    weight = torch.arange(12.0).view(3, 4) * value
    return {
        "plain": base.clone() + 1,
        "column": (base.clone() + 2)[:, 2],
        "one_of_a_row": (base.clone() + 5)[:1, 2],
        "transposed": (base.clone() + 3).t(),
        "parameter": torch.nn.Parameter(base[0].clone() + 4),
        "conjugate": torch.complex(base[1].clone(), base[2].clone()).conj(),
        "tied": [weight, weight, weight.view(-1)],
        "bits": torch.tensor([value, rank], dtype=torch.bfloat16),
        "zero_dim": torch.tensor(value),
        "empty": torch.empty(0, 3),
        "steps": value,
        "nested": ({"lr": value / 10}, [value, None]),
    }


def places(state):
    if isinstance(state, torch.Tensor):
        yield state.data_ptr(), state.stride(), type(state)
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from places(item)


def materialized(state):
    """Without strides, conjugation and Parameter: as a loaded state has it."""
    if isinstance(state, torch.Tensor):
        return state.detach().resolve_conj().contiguous()
    if isinstance(state, dict):
        return {key: materialized(item) for key, item in state.items()}
    return type(state)(map(materialized, state)) if isinstance(state, list | tuple) else state


class ReadingStorage(Storage):
    def __init__(self):
        self.count, self.largest = 0, 0

    def read_into(self, file, target):
        self.count += len(target)
        self.largest = max(self.largest, len(target))
        return super().read_into(file, target)


class Live(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "step_10"

    def load(self, live, world_size=2, **options):
        """What each virtual rank returns, or the message of its error; and its counters."""

        def rank_main(mesh):
            comm = MeshComm(mesh)
            try:
                return load_shard(self.folder, comm, into=live[mesh.rank], **options), comm.counters.control_calls
            except CheckpointError as error:
                return str(error), comm.counters.control_calls

        return zip(*VirtualCluster(world_size).run(rank_main), strict=True)

    def test_every_kind_of_tensor_is_filled_where_it_is(self):
        saved, live = ([state_of(rank, value) for rank in range(2)] for value in (3, 8))
        save_sharded(saved, self.folder, 10, storage=CrashingStorage())
        before, disk = [list(places(state)) for state in live], ReadingStorage()
        loaded, calls = self.load(live, storage=disk)
        for rank in range(2):
            self.assertIs(loaded[rank], live[rank])
            self.assertEqual(list(places(live[rank])), before[rank], "a tensor moved")
            self.assertTrue(same(materialized(live[rank]), materialized(saved[rank])))
            self.assertTrue(live[rank]["parameter"].requires_grad)
        self.assertEqual(set(calls), {3})
        self.assertEqual(disk.count, sum(path.stat().st_size for path in self.folder.glob("*.bin")), "read once")

    def test_large_tensors_are_read_by_a_megabyte(self):
        saved, live = torch.arange(1_000_003.0), torch.zeros(1_000_003)
        save_sharded([{"w": saved}], self.folder, 10, storage=CrashingStorage())
        disk = ReadingStorage()
        list(self.load([{"w": live}], world_size=1, storage=disk))
        self.assertTrue(torch.equal(live, saved))
        self.assertEqual(disk.largest, 1 << 20)

    def test_what_does_not_fit_is_listed_on_every_rank_and_nothing_has_changed(self):
        save_sharded(small_states(3), self.folder, 10, storage=CrashingStorage())
        live = small_states(3, 50.0)
        live[1]["more"] = live[1].pop("own")
        live[1]["flat"] = live[1]["flat"].double()
        before = copy.deepcopy(live)
        messages, calls = self.load(live, world_size=3)
        self.assertEqual(len(set(messages)), 1)
        for part in ("rank 1 failed: ", "missing key more", "unexpected key own", "flat: expected torch.float64"):
            self.assertIn(part, messages[0])
        self.assertTrue(same(live, before), "something live has changed")
        self.assertEqual(set(calls), {2})

    def test_live_states_on_some_ranks_only_are_refused_on_every_rank(self):
        save_sharded(small_states(3), self.folder, 10, storage=CrashingStorage())
        live = small_states(3, 50.0)
        messages, calls = self.load([live[0], None, live[2]], world_size=3)
        self.assertEqual(set(messages), {"into: given on some ranks only: [True, False, True]"})
        self.assertEqual(set(calls), {1})
        self.assertTrue(same(live, small_states(3, 50.0)))

    def test_a_tensor_whose_elements_share_memory_cannot_be_filled(self):
        saved = {"first": torch.ones(3), "wide": torch.arange(3.0)}
        save_sharded([saved], self.folder, 10, storage=CrashingStorage())
        live = {"first": torch.zeros(3), "wide": torch.zeros(1).expand(3)}
        messages, _ = self.load([live], world_size=1)
        self.assertIn("wide: cannot be filled: its elements share memory", messages[0])
        with self.assertRaisesRegex(CheckpointError, "^wide: cannot be filled"):
            load_into(live, saved)
        self.assertTrue(same(live["first"], torch.zeros(3)))

    def test_a_damaged_header_anywhere_changes_nothing(self):
        save_sharded(small_states(2), self.folder, 10, storage=CrashingStorage())
        data = bytearray((self.folder / "rank1.bin").read_bytes())
        data[data.index(b'"steps"') + 3] ^= 1
        (self.folder / "rank1.bin").write_bytes(data)
        live = small_states(2, 50.0)
        messages, _ = self.load(live)
        self.assertEqual(len(set(messages)), 1)
        self.assertRegex(messages[0], "^rank 1 failed: .*rank1.bin: sha256 mismatch")
        self.assertTrue(same(live, small_states(2, 50.0)))

    def test_damaged_bytes_of_a_tensor_are_refused_on_every_rank(self):
        save_sharded(small_states(2), self.folder, 10, storage=CrashingStorage())
        data = bytearray((self.folder / "rank1.bin").read_bytes())
        data[-1] ^= 1
        (self.folder / "rank1.bin").write_bytes(data)
        messages, _ = self.load(small_states(2, 50.0))
        self.assertEqual(len(set(messages)), 1)
        self.assertRegex(messages[0], "^rank 1 failed: .*rank1.bin: sha256 mismatch")

    def test_tensors_tied_here_but_not_in_the_checkpoint_are_refused(self):
        save_sharded([{"a": torch.ones(3), "b": torch.zeros(3)}], self.folder, 10, storage=CrashingStorage())
        one = torch.full((3,), 7.0)
        messages, _ = self.load([{"a": one, "b": one}], world_size=1)
        self.assertTrue(messages[0].endswith("rank0.bin: a and b are one tensor here, two in the checkpoint"))
        self.assertTrue(same(one, torch.full((3,), 7.0)))

    def test_views_of_one_memory_that_are_not_tied(self):
        def views(base):
            return {"part": base[:3], "all": base, "turned": base.view(2, 3).t(), "bits": base.view(torch.int32)}

        saved, live = views(torch.arange(6.0)), views(torch.zeros(6))
        save_sharded([saved], self.folder, 10, storage=CrashingStorage())
        list(self.load([live], world_size=1))
        self.assertTrue(same(live, saved))

    def test_names_with_slashes_that_could_be_confused(self):
        state = {"a/b": torch.ones(2), "a": {"c": torch.zeros(2), "": {"b": 3}}}
        save_sharded([state], self.folder, 10, storage=CrashingStorage())
        live = {"a/b": torch.zeros(2), "a": {"c": torch.ones(2), "": {"b": 4}}}
        list(self.load([live], world_size=1))
        self.assertTrue(same(live, state))
        with self.assertRaisesRegex(CheckpointError, "a/b: two tensors of the state have this path"):
            save_sharded([{"a/b": torch.ones(2), "a": {"b": torch.ones(2)}}], self.folder, 10)

    def test_tensors_tied_in_the_checkpoint_but_not_here_are_both_filled(self):
        weight = torch.arange(6.0)
        save_sharded([{"a": weight, "b": weight}], self.folder, 10, storage=CrashingStorage())
        live = {"a": torch.zeros(6), "b": torch.zeros(6)}
        list(self.load([live], world_size=1))
        self.assertTrue(same(live, {"a": weight, "b": weight.clone()}))


if __name__ == "__main__":
    unittest.main()
