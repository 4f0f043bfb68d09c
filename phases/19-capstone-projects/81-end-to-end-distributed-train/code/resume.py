"""Reading a checkpoint of any number of ranks: refuse first, change later.

It is lesson 80's `load_resharded` that reads: each rank gets the elements that it needs, whoever held them. But first
the ranks look whose checkpoint it is: of another job nothing would fit, and the reason is in its settings.
"""

from pathlib import Path

from manifest import CheckpointError, read_manifest
from reshard_load import load_resharded
from shardfile import ShardReader
from storage import DISK
from team import Team


def read_checkpoint(folder: Path | str, comm, owner: dict, layout: list[dict], may_change: tuple = ()) -> dict:
    """Return what this rank needs of a checkpoint; all ranks call it. "random" becomes the list of all that saved one.

    `owner` is what the state's "job" must be, except for the names in `may_change`; `layout` (see lesson 80) says which
    elements this rank wants. Raises the same CheckpointError on every rank if it is another's, damaged, or none at all.
    """
    Team.of_comm(comm).together(lambda rank: check_owner(folder, owner, may_change))
    return load_resharded(folder, comm, layout=layout, per_rank=("random",))


def check_owner(folder: Path | str, owner: dict, may_change: tuple = ()) -> None:
    """Raise CheckpointError, naming each difference, unless rank 0's shard says that this job has saved it."""
    with ShardReader(Path(folder), 0, read_manifest(folder), DISK) as reader:
        saved = reader.read_header().header.build(reader.header.entries)
    was = saved.get("job") if isinstance(saved, dict) else None
    if not isinstance(was, dict):
        raise CheckpointError(f"{folder}: not a checkpoint of this training loop: it does not say of which job")
    changed = [
        f"{name} was {was.get(name)!r}, is {value!r}"
        for name, value in owner.items()
        if was.get(name) != value and name not in may_change
    ]
    if changed:
        raise CheckpointError(f"{folder}: saved by another job: {'; '.join(changed)}")
