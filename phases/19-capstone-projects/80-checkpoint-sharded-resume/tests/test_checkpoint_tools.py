"""Looking at checkpoints, checking them again, a second tier, and safetensors and back."""

import contextlib
import errno
import importlib.util
import io
import json
import re
import sys
import tempfile
import unittest
import zlib
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import checkpoint_tools
import torch
from bitwise import same, small_states
from checkpoint import load_sharded, save_shard, save_sharded
from manifest import MANIFEST, CheckpointError, read_manifest
from mesh_comm import MeshComm
from recheck import recheck
from rotation import latest_checkpoint
from safetensors_files import from_safetensors, to_safetensors
from second_tier import copy_checkpoint
from storage import Crash, CrashingStorage, Storage
from virtual import VirtualCluster

STATES = small_states(2)
has_safetensors = unittest.skipUnless(importlib.util.find_spec("safetensors"), "safetensors is not installed")


class InFolders(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)
        self.folder = self.root / "step_10"
        self.manifest = save_sharded(STATES, self.folder, 10, 1.5, crc32=True, storage=CrashingStorage())

    def flip(self, name, at=-1, folder=None):
        path = (folder or self.folder) / name
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)


class CountingStorage(Storage):
    def __init__(self):
        self.count = 0

    def read_into(self, file, target):
        done = super().read_into(file, target)
        self.count += done
        return done


class Recheck(InFolders):
    def problems(self, **options):
        return [problem for _, problem in recheck(self.folder, **options)]

    def test_the_crc_is_that_of_the_file(self):
        for shard in self.manifest.shards:
            self.assertEqual(shard.crc32, f"{zlib.crc32((self.folder / shard.path).read_bytes()):08x}")
        self.assertEqual(read_manifest(self.folder), self.manifest)

    def test_a_collective_save_records_it_too(self):
        def rank_main(mesh):
            return save_shard(STATES[mesh.rank], self.root / "other", 10, MeshComm(mesh), crc32=True)

        manifests = VirtualCluster(2).run(rank_main)
        self.assertEqual([s.crc32 for s in manifests[1].shards], [s.crc32 for s in self.manifest.shards])

    def test_good_files(self):
        for fast in (False, True):
            disk = CountingStorage()
            self.assertEqual(self.problems(fast=fast, storage=disk), ["", ""])
            self.assertEqual(disk.count, sum(shard.size for shard in self.manifest.shards), "each byte is read once")

    def test_every_flipped_byte_is_found_by_both(self):
        for at in range(self.manifest.shards[1].size):
            self.flip("rank1.bin", at)
            self.assertRegex(self.problems(fast=True)[1], "rank1.bin: crc32 mismatch: expected ")
            if at % 7 == 0:
                self.assertRegex(self.problems()[1], "rank1.bin: sha256 mismatch")
            self.flip("rank1.bin", at)
        self.assertEqual(self.problems(fast=True), ["", ""])

    def test_files_of_more_than_one_block(self):
        self.folder = self.root / "large"
        save_sharded([{"w": torch.arange(600_000.0)}], self.folder, 10, crc32=True, storage=CrashingStorage())
        for fast in (False, True):
            self.assertEqual(self.problems(fast=fast), [""])
        for at in (1000, 1_500_000, -1):  # one in each block of 1 MB
            self.flip("rank0.bin", at)
            for fast in (False, True):
                self.assertIn("mismatch", self.problems(fast=fast)[0])
            self.flip("rank0.bin", at)

    def test_all_faults_are_listed(self):
        (self.folder / "rank0.bin").unlink()
        self.flip("rank1.bin")
        for fast in (False, True):
            first, second = self.problems(fast=fast)
            self.assertIn("rank0.bin: missing", first)
            self.assertIn("mismatch", second)
        (self.folder / "rank1.bin").write_bytes(b"x")
        self.assertIn("truncated", self.problems(fast=True)[1])

    def test_without_a_recorded_crc_the_fast_path_says_so(self):
        save_sharded(STATES, self.root / "plain", 10, storage=CrashingStorage())
        self.assertIn("no CRC-32 was recorded", recheck(self.root / "plain", fast=True)[0][1])
        self.assertEqual([problem for _, problem in recheck(self.root / "plain")], ["", ""])
        with self.assertRaisesRegex(CheckpointError, "manifest.json: missing"):
            recheck(self.root / "nowhere")

    def test_manifests_without_the_key_load_and_wrong_ones_do_not(self):
        fields = json.loads((self.folder / MANIFEST).read_text())
        for value in (7, None, "0", "xyzt0000", "0" * 9, "ABCDEF00", ["0"]):
            fields["shards"][1]["crc32"] = value
            (self.folder / MANIFEST).write_text(json.dumps(fields))
            with self.assertRaisesRegex(CheckpointError, r"shards\[1\].crc32: expected 8 lower-case hex digits"):
                load_sharded(self.folder, 2)
        for shard in fields["shards"]:
            del shard["crc32"]
        (self.folder / MANIFEST).write_text(json.dumps(fields))
        self.assertTrue(same(load_sharded(self.folder, 2)[1], STATES))


class SecondTier(InFolders):
    def test_the_copy_loads_without_the_first_and_has_its_own_manifest(self):
        plain = save_sharded(STATES, self.folder, 10, 1.5, storage=CrashingStorage())
        copied = copy_checkpoint(self.folder, self.root / "far" / "step_10")
        self.assertEqual([s.path for s in copied.shards], ["rank0.bin", "rank1.bin"])
        self.assertEqual([s.path for s in plain.shards], ["rank0.g1.bin", "rank1.g1.bin"])
        self.assertEqual([s.sha256 for s in copied.shards], [s.sha256 for s in plain.shards])
        self.assertTrue(all(s.crc32 for s in copied.shards) and not any(s.crc32 for s in plain.shards))
        for path in (*self.folder.iterdir(),):
            path.unlink()
        self.assertTrue(same(load_sharded(self.root / "far" / "step_10", 2)[1], STATES))
        self.assertEqual([problem for _, problem in recheck(self.root / "far" / "step_10", fast=True)], ["", ""])

    def test_the_manifest_is_written_last(self):
        disk = CrashingStorage()
        copy_checkpoint(self.folder, self.root / "far", storage=disk)
        operations = [re.sub(r"[.][0-9a-f]{32}", "", operation) for operation in disk.log]
        of_ranks = [
            [f"create {name}", f"write {name}", f"fsync {name}", "fsync folder far"]
            for name in ("rank0.bin", "rank1.bin")
        ]
        temporary = f"{MANIFEST}.tmp"
        of_manifest = [f"create {temporary}", f"write {temporary}", f"fsync {temporary}", f"rename {MANIFEST}"]
        self.assertEqual(
            operations,
            [
                "mkdir far",
                f"fsync folder {self.root.name}",
                *of_ranks[0],
                *of_ranks[1],
                *of_manifest,
                "fsync folder far",
            ],
        )

    def test_a_copy_that_is_there_is_left_alone_and_a_different_one_replaced(self):
        far = self.root / "far"
        first, disk = copy_checkpoint(self.folder, far), CrashingStorage()
        self.assertEqual(copy_checkpoint(self.folder, far, storage=disk), first)
        self.assertEqual(disk.log, [])
        save_sharded(small_states(3, 50), self.folder, 10, storage=CrashingStorage())
        copy_checkpoint(self.folder, far)
        self.assertTrue(same(load_sharded(far, 3)[1], small_states(3, 50)))
        self.assertEqual(len(list(far.iterdir())), 4)

    def test_a_crash_at_every_operation(self):
        for kind in ("new", "replaces"):
            rehearsal = CrashingStorage()
            copy_checkpoint(self.folder, self.prepare(kind, "rehearsal"), storage=rehearsal)
            publish = rehearsal.log.index(f"rename {MANIFEST}")
            for at, operation in enumerate(rehearsal.log):
                for when in ("before", "during", "after") if operation.startswith("write") else ("before", "after"):
                    with self.subTest(kind, operation=operation, when=when):
                        far = self.prepare(kind, f"{at}{when}")
                        with self.assertRaises(Crash):
                            copy_checkpoint(self.folder, far, storage=CrashingStorage(at, when))
                        published = at > publish or (at == publish and when == "after")
                        newest = latest_checkpoint(far.parent)
                        if not published and kind == "new":
                            self.assertIsNone(newest)
                        else:
                            expected = STATES if published else small_states(2, 50)
                            self.assertTrue(same(load_sharded(newest, 2)[1], expected))
                        copy_checkpoint(self.folder, far)
                        copy = {path.name for path in far.iterdir()}
                        shards = {shard.path for shard in read_manifest(far).shards}
                        self.assertEqual(copy, {MANIFEST, *shards}, "stray files")
                        self.assertTrue(same(load_sharded(far, 2)[1], STATES))

    def prepare(self, kind, name):
        far = self.root / kind / name / "step_10"
        far.parent.mkdir(parents=True)
        if kind == "replaces":
            save_sharded(small_states(2, 50), far, 10, storage=CrashingStorage())
        return far

    def test_what_is_not_good_is_not_copied(self):
        far = self.root / "far"
        self.flip("rank1.bin")
        with self.assertRaisesRegex(CheckpointError, "rank1.bin: sha256 mismatch: it is not copied"):
            copy_checkpoint(self.folder, far)
        self.assertEqual(list(far.iterdir()), [])
        with self.assertRaisesRegex(CheckpointError, "step_10"):
            copy_checkpoint(self.folder, self.root / "x" / ".." / "step_10")
        with self.assertRaisesRegex(CheckpointError, "manifest.json: missing"):
            copy_checkpoint(self.root / "nowhere", far)

    def test_a_full_second_disk(self):
        class Full(CrashingStorage):
            def perform(self, operation, path, action):
                if operation == "write" and path.name == "rank1.bin":
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return super().perform(operation, path, action)

        with self.assertRaisesRegex(CheckpointError, "(?=.*far/rank1.bin)(?=.*No space left on device)"):
            copy_checkpoint(self.folder, self.root / "far", storage=Full())
        self.assertEqual(list((self.root / "far").iterdir()), [])


@has_safetensors
class Safetensors(InFolders):
    def rich_states(self):
        tied = torch.arange(6.0).view(2, 3)
        return [
            {
                "embed": tied,
                "head": tied,
                "flat": tied.view(-1),
                "nested": ({"x": torch.arange(4, dtype=torch.bfloat16)}, [torch.tensor(rank)]),
                "empty": [torch.empty(0, 2), torch.empty(3, 0)],
                "values": {"lr": 0.1, "loss": float("inf"), "none": None, "text": "ü"},
                "layout": [],
            }
            for rank in range(2)
        ]

    def test_there_and_back_every_byte_is_the_same(self):
        for states in (STATES, self.rich_states(), [[torch.ones(2)]]):
            with tempfile.TemporaryDirectory() as parent:
                parent = Path(parent)
                before = save_sharded(states, parent / "a", 7, 2.5, crc32=True)
                paths = to_safetensors(parent / "a", parent / "b")
                self.assertEqual(
                    [path.name for path in paths], [f"rank{rank}.safetensors" for rank in range(len(states))]
                )
                self.assertEqual(len(list((parent / "b").iterdir())), len(states))
                self.assertEqual(from_safetensors(parent / "b", parent / "c"), before)
                self.assertTrue(same(load_sharded(parent / "c", len(states))[1], states))

    def test_others_can_read_it_and_tied_tensors_are_stored_once(self):
        from safetensors.torch import load_file

        save_sharded(self.rich_states(), self.root / "a", 7)
        tensors = load_file(to_safetensors(self.root / "a", self.root / "b")[1])
        self.assertTrue(same(tensors["embed"], torch.arange(6.0).view(2, 3)))
        self.assertEqual(tensors["nested/1/0"].item(), 1)
        self.assertEqual(sorted(tensors), ["embed", "empty/0", "empty/1", "nested/0/x", "nested/1/0"])

    def test_a_file_of_somebody_else_becomes_a_checkpoint_of_one_rank(self):
        from safetensors.torch import save_file

        weights = {"layer.0.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor([1], dtype=torch.int8)}
        save_file(weights, self.root / "model.safetensors", {"format": "pt"})
        manifest = from_safetensors(self.root / "model.safetensors", self.root / "c", step=5)
        self.assertEqual((manifest.step, manifest.world_size), (5, 1))
        self.assertTrue(same(load_sharded(self.root / "c", 1)[1][0], dict(sorted(weights.items()))))

    def test_what_does_not_fit_is_refused(self):
        from safetensors.torch import load_file, save_file

        to_safetensors(self.folder, self.root / "b")
        one = self.root / "b" / "rank1.safetensors"
        good, tensors = one.read_bytes(), load_file(one)
        cases = [
            (lambda: one.write_bytes(b"junk"), "rank1.safetensors: not a safetensors file"),
            (lambda: one.write_bytes((self.root / "b" / "rank0.safetensors").read_bytes()), "expected {'rank': 1"),
            (lambda: save_file(tensors, one, {"shard-80": "{"}), "rank1.safetensors: not valid JSON"),
            (lambda: save_file(tensors, one, {"shard-80": "{}"}), "missing key 'seconds'"),
            (lambda: save_file(tensors, one), "rank1.safetensors: not written by `convert`"),
            (lambda: one.unlink(), "expected {'rank': 0"),
        ]
        for damage, message in cases:
            damage()
            with self.subTest(message), self.assertRaises(CheckpointError) as caught:
                from_safetensors(self.root / "b", self.root / "c")
            self.assertIn(message, str(caught.exception))
            self.assertFalse((self.root / "c").exists())
            one.write_bytes(good)
        with self.assertRaisesRegex(CheckpointError, "found none"):
            from_safetensors(self.folder, self.root / "c")
        with self.assertRaisesRegex(CheckpointError, "nowhere: No such file"):
            from_safetensors(self.root / "nowhere", self.root / "c")

    def test_a_crash_at_every_operation(self):
        rehearsal, good = CrashingStorage(), {}
        for path in to_safetensors(self.folder, self.root / "rehearsal", storage=rehearsal):
            good[path.name] = path.read_bytes()
        for at, operation in enumerate(rehearsal.log):
            for when in ("before", "during", "after") if operation.startswith("write") else ("before", "after"):
                with self.subTest(operation=operation, when=when):
                    target = self.root / f"{at}{when}"
                    with self.assertRaises(Crash):
                        to_safetensors(self.folder, target, storage=CrashingStorage(at, when))
                    for path in target.glob("*.safetensors"):
                        self.assertEqual(path.read_bytes(), good[path.name], "half a file")
                    target.mkdir(exist_ok=True)
                    (target / "rank0.tmp").write_text("somebody's own")
                    to_safetensors(self.folder, target)
                    found = {path.name: path.read_bytes() for path in target.iterdir()}
                    self.assertEqual(found, {**good, "rank0.tmp": b"somebody's own"})

    def test_files_of_another_conversion_are_neither_replaced_nor_added_to(self):
        to_safetensors(self.folder, self.root / "good")
        foreign = (self.root / "good" / "rank0.safetensors").read_bytes()
        for name, data in [
            ("model.safetensors", b"model"),
            ("rank2.safetensors", foreign),
            ("rank1.safetensors", foreign),
            ("rank1.safetensors", b"short"),
        ]:
            with self.subTest(name), tempfile.TemporaryDirectory() as target:
                (Path(target) / name).write_bytes(data)
                with self.assertRaisesRegex(CheckpointError, f"has other safetensors files already: {name}$"):
                    to_safetensors(self.folder, target)
                self.assertEqual({path.name: path.read_bytes() for path in Path(target).iterdir()}, {name: data})

    def test_a_failure_leaves_nothing_behind(self):
        class Full(CrashingStorage):
            def perform(self, operation, path, action):
                if operation == failing and "rank1.safetensors" in path.name:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return super().perform(operation, path, action)

        for failing, left in (("write", set()), ("fsync", set()), ("rename", {"rank0.safetensors"})):
            with self.subTest(failing), tempfile.TemporaryDirectory() as target:
                with self.assertRaisesRegex(OSError, "No space left on device"):
                    to_safetensors(self.folder, target, storage=Full())
                self.assertEqual({path.name for path in Path(target).iterdir()}, left)

    def test_crafted_metadata(self):
        from safetensors.torch import save_file

        tensor = {"dtype": "float32", "shape": [2], "offset": 0, "numel": 2}
        header = {"rank": 0, "world_size": 1, "step": 0, "state": {"a": {"__tensor__": 0}}, "tensors": [tensor]}
        empty = {**tensor, "shape": [0, 10**30], "offset": 8, "numel": 0}
        one = self.root / "c" / "rank0.safetensors"
        one.parent.mkdir()
        for text, message in [
            (json.dumps(header), ""),
            ("\ud800", "surrogates not allowed"),
            ([1], "header: expected a string"),
            (json.dumps({**header, "state": {}}), "tensors[0]: missing, or not as the header says"),
            (json.dumps({**header, "tensors": [tensor, empty]}), "tensors[1].shape: no tensor is that large"),
            (
                json.dumps({**header, "world_size": 2}),
                "'world_size': 2, 'step': 0}, expected {'rank': 0, 'world_size': 1",
            ),
        ]:
            save_file({"a": torch.ones(2)}, one, {"shard-80": json.dumps({"seconds": 1, "header": text})})
            with self.subTest(message):
                if not message:
                    from_safetensors(one.parent, self.root / "good")
                    continue
                with self.assertRaises(CheckpointError) as caught:
                    from_safetensors(one.parent, self.root / "bad")
                self.assertIn(message, str(caught.exception))
        for rank in range(2):
            save_file({"a": torch.ones(2)}, one.with_name(f"rank{rank}.safetensors"))
        with self.assertRaisesRegex(CheckpointError, "rank0.safetensors: not written by `convert`"):
            from_safetensors(one.parent, self.root / "bad")

    def test_a_dtype_that_it_does_not_know(self):
        save_sharded([{}, {"z": torch.tensor([1 + 2j], dtype=torch.complex128)}], self.root / "a", 7)
        with self.assertRaisesRegex(CheckpointError, "safetensors cannot hold rank 1's torch.complex128"):
            to_safetensors(self.root / "a", self.root / "b")
        self.assertEqual(list((self.root / "b").iterdir()), [])


class WithoutSafetensors(InFolders):
    def test_a_clear_message(self):
        with mock.patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None}):
            for call in (to_safetensors, from_safetensors):
                source = self.folder if call is to_safetensors else self.folder / "rank0.bin"
                with self.assertRaisesRegex(CheckpointError, "needs the package safetensors: pip install safetensors"):
                    call(source, self.root / "b")


class Tool(InFolders):
    def tool(self, *args):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = checkpoint_tools.main([str(arg) for arg in args])
            except SystemExit as error:
                code = error.code
        return code, out.getvalue(), err.getvalue()

    def test_show(self):
        code, out, _ = self.tool("show", self.folder, "--json")
        found = json.loads(out)
        self.assertEqual((code, found["step"], found["world_size"]), (0, 10, 2))
        self.assertEqual([shard["sha256"] for shard in found["shards"]], [s.sha256 for s in self.manifest.shards])
        self.assertEqual(
            found["tensors"][2],
            {"rank": 1, "tensor": "flat", "dtype": "float32", "shape": [5], "bytes": 20, "tied_to": ""},
        )
        code, out, _ = self.tool("show", self.folder)
        self.assertEqual(code, 0)
        self.assertRegex(out, r"step 10, saved by 2 ranks in 1.5 s")
        self.assertRegex(out, r"1  rank1.bin +\d+ +[0-9a-f]{16}  [0-9a-f]{8}  flat \[5, 10\)")
        save_sharded(small_states(1), self.root / "step_9", 9)
        code, out, _ = self.tool("show", self.root, "--json")
        self.assertEqual([(c["step"], c["folder"], c["ranks"]) for c in json.loads(out)["checkpoints"]],
                         [(9, "step_9", 1), (10, "step_10", 2)])  # fmt: skip

    def test_names_that_would_steer_the_terminal_are_shown_escaped(self):
        save_sharded([{"\ud800\x1b[31m": torch.ones(2)}], self.root / "odd", 1)
        code, out, _ = self.tool("show", self.root / "odd")
        self.assertEqual(code, 0)
        self.assertIn(r"\ud800\x1b[31m", out)

    def test_verify(self):
        for options, method in [((), "sha256"), (("--fast",), "crc32")]:
            code, out, _ = self.tool("verify", self.folder, *options)
            self.assertEqual((code, out), (0, f"ok    rank0.bin ({method})\nok    rank1.bin ({method})\n"))
        self.flip("rank1.bin")
        for options, method in [((), "sha256"), (("--fast",), "crc32")]:
            code, out, _ = self.tool("verify", self.folder, "--json", *options)
            found = json.loads(out)
            self.assertEqual((code, found["ok"], found["method"], found["files"][0]["problem"]), (1, False, method, ""))
            self.assertIn(f"{method} mismatch", found["files"][1]["problem"])

    @has_safetensors
    def test_convert(self):
        code, out, _ = self.tool("convert", self.folder, "--to", self.root / "st")
        self.assertEqual((code, len(out.splitlines())), (0, 2))
        code, out, _ = self.tool("convert", self.root / "st", "--to", self.root / "back", "--json")
        self.assertEqual((code, len(json.loads(out)["wrote"])), (0, 3))
        self.assertEqual(read_manifest(self.root / "back"), self.manifest)

    def test_wrong_command_lines_and_folders(self):
        for args, code, message in [
            (["convert", self.folder], 2, "convert needs --to OUT"),
            (["show", self.folder, "--to", "x"], 2, "nothing else takes it"),
            (["show", self.folder, "--fast"], 2, "--fast is for verify"),
            (["verify", self.folder, "--step", "0"], 2, "--step is for convert"),
            (["convert", self.folder, "--to", self.root / "st", "--step", "0"], 1, f"{self.folder}: a checkpoint says"),
            (["burn", self.folder], 2, "invalid choice"),
            (["verify", self.root / "nowhere"], 1, "manifest.json: missing"),
            (["show", self.root / "nowhere"], 1, "nowhere"),
        ]:
            found, out, err = self.tool(*args)
            self.assertEqual((found, out), (code, ""))
            self.assertIn(message, err)
        code, _, err = self.tool("show", self.root / "nowhere", "--json")
        self.assertIn("nowhere", json.loads(err)["error"])


if __name__ == "__main__":
    unittest.main()
