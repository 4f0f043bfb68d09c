"""Dying at every file operation of three kinds of save, and what loads afterwards."""

import re
from pathlib import Path

import torch
from checkpoint import load_sharded, save_sharded
from manifest import MANIFEST
from packed import in_place
from restore import tensors_of
from rotation import latest_checkpoint
from storage import Crash, CrashingStorage

OLD, NEW = ([{"w": torch.full((6,), float(step + rank))} for rank in range(2)] for step in (10, 20))
WRITES = 2  # a shard of theirs is a header and one tensor
SAVES = {  # (folder, step) of the checkpoint that is there already, (folder, step) of the save that dies
    "first save": (None, ("step_5", 5)),
    "later save": (("step_5", 5), ("step_10", 10)),
    "same step again": (("step_5", 5), ("step_5", 5)),
}


def operations(ranks: int, new_folder: bool, replaced: int) -> int:
    """Predict what a save does to the disk: create, writes and two fsyncs a rank; five for the manifest; the rest."""
    return ranks * (WRITES + 3) + 5 + (2 if new_folder else 0) + replaced


def rehearse(parent: Path, kind: str) -> list[str]:
    """Return the operations of a save of this kind that nothing interrupts."""
    disk = CrashingStorage()
    save_and_die(parent, kind, disk)
    return [re.sub(r"\.[0-9a-f]{32}", "", operation) for operation in disk.log]


def die_at(parent: Path, kind: str, at: int, operation: str) -> tuple[list[str], set[str]]:
    """Die before, during (a write) and after an operation; return what loads each time, and what stays for ever."""
    found, strays = [], set()
    for when in ("before", "during", "after") if operation.startswith("write") else ("before", "after"):
        folder = parent / f"{at} {when}"
        found.append(save_and_die(folder, kind, CrashingStorage(at, when)))
        strays |= strays_after_next_save(folder / SAVES[kind][1][0], SAVES[kind][1][1])
    return found, strays


def save_and_die(parent: Path, kind: str, storage: CrashingStorage) -> str:
    """Save on a disk that crashes, as `storage` says; return which checkpoint loads afterwards, bit for bit."""
    before, save = SAVES[kind]
    parent.mkdir(parents=True)
    if before:
        save_sharded(OLD, parent / before[0], before[1], storage=CrashingStorage())
    try:
        save_sharded(NEW, parent / save[0], save[1], storage=storage)
    except Crash:
        pass
    newest = latest_checkpoint(parent)
    if newest is None:
        return "none"
    loaded = load_sharded(newest, 2)[1]
    return next((name for name, was in {"old": OLD, "new": NEW}.items() if _bits(was) == _bits(loaded)), "wrong")


def strays_after_next_save(folder: Path, step: int) -> set[str]:
    """Save once more, undisturbed; return the names in the folder that the manifest does not name."""
    manifest = save_sharded(NEW, folder, step, storage=CrashingStorage())
    return {path.name for path in folder.iterdir()} - {MANIFEST, *(shard.path for shard in manifest.shards)}


def _bits(states: list[dict]) -> list:
    return [(path, tensor.dtype, tensor.shape, bytes(in_place(tensor))) for path, tensor in tensors_of(states)]
