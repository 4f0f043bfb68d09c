import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from bitwise import same, small_states
from checkpoint import load_shard, load_sharded, save_shard, save_sharded
from comm import TorchComm
from mesh_comm import MeshComm
from manifest import MANIFEST, CheckpointError, ShardManifest, read_manifest
from ranks import run_ranks
from restore import load_into
from storage import CrashingStorage, Storage
from virtual import VirtualCluster

LESSON = Path(__file__).resolve().parents[1]


class Folder(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "step_10"

    def round_trip(self, state):
        save_sharded([state], self.folder, 10)
        return load_sharded(self.folder, 1)[1][0]


class RoundTrip(Folder):
    def test_values_and_types_come_back_exactly(self):
        state = {
            "none": None,
            "bools": [True, False],
            "ints": [0, -1, 2**70],
            "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf")],
            "text": ["", "ü \u0000 \ud800", "__tensor"],
            "empty": [{}, [], ()],
            "tuple": (1, (2.5, "x"), [torch.tensor([1, 2])]),
            "key/with slash": {"": 1},
        }
        self.assertTrue(same(self.round_trip(state), state))

    def test_a_state_may_be_a_list(self):
        state = [torch.tensor([1.5]), {"a": 2}]
        self.assertTrue(same(self.round_trip(state), state))

    def test_every_dtype(self):
        floats = "float64 float32 float16 bfloat16 float8_e4m3fn complex64 complex128"
        state = {}
        for name in [*floats.split(), *"int64 int32 int16 int8 uint8 uint16 bool".split()]:
            raw = torch.arange(48, dtype=torch.uint8)
            state[name] = raw % 2 == 0 if name == "bool" else raw.view(getattr(torch, name))
        self.assertTrue(same(self.round_trip(state), state))

    def test_every_kind_of_view(self):
        base = torch.arange(24.0).view(4, 6)
        state = {
            "column": base[:, 2],
            "transposed": base.t(),
            "strided": base[::2, 1::2],
            "expanded": torch.tensor([3.0]).expand(5),
            "one_of_a_row": base[:1, 2],  # one element with a stride of 6, and contiguous nevertheless
            "imaginary_part": torch.tensor([1 + 2j]).imag,
            "zero_dim": torch.tensor(7, dtype=torch.bfloat16),
            "empty": torch.empty(3, 0, 2),
            "empty_bool": torch.empty(0, dtype=torch.bool),
            "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
            "parameter": torch.nn.Parameter(torch.tensor([1.0, 2.0])),
            "nan_bits": torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32),
        }
        loaded = self.round_trip(state)
        self.assertTrue(same(loaded, state))
        self.assertTrue(all(t.is_contiguous() and type(t) is torch.Tensor for t in loaded.values()))

    def test_a_view_stores_its_own_bytes_not_its_storage(self):
        self.round_trip({"chunk": torch.arange(1_000_000)[5:15]})
        self.assertLess((self.folder / "rank0.bin").stat().st_size, 80 + 300)

    def test_tied_tensors_are_stored_once_and_come_back_tied(self):
        weight = torch.arange(1000.0).view(10, 100)
        state = {"embed": weight, "head": weight, "again": weight.view(-1), "detached": torch.nn.Parameter(weight)}
        loaded = self.round_trip(state)
        self.assertTrue(same(loaded, {**state, "detached": weight}))
        self.assertLess((self.folder / "rank0.bin").stat().st_size, 4000 + 700)
        self.assertIs(loaded["embed"], loaded["head"])
        loaded["embed"][3, 7] = -1
        self.assertEqual(loaded["again"][307], -1)
        self.assertEqual(loaded["detached"][3, 7], -1)

    def test_what_shares_memory_but_differs_is_not_tied(self):
        z, x = torch.tensor([1 + 2j]), torch.arange(6.0)
        state = {"z": z, "conj": z.conj(), "part": x[:3], "all": x, "bits": x.view(torch.int32), "t": x.view(2, 3).t()}
        state |= {"e1": torch.empty(0), "e2": torch.empty(0), "spread": torch.ones(1).expand(3), "ones": torch.ones(1)}
        loaded = self.round_trip(state)
        self.assertTrue(same(loaded, state))
        self.assertIsNot(loaded["e1"], loaded["e2"])

    def test_a_disk_that_takes_a_few_bytes_at_a_time(self):
        class Slow:
            name, got = "slow", b""

            def write(self, data):
                self.got += bytes(data[:3])
                return len(data[:3])

        file = Slow()
        Storage().write(file, b"0123456789")
        self.assertEqual(file.got, b"0123456789")

    def test_loaded_tensors_own_their_memory(self):
        state = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
        loaded = self.round_trip(state)
        loaded["a"].zero_()
        self.assertTrue(same(loaded["b"], state["b"]))
        self.assertTrue(same(load_sharded(self.folder, 1)[1][0], state))

    def test_the_manifest_says_what_is_there(self):
        manifest = save_sharded(small_states(3), self.folder, 10, wall_clock_seconds=1.5)
        self.assertEqual((manifest.step, manifest.world_size, manifest.wall_clock_seconds), (10, 3, 1.5))
        self.assertEqual(
            sorted(p.name for p in self.folder.iterdir()), [MANIFEST, "rank0.bin", "rank1.bin", "rank2.bin"]
        )
        self.assertEqual(
            [s.size for s in manifest.shards], [(self.folder / s.path).stat().st_size for s in manifest.shards]
        )
        self.assertEqual(
            [(s.layout[0]["start"], s.layout[0]["end"]) for s in manifest.shards], [(0, 3), (3, 6), (6, 10)]
        )
        self.assertEqual(ShardManifest.from_json(manifest.to_json()), manifest)
        self.assertEqual(read_manifest(self.folder), manifest)
        self.assertEqual(load_sharded(str(self.folder), 3)[0], manifest)

    def test_saving_a_step_again_replaces_it_and_sweeps_the_old_files(self):
        save_sharded(small_states(4), self.folder, 10)
        (self.folder / "notes.txt").write_text("mine")
        (self.folder / "rank7.g9.bin").write_text("left by a save that died")
        save_sharded(small_states(2, 50), self.folder, 10)
        self.assertTrue(same(load_sharded(self.folder, 2)[1], small_states(2, 50)))
        names = sorted(path.name for path in self.folder.iterdir())
        self.assertEqual(len(names), 4)
        self.assertEqual((names[0], names[1]), (MANIFEST, "notes.txt"))

    def test_a_new_save_replaces_a_damaged_checkpoint(self):
        save_sharded(small_states(2), self.folder, 10)
        (self.folder / MANIFEST).write_text("{")
        save_sharded(small_states(2, 50), self.folder, 10)
        self.assertTrue(same(load_sharded(self.folder, 2)[1], small_states(2, 50)))
        self.assertEqual(len(list(self.folder.iterdir())), 3)

    def test_many_small_and_one_large_tensor(self):
        state = {f"p{i}": torch.full((i % 5,), float(i)) for i in range(2000)} | {"large": torch.arange(700_001)}
        self.assertTrue(same(self.round_trip(state), state))


class BadInput(Folder):
    def refuse(self, message, states, step=10, **options):
        with self.assertRaisesRegex(CheckpointError, message):
            save_sharded(states, self.folder, step, **options)
        self.assertFalse(self.folder.exists(), "something was written")

    def test_arguments(self):
        for step in (-1, True, 1.0, "3", None):
            self.refuse("step: expected a whole number", [{}], step)
        for seconds in (float("nan"), float("inf"), -1.0, "0", None, True):
            self.refuse("wall_clock_seconds: expected a finite number", [{}], wall_clock_seconds=seconds)
        for states in ([], {}, None, torch.ones(3)):
            self.refuse("per_rank_state: expected a list", states)
        for size in (0, -1, True, 2.0, "2", None):
            with self.assertRaisesRegex(CheckpointError, "expected_world_size"):
                load_sharded(self.folder, size)

    def test_states_that_cannot_be_saved(self):
        cyclic = {}
        cyclic["self"] = cyclic
        cases = [
            ("state: expected a dict or a list", torch.ones(2)),
            ("a/b: cannot save a builtins.set", {"a": {"b": {1}}}),
            ("f/1: cannot save a builtins.function", {"f": [1, lambda: 0]}),
            ("b: cannot save a builtins.bytes", {"b": b"x"}),
            ("d: cannot save a torch.dtype", {"d": torch.float32}),
            ("shape: cannot save a torch.Size", {"shape": torch.ones(2).shape}),
            ("a: expected keys that are plain strings, found 3", {"a": {3: 1}}),
            ("state: expected keys that are plain strings, found '__tensor__'", {"__tensor__": 0}),
            ("sparse: cannot save", {"sparse": torch.eye(2).to_sparse()}),
            ("meta: cannot save", {"meta": torch.empty(2, device="meta")}),
            ("state: nested too deeply, or it contains itself", cyclic),
        ]
        for message, state in cases:
            with self.subTest(message):
                self.refuse(message, [{"fine": 1}, state])

    def test_the_failing_rank_is_named(self):
        self.refuse("rank 1 failed: x: cannot save", [{}, {"x": object()}, {}])

    def test_layouts_that_do_not_fit(self):
        def entry(**changes):
            return {"unit": "flat", "start": 0, "end": 4, "total": 4, **changes}

        for message, layout in [
            ("layout: expected a list", {}),
            (r"layout\[0\]: missing key 'total'", [{"unit": "flat", "start": 0, "end": 4}]),
            (r"layout\[0\].unit", [entry(unit=3)]),
            (r"layout\[0\].start", [entry(start=-1)]),
            (r"layout\[0\].end", [entry(start=5)]),
            (r"layout\[0\].total", [entry(total=3)]),
            ("no tensor at or below 'other'", [entry(unit="other")]),
            ("a range of 3 elements, but flat/a has 4", [entry(end=3)]),
            (r"layout of 'flat': no rank holds elements \[4, 9\)", [entry(total=9)]),
            ("layout of 'flat': gap at element 0", [entry(start=1, end=5, total=5)]),
            ("layout of 'flat': overlap at element 0", [entry(), entry()]),
            ("layout of 'flat': rank 0 says total 8, others 4", [entry(), entry(start=4, end=8, total=8)]),
        ]:
            with self.subTest(message):
                self.refuse(message, [{"flat": {"a": torch.ones(4)}, "layout": layout}])

    def test_empty_shards_are_fine(self):
        states = small_states(12)  # 10 elements on 12 ranks
        save_sharded(states, self.folder, 10)
        self.assertTrue(same(load_sharded(self.folder, 12)[1], states))

    def test_a_folder_that_cannot_be(self):
        self.folder.write_text("a file")
        with self.assertRaisesRegex(CheckpointError, "step_10: File exists|step_10: Not a directory"):
            save_sharded([{}], self.folder, 10)
        with self.assertRaisesRegex(CheckpointError, "null"):
            save_sharded([{}], "a\0b", 10)
        with self.assertRaisesRegex(CheckpointError, "manifest.json: missing"):
            load_sharded(self.folder / "nowhere", 1)


class FullDisk(Storage):
    """A disk on which one kind of operation fails."""

    def __init__(self, operation, name, code=errno.ENOSPC):
        self.operation, self.name, self.code = operation, name, code

    def perform(self, operation, path, action):
        def failing():
            raise OSError(self.code, "No space left on device")

        matches = operation == self.operation and path.name.startswith(self.name)
        return super().perform(operation, path, failing if matches else action)


class Together(Folder):
    """Collective saves and loads on virtual ranks."""

    def on_ranks(self, world_size, work):
        """Run work(rank, comm) on virtual ranks; errors come back as their messages."""

        def rank_main(mesh):
            comm = MeshComm(mesh)
            try:
                return work(mesh.rank, comm), comm
            except CheckpointError as error:
                return str(error), comm

        return zip(*VirtualCluster(world_size).run(rank_main), strict=True)

    def test_each_rank_writes_and_reads_its_own_file(self):
        for world_size in (1, 2, 3, 8):
            with self.subTest(world_size=world_size):
                self.check_files_of(world_size, small_states(world_size), self.folder / str(world_size))

    def check_files_of(self, world_size, states, folder):
        manifests, comms = self.on_ranks(world_size, lambda r, comm: save_shard(states[r], folder, 10, comm))
        self.assertEqual(set(map(repr, manifests)), {repr(read_manifest(folder))})
        self.assertEqual({comm.counters.control_calls for comm in comms}, {5})
        self.assertEqual({sum(comm.counters.bytes.values()) for comm in comms}, {0}, "tensors crossed the network")
        loaded, comms = self.on_ranks(world_size, lambda r, comm: load_shard(folder, comm))
        self.assertTrue(same(list(loaded), states))
        self.assertEqual({comm.counters.control_calls for comm in comms}, {2})

    def test_both_ways_write_the_same_bytes(self):
        states = small_states(3)
        folder = self.folder / "a"
        manifests, _ = self.on_ranks(
            3, lambda r, comm: save_shard(states[r], folder, 10, comm, wall_clock_seconds=2 + r)
        )
        self.assertEqual([manifest.wall_clock_seconds for manifest in manifests], [2.0] * 3, "rank 0's, on every rank")
        save_sharded(states, self.folder / "b", 10, 2)
        for name in ("rank0.bin", "rank1.bin", "rank2.bin", MANIFEST):
            self.assertEqual((self.folder / "a" / name).read_bytes(), (self.folder / "b" / name).read_bytes())

    def test_one_rank_fails_and_all_raise_the_same(self):
        before, after = small_states(3), small_states(3, 50)
        save_sharded(before, self.folder, 10)
        names = {path.name for path in self.folder.iterdir()}
        for rank, operation, name in [
            (0, "write", "rank0"),
            (1, "create", "rank1"),
            (2, "write", "rank2"),
            (2, "fsync", "rank2"),
            (1, "fsync folder", "step_10"),
            (0, "write", MANIFEST),
            (0, "fsync", MANIFEST),
        ]:
            with self.subTest(rank=rank, operation=operation):
                disks = [FullDisk(operation, name) if r == rank else Storage() for r in range(3)]
                errors, _ = self.on_ranks(
                    3, lambda r, comm, disks=disks: save_shard(after[r], self.folder, 10, comm, storage=disks[r])
                )
                self.assertEqual(len(set(errors)), 1)
                self.assertRegex(errors[0], rf"^rank {rank} failed: .*/{name}.*: No space left on device$")
                self.assertTrue(same(load_sharded(self.folder, 3)[1], before))
                self.assertEqual({path.name for path in self.folder.iterdir()}, names, "files stayed behind")

    def test_a_failed_rename_keeps_the_old_and_leaves_nothing(self):
        before, after = small_states(2), small_states(2, 50)
        save_sharded(before, self.folder, 10)
        with self.assertRaisesRegex(CheckpointError, "manifest.json: No space left"):
            save_sharded(after, self.folder, 10, storage=FullDisk("rename", MANIFEST))
        self.assertTrue(same(load_sharded(self.folder, 2)[1], before))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), [MANIFEST, "rank0.bin", "rank1.bin"])

    def test_a_rename_that_is_done_and_yet_reports_an_error_deletes_nothing(self):
        class LateError(Storage):  # as a network mount may answer
            def perform(self, operation, path, action):
                result = super().perform(operation, path, action)
                if operation == "rename":
                    raise OSError(errno.EIO, "Input/output error", str(path))
                return result

        before, after = small_states(2), small_states(2, 50)
        save_sharded(before, self.folder, 10)
        with self.assertRaisesRegex(CheckpointError, "manifest.json: Input/output error"):
            save_sharded(after, self.folder, 10, storage=LateError())
        self.assertTrue(same(load_sharded(self.folder, 2)[1], after))
        left = {path.name for path in self.folder.iterdir()}
        self.assertLess({"rank0.bin", "rank1.bin"}, left, "a power cut may still bring the old manifest back")

    def test_one_rank_alone_that_fails_leaves_nothing(self):
        with self.assertRaisesRegex(CheckpointError, "No space left"):
            save_sharded(small_states(1), self.folder, 10, storage=FullDisk("fsync", "rank0"))
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_bad_state_on_one_rank_stops_all_before_anything_is_written(self):
        states = [{}, {"x": object()}, {}]
        errors, _ = self.on_ranks(3, lambda r, comm: save_shard(states[r], self.folder, 10, comm))
        self.assertEqual(set(errors), {"rank 1 failed: x: cannot save a builtins.object: only tensors, dicts, lists, "
                                       "tuples and JSON's values"})  # fmt: skip
        errors, _ = self.on_ranks(3, lambda r, comm: save_shard({}, self.folder, 10 + (r == 2), comm))
        self.assertEqual(set(errors), {"step: the ranks disagree: [10, 10, 11]"})
        errors, _ = self.on_ranks(3, lambda r, comm: save_shard(small_states(2)[r % 2], self.folder, 10, comm))
        self.assertRegex(errors[2], r"(?=.*flat)(?=.*\b0\b)")
        self.assertEqual(len(set(errors)), 1)
        self.assertFalse(self.folder.exists())

    def test_ranks_that_do_not_share_a_folder_are_told_so(self):
        folders = [self.folder / "node0", self.folder / "node1"]
        folders[1].mkdir(parents=True)
        errors, _ = self.on_ranks(2, lambda r, comm: save_shard({}, folders[r], 10, comm))
        self.assertRegex(errors[1], "rank 0 failed: .*node0/rank1.bin: missing.* one shared folder")
        self.assertEqual(len(set(errors)), 1)

    def test_one_damaged_shard_is_refused_on_every_rank(self):
        save_sharded(small_states(3), self.folder, 10)
        data = bytearray((self.folder / "rank2.bin").read_bytes())
        data[-1] ^= 1
        (self.folder / "rank2.bin").write_bytes(data)
        errors, _ = self.on_ranks(3, lambda r, comm: load_shard(self.folder, comm))
        self.assertEqual(len(set(errors)), 1)
        self.assertRegex(errors[0], "^rank 2 failed: .*rank2.bin: sha256 mismatch")

    def test_the_wrong_number_of_ranks_is_refused_on_every_rank(self):
        save_sharded(small_states(3), self.folder, 10)
        for world_size in (1, 2, 4):
            errors, _ = self.on_ranks(world_size, lambda r, comm: load_shard(self.folder, comm))
            self.assertEqual(len(set(errors)), 1)
            self.assertRegex(errors[0], f"world_size mismatch: saved by 3 ranks, to be loaded by {world_size}")

    def test_ranks_that_see_different_manifests_are_refused(self):
        folders = [self.folder / "a", self.folder / "b"]
        for step, folder in enumerate(folders):
            save_sharded(small_states(2), folder, step)
        errors, _ = self.on_ranks(2, lambda r, comm: load_shard(folders[r], comm))
        self.assertRegex(errors[1], "the ranks read different manifests")


class TwoWriters(Folder):
    def test_they_take_turns(self):
        choices = [small_states(2, 100 * which) for which in range(2)]
        errors = []

        def save_often(states):
            try:
                for _ in range(30):
                    save_sharded(states, self.folder, 10, storage=CrashingStorage())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save_often, args=(states,)) for states in choices]
        for thread in threads:
            thread.start()
        loaded = []
        while any(thread.is_alive() for thread in threads):  # a reader in between: right bytes, or a clear refusal
            try:
                loaded.append(load_sharded(self.folder, 2)[1])
            except CheckpointError:
                continue
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        loaded.append(load_sharded(self.folder, 2)[1])
        self.assertTrue(all(same(states, choices[0]) or same(states, choices[1]) for states in loaded))
        self.assertEqual(len(list(self.folder.iterdir())), 3)


def save_and_load_in_a_process(rank, world_size, folder):
    states = small_states(world_size)
    save_shard(states[rank], folder, 10)
    loaded = load_shard(folder, TorchComm())
    save_shard(small_states(world_size, 50)[rank], folder, 10)
    return same(loaded, states[rank]), load_shard(folder)


class Processes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.results = run_ranks(save_and_load_in_a_process, 3, cls.temporary.name, timeout=60)

    def test_real_processes_save_and_load_over_gloo(self):
        self.assertTrue(all(equal for equal, _ in self.results))

    def test_and_save_again(self):
        self.assertTrue(same([state for _, state in self.results], small_states(3, 50)))
        self.assertTrue(same(load_sharded(self.temporary.name, 3)[1], small_states(3, 50)))
        self.assertEqual(len(list(Path(self.temporary.name).iterdir())), 4)


class LoadInto(Folder):
    def make_live(self, value):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        model[1].weight.data = model[0].weight.data.view(2, 3)  # shares memory: tied
        torch.nn.init.constant_(model[0].weight, value)
        optimizer = {"shard": torch.full((5,), value), "betas": (value, 0.9), "steps": int(value), "log": [1, value]}
        return model, {"model": model.state_dict(), "optimizer": optimizer}

    def test_live_tensors_are_filled_in_place(self):
        (model, state), (target_model, target) = self.make_live(3.0), self.make_live(9.0)
        before = [p.data_ptr() for p in target_model.parameters()]
        load_into(target, self.round_trip(state))
        self.assertTrue(same(target, state))
        self.assertEqual([p.data_ptr() for p in target_model.parameters()], before)
        self.assertTrue(all(map(torch.equal, target_model.parameters(), model.parameters())))
        self.assertEqual(target["optimizer"]["betas"], (3.0, 0.9))

    def test_every_difference_is_reported_and_nothing_changed(self):
        _, loaded = self.make_live(3.0)
        _, target = self.make_live(9.0)
        snapshot = json.dumps(target, default=lambda t: t.tolist())
        loaded["model"]["extra"] = loaded["model"].pop("0.bias")
        loaded["model"]["1.bias"] = loaded["model"]["1.bias"].double()
        loaded["optimizer"]["shard"] = torch.ones(1, 5)
        loaded["optimizer"]["log"].append(3)
        loaded["optimizer"]["steps"] = torch.tensor(3)
        with self.assertRaises(CheckpointError) as caught:
            load_into(target, loaded)
        for message in [
            "missing key model/0.bias",
            "unexpected key model/extra",
            "model/1.bias: expected torch.float32 [2], found torch.float64 [2]",
            "optimizer/shard: expected torch.float32 [5], found torch.float32 [1, 5]",
            "unexpected key optimizer/log/2",
            "optimizer/steps: expected a single value, found a tensor",
        ]:
            self.assertIn(message, str(caught.exception))
        self.assertEqual(json.dumps(target, default=lambda t: t.tolist()), snapshot)

    def test_parameters_that_require_gradients(self):
        live = {"p": torch.nn.Parameter(torch.zeros(2))}
        load_into(live, {"p": torch.ones(2)})
        self.assertTrue(live["p"].requires_grad and live["p"].is_leaf)
        self.assertTrue(same(live["p"].detach(), torch.ones(2)))

    def test_tensors_inside_tuples_are_filled_too(self):
        live = torch.zeros(2)
        target = {"pair": (live, 1)}
        load_into(target, {"pair": (torch.ones(2), 2)})
        self.assertTrue(same(live, torch.ones(2)))
        self.assertEqual(target["pair"][1], 2)


class Demonstration(unittest.TestCase):
    def test_runs_and_holds(self):
        with tempfile.TemporaryDirectory() as folder:
            for ranks in (4, 2):  # the second run finds what the first has left
                done = self.run_main("--out", folder, "--world-size", str(ranks))
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertRegex(done.stdout, r"LESSON 80: .* -- (\d+) of \1 claims hold")
                _, states = load_sharded(Path(folder) / "round_trip", ranks)
                self.assertEqual(
                    [state["data"]["next_sample"] for state in states], [37 * ranks + r for r in range(ranks)]
                )

    def run_main(self, *flags, **options):
        command = [sys.executable, LESSON / "code" / "main.py", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)

    def test_flags_that_would_do_nothing_are_refused(self):
        for flags, message in [
            (["--seed", "7"], "--seed: not used by this lesson without --bench"),
            (["--mb", "200"], "--mb: not used by this lesson without --bench"),
            (["--bench", "--seed", "8"], "--seed: not used by this lesson"),
        ]:
            done = self.run_main(*flags)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"error: {message}", done.stderr)

    def test_a_place_that_cannot_be_written_to_is_named_in_a_line(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "round_trip").write_text("somebody's file")
            done = self.run_main("--out", folder, "--world-size", "1")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, rf"^stopped: {folder}/round_trip.*\n$")

    def test_torchrun_is_refused(self):
        launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        done = self.run_main(env=launched)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("torchrun is for 77, 78, 79 and 81", done.stderr)


if __name__ == "__main__":
    unittest.main()
