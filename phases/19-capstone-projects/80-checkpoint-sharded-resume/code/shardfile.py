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
from contextlib import contextmanager
from pathlib import Path

import torch
from manifest import CheckpointError, Shard, ShardManifest
from packed import BLOCK, PackedState, blocks_of, bytes_of
from restore import Destination
from shardheader import Entry, read_header
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
    From Python 3.12 on no new thread starts then, either; the work is done first.
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
        try:
            self.thread.start()
        except RuntimeError:
            self._run()

    def __exit__(self, *_):
        if self.thread.ident is not None:
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
    """Reads one rank's shard; everything that is read from front to back is hashed. Raises CheckpointError.

    `open()`, then `fill()`: the state, verified. `scan()`: verified, but not kept. `read_header()`, then `read_part()`:
    some of it, for what has been verified already. A wrong sha256 is reported before anything that the contents say.
    """

    def __init__(self, folder: Path, rank: int, manifest: ShardManifest, storage: Storage):
        self.shard, self.manifest, self.storage = manifest.shards[rank], manifest, storage
        self.path, self.left, self.digest = folder / self.shard.path, self.shard.size, hashlib.sha256()
        self.file = storage.open(self.path)

    def open(self, live=None) -> "ShardReader":
        """Read and check the header, and that `live`, if given, is a state like the one saved."""
        with self._suspecting():
            self.header = read_header(self._take, self.shard, self.manifest)
            self.destination = Destination(self.header, live)
        return self

    def fill(self):
        """Read the bytes of every tensor to where they belong; return the state."""
        for flat in self.destination.flats:
            for block in blocks_of(bytes_of(flat)):
                self._read(block)  # hashed at once, while the block is still in this core's cache
        self._compare()
        return self.destination.state()

    def scan(self) -> dict[int, str]:
        """Read the whole file, keep nothing; return the sha256 of each region, by its offset."""
        self.read_header()
        regions, spare = {}, memoryview(bytearray(BLOCK))
        for offset, (dtype, numel) in self.header.regions.items():
            left, digest = numel * dtype.itemsize, hashlib.sha256()
            while left:
                block = spare[: min(left, BLOCK)]
                self._read(block)
                digest.update(block)
                left -= len(block)
            regions[offset] = digest.hexdigest()
        self._compare()
        return regions

    def read_header(self) -> "ShardReader":
        """Read and check the header only."""
        with self._suspecting():
            self.header = read_header(self._take, self.shard, self.manifest)
        return self

    def read_part(self, entry: Entry, first: int, target: torch.Tensor) -> None:
        """Fill `target`, 1-d, with the elements of a tensor from number `first` on."""
        self.file.seek(self.header.size + entry.offset + first * entry.dtype.itemsize)
        self._read_into(bytes_of(target))

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
        self._read_into(block)
        self.digest.update(block)

    def _read_into(self, block: memoryview) -> None:
        if self.storage.read_into(self.file, block) < len(block):
            raise CheckpointError(f"{self.file.name}: became shorter while it was read")

    @contextmanager
    def _suspecting(self):
        """Before a fault in what the header says is believed, see whether the file is the one that was saved."""
        try:
            yield
        except CheckpointError as fault:
            while self.left:
                self._take(min(self.left, BLOCK))
            self._compare()
            raise CheckpointError(f"{self.path}: {fault}") from None

    def _compare(self) -> None:
        found, expected = self.digest.hexdigest(), self.shard.sha256
        if found != expected:
            raise CheckpointError(f"{self.path}: sha256 mismatch: expected {expected[:12]}..., found {found[:12]}...")
