"""Which checkpoints of a folder are complete, which is the newest, and deleting the old ones.

Order is that of the recorded step, as a number: not of names ("step_9" > "step_10") and not of file times (a copy or a
restored backup has new ones). Folders without a complete checkpoint are somebody else's: they do not count and stay.
"""

from pathlib import Path

from manifest import MANIFEST, CheckpointError, read_manifest
from publish import DELETED, OURS
from storage import DISK, Storage


def complete_checkpoints(parent_dir, *, storage: Storage = DISK) -> list[tuple[int, Path]]:
    """Return (step, folder) of each complete checkpoint directly in `parent_dir`, by step. Links are not followed."""
    found = []
    for folder in _folders(parent_dir, storage):
        try:
            manifest = read_manifest(folder, storage)
            manifest.check_files(folder, storage)
        except (CheckpointError, OSError):
            continue
        found.append((manifest.step, folder))
    return sorted(found)


def latest_checkpoint(parent_dir, *, storage: Storage = DISK) -> Path | None:
    """Return the folder of the complete checkpoint with the highest step; None if there is none.

    Raises CheckpointError if `parent_dir` itself cannot be read: a typing error must not look like a fresh start.
    """
    found = complete_checkpoints(parent_dir, storage=storage)
    return found[-1][1] if found else None


def rotate_checkpoints(parent_dir, keep_last: int = 5, *, just_saved=None, storage: Storage = DISK) -> list[str]:
    """Delete all but the `keep_last` newest complete checkpoints; return the names of those deleted, oldest first.

    One process calls it, after a save has returned. `just_saved` is a folder that stays whatever its step: after a roll
    back, the newest save is not the one with the highest step. If some cannot be deleted, the others still are, and
    a CheckpointError says which were not, and why, and which were. Another one names the value of `keep_last` if
    that is no whole number of at least 1.
    """
    if type(keep_last) is not int or keep_last < 1:
        raise CheckpointError(f"keep_last: expected a whole number of at least 1, found {keep_last!r}")
    spared = None if just_saved is None else Path(just_saved).resolve()
    old = [folder for _, folder in complete_checkpoints(parent_dir, storage=storage)[:-keep_last]]
    halfway = [folder for folder in _folders(parent_dir, storage) if _is_half_deleted(folder, storage)]
    deleted, failed = [], []
    for folder in [*halfway, *(folder for folder in old if folder.resolve() != spared)]:
        try:
            _delete(folder, storage)
            deleted.append(folder.name)
        except OSError as error:
            failed.append(f"{error.filename}: {error.strerror}")
    if failed:
        raise CheckpointError(f"could not delete {'; '.join(failed)} (deleted: {', '.join(deleted) or 'none'})")
    return deleted


def _delete(folder: Path, storage: Storage) -> None:
    """Take the manifest away first, in one rename: at no moment is there a checkpoint that only looks complete."""
    with storage.lock(folder):
        if storage.kind(folder / MANIFEST)[0] == "file":
            storage.rename(folder / MANIFEST, folder / DELETED)
            storage.fsync_folder(folder)
        ours = [name for name in storage.names(folder) if OURS.fullmatch(name)]
        for name in sorted(ours, key=lambda name: name == DELETED):  # last: until then a later rotation can go on
            storage.delete(folder / name)
        if not storage.names(folder):  # files that are not ours stay, and with them the folder
            storage.remove_folder(folder)
    storage.fsync_folder(folder.parent)


def _is_half_deleted(folder: Path, storage: Storage) -> bool:
    try:
        return storage.kind(folder / DELETED)[0] == "file" and storage.kind(folder / MANIFEST)[0] == "missing"
    except OSError:  # somebody else's, who does not let us look
        return False


def _folders(parent_dir, storage: Storage) -> list[Path]:
    parent = Path(parent_dir)
    try:
        return [parent / name for name in storage.names(parent) if storage.kind(parent / name)[0] == "folder"]
    except OSError as error:
        raise CheckpointError(f"{parent}: {error.strerror}") from error
