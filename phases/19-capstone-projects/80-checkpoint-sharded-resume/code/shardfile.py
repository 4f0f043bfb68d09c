"""A shard file: one rank's state as raw bytes behind a JSON header. No pickle, so loading cannot run code.

    b"SHARD-80" | length of the header (8 bytes, little-endian) | header (JSON) | the tensors' bytes, little-endian

The header holds rank, world size and step, the state with `{"__tensor__": k}` in place of tensor k, and the table of
tensors. It sits here, not in the manifest, so that the one sha256 of the file covers it, and a rank reads the table of
its own tensors only. Whoever swaps two shards and mends the manifest to match still meets the rank inside the file.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
import wire
from manifest import CheckpointError, Shard, ShardManifest, check_integer, check_keys, check_layout, parse_json, show
from storage import Storage

MAGIC = b"SHARD-80"
BLOCK = 1 << 20  # bytes read and hashed at a time
RESERVED = TENSOR, TUPLE, FLOAT = "__tensor__", "__tuple__", "__float__"  # what JSON lacks: {"__float__": "nan"}


class PackedState:
    """One rank's state taken apart into a header and the regions of memory that follow it in the file.

    A state is made of dicts with string keys, lists, tuples, strings, ints, floats (exact; also NaN and infinities),
    bools, None and tensors. Raises CheckpointError, naming the key, for anything else. A view stores its own elements,
    not its storage; tensors that are the same elements in memory (tied) are stored once.
    """

    def __init__(self, state: dict | list, rank: int, world_size: int, step: int):
        if not isinstance(state, dict | list):
            raise CheckpointError(f"state: expected a dict or a list, found a {type(state).__name__}")
        self.table, self.regions, self._end = [], [], 0  # _end: bytes in `regions`
        self._offsets, self._indices, self._numels = {}, {}, {}  # of a place in memory, of a tensor, of a key
        facts = {"rank": rank, "world_size": world_size, "step": step, "state": self._take_apart(state, "")}
        header = json.dumps({**facts, "tensors": self.table}, allow_nan=False).encode()
        self.header = MAGIC + len(header).to_bytes(8, "little") + header
        self.size = len(self.header) + self._end
        self.layout = state.get("layout", []) if isinstance(state, dict) else []
        self._check_layout()

    def blocks(self) -> Iterator[memoryview]:
        """Yield the file's contents in pieces of at most 1 MB, without copying."""
        for region in (memoryview(self.header), *self.regions):
            yield from _blocks(region)

    def _take_apart(self, value, path: str):
        if isinstance(value, torch.Tensor):
            return {TENSOR: self._add(value, path)}
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str or key in RESERVED:
                    raise CheckpointError(f"{path or 'state'}: expected keys that are plain strings, found {show(key)}")
            return {key: self._take_apart(item, f"{path}/{key}" if path else key) for key, item in value.items()}
        if type(value) in (list, tuple):
            items = [self._take_apart(item, f"{path}/{i}" if path else str(i)) for i, item in enumerate(value)]
            return items if type(value) is list else {TUPLE: items}
        if type(value) is float and not math.isfinite(value):
            return {FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(f"{path}: cannot save a {kind}: only tensors, dicts, lists, tuples and JSON's values")

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        """Return the index of the tensor's entry in the table; add the entry, and its bytes, if they are new."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized:
            kind = f"{type(tensor).__name__} of {tensor.layout} and {tensor.dtype} on {tensor.device}"
            raise CheckpointError(f"{path}: cannot save a {kind}: only plain dense tensors")
        tensor = tensor.detach()
        self._numels[path] = tensor.numel()
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.numel(), tensor.is_conj(), tensor.is_neg())
        if not tensor.is_contiguous():
            place += (tensor.shape, tensor.stride())
        if tensor.numel() == 0:
            place = (path,)  # all empty tensors lie at address 0: they are not tied
        if place not in self._offsets:
            region = bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())
            self._offsets[place] = self._end
            self._end += len(region)
            self.regions.append(region)
        if (place, tensor.shape) not in self._indices:
            self._indices[place, tensor.shape] = len(self.table)
            entry = {"dtype": wire.dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            self.table.append({**entry, "offset": self._offsets[place], "numel": tensor.numel()})
        return self._indices[place, tensor.shape]

    def _check_layout(self) -> None:
        check_layout(self.layout)
        for item in self.layout:
            unit, length = item["unit"], item["end"] - item["start"]
            numels = {path: n for path, n in self._numels.items() if path == unit or path.startswith(unit + "/")}
            if not numels:
                raise CheckpointError(f"layout: the state has no tensor at or below {unit!r}")
            for path, numel in numels.items():
                if numel != length:
                    raise CheckpointError(f"layout: {unit!r} is a range of {length} elements, but {path} has {numel}")


def write_shard(packed: PackedState, rank: int, path: Path, storage: Storage) -> Shard:
    """Write a new file and make it durable: fsync the file, fsync the folder. Returns its manifest entry."""
    digest = hashlib.sha256()

    def write():
        for block in packed.blocks():
            storage.write(file, block)
        storage.fsync(file)

    with storage.create(path) as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(write)  # hashing and writing both let go of the interpreter lock: they run side by side
        for block in packed.blocks():
            digest.update(block)
        written.result()
    storage.fsync_folder(path.parent)
    return Shard(rank, path.name, packed.size, digest.hexdigest(), packed.layout)


def read_shard(folder: Path, rank: int, manifest: ShardManifest, storage: Storage) -> dict | list:
    """Read one rank's state into new CPU tensors; what was tied is tied. Raises CheckpointError for any other file.

    A wrong sha256 is reported before anything that the contents say about themselves.
    """
    shard, state, fault = manifest.shards[rank], None, None
    path = folder / shard.path
    with storage.open(path) as file:
        reader = _HashingReader(file, shard.size, storage)
        try:
            state = _read_state(reader, shard, manifest)
        except CheckpointError as error:
            fault = error
        reader.skip_rest()
    if reader.digest.hexdigest() != shard.sha256:
        found = reader.digest.hexdigest()[:12]
        raise CheckpointError(f"{path}: sha256 mismatch: expected {shard.sha256[:12]}..., found {found}...")
    if fault is not None:
        raise CheckpointError(f"{path}: {fault}")
    return state


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, not a copy."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class _HashingReader:
    """Reads a file from front to back; everything that is read is hashed. A thread reads ahead of the hash."""

    def __init__(self, file: BinaryIO, size: int, storage: Storage):
        self.file, self.left, self.storage, self.digest = file, size, storage, hashlib.sha256()

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise CheckpointError(f"the file ends too early: {count} bytes expected, {self.left} left")
        data = bytearray(count)
        self._read(memoryview(data))
        self.digest.update(data)
        return bytes(data)

    def fill(self, regions: list[memoryview]) -> None:
        blocks = [block for region in regions for block in _blocks(region)]
        with ThreadPoolExecutor(1) as pool:
            for block, _ in zip(blocks, pool.map(self._read, blocks), strict=True):
                self.digest.update(block)

    def skip_rest(self) -> None:
        while self.left:
            self.take(min(self.left, BLOCK))

    def _read(self, block: memoryview) -> None:
        self.left -= len(block)
        if self.storage.read_into(self.file, block) < len(block):
            raise CheckpointError(f"{self.file.name}: became shorter while it was read")


def _blocks(region: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(region), BLOCK):
        yield region[start : start + BLOCK]


def _read_state(reader: _HashingReader, shard: Shard, manifest: ShardManifest):
    if reader.take(len(MAGIC)) != MAGIC:
        raise CheckpointError("not a shard file")
    header = parse_json(reader.take(int.from_bytes(reader.take(8), "little")))
    check_keys("header", header, ["rank", "world_size", "step", "state", "tensors"])
    expected = {"rank": shard.rank, "world_size": manifest.world_size, "step": manifest.step}
    for name, value in expected.items():
        check_integer(name, header[name])
        if header[name] != value:
            raise CheckpointError(f"{name}: expected {value}, but the shard itself says {header[name]}")
    tensors = _read_tensors(reader, header["tensors"])
    try:
        state = _put_together(header["state"], tensors)
    except RecursionError:
        raise CheckpointError("state: nested too deeply") from None
    layout = state.get("layout", []) if isinstance(state, dict) else []
    if layout != shard.layout:
        raise CheckpointError("layout: the manifest's differs from the shard's own")
    return state


def _read_tensors(reader: _HashingReader, table: list) -> list[torch.Tensor]:
    """Check the whole table, then allocate, then read. A region has one flat tensor; tied tensors are views of it."""
    if not isinstance(table, list):
        raise CheckpointError("tensors: expected a list")
    entries, regions, end = [_check_entry(f"tensors[{i}]", entry) for i, entry in enumerate(table)], {}, 0
    for i, (dtype, shape, offset) in enumerate(entries):
        numel = math.prod(shape)
        if offset == end:
            end += numel * dtype.itemsize
            regions[offset] = dtype, numel  # an empty one is replaced by the next tensor
        elif regions.get(offset) != (dtype, numel):
            raise CheckpointError(f"tensors[{i}].offset: expected {end}, or that of a tied tensor, found {offset}")
    if end != reader.left:
        raise CheckpointError(f"tensors: the table describes {end} bytes, the file holds {reader.left}")
    flats = {offset: torch.empty(numel, dtype=dtype) for offset, (dtype, numel) in regions.items()}
    reader.fill([bytes_of(flat) for flat in flats.values()])
    return [flats[o].view(s) if math.prod(s) else torch.empty(s, dtype=d) for d, s, o in entries]


def _check_entry(name: str, entry) -> tuple[torch.dtype, list[int], int]:
    check_keys(name, entry, ["dtype", "shape", "offset", "numel"])
    try:
        dtype = wire.dtype_of(entry["dtype"])
    except ValueError as error:
        raise CheckpointError(f"{name}.dtype: {error}") from None
    if not isinstance(entry["shape"], list):
        raise CheckpointError(f"{name}.shape: expected a list, found {show(entry['shape'])}")
    for size in entry["shape"]:
        check_integer(f"{name}.shape", size)
    check_integer(f"{name}.offset", entry["offset"])
    check_integer(f"{name}.numel", entry["numel"])
    if entry["numel"] != math.prod(entry["shape"]):
        raise CheckpointError(f"{name}.numel: expected {math.prod(entry['shape'])}, found {entry['numel']}")
    return dtype, entry["shape"], entry["offset"]


def _put_together(node, tensors: list[torch.Tensor]):
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
