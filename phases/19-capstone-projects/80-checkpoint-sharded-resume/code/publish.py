"""Publishing: the files of a save are written beside those of the old checkpoint, and one rename replaces it.

What counts is what the manifest in the folder names. Everything else of ours in the folder is left over from a save
that died, or from a checkpoint that was replaced, and is swept away.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from manifest import MANIFEST, SHARD_NAME, CheckpointError, ShardManifest, read_manifest
from storage import Storage

DELETED = "manifest.deleted"  # what rotation renames a manifest to, before it deletes the shards
OURS = re.compile(rf"{SHARD_NAME.pattern}|{re.escape(MANIFEST)}\.[0-9a-f]{{32}}\.tmp|{re.escape(DELETED)}")


@contextlib.contextmanager
def opened(folder: Path, storage: Storage) -> Iterator[str]:
    """Make, lock and sweep a folder; give the suffix of the names that new shard files may take in it."""
    storage.make_folder(folder)
    with storage.lock(folder):
        if storage.kind(folder / MANIFEST)[0] == "folder":  # nothing can take its place, so nothing is written
            raise CheckpointError(f"{folder / MANIFEST}: a folder is in the place of the manifest")
        sweep(folder, storage)
        taken = [int(match[2] or 0) for match in map(SHARD_NAME.fullmatch, storage.names(folder)) if match]
        yield f".g{max(taken) + 1}.bin" if taken else ".bin"


def write_manifest(manifest: ShardManifest, path: Path, storage: Storage) -> None:
    """Write a manifest under a temporary name, durably, if the files that it names are all here."""
    try:
        manifest.check_files(path.parent, storage)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Do all ranks write into one shared folder?") from None
    with storage.create(path) as file:
        storage.write(file, manifest.to_json().encode())
        storage.fsync(file)


def rename_manifest(temporary: Path, folder: Path, storage: Storage) -> None:
    """Publish: from this rename on, and not before, the new checkpoint exists."""
    try:
        storage.rename(temporary, folder / MANIFEST)
    except OSError:
        if storage.kind(temporary)[0] != "missing":  # not renamed, so nothing was published
            sweep(folder, storage)
        raise
    storage.fsync_folder(folder)  # if this fails, keep both: which one survives a power cut is not known
    sweep(folder, storage)  # the files of the checkpoint that this one replaces


def sweep(folder: Path, storage: Storage) -> None:
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
