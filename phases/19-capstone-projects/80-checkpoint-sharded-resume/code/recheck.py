"""Is a checkpoint still what was saved? Read all of it again and compare: sha256, or the CRC-32 where one was recorded.

A CRC finds accidents, in a fraction of a hash's time on a core without SHA instructions. It is no protection against
intent, but neither is a hash that lies beside the data.
"""

import zlib
from pathlib import Path

from manifest import CheckpointError, Shard, ShardManifest, read_manifest
from packed import BLOCK
from shardfile import ShardReader
from storage import DISK, Storage


def recheck(folder, *, fast: bool = False, storage: Storage = DISK) -> list[tuple[Shard, str]]:
    """Return (manifest entry, what is wrong) for each rank's file; "" where nothing is. `fast` compares the CRC-32.

    Raises CheckpointError if the manifest itself is missing or damaged.
    """
    folder = Path(folder)
    manifest, found = read_manifest(folder, storage), []
    for shard in manifest.shards:
        try:
            manifest.check_files(folder, storage, [shard.rank])
            if fast:
                check_crc32(folder, shard, storage)
            else:
                _check_sha256(folder, shard.rank, manifest, storage)
            found.append((shard, ""))
        except (CheckpointError, OSError) as error:
            found.append((shard, str(error)))
    return found


def check_crc32(folder: Path, shard: Shard, storage: Storage = DISK) -> None:
    """Raise CheckpointError unless the CRC-32 of a shard file is the one that its manifest entry records."""
    path = folder / shard.path
    if not shard.crc32:
        raise CheckpointError(f"{path}: no CRC-32 was recorded (save with crc32=True), so only sha256 can tell")
    crc, spare = 0, memoryview(bytearray(BLOCK))
    with storage.open(path) as file:
        while count := storage.read_into(file, spare):
            crc = zlib.crc32(spare[:count], crc)
    if f"{crc:08x}" != shard.crc32:
        raise CheckpointError(f"{path}: crc32 mismatch: expected {shard.crc32}, found {crc:08x}")


def _check_sha256(folder: Path, rank: int, manifest: ShardManifest, storage: Storage) -> None:
    with ShardReader(folder, rank, manifest, storage) as reader:
        reader.scan()
