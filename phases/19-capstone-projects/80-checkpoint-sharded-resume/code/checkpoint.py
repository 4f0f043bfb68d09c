"""Saving and loading a sharded checkpoint: N ranks write N files, one rename makes them a checkpoint.

A save, each line a step that all ranks finish, or none gets past it:

    1. every rank takes its state apart              nothing is written before every state is known to be good
    2. rank 0 makes and locks the folder             and sweeps what an interrupted save has left there
    3. every rank writes its file, fsync             under a name that no manifest names yet
    4. rank 0 writes the manifest, fsync             under a temporary name
    5. rank 0 renames it, fsync the folder           from here on, and not before, the checkpoint exists
"""

import contextlib
import functools
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from manifest import (
    MANIFEST,
    CheckpointError,
    Shard,
    ShardManifest,
    check_coverage,
    check_integer,
    check_one_manifest,
    check_seconds,
    read_manifest,
)
from mapped import MappedReader
from packed import PackedState, in_place
from publish import opened, rename_manifest, sweep, write_manifest
from shardfile import ShardReader, write_shard
from storage import DISK, Storage
from team import Team


def save_shard(
    state, dest_dir, step, comm=None, *, wall_clock_seconds=0.0, crc32: bool = False, storage: Storage = DISK
) -> ShardManifest:
    """Save the state of this rank; all ranks call it together. `dest_dir` is one folder that every rank can see.

    Returns once the checkpoint is on disk, complete. Raises the same CheckpointError on every rank, naming the rank and
    the cause, if any rank fails; then what was in the folder before is still there and still loads. (One failure comes
    later than that: if the folder cannot be fsynced after the rename, the new checkpoint is there, whole, but may not
    survive a power cut.) The manifest records rank 0's `wall_clock_seconds` and, with `crc32`, a CRC-32 of each file.
    """
    team = Team.of_comm(comm)
    save = Save(dest_dir, step, wall_clock_seconds, team, storage, crc32)
    save.pack({team.ranks[0]: state})
    return save.publish()


def load_shard(src_dir, comm=None, *, into=None, mapped: bool = False, storage: Storage = DISK):
    """Return the state of this rank, as new CPU tensors; all ranks call it together.

    With `into`, a live state of the same structure (see `restore.load_into`), the bytes are read straight into its
    tensors, other values are replaced, and it is returned: no second copy, and no new memory to be had page by page.

    With `mapped`, which excludes `into`, the new tensors are the pages of the file itself, hashed where they are and
    not copied. They may be changed, the file never is. But the file must not be changed in place, nor the disk fail,
    while they live: mapped.py says what one gains and what one gives up. Each rank may choose for itself.

    Raises the same CheckpointError on every rank if any rank's file, or the manifest, is not exactly what was saved, or
    does not fit `into` (names, shapes and dtypes, all differences listed). Nothing live changes until every rank's
    header has been found to fit its `into`. Damage that leaves the header in order shows only when all bytes have been
    read, and then `into` must be loaded from another checkpoint.
    """
    team = Team.of_comm(comm)
    return _load(src_dir, team, storage, into, mapped)[1][team.ranks[0]]


def save_sharded(
    per_rank_state, dest_dir, step, wall_clock_seconds=0.0, *, crc32: bool = False, storage: Storage = DISK
) -> ShardManifest:
    """Save all ranks' states (`per_rank_state[r]` is rank r's) from one process, as N calls of `save_shard` would."""
    if not isinstance(per_rank_state, list | tuple) or not per_rank_state:
        raise CheckpointError("per_rank_state: expected a list of states, one a rank, with at least one rank")
    team = Team.of_one_process(len(per_rank_state))
    save = Save(dest_dir, step, wall_clock_seconds, team, storage, crc32)
    save.pack(dict(enumerate(per_rank_state)))
    return save.publish()


def load_sharded(
    src_dir, expected_world_size, *, mapped: bool = False, storage: Storage = DISK
) -> tuple[ShardManifest, list]:
    """Return (manifest, [state of each rank]): all ranks' states in one process, as N calls of `load_shard` would."""
    check_integer("expected_world_size", expected_world_size, least=1)
    manifest, states = _load(src_dir, Team.of_one_process(expected_world_size), storage, mapped=mapped)
    return manifest, [states[rank] for rank in range(expected_world_size)]


class Save:
    """One save: `pack` is step 1 of the five, `publish` the others. An asynchronous save has a thread do `publish`."""

    def __init__(self, dest_dir, step, wall_clock_seconds, team: Team, storage: Storage = DISK, crc32: bool = False):
        self.folder, self.step, self.seconds = Path(dest_dir), step, wall_clock_seconds
        self.team, self.storage, self.crc32 = team, storage, crc32

    def pack(self, states: dict, keep: Callable = in_place) -> None:
        """Take the ranks' states apart, and see that they fit together. `keep` (see `PackedState`) may copy them."""
        self.packed = {}

        def prepare(rank):
            check_integer("step", self.step)
            check_seconds("wall_clock_seconds", self.seconds)
            self.packed[rank] = PackedState(states[rank], rank, self.team.world_size, self.step, keep)
            return {"step": self.step, "seconds": float(self.seconds), "layout": self.packed[rank].layout}

        facts = self.team.together(prepare)
        steps = [fact["step"] for fact in facts]
        if len(set(steps)) > 1:
            raise CheckpointError(f"step: the ranks disagree: {steps}")
        check_coverage([fact["layout"] for fact in facts])
        self.seconds = facts[0]["seconds"]

    def publish(self) -> ShardManifest:
        """Write every rank's file, then the manifest; rename it."""
        folder, storage, team = self.folder, self.storage, self.team
        with contextlib.ExitStack() as lock:  # held by rank 0 until the save is over
            suffix = team.on_rank_0(lambda: lock.enter_context(opened(folder, storage)))

            def write(rank):
                path = folder / f"rank{rank}{suffix}"
                return asdict(write_shard(self.packed[rank], rank, path, storage, self.crc32))

            temporary = folder / f"{MANIFEST}.{uuid.uuid4().hex}.tmp"
            try:
                shards = [Shard(**shard) for shard in team.together(write)]
                manifest = ShardManifest(self.step, team.world_size, self.seconds, shards)
                team.on_rank_0(lambda: write_manifest(manifest, temporary, storage))
            except CheckpointError:
                if 0 in team.ranks:
                    with contextlib.suppress(OSError):
                        sweep(folder, storage)
                raise
            team.on_rank_0(lambda: rename_manifest(temporary, folder, storage))
        return manifest


def _load(src_dir, team: Team, storage: Storage, into=None, mapped=False) -> tuple[ShardManifest, dict]:
    folder, manifest = Path(src_dir), functools.cache(lambda: read_manifest(Path(src_dir), storage))
    reader = MappedReader if mapped else ShardReader

    def check(rank):
        if mapped and into is not None:
            raise CheckpointError("into, mapped: only one of them: live tensors are filled by a copy, pages are not")
        if manifest().world_size != team.world_size:
            sizes = f"saved by {manifest().world_size} ranks, to be loaded by {team.world_size} (see load_resharded)"
            raise CheckpointError(f"{folder / MANIFEST}: world_size mismatch: {sizes}")
        manifest().check_files(folder, storage, [rank])
        return [manifest().digest(), str(folder), into is not None]

    facts = team.together(check)
    digests, folders, with_into = zip(*facts, strict=True)
    check_one_manifest(digests, folders)
    if len(set(with_into)) > 1:
        raise CheckpointError(f"into: given on some ranks only: {list(with_into)}")
    with contextlib.ExitStack() as files:

        def open_one(rank):
            return files.enter_context(reader(folder, rank, manifest(), storage)).open(into)

        if into is not None:  # nothing live may change before every rank's header has been found to fit
            readers = {}
            team.together(lambda rank: readers.update({rank: open_one(rank)}))
            open_one = readers.get
        states = {}
        try:
            team.together(lambda rank: states.update({rank: open_one(rank).fill()}))
        except BaseException:
            states.clear()  # the traceback keeps this frame, and it would keep the other ranks' files mapped
            raise
    return manifest(), states
