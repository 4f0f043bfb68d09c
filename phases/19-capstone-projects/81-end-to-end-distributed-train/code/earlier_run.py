"""What an operated run finds in its folder: it is kept, unless it is to be deleted and a run has written it.

checkpoints/step_<n>/  the files of lesson 80's checkpoints
metrics.jsonl          lines that `read_metrics` can read
tensorboard/           event files
"""

import re
from contextlib import suppress
from pathlib import Path

from manifest import MANIFEST, CheckpointError  # 80
from metrics import read_metrics
from publish import OURS  # 80: the other names in a checkpoint's folder
from saving import alone_in
from storage import DISK  # 80
from team import Team  # 80

METRICS, TENSORBOARD, CHECKPOINTS = "metrics.jsonl", "tensorboard", "checkpoints"
NAMES = {  # of files, by those of the folders that they are in
    f"{TENSORBOARD}": re.compile(r"events\.out\.tfevents\.\d{10}\..*", re.ASCII),
    rf"{CHECKPOINTS}/step_\d+": re.compile(rf"{re.escape(MANIFEST)}|{OURS.pattern}"),
}


def make_room(folder: Path, resume: bool, fresh: bool) -> bool:
    """See that a run can begin in `folder`, or go on (`resume`); delete what runs have left (`fresh`), and say if so.

    Raises ValueError, with nothing changed, if there is a run and neither was asked for, or if the metrics are none.
    Raises CheckpointError if a run is going on there, or something cannot be deleted.
    """
    check_metrics(folder / METRICS)
    files = written(folder)
    if resume or not files:
        return False
    if not fresh:
        raise ValueError(f"{folder}: an earlier run is here: --resume auto goes on with it, --fresh deletes it")
    with alone_in(folder / CHECKPOINTS, Team.of_one_process(1)):
        delete(written(folder), folder)
    return True


def written(folder: Path) -> list[Path]:
    """Return the files that runs have written in `folder`, and no others."""
    found = [folder / METRICS] if DISK.kind(folder / METRICS)[0] == "file" else []
    for path in [*folder.glob(f"{TENSORBOARD}/*"), *folder.glob(f"{CHECKPOINTS}/*/*")]:
        where = path.parent.relative_to(folder).as_posix()
        is_ours = any(re.fullmatch(each, where, re.ASCII) and name.fullmatch(path.name) for each, name in NAMES.items())
        if is_ours and [DISK.kind(each)[0] for each in (path, path.parent)] == ["file", "folder"]:  # and no links
            found.append(path)
    return sorted(found)


def check_metrics(path: Path) -> None:
    """Raise ValueError, naming file and line, if there is something that does not hold metrics."""
    if path.is_file():
        read_metrics(path)
    elif DISK.kind(path)[0] != "missing":
        raise ValueError(f"{path}: expected a file of metrics, found something else")


def delete(files: list[Path], folder: Path) -> None:
    """Delete files, and the folders they were in, up to `folder`, where nothing else is left in them."""
    try:
        for path in files:
            path.unlink()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: an earlier run cannot be deleted: {error.strerror}") from None
    folders = {parent for path in files for parent in path.parents if folder in (parent, *parent.parents)}
    for each in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):  # something of somebody else's is in it
            each.rmdir()
