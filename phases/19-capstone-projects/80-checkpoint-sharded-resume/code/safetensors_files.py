"""A checkpoint as safetensors files, one a rank, and back, bit for bit.

safetensors (an extra: `pip install safetensors`) is the format in which weights are published: a JSON table and raw
bytes, as here, but tensors only. The rest of a state travels in the file's metadata: the header of our own shard.
"""

import contextlib
import importlib
import json
import re
import uuid
from pathlib import Path

from checkpoint import load_sharded, save_sharded
from manifest import CheckpointError, ShardManifest, read_manifest
from packed import PackedState
from restore import tensors_of
from shardheader import Entry, Header, parse_header
from storage import DISK, Storage
from strictjson import about, check_integer, check_keys, parse_json

METADATA = "shard-80"  # the key of our header in a file's metadata
TEMPORARY = re.compile(r"rank[0-9]+\.safetensors\.[0-9a-f]{32}\.tmp")


def to_safetensors(src_dir, dest_dir, *, storage: Storage = DISK) -> list[Path]:
    """Write `rank0.safetensors`, ... from a checkpoint, which is verified first; return the files' paths.

    Tied tensors are stored once. All files are written under temporary names, then renamed. One that is there already,
    byte for byte, is left as it is: so the next call finishes what one that died has begun. Raises CheckpointError,
    and renames nothing, if `dest_dir` has other safetensors files, or if safetensors does not know a dtype.
    """
    codec, target, written = _codec(), Path(dest_dir), {}
    manifest, states = load_sharded(src_dir, read_manifest(src_dir, storage).world_size, storage=storage)
    paths = [target / f"rank{rank}.safetensors" for rank in range(len(states))]
    storage.make_folder(target)
    with storage.lock(target):
        _sweep(target, storage)
        there = {target / name for name in storage.names(target) if name.endswith(".safetensors")}
        _refuse(target, there.difference(paths))
        try:
            for rank, path in enumerate(paths):
                with about(src_dir):
                    data = _encoded(codec, states[rank], rank, manifest)
                if path not in there:
                    written[_write_beside(path, data, storage)] = path
                elif storage.kind(path) != ("file", len(data)) or storage.read(path) != data:
                    _refuse(target, {path})
            for temporary, path in written.items():
                storage.rename(temporary, path)
        except (CheckpointError, OSError):
            _sweep(target, storage)
            raise
        storage.fsync_folder(target)
    return paths


def from_safetensors(source, dest_dir, step: int = 0, *, storage: Storage = DISK) -> ShardManifest:
    """Save a checkpoint from what `to_safetensors` wrote, or from any one file: then of one rank, {name: tensor}.

    `step` is used for a file that does not say. Raises CheckpointError for files that do not belong together.
    """
    source = Path(source)
    files = [source] if source.is_file() else _files_of(source, storage)
    ranks = [_read(path) for path in files]
    if len(ranks) == 1 and ranks[0][0] is None:
        with about(f"{files[0]} as a checkpoint"):
            return save_sharded([ranks[0][2]], dest_dir, step, crc32=True, storage=storage)
    for rank, (facts, _, _) in enumerate(ranks):
        if facts is None:
            raise CheckpointError(f"{files[rank]}: not written by `convert`; such files are read one at a time")
        first = {**ranks[0][0], "rank": rank, "world_size": len(files)}
        if facts != first:
            raise CheckpointError(f"{files[rank]}: says {facts}, expected {first}")
    facts, seconds, _ = ranks[0]
    states = [state for *_, state in ranks]
    with about(f"{source} as a checkpoint"):
        return save_sharded(states, dest_dir, facts["step"], seconds, crc32=True, storage=storage)


def _encoded(codec, state, rank: int, manifest: ShardManifest) -> bytes:
    """Return the contents of a rank's file. The same state always gives the same bytes."""
    packed = PackedState(state, rank, manifest.world_size, manifest.step)
    header = _header(packed.header[16:], sum(map(len, packed.regions)), f"rank {rank}")
    tensors = dict(tensors_of(state))
    stored = {path: tensors[path] for path in _names(header).values()}
    extra = {"seconds": manifest.wall_clock_seconds, "header": packed.header[16:].decode()}
    try:
        return codec.save(stored, {METADATA: json.dumps(extra)})
    except Exception as error:  # a dtype that it does not know is a KeyError here, a ValueError there
        kinds = sorted({str(tensor.dtype) for tensor in stored.values()})
        raise CheckpointError(f"safetensors cannot hold rank {rank}'s {', '.join(kinds)}: {error}") from error


def _write_beside(path: Path, data: bytes, storage: Storage) -> Path:
    """Write a file under a temporary name, durably; return that name."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with storage.create(temporary) as file:
        storage.write(file, data)
        storage.fsync(file)
    return temporary


def _sweep(target: Path, storage: Storage) -> None:
    """Delete what a conversion that died has left half-written."""
    for name in filter(TEMPORARY.fullmatch, storage.names(target)):
        with contextlib.suppress(OSError):
            storage.delete(target / name)


def _refuse(target: Path, others: set[Path]) -> None:
    if others:
        names = ", ".join(sorted(path.name for path in others)[:3])
        raise CheckpointError(f"{target}: has other safetensors files already: {names}")


def _read(path: Path) -> tuple[dict | None, float, dict]:
    """Return (rank, world_size and step; seconds; state) of one file; (None, 0.0, tensors) for a foreign one."""
    if path.exists() and not path.is_file():  # a pipe would wait for one who writes
        raise CheckpointError(f"{path}: expected a plain file")
    try:
        with _codec(module="safetensors").safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    if METADATA not in metadata:
        return None, 0.0, tensors
    try:
        extra = parse_json(metadata[METADATA])
        check_keys("metadata", extra, ["seconds", "header"])
        if not isinstance(extra["header"], str):
            raise CheckpointError("header: expected a string")
        text = extra["header"].encode()
        header = _header(text, sum(t.numel() * t.element_size() for t in tensors.values()), "header")
        names, filled = _names(header), []
        for index, entry in enumerate(header.entries):
            name = names.get(_place(index, entry), f"tensors[{index}]")  # one that the state does not use has no name
            tensor = tensors.get(name)
            if tensor is None or tensor.dtype != entry.dtype or tensor.numel() != entry.numel:
                raise CheckpointError(f"{name}: missing, or not as the header says")
            filled.append(tensor.view(-1).view(entry.shape) if entry.numel else tensor.view(entry.shape))
        facts = {key: parse_json(text)[key] for key in ("rank", "world_size", "step")}
    except ValueError as error:  # a CheckpointError, or text that is not Unicode
        raise CheckpointError(f"{path}: {error}") from None
    return facts, extra["seconds"], header.build(filled)


def _header(text: bytes, available: int, name: str) -> Header:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise CheckpointError(f"{name}: expected a JSON object")
    for key in ("rank", "world_size", "step"):
        check_integer(key, found.get(key))
    return parse_header(text, {key: found[key] for key in ("rank", "world_size", "step")}, available)


def _place(index: int, entry: Entry) -> int:
    """Tied tensors have one place; an empty one has its own."""
    return entry.offset if entry.numel else -1 - index


def _names(header: Header) -> dict[int, str]:
    """Return the name under which each place is stored: the first path that leads to it."""
    names, indices = {}, {id(entry): index for index, entry in enumerate(header.entries)}
    for path, entry in header.paths().items():
        names.setdefault(_place(indices[id(entry)], entry), path)
    return names


def _files_of(folder: Path, storage: Storage) -> list[Path]:
    try:
        names = [name for name in storage.names(folder) if name.endswith(".safetensors")]
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    expected = [f"rank{rank}.safetensors" for rank in range(len(names))]
    if not names or (len(names) > 1 and sorted(names) != sorted(expected)):
        raise CheckpointError(
            f"{folder}: expected one safetensors file, or one a rank, found {', '.join(names) or 'none'}"
        )
    return [folder / name for name in (expected if len(names) > 1 else names)]


def _codec(module: str = "safetensors.torch"):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise CheckpointError("this needs the package safetensors: pip install safetensors") from None
