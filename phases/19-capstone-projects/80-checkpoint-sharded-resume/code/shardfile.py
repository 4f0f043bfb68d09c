"""A shard file: one rank's state as raw bytes behind a JSON header. No pickle, so loading cannot run code.

    b"SHARD-80" | length of the header (8 bytes, little-endian) | header (JSON) | the tensors' bytes, little-endian

The header holds rank, world size and step, the state with `{"__tensor__": k}` in place of tensor k, and the table of
tensors. It sits here, not in the manifest, so that the one sha256 of the file covers it, and a rank reads the table of
its own tensors only. Whoever swaps two shards and mends the manifest to match still meets the rank inside the file.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from manifest import CheckpointError, Shard, ShardManifest
from packed import BLOCK, PackedState, blocks_of, bytes_of
from restore import Destination
from shardheader import read_header
from storage import Storage


def write_shard(packed: PackedState, rank: int, path: Path, storage: Storage, crc32: bool = False) -> Shard:
    """Write a new file and make it durable: fsync the file, fsync the folder. Returns its manifest entry."""
    with storage.create(path) as file:
        for block in packed.blocks():
            storage.write(file, block)
        with Beside(lambda: storage.fsync(file)):  # while the disk takes the bytes, this core hashes them
            sha256, crc = checksums(packed.blocks(), crc32)
    storage.fsync_folder(path.parent)
    return Shard(rank, path.name, packed.size, sha256, packed.layout, crc)


class Beside:
    """`with Beside(work): ...` runs `work()` in a thread beside the block; leaving it waits, and raises its error.

    Not an executor: an asynchronous save may have to end while the interpreter does, and executors have closed by then.
    """

    def __init__(self, work: Callable[[], object]):
        self.work, self.errors = work, []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.thread.join()
        if self.errors:
            raise self.errors[0]


def checksums(blocks: Iterable, crc32: bool) -> tuple[str, str]:
    """Return the sha256 of all blocks together in hex, and the CRC-32, or "" if it is not asked for."""
    digest, crc = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        crc = zlib.crc32(block, crc) if crc32 else 0
    return digest.hexdigest(), f"{crc:08x}" if crc32 else ""


class ShardReader:
    """Reads one rank's shard from front to back, in two steps; everything that is read is hashed.

    `open()` reads the header; a wrong sha256 is reported before anything that the contents say about themselves.
    `fill(tensors)` reads the tensors. Both raise CheckpointError for a file that is not exactly what was saved.
    """

    def __init__(self, folder: Path, rank: int, manifest: ShardManifest, storage: Storage):
        self.shard, self.manifest, self.storage = manifest.shards[rank], manifest, storage
        self.path, self.left, self.digest = folder / self.shard.path, self.shard.size, hashlib.sha256()
        self.file = storage.open(self.path)

    def open(self, live=None) -> "ShardReader":
        """Read and check the header, and that `live`, if given, is a state like the one saved."""
        try:
            self.header = read_header(self._take, self.shard, self.manifest)
            self.destination = Destination(self.header, live)
        except CheckpointError as fault:
            self._skip_rest()
            self._compare()
            raise CheckpointError(f"{self.path}: {fault}") from None
        return self

    def fill(self):
        """Read the bytes of every tensor to where they belong; return the state."""
        for flat in self.destination.flats:
            for block in blocks_of(bytes_of(flat)):
                self._read(block)  # hashed at once, while the block is still in this core's cache
        self._compare()
        return self.destination.state()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def _take(self, count: int) -> bytes:
        if count > self.left:
            raise CheckpointError(f"the file ends too early: {count} bytes expected, {self.left} left")
        data = bytearray(count)
        self._read(memoryview(data))
        return bytes(data)

    def _read(self, block: memoryview) -> None:
        self.left -= len(block)
        if self.storage.read_into(self.file, block) < len(block):
            raise CheckpointError(f"{self.file.name}: became shorter while it was read")
        self.digest.update(block)

    def _skip_rest(self) -> None:
        while self.left:
            self._take(min(self.left, BLOCK))

    def _compare(self) -> None:
        found, expected = self.digest.hexdigest(), self.shard.sha256
        if found != expected:
            raise CheckpointError(f"{self.path}: sha256 mismatch: expected {expected[:12]}..., found {found[:12]}...")
