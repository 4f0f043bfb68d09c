"""Reading a checkpoint of any number of ranks: refuse first, change later.

It is lesson 80's `load_resharded` that reads: each rank gets the elements that it needs, whoever held them. But first
the ranks look whose checkpoint it is: of another job nothing would fit, and the reason is in its settings.
"""

from collections.abc import Callable
from pathlib import Path

from manifest import CheckpointError, read_manifest
from memory import check_whole
from reshard_load import load_resharded
from shardfile import ShardReader
from storage import DISK
from team import Team


FLAGS = ("rows", "seed")  # of main.py, that set what a job has under the same name


def read_checkpoint(folder: Path | str, comm, check_owner: Callable[[dict], str], layout: list[dict]) -> dict:
    """Return what this rank needs of a checkpoint; all ranks call it. "random" becomes the list of all that saved one.

    `check_owner` is given the "job" of the saved state, and says what is wrong with it, if anything. `layout` (see
    lesson 80) says which elements this rank wants. Raises the same CheckpointError on every rank if the checkpoint is
    another's, damaged, or none at all.
    """

    def look() -> str | None:
        job = saved_job(folder)
        try:
            return check_owner(job)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"saved by another training loop, whose job is {job}: {error!r}"

    refuse_together(folder, comm, look)
    return load_resharded(folder, comm, layout=layout, per_rank=("random",))


def refuse_together(folder: Path | str, comm, fault_in: Callable[[], str | None]) -> None:
    """Raise the same CheckpointError on every rank if `fault_in()` says on any of them what is wrong; all call it.

    It names the folder, and the ranks whose fault it is, unless all have the same.
    """

    def look(rank: int) -> None:
        if fault := fault_in():
            raise CheckpointError(f"{folder}: {fault}")

    Team.of_comm(comm).together(look)


def check_counts(counts: dict, position: int) -> None:
    """Raise ValueError unless an optimizer can have taken and skipped so many steps by step `position`."""
    for name in ("steps", "skipped_steps"):
        check_whole(name, counts[name], least=0)
    if counts["steps"] + counts["skipped_steps"] > position:
        raise ValueError(f"the optimizer has counted {counts['steps']} + {counts['skipped_steps']} of {position} steps")


def saved_job(folder: Path | str) -> dict:
    """Return what a checkpoint says of the job that saved it, from the header of rank 0's shard.

    Raises CheckpointError if it says nothing.
    """
    with ShardReader(Path(folder), 0, read_manifest(folder), DISK) as reader:
        saved = reader.read_header().header.build(reader.header.entries)
    if not isinstance(saved, dict) or not isinstance(saved.get("job"), dict):
        raise CheckpointError(f"{folder}: not a checkpoint of this training loop: it does not say of which job")
    return saved["job"]


def changes(was: dict, now: dict, may_change: tuple = ()) -> str:
    """Say which settings of a job are not what they were, but for those in `may_change`; "" if none is."""
    changed = [
        f"{name} was {was.get(name)!r}, is {value!r}" + (f" (--{name} {was.get(name)})" if name in FLAGS else "")
        for name, value in now.items()
        if was.get(name) != value and name not in may_change
    ]
    return f"saved by another job: {'; '.join(changed)}" if changed else ""
