"""Ways to damage a checkpoint of two ranks: (what is wrong, how to make it so, what the refusal must say)."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

from manifest import MANIFEST


def edit_manifest(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Return a damage that changes the manifest's JSON and nothing else."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / MANIFEST).read_text())
        change(fields)
        (folder / MANIFEST).write_text(json.dumps(fields))

    return damage


def mend_hashes(folder: Path) -> None:
    """Do what a careful attacker does: give every shard the size and sha256 of what is now in its file."""

    def change(fields: dict) -> None:
        for shard in fields["shards"]:
            data = (folder / shard["path"]).read_bytes()
            shard.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit_manifest(change)(folder)


def flip_a_bit(folder: Path) -> None:
    """Change one bit in the middle of rank 1's file."""
    data = bytearray((folder / "rank1.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rank1.bin").write_bytes(data)


def swap_shards(folder: Path) -> None:
    """Exchange the two ranks' files and mend the manifest."""
    first, second = ((folder / f"rank{rank}.bin").read_bytes() for rank in range(2))
    (folder / "rank0.bin").write_bytes(second)
    (folder / "rank1.bin").write_bytes(first)
    mend_hashes(folder)


def plant_pickle(folder: Path) -> None:
    """Put a pickle that would run code in the place of a shard, its sha256 correct."""
    (folder / "rank1.bin").write_bytes(pickle.dumps(CodeThatRuns()))
    mend_hashes(folder)


class CodeThatRuns:
    """Unpickling it calls a function that the file chose: a harmless one here."""

    def __reduce__(self):
        return run_code, ("a pickle was loaded",)


CODE_RAN: list[str] = []


def run_code(text: str) -> None:
    """Leave a trace."""
    CODE_RAN.append(text)


def link_out(folder: Path) -> None:
    """Put a link to a file elsewhere in the place of a shard: the same bytes, but not this checkpoint's."""
    (folder / "rank1.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "rank1.bin").symlink_to(folder.parent / "elsewhere.bin")


WRONG_CHECKPOINTS = [
    ("no manifest", lambda folder: (folder / MANIFEST).unlink(), "manifest.json: missing"),
    (
        "manifest cut off",
        lambda folder: (folder / MANIFEST).write_text('{"format": 1, "st'),
        "manifest.json: not valid JSON",
    ),
    ("manifest is a list", lambda folder: (folder / MANIFEST).write_text("[]"), "expected a JSON object"),
    ("key missing", edit_manifest(lambda m: m.pop("step")), "missing key 'step'"),
    ("key too many", edit_manifest(lambda m: m["shards"][1].update(note=1)), "shards[1]: unexpected key 'note'"),
    ("step is -1", edit_manifest(lambda m: m.update(step=-1)), "manifest.json: step:"),
    ("world_size is 2.0", edit_manifest(lambda m: m.update(world_size=2.0)), "manifest.json: world_size:"),
    ("rank is true", edit_manifest(lambda m: m["shards"][1].update(rank=True)), "shards[1].rank:"),
    ("clock is NaN", edit_manifest(lambda m: m.update(wall_clock_seconds=float("nan"))), "wall_clock_seconds:"),
    ("path leads out", edit_manifest(lambda m: m["shards"][0].update(path="../rank0.bin")), "shards[0].path:"),
    ("path is absolute", edit_manifest(lambda m: m["shards"][0].update(path="/etc/hosts")), "shards[0].path:"),
    ("one file twice", edit_manifest(lambda m: m["shards"][1].update(path="rank0.bin")), "shards[1].path:"),
    (
        "one rank twice",
        edit_manifest(lambda m: m["shards"].__setitem__(1, m["shards"][0])),
        "shards[1].rank: expected 1",
    ),
    ("one rank's entry gone", edit_manifest(lambda m: m["shards"].pop()), "missing: rank 1"),
    (
        "ranges overlap",
        edit_manifest(lambda m: m["shards"][1]["layout"][0].update(start=500)),
        "overlap at element 500",
    ),
    ("shard gone", lambda folder: (folder / "rank1.bin").unlink(), "rank1.bin: missing"),
    ("shard cut off", lambda folder: (folder / "rank1.bin").write_bytes(b"SHARD-80"), "rank1.bin: truncated"),
    ("one bit flipped", flip_a_bit, "rank1.bin: sha256 mismatch"),
    ("shards swapped, manifest mended", swap_shards, "rank0.bin: rank: expected 0, but the shard itself says 1"),
    ("a pickle, sha256 correct", plant_pickle, "rank1.bin: not a shard file"),
    ("shard is a link", link_out, "expected a plain file, found a link"),
]
