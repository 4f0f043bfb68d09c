"""Loading a checkpoint of N ranks on M: every rank reads the byte ranges it needs, and all of it has been verified.

    1. every rank reads the manifest, and says which ranges it wants    together they must cover every unit
    2. rank r hashes the files r, r + M, ...                            each file once, by one rank, for all
    3. every rank reads its ranges, straight to where they belong       and what all ranks hold alike, once

What is not a range of a unit must be the same on all N ranks (counts, settings): then it is the new ranks', too. What
is each rank's own (random states) has no meaning for another number of ranks; `per_rank` names it.
"""

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path

from layout import check_coverage
from manifest import CheckpointError, ShardManifest, check_one_manifest, read_manifest
from merge import Merged, unit_of
from reshard import check_plan, check_wanted, even_layout, make_plan
from shardfile import ShardReader
from storage import DISK, Storage
from strictjson import about, check_integer, show
from team import Team


def load_resharded(src_dir, comm=None, *, layout=None, per_rank=(), storage: Storage = DISK):
    """Return this rank's part of a checkpoint saved by any number of ranks; all ranks call it together.

    `layout` says which ranges this rank wants (`ZeroOptimizer.layout()`); by default each unit is cut evenly. A key in
    `per_rank`, "random" say, becomes the list of what the N ranks saved there. Raises the same CheckpointError on every
    rank if a file is not what was saved, the ranges do not cover the units, or ranks saved different values for
    anything else; each difference is listed.
    """
    team = Team.of_comm(comm)
    return _load(src_dir, team, {team.ranks[0]: layout}, per_rank, storage)[team.ranks[0]]


def load_resharded_all(src_dir, world_size, *, layouts=None, per_rank=(), storage: Storage = DISK) -> list:
    """Return the states of all `world_size` new ranks in one process, as that many calls of `load_resharded` would."""
    check_integer("world_size", world_size, least=1)
    layouts = [None] * world_size if layouts is None else layouts
    if not isinstance(layouts, list | tuple) or len(layouts) != world_size:
        raise CheckpointError(f"layouts: expected a list of {world_size}, one a new rank")
    team, wanted = Team.of_one_process(world_size), dict(enumerate(layouts))
    states = _load(src_dir, team, wanted, per_rank, storage)
    return [states[rank] for rank in range(world_size)]


def _load(src_dir, team: Team, layouts: dict, per_rank, storage: Storage) -> dict:
    folder, wanted, keys = Path(src_dir), {}, _keys(per_rank)
    manifest = functools.cache(lambda: read_manifest(folder, storage))
    saved = functools.cache(lambda: [shard.layout for shard in manifest().shards])

    def want(rank):
        if keys is None:
            raise CheckpointError(f"per_rank: expected a list of strings, found {show(per_rank)}")
        manifest().check_files(folder, storage)
        wanted[rank] = even_layout(saved(), team.world_size, rank) if layouts[rank] is None else layouts[rank]
        with about(folder):
            check_wanted(wanted[rank], saved())
        mine = {"layout": wanted[rank], "per_rank": sorted(keys)}
        return mine | {"manifest": manifest().digest(), "folder": str(folder)}

    facts = team.together(want)
    check_one_manifest([fact["manifest"] for fact in facts], [fact["folder"] for fact in facts])
    if any(fact["per_rank"] != facts[0]["per_rank"] for fact in facts):
        raise CheckpointError(f"per_rank: the ranks disagree: {[fact['per_rank'] for fact in facts]}")
    with about(facts[0]["folder"]):  # the same words on every rank
        check_coverage([fact["layout"] for fact in facts])

    with contextlib.ExitStack() as files:

        def verify(rank):
            shares = range(rank, manifest().world_size, team.world_size)
            return {str(source): _verify(folder, source, manifest(), keys, storage) for source in shares}

        digests = {int(source): found for share in team.together(verify) for source, found in share.items()}

        @functools.cache
        def readers():
            sources = range(manifest().world_size)
            return [files.enter_context(ShardReader(folder, s, manifest(), storage)).read_header() for s in sources]

        @functools.cache
        def merged():
            with about(folder):
                return Merged([reader.header for reader in readers()], saved(), keys, digests)

        def read(rank):
            plan = make_plan(saved(), wanted[rank])
            check_plan(plan, saved(), wanted[rank])
            states[rank], places = merged().allocate(wanted[rank])
            like = rank % len(readers())  # not all from one file
            for leaf, flat in places:
                if leaf.unit is None:
                    source = like if leaf.source is None else leaf.source
                    readers()[source].read_part(leaf.entries[source], 0, flat)
                for move in plan:
                    if move.unit == leaf.unit:
                        part = flat[move.start : move.end]
                        readers()[move.source].read_part(leaf.entries[move.source], move.source_start, part)

        states = {}
        team.together(read)
    return states


def _keys(per_rank) -> list[str] | None:
    """Return the keys as a list; None if they are none. A string would be its letters."""
    if isinstance(per_rank, str) or not isinstance(per_rank, Iterable):
        return None
    keys = list(per_rank)
    return keys if all(isinstance(key, str) for key in keys) else None


def _verify(folder: Path, source: int, manifest: ShardManifest, keys: list[str], storage: Storage) -> dict[str, str]:
    """Hash a whole file; return the hash of each tensor in it of which every rank should have the same."""
    with ShardReader(folder, source, manifest, storage) as reader:
        found = reader.scan()
        header = reader.header
    alike = {
        path: entry
        for path, entry in header.paths().items()
        if unit_of(path, reader.shard.layout) is None and unit_of(path, [{"unit": key} for key in keys]) is None
    }
    return {path: found[entry.offset][:16] for path, entry in alike.items() if entry.numel}
