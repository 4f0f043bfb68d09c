"""The header of a shard file, read back: every field checked before a byte of a tensor is allocated or read."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import wire
from manifest import Shard, ShardManifest
from packed import FLOAT, MAGIC, RESERVED, TENSOR, TUPLE
from strictjson import CheckpointError, check_integer, check_keys, parse_json, show


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: its dtype and shape, and where its bytes begin, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a shard says about itself. `size`: its bytes, magic and length included. `state`: with numbers for tensors.

    `regions`: offset -> (dtype, number of elements) of each piece of memory stored, in the order of the file. Tied
    tensors are entries at one offset.
    """

    size: int
    state: dict | list
    entries: list[Entry]
    regions: dict[int, tuple[torch.dtype, int]]

    def build(self, tensors: list):
        """Return the state with `tensors[i]` in the place of tensor i."""
        try:
            return _put_together(self.state, tensors)
        except RecursionError:
            raise CheckpointError("state: nested too deeply") from None

    def state_in(self, memory: dict[int, torch.Tensor]):
        """Return the state with its tensors in `memory`, which has a 1-d tensor for each region, by offset."""
        tensors = [
            memory[e.offset].view(e.shape) if e.numel else torch.empty(e.shape, dtype=e.dtype) for e in self.entries
        ]
        return self.build(tensors)

    def paths(self) -> dict[str, Entry]:
        """Return each tensor by its path in the state, "optimizer/flat/master"."""
        found = list(_tensors(self.build(self.entries), ""))
        if len(dict(found)) < len(found):
            raise CheckpointError("state: two tensors have the same path")
        return dict(found)


def read_header(take: Callable[[int], bytes], shard: Shard, manifest: ShardManifest) -> Header:
    """Read a header with `take(number of bytes)` and check it. Raises CheckpointError naming the field."""
    if take(len(MAGIC)) != MAGIC:
        raise CheckpointError("not a shard file")
    length = int.from_bytes(take(8), "little")
    expected = {"rank": shard.rank, "world_size": manifest.world_size, "step": manifest.step}
    header = parse_header(take(length), expected, shard.size - len(MAGIC) - 8 - length)
    state = header.build(header.entries)
    if not isinstance(state, dict | list):
        raise CheckpointError(f"state: expected a dict or a list, found {show(header.state)}")
    layout = state.get("layout", []) if isinstance(state, dict) else []
    if layout != shard.layout:
        raise CheckpointError("layout: the manifest's differs from the shard's own")
    header.paths()  # raises if there is one twice
    return header


def parse_header(text: bytes, expected: dict[str, int], available: int) -> Header:
    """Check the JSON of a header: `expected` rank, world_size and step, and a table of `available` bytes."""
    found = parse_json(text)
    check_keys("header", found, ["rank", "world_size", "step", "state", "tensors"])
    for name, value in expected.items():
        check_integer(name, found[name])
        if found[name] != value:
            raise CheckpointError(f"{name}: expected {value}, but the shard itself says {found[name]}")
    if not isinstance(found["tensors"], list):
        raise CheckpointError("tensors: expected a list")
    entries = [_check_entry(f"tensors[{i}]", entry) for i, entry in enumerate(found["tensors"])]
    return Header(len(MAGIC) + 8 + len(text), found["state"], entries, _regions(entries, available))


def _regions(entries: list[Entry], available: int) -> dict[int, tuple[torch.dtype, int]]:
    regions, end = {}, 0
    for i, entry in enumerate(entries):
        if entry.offset == end:
            end += entry.numel * entry.dtype.itemsize
            regions[entry.offset] = entry.dtype, entry.numel  # an empty one is replaced by the next tensor
        elif regions.get(entry.offset) != (entry.dtype, entry.numel):
            found = f"expected {end}, or that of a tied tensor, found {entry.offset}"
            raise CheckpointError(f"tensors[{i}].offset: {found}")
    if end != available:
        raise CheckpointError(f"tensors: the table describes {end} bytes, the file holds {available}")
    return regions


def _check_entry(name: str, entry) -> Entry:
    check_keys(name, entry, ["dtype", "shape", "offset", "numel"])
    try:
        dtype = wire.dtype_of(entry["dtype"])
    except ValueError as error:
        raise CheckpointError(f"{name}.dtype: {error}") from None
    if not isinstance(entry["shape"], list):
        raise CheckpointError(f"{name}.shape: expected a list, found {show(entry['shape'])}")
    for size in entry["shape"]:
        check_integer(f"{name}.shape", size)
    if math.prod(size for size in entry["shape"] if size) >= 2**63:  # an empty tensor may still claim it
        raise CheckpointError(f"{name}.shape: no tensor is that large: {show(entry['shape'])}")
    check_integer(f"{name}.offset", entry["offset"])
    check_integer(f"{name}.numel", entry["numel"])
    if entry["numel"] != math.prod(entry["shape"]):
        raise CheckpointError(f"{name}.numel: expected {math.prod(entry['shape'])}, found {entry['numel']}")
    return Entry(dtype, tuple(entry["shape"]), entry["offset"])


def _put_together(node, tensors: list):
    if isinstance(node, list):
        return [_put_together(item, tensors) for item in node]
    if not isinstance(node, dict):
        if isinstance(node, float) and not math.isfinite(node):
            raise CheckpointError(f"state: {node} is not JSON")
        return node
    if set(node) == {TENSOR}:
        check_integer(f"state: {TENSOR}", node[TENSOR])
        if node[TENSOR] >= len(tensors):
            raise CheckpointError(f"state: tensor {node[TENSOR]} of {len(tensors)}")
        return tensors[node[TENSOR]]
    if set(node) == {TUPLE} and isinstance(node[TUPLE], list):
        return tuple(_put_together(item, tensors) for item in node[TUPLE])
    if set(node) == {FLOAT} and node[FLOAT] in ("nan", "inf", "-inf"):
        return float(node[FLOAT])
    if not node.keys().isdisjoint(RESERVED):
        raise CheckpointError(f"state: malformed {show(node)}")
    return {key: _put_together(item, tensors) for key, item in node.items()}


def _tensors(value, path: str) -> Iterator[tuple[str, Entry]]:
    if isinstance(value, Entry):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{path}/{key}" if path else f"{key}")
