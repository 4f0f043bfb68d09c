"""Lesson 80: checkpoints that survive. One file a rank, one rename that counts, and nothing loads that was not saved.

`python code/main.py` saves and loads on 4 processes, tries the ways of being wrong, and dies at every file operation.
"""

import hashlib
import json
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import bench_checkpoint  # --bench: beside the disk itself, sha256 alone and torch.distributed.checkpoint
import demo  # 76: flags, tables, verdict
import torch
import wire  # 76: tensors as bytes
from checkpoint import load_shard, load_sharded, save_shard, save_sharded  # N ranks, N files, one rename
from comm import TorchComm  # 76: what a rank sees of the others
from manifest import MANIFEST, CheckpointError, ShardManifest  # the file that makes N shards a checkpoint
from ranks import run_ranks  # 76: one process a rank
from restore import load_into  # a loaded state into live tensors
from rotation import latest_checkpoint, rotate_checkpoints  # the newest, and deleting the oldest
from storage import Crash, CrashingStorage  # the disk, as a process sees it that will die

__all__ = [
    "CheckpointError",
    "ShardManifest",
    "latest_checkpoint",
    "load_into",
    "load_shard",
    "load_sharded",
    "make_demo_state",
    "rotate_checkpoints",
    "save_shard",
    "save_sharded",
]


def make_demo_state(rank: int, world_size: int) -> dict:
    """Return what a rank of a ZeRO-1 job would save, small: its range of the flat buffers, and the rest of its life.

    1,003 elements: no world size from 2 to 8 divides them. Every rank's values are its own, the model's are the same.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    start, end = (1003 * r // world_size for r in (rank, rank + 1))
    flat, noise = torch.arange(1003) / 1003, torch.Generator().manual_seed(80 + rank)
    embedding = torch.arange(64).view(16, 4) / 64  # (vocabulary, dim)
    return {
        "model": {
            "embed.weight": embedding,
            "head.weight": embedding,
            "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        },
        "optimizer": {
            "flat": {"master": flat[start:end], "exp_avg": flat[start:end] / 10, "exp_avg_sq": flat[start:end] ** 2},
            "betas": (0.9, 0.95),
            "steps": torch.tensor(10),
        },
        "random": {"torch": noise.get_state()},
        "data": {"epoch": 1, "next_sample": 37 * world_size + rank},
        "best_loss": float("inf"),
        "layout": [{"unit": "optimizer/flat", "start": start, "end": end, "total": 1003}],
    }


def byte_equal(a, b) -> bool:
    """Compare two states: same structure, types, dtypes, shapes, and the same bits (0.0 is not -0.0)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and wire.tensor_to_bytes(a) == wire.tensor_to_bytes(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(byte_equal(a[key], b[key]) for key in a)
    if type(a) is type(b) and isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(byte_equal, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def save_then_load(rank: int, world_size: int, folder: str) -> tuple[bool, bool]:
    """Save and load on one of N processes; say whether the bytes are equal and whether tied tensors are tied again."""
    comm, state = TorchComm(), make_demo_state(rank, world_size)
    save_shard(state, folder, 10, comm)
    loaded = load_shard(folder, comm)
    tied = loaded["model"]["embed.weight"] is loaded["model"]["head.weight"]
    return byte_equal(state, loaded), tied


def round_trip(claims: demo.Claims, folder: Path, world_size: int, backend: str) -> None:
    """N processes save and load together; then one process reads what they wrote."""
    outcomes = run_ranks(save_then_load, world_size, str(folder), backend=backend)
    manifest, states = load_sharded(folder, world_size)
    rows = [
        (s.rank, s.path, s.size, s.sha256[:16], f"[{s.layout[0]['start']}, {s.layout[0]['end']})")
        for s in manifest.shards
    ]
    demo.table(
        ["rank", "file", "bytes", "sha256", "range of the flat buffers"],
        rows,
        f"step {manifest.step}, saved by {world_size} processes",
    )
    names = sorted(path.name for path in folder.iterdir())
    claims.check("each process loads the bytes it saved", all(equal for equal, _ in outcomes))
    claims.check("tied tensors are stored once and come back tied", all(tied for _, tied in outcomes))
    one_process = all(byte_equal(state, make_demo_state(rank, world_size)) for rank, state in enumerate(states))
    claims.check("one process loads all of it", one_process)
    claims.check(
        "a file a rank and the manifest, nothing else", names == sorted([MANIFEST, *(s.path for s in manifest.shards)])
    )


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
    """What unpickling this calls: nothing harmful here, but the file chooses."""

    def __reduce__(self):
        return CODE_RAN.append, ("a pickle was loaded",)


CODE_RAN: list[str] = []


def link_out(folder: Path) -> None:
    """Put a link to a file elsewhere in the place of a shard: the same bytes, but not this checkpoint's."""
    (folder / "rank1.bin").rename(folder.parent / "elsewhere.bin")
    (folder / "rank1.bin").symlink_to(folder.parent / "elsewhere.bin")


WRONG_CHECKPOINTS = [  # (what is wrong, how to make it so, what the message must say)
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
        "overlap at element 501",
    ),
    ("shard gone", lambda folder: (folder / "rank1.bin").unlink(), "rank1.bin: missing"),
    ("shard cut off", lambda folder: (folder / "rank1.bin").write_bytes(b"SHARD-80"), "rank1.bin: truncated"),
    ("one bit flipped", flip_a_bit, "rank1.bin: sha256 mismatch"),
    ("shards swapped, manifest mended", swap_shards, "rank0.bin: rank: expected 0, but the shard itself says 1"),
    ("a pickle, sha256 correct", plant_pickle, "rank1.bin: not a shard file"),
    ("shard is a link", link_out, "expected a plain file, found a link"),
]


def refused(call: Callable, folder: Path) -> str:
    """Return the message of the CheckpointError that `call` raises, without the folder; "" if it does not raise."""
    try:
        call()
    except CheckpointError as error:
        return str(error).replace(f"{folder}/", "")
    return ""


def refusals(claims: demo.Claims, parent: Path) -> None:
    """Every way of being wrong meets one kind of error, which says where and why."""
    states, rows, unclear = [make_demo_state(rank, 2) for rank in range(2)], [], []
    for i, (what, damage, expected) in enumerate(WRONG_CHECKPOINTS):
        folder = parent / f"wrong{i}" / "step_10"
        save_sharded(states, folder, 10, storage=CrashingStorage())
        damage(folder)
        rows.append((what, refused(lambda folder=folder: load_sharded(folder, 2), folder)))
        unclear += [] if expected in rows[-1][1] else [what]

    good, live = parent / "good", make_demo_state(0, 2)
    save_sharded(states, good, 10, storage=CrashingStorage())
    live["model"]["new.weight"] = live["model"].pop("norm.weight")
    for what, call, expected in [
        ("another world size", lambda: load_sharded(good, 4), "world_size mismatch: saved by 2 ranks"),
        ("other keys in the live model", lambda: load_into(live, states[0]), "unexpected key model/norm.weight"),
        ("save: step is -1", lambda: save_sharded(states, good, -1), "step:"),
        ("save: not data", lambda: save_sharded([{"f": {"g": print}}], good, 1), "f/g: cannot save a builtins.builtin"),
        ("save: no rank at all", lambda: save_sharded([], good, 1), "at least one rank"),
    ]:
        rows.append((what, refused(call, good)))
        unclear += [] if expected in rows[-1][1] else [what]
    demo.table(["what is wrong", "CheckpointError"], rows, "refused, before any live tensor or file is changed")
    claims.check(f"{len(rows)} ways of being wrong are refused, each by name", not unclear, ", ".join(unclear))
    claims.check("the pickle was not loaded: no code ran", not CODE_RAN)
    intact = byte_equal(load_sharded(good, 2)[1], states)
    claims.check("the good checkpoint is untouched by five failures", intact)


OLD, NEW = ([{"w": torch.full((6,), float(step + rank))} for rank in range(2)] for step in (10, 20))
SAVES = {  # (folder, step) of the checkpoint that is there already, (folder, step) of the save that dies
    "first save": (None, ("step_5", 5)),
    "later save": (("step_5", 5), ("step_10", 10)),
    "same step again": (("step_5", 5), ("step_5", 5)),
}


def save_and_die(parent: Path, before: tuple | None, save: tuple, storage: CrashingStorage) -> str:
    """Save on a disk that crashes, as `storage` says; return which checkpoint loads afterwards, bit for bit."""
    parent.mkdir(parents=True)
    if before:
        save_sharded(OLD, parent / before[0], before[1], storage=CrashingStorage())
    try:
        save_sharded(NEW, parent / save[0], save[1], storage=storage)
    except Crash:
        pass
    newest = latest_checkpoint(parent)
    loaded = None if newest is None else load_sharded(newest, 2)[1]
    return next(
        (name for name, was in {"none": None, "old": OLD, "new": NEW}.items() if byte_equal(was, loaded)), "wrong"
    )


def strays_after_next_save(folder: Path, step: int) -> set[str]:
    """Save once more, undisturbed; return the names in the folder that the manifest does not name."""
    manifest = save_sharded(NEW, folder, step, storage=CrashingStorage())
    return {path.name for path in folder.iterdir()} - {MANIFEST, *(shard.path for shard in manifest.shards)}


def crash_drill(claims: demo.Claims, parent: Path) -> None:
    """Die before, during and after every operation of three kinds of save; look what loads afterwards."""
    totals, strays = [], set()
    for kind, (before, save) in SAVES.items():
        rehearsal, timeline, outcomes = CrashingStorage(), [], []
        save_and_die(parent / kind / "rehearsal", before, save, rehearsal)
        for at, operation in enumerate(rehearsal.log):
            moments = ("before", "during", "after") if operation.startswith("write") else ("before", "after")
            found = [
                save_and_die(parent / kind / f"{at} {when}", before, save, CrashingStorage(at, when))
                for when in moments
            ]
            for when in moments:
                strays |= strays_after_next_save(parent / kind / f"{at} {when}" / save[0], save[1])
            outcomes += found
            timeline.append((at, re.sub(r"\.[0-9a-f]{32}", "", operation), found[0], found[-1]))
        totals.append((kind, len(rehearsal.log), *map(outcomes.count, ("none", "old", "new", "wrong"))))
    demo.table(["#", "operation", "crash before", "crash after"], timeline, f"{kind}, interrupted: what loads")
    demo.table(["save", "operations", "none loads", "old loads", "new loads", "wrong"], totals, "all crashes")
    right = [wrong == 0 and new > 0 and (none == 0 or kind == "first save") for kind, _, none, _, new, wrong in totals]
    claims.check("after every crash the newest complete checkpoint loads, bit for bit", all(right))
    claims.check("and the next save leaves no file behind", not strays, ", ".join(sorted(strays)))


def rotation(claims: demo.Claims, parent: Path) -> None:
    """Keep the last three by recorded step; what is not a complete checkpoint is not ours to count or delete."""
    for step in (9, 10, 11, 100, 101):
        save_sharded([{"w": torch.full((3,), float(step))}], parent / f"step_{step}", step, storage=CrashingStorage())
    (parent / "step_final").mkdir()  # someone's notes
    shutil.copytree(parent / "step_101", parent / "step_102")
    (parent / "step_102" / "rank0.bin").unlink()  # a save that never finished
    deleted = rotate_checkpoints(parent, keep_last=3)
    kept = sorted(path.name for path in parent.iterdir())
    demo.table(["deleted", "kept"], [(", ".join(deleted), ", ".join(kept))], "rotation, keep_last=3")
    right = deleted == ["step_9", "step_10"] and len(kept) == 5
    claims.check("rotation goes by step as a number; incomplete and foreign folders stay", right)
    claims.check("keep_last=0 is refused", "keep_last" in refused(lambda: rotate_checkpoints(parent, 0), parent))


def main() -> int:
    """Run the lesson; return the exit code."""
    parser = demo.parser("Lesson 80: sharded checkpoints that survive crashes and refuse everything else.")
    parser.add_argument("--mb", type=demo.positive, default=64, help="megabytes a rank for --bench (default: 64)")
    args = demo.parse(parser, lesson=80)
    claims = demo.Claims()
    with tempfile.TemporaryDirectory(prefix="lesson80-") as folder:
        round_trip(claims, Path(folder) / "round_trip", args.world_size, args.backend)
        refusals(claims, Path(folder) / "refusals")
        crash_drill(claims, Path(folder) / "drill")
        rotation(claims, Path(folder) / "rotation")
        if args.bench:
            bench_checkpoint.run(Path(folder), args.mb)
    return claims.verdict("LESSON 80: what was saved is what loads")


if __name__ == "__main__":
    sys.exit(main())
