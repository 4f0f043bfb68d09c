"""Whatever goes wrong because of a file or a folder, the error says which: one may have many checkpoints."""

import errno
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import storage
import torch
from bitwise import small_states
from checkpoint import load_shard, load_sharded, save_sharded
from checkpoint_tools import show
from damage import WRONG_CHECKPOINTS, mend_hashes, plant_pickle, swap_shards
from manifest import CheckpointError
from mesh_comm import MeshComm
from recheck import recheck
from reshard_load import load_resharded, load_resharded_all
from rotation import rotate_checkpoints
from safetensors_files import from_safetensors, to_safetensors
from second_tier import copy_checkpoint
from storage import CrashingStorage, Storage
from virtual import VirtualCluster

has_safetensors = unittest.skipUnless(importlib.util.find_spec("safetensors"), "safetensors is not installed")


def demo_states() -> list[dict]:
    """Two ranks of what the damages of `damage.py` expect: ranges of 1,003 elements, the first 501 on rank 0."""
    flat = torch.arange(1003.0)
    return [
        {"optimizer": {"flat": flat[a:b]}, "layout": [{"unit": "optimizer/flat", "start": a, "end": b, "total": 1003}]}
        for a, b in ((0, 501), (501, 1003))
    ]


class Named(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)
        self.folder = self.root / "step_10"

    def save(self, states: list) -> None:
        save_sharded(states, self.folder, 10, storage=CrashingStorage())

    def assert_named(self, call, message: str = "", place: Path | None = None) -> None:
        """The call raises, its error names the folder (or another place) once, and says so much."""
        with self.assertRaises(CheckpointError) as caught:
            call()
        self.assertIn(str(place or self.folder), str(caught.exception))
        self.assertIn(message, str(caught.exception))


class Loading(Named):
    def test_every_damage_in_every_way_of_reading(self):
        readers = {
            "load": lambda to: load_sharded(self.folder, 2),
            "map": lambda to: load_sharded(self.folder, 2, mapped=True),
            "cut anew": lambda to: load_resharded_all(self.folder, 3),
            "copy": lambda to: copy_checkpoint(self.folder, to),
            "convert": lambda to: to_safetensors(self.folder, to),
        }
        for number, (what, damage, _) in enumerate(WRONG_CHECKPOINTS):
            self.folder = self.root / f"{number}" / "step_10"
            self.save(demo_states())
            damage(self.folder)
            for name, read in readers.items():
                bytes_are_in_order = name == "copy" and damage in (swap_shards, plant_pickle)  # all that a copy needs
                if not bytes_are_in_order and (name != "convert" or importlib.util.find_spec("safetensors")):
                    with self.subTest(what, read=name):
                        self.assert_named(lambda read=read: read(self.root / "elsewhere"))

    def test_two_tensors_of_one_path(self):
        self.save([{"a/b": torch.ones(2), "a": {"x": torch.ones(3)}}])
        path = self.folder / "rank0.bin"
        path.write_bytes(path.read_bytes().replace(b'"x"', b'"b"'))
        mend_hashes(self.folder)
        for read in (
            lambda: load_sharded(self.folder, 1),
            lambda: load_resharded_all(self.folder, 2),
            lambda: show(self.folder),
        ):
            self.assert_named(read, "state: two tensors have the same path", path)
        self.assertIn(f"{path}: state: two tensors", recheck(self.folder)[0][1])

    def test_what_does_not_fit_the_new_ranks(self):
        self.save([{**state, "own": rank} for rank, state in enumerate(demo_states())])
        whole = [{"unit": "optimizer/flat", "start": 0, "end": 1003, "total": 1003}]
        other, gap = [{**whole[0], "unit": "other"}], [{**whole[0], "start": 1}]
        for options, message in [
            ({}, "own: rank 0 has 0, rank 1 has 1"),
            ({"per_rank": ["own", "absent"]}, "per_rank: there is no 'absent'"),
            ({"layouts": [other], "per_rank": ["own"]}, "missing unit 'optimizer/flat'"),
            ({"layouts": [gap], "per_rank": ["own"]}, "gap at element 0"),
        ]:
            self.assert_named(lambda options=options: load_resharded_all(self.folder, 1, **options), message)

    def test_ranks_that_see_different_folders(self):
        for step in (1, 2):
            save_sharded(small_states(2), self.root / f"step_{step}", step, storage=CrashingStorage())

        def fail(mesh, load):
            self.assert_named(
                lambda: load(self.root / f"step_{mesh.rank + 1}", MeshComm(mesh)),
                f"{self.root / 'step_1'}, {self.root / 'step_2'}: the ranks read different manifests",
                self.root / f"step_{mesh.rank + 1}",
            )

        for load in (load_shard, load_resharded):
            VirtualCluster(2).run(fail, load)


class Elsewhere(Named):
    def test_a_lock_that_cannot_be_had(self):
        """The system's own error of a lock does not say on what."""
        self.save(small_states(2))
        broken = mock.Mock(LOCK_EX=1, LOCK_NB=2, flock=mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with mock.patch.object(storage, "fcntl", broken):
            for call in (
                lambda: save_sharded(small_states(2), self.folder, 11),
                lambda: copy_checkpoint(self.folder, self.root / "copy"),
                lambda: rotate_checkpoints(self.root, 1),
            ):
                if len(list(self.root.glob("step_*"))) < 2:
                    save_sharded(small_states(1), self.root / "step_12", 12, storage=Unlocked())
                self.assert_named(call, "Input/output error", self.root)
                with self.assertRaises(CheckpointError) as caught:
                    call()
                self.assertNotIn("None", str(caught.exception))

    def test_a_folder_that_one_may_not_look_into(self):
        class Closed(Storage):
            def kind(self, path):
                if path.name == "rank1.bin" or path.parent.name == "private":
                    raise PermissionError(errno.EACCES, "Permission denied", str(path))
                return super().kind(path)

        self.save(small_states(2))
        (self.root / "private").mkdir()
        far = self.root / "far"
        closed = self.folder / "rank1.bin"
        self.assert_named(lambda: copy_checkpoint(self.folder, far, storage=Closed()), "Permission denied", closed)
        self.assert_named(lambda: load_sharded(self.folder, 2, storage=Closed()), "Permission denied", closed)
        self.assertEqual(rotate_checkpoints(self.root, 1, storage=Closed()), [])  # somebody else's: it stays

    @has_safetensors
    def test_safetensors(self):
        from safetensors.torch import save_file

        save_sharded([{"z": torch.ones(2, dtype=torch.complex128)}], self.folder, 1, storage=CrashingStorage())
        self.assert_named(lambda: to_safetensors(self.folder, self.root / "b"), "cannot hold rank 0's")
        foreign = self.root / "foreign.safetensors"
        save_file({"__tensor__": torch.ones(2)}, foreign)
        self.assert_named(lambda: from_safetensors(foreign, self.root / "c"), "plain strings", foreign)
        self.save(demo_states())
        first, _ = to_safetensors(self.folder, self.root / "d")
        text = first.read_bytes()
        first.write_bytes(text.replace(rb"\"end\\\": 501", rb"\"end\\\": 500"))
        self.assertNotEqual(first.read_bytes(), text)
        self.assert_named(lambda: from_safetensors(self.root / "d", self.root / "e"), "layout", self.root / "d")


class Unlocked(CrashingStorage):
    """For what must be there although no lock can be had."""

    def _has_locked(self, descriptor, folder):
        return True


if __name__ == "__main__":
    unittest.main()
