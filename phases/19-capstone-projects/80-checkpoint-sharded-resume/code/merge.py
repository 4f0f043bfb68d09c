"""N ranks' states as one: which tensors are ranges of a unit, which are the same on every rank, and what differs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from restore import container, items
from shardheader import Entry, Header
from strictjson import CheckpointError, shorten


@dataclass(frozen=True)
class Leaf:
    """A tensor of the merged state: its entry in each rank's shard.

    `unit`: it is a range of that unit. `source`: it is that rank's own, from `per_rank`. Neither: the same on all.
    """

    entries: list[Entry]
    unit: str | None = None
    source: int | None = None

    def place(self) -> tuple:
        """Return what two leaves have in common if, on every rank, they are one piece of memory: tied tensors."""
        own = range(len(self.entries)) if self.source is None else [self.source]
        offsets = tuple(self.entries[rank].offset if self.entries[rank].numel else None for rank in own)
        return (self.unit, self.source, offsets) if any(offset is not None for offset in offsets) else (id(self),)


class Merged:
    """What N shards say together, from their headers alone. Raises CheckpointError that lists every difference.

    `digests[rank]` has a hash of each tensor that all ranks should hold alike, by its path.
    """

    def __init__(self, headers: list[Header], layouts: list[list[dict]], per_rank: Iterable[str], digests: dict):
        self.layouts, self.per_rank, self.digests, self.faults = layouts, sorted(per_rank), digests, []
        self._found = set()  # of per_rank
        self.skeleton = self._merge("", [header.build(header.entries) for header in headers])
        self.faults += [f"per_rank: there is no {key!r}" for key in self.per_rank if key not in self._found]
        if self.faults:
            raise CheckpointError("; ".join(self.faults))

    def allocate(self, wanted: list[dict]) -> tuple[object, list[tuple[Leaf, torch.Tensor]]]:
        """Return a new rank's state, its tensors not filled yet, and what to fill: each piece of memory once."""
        lengths = {item["unit"]: item["end"] - item["start"] for item in wanted}
        memory: dict[tuple, tuple[Leaf, torch.Tensor]] = {}

        def tensor(leaf: Leaf) -> torch.Tensor:
            entry = leaf.entries[leaf.source or 0]
            numel = entry.numel if leaf.unit is None else lengths[leaf.unit]
            _, flat = memory.setdefault(leaf.place(), (leaf, torch.empty(numel, dtype=entry.dtype)))
            return flat.view(entry.shape) if leaf.unit is None else flat

        def build(value):
            if isinstance(value, Leaf):
                return tensor(value)
            if isinstance(value, dict):
                return {key: build(item) for key, item in value.items()}
            return type(value)(map(build, value)) if isinstance(value, list | tuple) else value

        state = build(self.skeleton)
        if wanted:
            state["layout"] = wanted
        return state, list(memory.values())

    def _merge(self, path: str, values: list):
        """Return what stands at `path` in the merged state; `values` is what each rank has there."""
        if path == "layout":
            return []  # each new rank has its own
        if path in self.per_rank:
            self._found.add(path)
            return [_own(value, rank, len(values)) for rank, value in enumerate(values)]
        if isinstance(values[0], Entry) and all(isinstance(value, Entry) for value in values):
            return self._merge_tensors(path, values)
        kinds = [container(value) or type(value).__name__ for value in values]
        if not self._alike(path, "has", kinds):
            return None
        if kinds[0] not in ("dict", "list", "tuple"):
            self._alike(path, "has", [repr(value) for value in values], "name it in per_rank")
            return values[0]
        keys = [dict.fromkeys(items(value)) for value in values]
        for key in dict.fromkeys(key for of_rank in keys for key in of_rank):
            lacking = [str(rank) for rank, of_rank in enumerate(keys) if key not in of_rank]
            if lacking:
                self.faults.append(f"missing key {_join(path, key)} on rank {', '.join(lacking)}")
        common = [key for key in keys[0] if all(key in of_rank for of_rank in keys)]
        merged = [self._merge(_join(path, key), [items(value)[key] for value in values]) for key in common]
        return dict(zip(common, merged, strict=True)) if kinds[0] == "dict" else type(values[0])(merged)

    def _merge_tensors(self, path: str, entries: list[Entry]) -> Leaf:
        unit = unit_of(path, self.layouts[0])
        if self._alike(path, "is", [f"{entry.dtype}" for entry in entries]):
            if unit is not None:
                for rank, entry in enumerate(entries):
                    if len(entry.shape) != 1:
                        self.faults.append(f"{path}: a range must have one dimension, rank {rank}'s is {entry.shape}")
            elif self._alike(path, "is", [f"{list(entry.shape)}" for entry in entries]) and entries[0].numel:
                values = [self.digests[rank][path] for rank in range(len(entries))]
                self._alike(path, "has values with hash", values, "name it in layout or per_rank")
        return Leaf(entries, unit)

    def _alike(self, path: str, verb: str, found: list[str], advice: str = "") -> bool:
        for rank, each in enumerate(found):
            if each != found[0]:
                ending = f" ({advice})" if advice else ""
                what = f"rank 0 {verb} {shorten(found[0])}, rank {rank} {verb} {shorten(each)}{ending}"
                self.faults.append(f"{path or 'state'}: {what}")
                return False
        return True


def unit_of(path: str, layout: list[dict]) -> str | None:
    """Return the unit at or above a path; None if there is none."""
    names = (item["unit"] for item in layout)
    return next((name for name in names if path == name or path.startswith(name + "/")), None)


def _own(value, rank: int, ranks: int):
    """Mark the tensors of a value that is this rank's own."""
    if isinstance(value, Entry):
        return Leaf([value] * ranks, source=rank)
    if isinstance(value, dict):
        return {key: _own(item, rank, ranks) for key, item in value.items()}
    return type(value)(_own(item, rank, ranks) for item in value) if isinstance(value, list | tuple) else value


def _join(path: str, key) -> str:
    return f"{path}/{key}" if path else f"{key}"
