"""Whatever is wrong with a checkpoint, loading it raises CheckpointError naming file and field, and runs no code."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from bitwise import same, small_states
from checkpoint import load_sharded, save_sharded
from manifest import MANIFEST, CheckpointError, ShardManifest
from safetensors_files import from_safetensors
from storage import DISK, CrashingStorage

STATES = small_states(2)


CODE_RAN = []


def run_code():
    CODE_RAN.append("ran")


class Dangerous:
    def __reduce__(self):
        return run_code, ()


class Damaged(unittest.TestCase):
    """Each test starts from a good checkpoint of two ranks."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "step_10"
        save_sharded(STATES, self.folder, 10, 1.25, storage=CrashingStorage())
        self.good = {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def restore(self):
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, data in self.good.items():
            (self.folder / name).write_bytes(data)

    def load(self, **options):
        return load_sharded(self.folder, 2, **options)

    def refuse(self, *messages):
        with self.assertRaises(CheckpointError) as caught:
            self.load()
        for message in messages:
            self.assertIn(message, str(caught.exception))
        self.restore()

    def mend(self):
        """Give the manifest the sizes and hashes of the files as they are now."""
        fields = json.loads(self.good[MANIFEST])
        for shard in fields["shards"]:
            data = (self.folder / shard["path"]).read_bytes()
            shard.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        (self.folder / MANIFEST).write_text(json.dumps(fields))


class Manifest(Damaged):
    def edit(self, change):
        fields = json.loads(self.good[MANIFEST])
        change(fields)
        (self.folder / MANIFEST).write_text(json.dumps(fields))

    def test_fields_of_the_manifest(self):
        wrong = {
            "step": [-1, True, 10.0, "10", None, [10], float("nan")],
            "world_size": [0, -2, True, 2.0, 2.9, "2", None, 10**12],
            "wall_clock_seconds": [float("nan"), float("inf"), -1, "0", None, True, 10**400],
            "shards": [{}, None, "x", [], 3],
            "format": [2, True, "1", None, 1.0],
        }
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key, value=value):
                    self.edit(lambda fields, key=key, value=value: fields.update({key: value}))
                    self.refuse(str(self.folder / MANIFEST), "shards" if value == 10**12 else key)

    def test_fields_of_a_shard(self):
        digest = "0" * 64
        wrong = {
            "rank": [0, 2, -1, True, 1.0, "1", None],
            "path": [3, None, "", ".", "..", "../rank1.bin", "/etc/hosts", "rank1.bin\0", "rank1.bin/", "./rank1.bin",
                     "rank0.bin", "rank01.bin", "rank\u0661.bin", "RANK1.BIN", "rank1.bin\n", "rank1.g0.bin", MANIFEST,
                     "C:\\rank1.bin", "rank" + "9" * 5000 + ".bin", "rank1.g" + "9" * 5000 + ".bin\0", ["rank1.bin"]],
            "size": [-1, True, 1.0, "9", None],
            "sha256": [None, "", 7, digest[1:], digest + "0", "G" * 64, "A" * 64, digest + "\n", [digest]],
            "layout": [None, {}, [3], [{}], "flat"],
        }  # fmt: skip
        for key, values in wrong.items():
            for value in values:
                with self.subTest(key, value=value):
                    self.edit(lambda fields, key=key, value=value: fields["shards"][1].update({key: value}))
                    self.refuse(str(self.folder / MANIFEST), f"shards[1].{key}")

    def test_keys(self):
        for key in ("format", "step", "world_size", "wall_clock_seconds", "shards"):
            self.edit(lambda fields, key=key: fields.pop(key))
            self.refuse(MANIFEST, f"missing key '{key}'")
        for key in ("rank", "path", "size", "sha256", "layout"):
            self.edit(lambda fields, key=key: fields["shards"][0].pop(key))
            self.refuse(MANIFEST, f"shards[0]: missing key '{key}'")
        self.edit(lambda fields: fields.update(extra=1))
        self.refuse(MANIFEST, "unexpected key 'extra'")
        self.edit(lambda fields: fields["shards"][0].update(extra=1))
        self.refuse(MANIFEST, "shards[0]: unexpected key 'extra'")
        (self.folder / MANIFEST).write_bytes(self.good[MANIFEST].replace(b'"step": 10', b'"step": 9, "step": 10'))
        self.refuse(MANIFEST, "a key appears twice")

    def test_the_set_of_shards(self):
        self.edit(lambda fields: fields["shards"].pop(0))
        self.refuse(MANIFEST, "shards: expected 2, one a rank, found 1; missing: rank 0")
        self.edit(lambda fields: fields["shards"].append(fields["shards"][0]))
        self.refuse(MANIFEST, "shards: expected 2, one a rank, found 3")
        self.edit(lambda fields: fields["shards"].__setitem__(0, fields["shards"][1]))
        self.refuse(MANIFEST, "shards[0].rank: expected 0 (each rank once), found 1")
        self.edit(lambda fields: fields["shards"].reverse())
        self.refuse(MANIFEST, "shards[0].rank")
        self.edit(lambda fields: fields.update(shards=["rank0.bin", "rank1.bin"]))
        self.refuse(MANIFEST, "shards[0]: expected a JSON object")

    def test_ranges(self):
        for change, message in [
            ({"start": 4}, "overlap at element 4"),
            ({"start": 6}, "gap at element 5"),
            ({"end": 9}, "no rank holds elements [9, 10)"),
            ({"total": 11}, "rank 1 says total 11, others 10"),
            ({"unit": "other"}, "no rank holds"),
            ({"start": 10}, "gap at element 5"),
        ]:
            self.edit(lambda fields, change=change: fields["shards"][1]["layout"][0].update(change))
            self.refuse(MANIFEST, "layout of", message)
        self.edit(lambda fields: [shard.update(layout=[]) for shard in fields["shards"]])
        self.refuse("rank 0", "rank0.bin: layout: the manifest's differs from the shard's own")

    def test_text_that_is_no_manifest(self):
        deep = "[" * 100_000
        for text in (
            "",
            " ",
            "null",
            "[]",
            "3",
            '"x"',
            "{",
            "{}",
            "\0",
            deep,
            '{"step": 1' + "0" * 5000 + "}",
            "{'step': 1}",
        ):
            (self.folder / MANIFEST).write_text(text)
            self.refuse(str(self.folder / MANIFEST))
            with self.assertRaises(CheckpointError):
                ShardManifest.from_json(text)
        (self.folder / MANIFEST).write_bytes(b"\xff\xfe{")
        self.refuse(MANIFEST, "not valid JSON")

    def test_cut_off_anywhere(self):
        text = self.good[MANIFEST].rstrip()
        for length in range(len(text)):
            with self.assertRaisesRegex(CheckpointError, "^manifest.json: "):
                ShardManifest.from_json(text[:length])

    def test_any_changed_byte_is_refused_or_harmless(self):
        for i in range(len(self.good[MANIFEST])):
            data = bytearray(self.good[MANIFEST])
            data[i] ^= 1
            (self.folder / MANIFEST).write_bytes(data)
            try:
                _, states = load_sharded(self.folder, 2)
            except CheckpointError as error:
                self.assertIn(str(self.folder), str(error))
            else:  # a digit of the clock, say
                self.assertTrue(same(states, STATES), bytes(data))

    def test_the_manifest_is_not_a_plain_file(self):
        (self.folder / MANIFEST).unlink()
        self.refuse("manifest.json: missing")
        (self.folder / MANIFEST).rename(self.folder.parent / "elsewhere")
        (self.folder / MANIFEST).symlink_to(self.folder.parent / "elsewhere")
        self.refuse("manifest.json: expected a plain file, found a link")
        (self.folder / MANIFEST).unlink()
        (self.folder / MANIFEST).mkdir()
        self.refuse("manifest.json: expected a plain file, found a folder")

    def test_the_whole_manifest_is_checked_before_any_shard_is_opened(self):
        class Watching(CrashingStorage):
            opened: tuple = ()

            def open(self, path):
                self.opened += (path.name,)
                return super().open(path)

        self.edit(lambda fields: fields["shards"][1].update(sha256="?"))
        disk = Watching()
        with self.assertRaises(CheckpointError):
            load_sharded(self.folder, 2, storage=disk)
        self.assertEqual(set(disk.opened), {MANIFEST})


class ShardFile(Damaged):
    def test_any_changed_byte_is_a_sha256_mismatch(self):
        for i in range(len(self.good["rank1.bin"])):
            data = bytearray(self.good["rank1.bin"])
            data[i] ^= 0x80
            (self.folder / "rank1.bin").write_bytes(data)
            with self.assertRaisesRegex(CheckpointError, "rank 1 failed: .*rank1.bin: sha256 mismatch: expected"):
                self.load()

    def test_another_length(self):
        for data in (b"", self.good["rank1.bin"][:-1]):
            (self.folder / "rank1.bin").write_bytes(data)
            self.refuse("rank1.bin: truncated", "sha256 mismatch", f"found {len(data)}")
        (self.folder / "rank1.bin").write_bytes(self.good["rank1.bin"] + b"\0")
        self.refuse("rank1.bin: too long", "sha256 mismatch")

    def test_not_a_plain_file(self):
        (self.folder / "rank0.bin").unlink()
        self.refuse("rank 0 failed", "rank0.bin: missing")
        (self.folder / "rank0.bin").unlink()
        (self.folder / "rank0.bin").mkdir()
        self.refuse("rank0.bin: expected a plain file, found a folder")
        for target in (self.folder / "rank0.copy", self.folder.parent / "outside.bin"):
            (self.folder / "rank0.bin").rename(target)
            (self.folder / "rank0.bin").symlink_to(target)
            self.refuse("rank0.bin: expected a plain file, found a link")
        if hasattr(os, "mkfifo"):
            (self.folder / "rank0.bin").unlink()
            os.mkfifo(self.folder / "rank0.bin")  # opening it would wait for ever
            self.refuse("rank0.bin: expected a plain file, found a special file")

    @unittest.skipUnless(hasattr(os, "mkfifo"), "needs named pipes")
    def test_a_pipe_is_refused_whoever_opens_it(self):
        for name in ("rank0.bin", "manifest.json"):
            (self.folder / name).unlink()
            os.mkfifo(self.folder / name)
            for read in (DISK.open, DISK.read):
                with self.assertRaises(OSError) as caught:
                    read(self.folder / name)
                self.assertEqual(caught.exception.filename, str(self.folder / name))
                self.assertEqual(caught.exception.strerror, "expected a plain file, found a special file")
        (self.folder / "manifest.json").rename(self.folder / "rank0.safetensors")
        with self.assertRaisesRegex(CheckpointError, "rank0.safetensors: expected a plain file"):
            from_safetensors(self.folder, self.folder.parent / "other")

    def test_swapped_shards_with_a_mended_manifest(self):
        (self.folder / "rank0.bin").write_bytes(self.good["rank1.bin"])
        (self.folder / "rank1.bin").write_bytes(self.good["rank0.bin"])
        self.refuse("rank 0 failed", "rank 1 failed", "sha256 mismatch")
        (self.folder / "rank0.bin").write_bytes(self.good["rank1.bin"])
        (self.folder / "rank1.bin").write_bytes(self.good["rank0.bin"])
        self.mend()
        self.refuse("rank0.bin: rank: expected 0, but the shard itself says 1")

    def test_a_shard_of_another_step_or_world(self):
        other = self.folder.parent / "other"
        save_sharded(STATES, other, 11, storage=CrashingStorage())
        shutil.copy(other / "rank0.bin", self.folder / "rank0.bin")
        self.mend()
        self.refuse("rank0.bin: step: expected 10, but the shard itself says 11")
        save_sharded([STATES[0], STATES[1], {}], other, 10, storage=CrashingStorage())
        shutil.copy(other / "rank0.g1.bin", self.folder / "rank0.bin")
        self.mend()
        self.refuse("rank0.bin: world_size: expected 2, but the shard itself says 3")

    def test_code_in_a_file_does_not_run(self):
        dangerous = pickle.dumps(Dangerous())
        pickle.loads(dangerous)
        self.assertEqual(CODE_RAN, ["ran"], "this pickle should run code when loaded")
        CODE_RAN.clear()
        (self.folder / "rank0.bin").write_bytes(dangerous)
        self.mend()
        self.refuse("rank0.bin: not a shard file")
        (self.folder / MANIFEST).write_bytes(dangerous)
        self.refuse("manifest.json: not valid JSON")
        torch.save({"w": torch.ones(3)}, self.folder / "rank0.bin")
        self.mend()
        self.refuse("rank0.bin: not a shard file")
        self.assertEqual(CODE_RAN, [])

    def craft(self, payload=bytes(8), **changes):
        """Put a shard with a header of our making in rank 0's place, size and sha256 correct."""
        tensor = {"dtype": "float32", "shape": [2], "offset": 0, "numel": 2}
        header = {"rank": 0, "world_size": 2, "step": 10, "state": {"w": {"__tensor__": 0}}, "tensors": [tensor]}
        header.update({key: value for key, value in changes.items() if key in header})
        tensor.update({key: value for key, value in changes.items() if key in tensor})
        self.craft_text(json.dumps(header).encode(), payload)

    def craft_text(self, text, payload=b""):
        (self.folder / "rank0.bin").write_bytes(b"SHARD-80" + struct.pack("<Q", len(text)) + text + payload)
        fields = json.loads(self.good[MANIFEST])
        for shard in fields["shards"]:
            shard["layout"] = []
        self.good[MANIFEST] = json.dumps(fields).encode()
        self.mend()

    def test_crafted_headers(self):
        self.craft()
        with self.assertRaisesRegex(CheckpointError, "^rank 1 failed: [^;]*rank1.bin: layout"):  # rank 0's own is fine
            self.load()
        two = {"dtype": "float32", "shape": [1], "offset": 0, "numel": 1}
        for message, changes in {
            "rank: expected a whole number": {"rank": True},
            "rank: expected 0": {"rank": 1},
            "world_size: expected 2": {"world_size": 4},
            "step: expected 10": {"step": 9},
            "tensors: expected a list": {"tensors": {}},
            "tensors[0]: missing key 'dtype'": {"tensors": [{}]},
            "tensors[0]: expected a JSON object": {"tensors": [3]},
            "tensors[0].dtype: 'float33' is not": {"dtype": "float33"},
            "tensors[0].dtype: 'nn' is not": {"dtype": "nn"},
            "tensors[0].dtype: ['float32'] is not": {"dtype": ["float32"]},
            "tensors[0].shape: expected a list": {"shape": 2},
            "tensors[0].shape: expected a whole number": {"shape": [-1]},
            "tensors[0].shape: no tensor is that large: [0, 4294967296, 4294967296]": {
                "shape": [0, 2**32, 2**32],
                "numel": 0,
            },
            "tensors[0].numel: expected 3, found 2": {"shape": [3]},
            "tensors[0].numel: expected 2, found 1": {"numel": 1},
            "tensors[0].numel: expected a whole": {"numel": 2.0},
            "tensors[0].offset: expected 0": {"offset": 4},
            "tensors[0].offset: expected a whole": {"offset": -4},
            "tensors: the table describes 8 bytes, the file holds 9": {"payload": bytes(9)},
            "tensors: the table describes 8 bytes, the file holds 4": {"payload": bytes(4)},
            "the table describes 4000000000000000": {"shape": [10**15], "numel": 10**15},  # nothing is allocated
            "the table describes 12 bytes": {"tensors": [two, {**two, "offset": 4}, {**two, "offset": 8}]},
            "tensors[1].offset: expected 4": {"tensors": [two, {**two, "offset": 2}]},
            "tensors[1].offset: expected 8": {"tensors": [{**two, "shape": [2], "numel": 2}, two]},
            "state: tensor 1 of 1": {"state": {"w": {"__tensor__": 1}}},
            "state: __tensor__: expected a whole": {"state": {"w": {"__tensor__": True}}},
            "state: malformed": {"state": {"w": {"__tensor__": 0, "x": 1}}},
            "malformed {'__tuple__'": {"state": {"w": {"__tuple__": 3}}},
            "malformed {'__float__'": {"state": {"w": {"__float__": "1.0"}}},
            "state: expected a dict or a list, found 3": {"state": 3},
            "state: expected a dict or a list, found {'__tensor__': 0}": {"state": {"__tensor__": 0}},
            "state: expected a dict or a list, found {'__tuple__': []}": {"state": {"__tuple__": []}},
            "nan is not JSON": {"state": [float("nan")]},
        }.items():
            with self.subTest(message):
                self.craft(**changes)
                self.refuse("rank 0 failed", f"rank0.bin: {message}" if ":" in message else message)

    def test_crafted_text(self):
        for text, message in [
            (b"", "not valid JSON"),
            (b"[]", "header: expected a JSON object"),
            (b"{}", "header: missing key 'rank'"),
            (b"[" * 100_000, "not valid JSON"),
            (b'{"rank": 0, "rank": 0}', "a key appears twice"),
            (b"\xff", "not valid JSON"),
        ]:
            self.craft_text(text)
            self.refuse("rank0.bin", message)
        for length in (2**63, 100):
            (self.folder / "rank0.bin").write_bytes(b"SHARD-80" + struct.pack("<Q", length) + b"{}")
            self.mend()
            self.refuse("rank0.bin: the file ends too early")
        for data in (b"", b"SHARD", b"SHARD-80", b"SHARD-80\0\0"):
            (self.folder / "rank0.bin").write_bytes(data)
            self.mend()
            self.refuse("rank0.bin: the file ends too early")

    def test_a_file_that_shrinks_while_it_is_read(self):
        class Shrinking(CrashingStorage):
            def open(self, path):
                if path.name == "rank1.bin":
                    os.truncate(path, path.stat().st_size - 3)
                return super().open(path)

        with self.assertRaisesRegex(CheckpointError, "rank 1 failed: .*rank1.bin: (sha256 mismatch|became shorter)"):
            self.load(storage=Shrinking())

    def test_a_disk_that_cannot_be_read(self):
        class Failing(CrashingStorage):
            def read_into(self, file, target):
                raise OSError(5, "Input/output error", file.name)

        with self.assertRaisesRegex(CheckpointError, "rank0.bin: Input/output error"):
            self.load(storage=Failing())


if __name__ == "__main__":
    unittest.main()
