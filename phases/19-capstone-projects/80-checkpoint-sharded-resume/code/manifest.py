"""The manifest: the one JSON file that says which shard files make up a checkpoint.

No manifest, no checkpoint: shards count only once a manifest names them, and the manifest appears in one rename. It is
checked as a whole before any shard is opened; each fault is a `CheckpointError` that names file and field.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path

from layout import check_coverage, check_layout
from storage import DISK, Storage
from strictjson import CheckpointError, check_integer, check_keys, check_seconds, parse_json, show

MANIFEST = "manifest.json"
FORMAT = 1
SHARD_NAME = re.compile(r"rank(0|[1-9][0-9]*)(?:\.g([1-9][0-9]*))?\.bin")  # rank, generation


@dataclass(frozen=True)
class Shard:
    """One rank's file: its name in the folder, size in bytes, checksums, and which ranges of flat buffers it holds.

    `crc32`: the CRC-32 of the file in 8 hex digits, for a faster second look; "" if it was not recorded.
    """

    rank: int
    path: str
    size: int
    sha256: str
    layout: list[dict] = field(default_factory=list)  # see layout.py
    crc32: str = ""

    def __post_init__(self):
        check_integer("rank", self.rank)
        if not isinstance(self.path, str) or SHARD_NAME.fullmatch(self.path) is None:  # no "..", no "/", no NUL
            raise CheckpointError(f"path: expected 'rank{self.rank}.bin', maybe with .gN, found {show(self.path)}")
        check_integer("size", self.size)
        if not isinstance(self.sha256, str) or re.fullmatch("[0-9a-f]{64}", self.sha256) is None:
            raise CheckpointError(f"sha256: expected 64 lower-case hex digits, found {show(self.sha256)}")
        check_layout(self.layout)
        if not isinstance(self.crc32, str) or re.fullmatch("([0-9a-f]{8})?", self.crc32) is None:
            raise CheckpointError(f"crc32: expected 8 lower-case hex digits, or none, found {show(self.crc32)}")


@dataclass(frozen=True)
class ShardManifest:
    """What a checkpoint consists of. `shards[r]` is rank r's. A manifest that breaks a rule cannot be constructed."""

    step: int
    world_size: int
    wall_clock_seconds: float
    shards: list[Shard]

    def __post_init__(self):
        check_integer("step", self.step)
        check_integer("world_size", self.world_size, least=1)
        check_seconds("wall_clock_seconds", self.wall_clock_seconds)
        if len(self.shards) != self.world_size:
            have = {shard.rank for shard in self.shards}
            missing = islice((str(rank) for rank in range(self.world_size) if rank not in have), 4)
            which = f"; missing: rank {', '.join(missing)}" if len(self.shards) < self.world_size else ""
            raise CheckpointError(f"shards: expected {self.world_size}, one a rank, found {len(self.shards)}{which}")
        for rank, shard in enumerate(self.shards):
            if shard.rank != rank:
                raise CheckpointError(f"shards[{rank}].rank: expected {rank} (each rank once), found {shard.rank}")
            if SHARD_NAME.fullmatch(shard.path)[1] != str(rank):
                raise CheckpointError(f"shards[{rank}].path: expected rank {rank}'s file, found {show(shard.path)}")
        check_coverage([shard.layout for shard in self.shards])

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = MANIFEST) -> "ShardManifest":
        """Read what `to_json` wrote. Raises CheckpointError, beginning with `source`, for anything else."""
        try:
            found = parse_json(text)
            check_keys("top level", found, ["format", *(f.name for f in fields(cls))])
            check_integer("format", found["format"])
            if found.pop("format") != FORMAT:
                raise CheckpointError(f"format: only {FORMAT} is known here")
            if not isinstance(found["shards"], list):
                raise CheckpointError(f"shards: expected a list, found {show(found['shards'])}")
            found["shards"] = [_shard(f"shards[{i}]", item) for i, item in enumerate(found["shards"])]
            return cls(**found)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None

    def digest(self) -> str:
        """Return a hash of all that the manifest says: equal on two ranks only if they have read the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def check_files(self, folder: Path, storage: Storage = DISK, ranks: Iterable[int] | None = None) -> None:
        """Check, opening nothing, that the shard files (of `ranks`, or all) are plain files of the right size."""
        for shard in self.shards if ranks is None else [self.shards[rank] for rank in ranks]:
            path = Path(folder) / shard.path
            size = _plain_size(path, storage)
            if size != shard.size:
                change = "truncated" if size < shard.size else "too long"
                raise CheckpointError(
                    f"{path}: {change} (a sure sha256 mismatch): expected {shard.size} bytes, found {size}"
                )


def check_one_manifest(digests: list[str], folders: list[str]) -> None:
    """Raise CheckpointError unless all ranks have read the same manifest. `folders`: where each has read it."""
    if len(set(digests)) > 1:
        why = "it is not one folder that all share, or was saved into meanwhile"
        raise CheckpointError(f"{', '.join(dict.fromkeys(folders))}: the ranks read different manifests: {why}")


def read_manifest(folder: Path | str, storage: Storage = DISK) -> ShardManifest:
    """Read and check a folder's manifest. Raises CheckpointError: without a good manifest there is no checkpoint."""
    path = Path(folder) / MANIFEST
    try:
        _plain_size(path, storage)
        return ShardManifest.from_json(storage.read(path), source=str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _plain_size(path: Path, storage: Storage) -> int:
    """Refuse what is missing, a folder, a link (it may lead out of the checkpoint) or a device."""
    kind, size = storage.kind(path)
    if kind == "missing":
        raise CheckpointError(f"{path}: missing, so this is not a complete checkpoint")
    if kind != "file":
        raise CheckpointError(f"{path}: expected a plain file, found a {kind}")
    return size


def _shard(name: str, item) -> Shard:
    required = [f.name for f in fields(Shard) if f.name != "crc32"]
    check_keys(name, item, required + ["crc32"] * (isinstance(item, dict) and "crc32" in item))
    try:
        return Shard(**item)
    except CheckpointError as error:
        raise CheckpointError(f"{name}.{error}") from None
