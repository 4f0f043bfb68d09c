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
import hashlib
import re
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from manifest import (
    MANIFEST,
    SHARD_NAME,
    CheckpointError,
    Shard,
    ShardManifest,
    check_coverage,
    check_integer,
    check_seconds,
    read_manifest,
)
from shardfile import PackedState, read_shard, write_shard
from storage import DISK, Storage

DELETED = "manifest.deleted"  # what rotation renames a manifest to, before it deletes the shards
OURS = re.compile(rf"{SHARD_NAME.pattern}|{re.escape(MANIFEST)}\.[0-9a-f]{{32}}\.tmp|{re.escape(DELETED)}")


def save_shard(state, dest_dir, step, comm=None, *, wall_clock_seconds=0.0, storage: Storage = DISK) -> ShardManifest:
    """Save the state of this rank; all ranks call it together. `dest_dir` is one folder that every rank can see.

    Returns once the checkpoint is on disk, complete. Raises the same CheckpointError on every rank, naming the rank and
    the cause, if any rank fails; then what was in the folder before is still there and still loads. The manifest
    records rank 0's `wall_clock_seconds`.
    """
    comm = comm or _default_comm()
    team = _Team(comm.world_size, [comm.rank], comm.agree)
    return _save({comm.rank: state}, dest_dir, step, wall_clock_seconds, team, storage)


def load_shard(src_dir, comm=None, *, storage: Storage = DISK):
    """Return the state of this rank, as new CPU tensors; all ranks call it together.

    Raises the same CheckpointError on every rank if any rank's file, or the manifest, is not exactly what was saved.
    """
    comm = comm or _default_comm()
    return _load(src_dir, _Team(comm.world_size, [comm.rank], comm.agree), storage)[1][comm.rank]


def save_sharded(per_rank_state, dest_dir, step, wall_clock_seconds=0.0, *, storage: Storage = DISK) -> ShardManifest:
    """Save all ranks' states (`per_rank_state[r]` is rank r's) from one process, as N calls of `save_shard` would."""
    if not isinstance(per_rank_state, list | tuple) or not per_rank_state:
        raise CheckpointError("per_rank_state: expected a list of states, one a rank, with at least one rank")
    team = _Team.of_one_process(len(per_rank_state))
    return _save(dict(enumerate(per_rank_state)), dest_dir, step, wall_clock_seconds, team, storage)


def load_sharded(src_dir, expected_world_size, *, storage: Storage = DISK) -> tuple[ShardManifest, list]:
    """Return (manifest, [state of each rank]): all ranks' states in one process, as N calls of `load_shard` would."""
    check_integer("expected_world_size", expected_world_size, least=1)
    manifest, states = _load(src_dir, _Team.of_one_process(expected_world_size), storage)
    return manifest, [states[rank] for rank in range(expected_world_size)]


@dataclass
class _Team:
    """The ranks of one save or load, and which of them live in this process: one of N, or all."""

    world_size: int
    ranks: list[int]
    agree: Callable[[list], list]

    @classmethod
    def of_one_process(cls, world_size: int) -> "_Team":
        return cls(world_size, list(range(world_size)), lambda facts: [facts])

    def together(self, work: Callable[[int], object]) -> list:
        """Run `work(rank)` on every rank. Returns all results (small JSON values), on every rank, in rank order.

        If it raises on any rank, every rank raises the same CheckpointError. This is also a barrier.
        """
        facts, cause = [], None
        for rank in self.ranks:
            try:
                facts.append([rank, True, work(rank)])
            except Exception as error:
                cause = error
                facts.append([rank, False, _describe(error)])
        everyone = sorted(fact for of_process in self.agree(facts) for fact in of_process)
        failed = {}  # message -> the ranks that failed with it
        for rank, ok, value in everyone:
            if not ok:
                failed.setdefault(value, []).append(rank)
        if len(failed) == 1 and len(*failed.values()) == self.world_size:
            raise CheckpointError(*failed) from cause
        if failed:
            parts = [f"rank {', '.join(map(str, ranks))} failed: {message}" for message, ranks in failed.items()]
            raise CheckpointError("; ".join(parts)) from cause
        return [value for _, _, value in everyone]

    def on_rank_0(self, work: Callable[[], object]):
        """Run `work` on rank 0; return its result on every rank."""
        return self.together(lambda rank: work() if rank == 0 else None)[0]


def _save(states: dict, dest_dir, step, wall_clock_seconds, team: _Team, storage: Storage) -> ShardManifest:
    folder, packed = Path(dest_dir), {}

    def prepare(rank):
        check_integer("step", step)
        check_seconds("wall_clock_seconds", wall_clock_seconds)
        packed[rank] = PackedState(states[rank], rank, team.world_size, step)
        return {"step": step, "seconds": float(wall_clock_seconds), "layout": packed[rank].layout}

    facts = team.together(prepare)
    steps = [fact["step"] for fact in facts]
    if len(set(steps)) > 1:
        raise CheckpointError(f"step: the ranks disagree: {steps}")
    check_coverage([fact["layout"] for fact in facts])

    with contextlib.ExitStack() as lock:  # held by rank 0 until the save is over

        def open_folder():
            storage.make_folder(folder)
            lock.enter_context(storage.lock(folder))
            _sweep(folder, storage)
            return _next_generation(folder, storage)

        generation = team.on_rank_0(open_folder)
        suffix = f".g{generation}" if generation else ""

        def write(rank):
            return asdict(write_shard(packed[rank], rank, folder / f"rank{rank}{suffix}.bin", storage))

        temporary = folder / f"{MANIFEST}.{uuid.uuid4().hex}.tmp"
        try:
            shards = [Shard(**shard) for shard in team.together(write)]
            manifest = ShardManifest(step, team.world_size, facts[0]["seconds"], shards)
            team.on_rank_0(lambda: _write_manifest(manifest, temporary, storage))
        except CheckpointError:
            if 0 in team.ranks:
                with contextlib.suppress(OSError):
                    _sweep(folder, storage)
            raise
        team.on_rank_0(lambda: _publish(temporary, folder, storage))
    return manifest


def _write_manifest(manifest: ShardManifest, path: Path, storage: Storage) -> None:
    try:
        manifest.check_files(path.parent, storage)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Do all ranks write into one shared folder?") from None
    with storage.create(path) as file:
        storage.write(file, manifest.to_json().encode())
        storage.fsync(file)


def _publish(temporary: Path, folder: Path, storage: Storage) -> None:
    try:
        storage.rename(temporary, folder / MANIFEST)
    except OSError:
        if storage.kind(temporary)[0] != "missing":  # not renamed, so nothing was published
            _sweep(folder, storage)
        raise
    storage.fsync_folder(folder)  # if this fails, keep both: which one survives a power cut is not known
    _sweep(folder, storage)  # the files of the checkpoint that this one replaces


def _sweep(folder: Path, storage: Storage) -> None:
    """Delete the files of ours that the folder's manifest does not name. A file that cannot be deleted can stay."""
    named = set()
    if storage.kind(folder / MANIFEST)[0] != "missing":
        try:
            named = {shard.path for shard in read_manifest(folder, storage).shards}
        except CheckpointError:
            return  # damaged: a person may still save the shards it named
    for name in storage.names(folder):
        if OURS.fullmatch(name) and name not in named:
            with contextlib.suppress(OSError):
                storage.delete(folder / name)


def _next_generation(folder: Path, storage: Storage) -> int:
    taken = [int(match[2] or 0) for match in map(SHARD_NAME.fullmatch, storage.names(folder)) if match]
    return max(taken) + 1 if taken else 0


def _load(src_dir, team: _Team, storage: Storage) -> tuple[ShardManifest, dict]:
    folder, states = Path(src_dir), {}
    read = functools.cache(lambda: read_manifest(folder, storage))

    def check(rank):
        if read().world_size != team.world_size:
            sizes = f"saved by {read().world_size} ranks, to be loaded by {team.world_size}"
            raise CheckpointError(f"{folder / MANIFEST}: world_size mismatch: {sizes}")
        read().check_files(folder, storage, [rank])
        return hashlib.sha256(read().to_json().encode()).hexdigest()

    if len(set(team.together(check))) > 1:
        raise CheckpointError(f"{folder}: the ranks read different manifests: not one folder, or saved again meanwhile")

    def read_one(rank):
        states[rank] = read_shard(folder, rank, read(), storage)

    team.together(read_one)
    return read(), states


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _default_comm():
    from comm import TorchComm

    return TorchComm()
