"""A second copy of a checkpoint on another disk: verified while it is copied, with a manifest of its own, written last.

The first tier is fast and near, and goes with its machine; the second is slow and stays. A checkpoint is on the second
tier when the manifest there says so, and not before: the copy is a save like any other, interrupted like any other.
"""

import contextlib
import hashlib
import uuid
import zlib
from dataclasses import replace
from pathlib import Path

from manifest import MANIFEST, CheckpointError, Shard, ShardManifest, read_manifest
from packed import BLOCK
from publish import opened, rename_manifest, sweep, write_manifest
from storage import DISK, Storage


def copy_checkpoint(src_dir, dest_dir, *, storage: Storage = DISK) -> ShardManifest:
    """Copy a complete checkpoint; return the copy's manifest, which also records a CRC-32 of each file.

    One process calls it, after the save has returned. A copy that is there already is left as it is. Raises
    CheckpointError, and publishes nothing, if a file is not the one that was saved; with the path, if both are the
    same folder; with the path and what the system says, if the disk fails.
    """
    source, target = Path(src_dir), Path(dest_dir)
    if source.resolve() == target.resolve():
        raise CheckpointError(f"{target}: the second tier must be another folder than the first")
    manifest = read_manifest(source, storage)
    try:
        manifest.check_files(source, storage)
        with opened(target, storage) as suffix:  # this also sweeps what a copy that died has left
            if (there := _copy_already_there(manifest, target, storage)) is not None:
                return there
            temporary = target / f"{MANIFEST}.{uuid.uuid4().hex}.tmp"
            try:
                shards = [
                    _copy(source, shard, target / f"rank{shard.rank}{suffix}", storage) for shard in manifest.shards
                ]
                copied = replace(manifest, shards=shards)
                write_manifest(copied, temporary, storage)
            except (CheckpointError, OSError):
                with contextlib.suppress(OSError):
                    sweep(target, storage)
                raise
            rename_manifest(temporary, target, storage)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return copied


def _copy(source: Path, shard: Shard, path: Path, storage: Storage) -> Shard:
    """Copy one file; return its entry in the copy's manifest."""
    digest, crc, spare = hashlib.sha256(), 0, memoryview(bytearray(BLOCK))
    with storage.open(source / shard.path) as original, storage.create(path) as file:
        while count := storage.read_into(original, spare):
            block = spare[:count]
            storage.write(file, block)
            digest.update(block)
            crc = zlib.crc32(block, crc)
        if digest.hexdigest() != shard.sha256:
            raise CheckpointError(f"{source / shard.path}: sha256 mismatch: it is not copied")
        storage.fsync(file)
    storage.fsync_folder(path.parent)
    return replace(shard, path=path.name, crc32=f"{crc:08x}")


def _copy_already_there(manifest: ShardManifest, target: Path, storage: Storage) -> ShardManifest | None:
    try:
        there = read_manifest(target, storage)
        there.check_files(target, storage)
    except CheckpointError:
        return None
    hashes = [[shard.sha256 for shard in each.shards] for each in (manifest, there)]
    return there if hashes[0] == hashes[1] and there.step == manifest.step else None
