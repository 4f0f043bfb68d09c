"""Lesson 80: checkpoints that survive. One file a rank, one rename that counts, and nothing loads that was not saved.

`python code/main.py` saves and loads on 4 processes, tries the ways of being wrong, dies at every file operation, saves
while training goes on, and loads on 3 processes what 4 have saved.
"""

import argparse
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
from asyncsave import AsyncSaver  # a copy now, the writing later
from checkpoint import load_shard, load_sharded, save_shard, save_sharded  # N ranks, N files, one rename
from comm import TorchComm  # 76: what a rank sees of the others
from crash_drill import SAVES, die_at, operations, rehearse  # dying at every operation
from damage import CODE_RAN, WRONG_CHECKPOINTS, flip_a_bit  # ways to be wrong
from demo_state import make_demo_state, tensor_bytes  # what is saved here
from endings import say_why  # 76: a line in the place of a traceback
from given_flags import allow_only  # 76: a flag that would do nothing is refused
from manifest import MANIFEST, CheckpointError, ShardManifest  # the file that makes N shards a checkpoint
from ranks import run_ranks, under_torchrun  # 76: one process a rank
from recheck import recheck  # the same bytes still? sha256, or a CRC
from reshard import check_plan, even_layout, make_plan  # what moves where when N becomes M
from reshard_load import load_resharded, load_resharded_all  # and moving it
from restore import load_into  # a loaded state into live tensors
from rotation import latest_checkpoint, rotate_checkpoints  # the newest, and deleting the oldest
from second_tier import copy_checkpoint  # another disk, a manifest of its own
from storage import CrashingStorage  # the disk, as a process sees it that will die

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "ShardManifest",
    "copy_checkpoint",
    "latest_checkpoint",
    "load_into",
    "load_resharded",
    "load_resharded_all",
    "load_shard",
    "load_sharded",
    "make_demo_state",
    "recheck",
    "rotate_checkpoints",
    "save_shard",
    "save_sharded",
]


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
    rows, predicted = [], []
    for s in manifest.shards:
        header = int.from_bytes((folder / s.path).read_bytes()[8:16], "little")
        predicted.append(16 + header + tensor_bytes(s.rank, world_size))
        held = f"[{s.layout[0]['start']}, {s.layout[0]['end']})"
        rows.append(
            (s.rank, s.path, held, tensor_bytes(s.rank, world_size), header, predicted[-1], s.size, s.sha256[:12])
        )
    columns = ["rank", "file", "flat range", "tensor bytes", "header", "predicted", "file bytes", "sha256"]
    demo.table(columns, rows, f"step {manifest.step}, saved by {world_size} processes")
    names = sorted(path.name for path in folder.iterdir())
    claims.check("each process loads the bytes it saved", all(equal for equal, _ in outcomes))
    claims.check("tied tensors come back tied", all(tied for _, tied in outcomes))
    claims.check("every file has the predicted size", predicted == [shard.size for shard in manifest.shards])
    one_process = all(byte_equal(state, make_demo_state(rank, world_size)) for rank, state in enumerate(states))
    claims.check("one process loads all of it", one_process)
    mapped = load_sharded(folder, world_size, mapped=True)[1]
    claims.check("and the same bits if the files are mapped instead of read", byte_equal(mapped, states))
    expected = sorted([MANIFEST, *(shard.path for shard in manifest.shards)])
    claims.check("a file a rank and the manifest, nothing else", names == expected)


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


def crash_drill(claims: demo.Claims, parent: Path) -> None:
    """Die before, during and after every operation of three kinds of save; look what loads afterwards."""
    totals, strays = [], set()
    for kind, (before, save) in SAVES.items():
        timeline, outcomes = [], []
        log = rehearse(parent / kind / "rehearsal", kind)
        for at, operation in enumerate(log):
            found, left = die_at(parent / kind, kind, at, operation)
            strays |= left
            outcomes += found
            timeline.append((at, operation, found[0], found[-1]))
        predicted = operations(2, new_folder=before != save, replaced=2 if before == save else 0)
        totals.append((kind, predicted, len(log), *map(outcomes.count, ("none", "old", "new", "wrong"))))
    demo.table(["#", "operation", "crash before", "crash after"], timeline, f"{kind}, interrupted: what loads")
    columns = ["save", "predicted", "operations", "none loads", "old loads", "new loads", "wrong"]
    demo.table(columns, totals, "all crashes")
    claims.check("each save takes the predicted number of operations", all(row[1] == row[2] for row in totals))
    right = [wrong == 0 and new > 0 and (none == 0 or kind == "first save") for kind, *_, none, _, new, wrong in totals]
    claims.check("after every crash the newest complete checkpoint loads, bit for bit", all(right))
    claims.check("and the next save leaves no file behind", not strays, ", ".join(sorted(strays)))


def save_while_training(rank: int, world_size: int, parent: str) -> list[bool]:
    """Save in the background three times, changing the state at once; say for each whether the right one loads."""
    comm, state = TorchComm(), {"w": torch.full((1000,), float(rank))}
    with AsyncSaver(comm) as saver:
        for step in range(1, 4):
            saver.save(state, f"{parent}/step_{step}", step)
            state["w"] += 10  # at once, while the copy is being written
            comm.all_reduce(torch.ones(1000, device=comm.device))  # training's own messages
    loaded = [load_shard(f"{parent}/step_{step}", comm)["w"] for step in range(1, 4)]
    return [bool((w == rank + 10 * i).all()) for i, w in enumerate(loaded)]


def asynchronous(claims: demo.Claims, parent: Path, world_size: int, backend: str) -> None:
    """A thread writes a copy while training changes the state and talks to the other ranks."""
    outcomes = run_ranks(save_while_training, world_size, str(parent), backend=backend)
    rows = [
        (rank, *("as at the call" if right else "changed" for right in of_rank))
        for rank, of_rank in enumerate(outcomes)
    ]
    demo.table(["rank", "step 1", "step 2", "step 3"], rows, "asynchronous saves: what the files hold")
    claims.check("an asynchronous save holds the state of its own call", all(map(all, outcomes)))


def load_on_fewer(rank: int, world_size: int, folder: str) -> dict:
    """Load a checkpoint of another number of ranks; the default cuts each unit evenly."""
    return load_resharded(folder, TorchComm(), per_rank=["random", "data/next_sample"])


def resharding(claims: demo.Claims, folder: Path, backend: str) -> None:
    """Saved by 4, loaded by 3 processes: a plan, and what it brings."""
    old, flat = [make_demo_state(rank, 4) for rank in range(4)], torch.arange(1003) / 1003
    save_sharded(old, folder, 10)
    saved, rows = [state["layout"] for state in old], []
    for rank in range(3):
        wanted = even_layout(saved, 3, rank)
        plan = make_plan(saved, wanted)
        check_plan(plan, saved, wanted)
        rows += [(rank, *move.row()) for move in plan]
    columns = ["new rank", "unit", "from rank", "its range", "to range", "elements"]
    demo.table(columns, rows, "4 ranks -> 3: what is read from where")
    new = run_ranks(load_on_fewer, 3, str(folder), backend=backend)
    parts = [torch.cat([state["optimizer"]["flat"][name] for state in new]) for name in ("master", "exp_avg_sq")]
    claims.check("at most N + M - 1 ranges are read", len(rows) <= 4 + 3 - 1, f"{len(rows)} of {4 + 3 - 1}")
    claims.check("the concatenation is identical", all(map(byte_equal, parts, (flat, flat**2))))
    alike = [byte_equal(state["model"], old[0]["model"]) for state in new]
    claims.check("what all ranks hold alike is there once, and equal", all(alike))
    differs = refused(lambda: load_resharded_all(folder, 3), folder)
    claims.check("what differs between ranks is named", "data/next_sample" in differs and "random/torch" in differs)


def second_look(claims: demo.Claims, parent: Path) -> None:
    """A copy on a second tier, with a manifest of its own, and a CRC that finds a flipped bit."""
    near, far = parent / "near" / "step_10", parent / "far" / "step_10"
    save_sharded([make_demo_state(rank, 2) for rank in range(2)], near, 10)
    manifest = copy_checkpoint(near, far)
    shutil.rmtree(near)
    states = load_sharded(far, 2)[1]
    good = [problem for _, problem in recheck(far, fast=True)]
    flip_a_bit(far)
    bad = [problem.replace(f"{far}/", "") for _, problem in recheck(far, fast=True)]
    rows = [(shard.rank, shard.path, shard.crc32, bad[shard.rank] or "ok") for shard in manifest.shards]
    demo.table(["rank", "file", "crc32", "after a bit was flipped"], rows, "second tier, verified again by CRC-32")
    claims.check("the second tier loads when the first is gone", byte_equal(states[1], make_demo_state(1, 2)))
    claims.check("a CRC finds one flipped bit", good == ["", ""] and not bad[0] and "crc32 mismatch" in bad[1])


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
    """Do what the command line says; return the exit code."""
    parser = demo.parser("Lesson 80: sharded checkpoints that survive crashes and refuse everything else.")
    parser.add_argument("--mb", type=demo.positive, default=200, help="megabytes a rank for --bench (default: 200)")
    args = demo.parse(parser, lesson=80)
    if under_torchrun():
        parser.error("this lesson starts ranks of its own; torchrun is for 77, 78, 79 and 81")
    used = "world_size backend out" + " bench mb" * args.bench
    allow_only(parser, "this lesson" if args.bench else "this lesson without --bench", used)
    return say_why(lambda: tell(args), CheckpointError)


def tell(args: argparse.Namespace) -> int:
    """Tell the story, a claim after the other; return the exit code."""
    claims, kept = demo.Claims(), demo.out_dir(args) / "round_trip"
    with tempfile.TemporaryDirectory(prefix="lesson80-") as folder:
        round_trip(claims, Path(folder) / "round_trip", args.world_size, args.backend)
        copy_checkpoint(Path(folder) / "round_trip", kept)
        demo.say(f"      to look at: {kept}")
        refusals(claims, Path(folder) / "refusals")
        crash_drill(claims, Path(folder) / "drill")
        rotation(claims, Path(folder) / "rotation")
        asynchronous(claims, Path(folder) / "asynchronous", args.world_size, args.backend)
        resharding(claims, Path(folder) / "resharding", args.backend)
        second_look(claims, Path(folder) / "second_look")
        if args.bench:
            bench_checkpoint.run(claims, Path(folder), args.mb)
    return claims.verdict("LESSON 80: what was saved is what loads")


if __name__ == "__main__":
    sys.exit(main())
