"""Loading without a copy: the pages of the file, hashed where they are, become the tensors (`mapped=True`).

    load_shard(folder)                 T bytes copied, a block at a time, each block hashed while it is in the cache
    load_shard(folder, mapped=True)    T bytes hashed, nothing copied

The mapping is private. Who writes to a tensor makes the system copy that page (4 KB, say) for this process first, so
the file never changes. Until then a page is the system's cache of the file: no memory of ours, dropped and read again
as need be. That pays where tensors are read: to move them to a GPU, to evaluate, to convert. Where all of them will be
written to, it only puts the copy off, and pays more for it, page by page: there `into` is the better choice.

What is given up: sha256 has verified the pages as they were *then*. The tensors show what is done to the file later.

- Deleted or renamed (a rotation, the next save's sweep): nothing happens. The bytes stay, and with them their space on
  the disk, until the last tensor is gone. (Windows does not let a mapped file be deleted: rotation reports an error.)
- Rewritten in place: the tensors may change, in silence. Truncated, or on a disk or a network that fails: whoever
  touches a lost page gets no error but SIGBUS, which ends the process.

No save, copy or rotation here opens for writing a file that exists. But others may, and disks fail: so it is not the
default.
"""

import torch
from manifest import CheckpointError
from shardfile import ShardReader


class MappedReader(ShardReader):
    """A reader whose tensors are the file's pages. Only the header is read as a `ShardReader` reads it.

    A tensor that does not begin at a multiple of its element size is copied: one behind three bools, say, or in a file
    whose header is not padded, as older ones are.
    """

    def open(self, live=None) -> "MappedReader":
        """Read and check the header. Nothing is filled here, so there is no `live` state."""
        return self.read_header()

    def fill(self):
        """Map the file and hash its pages; return the state, made of them. If they are wrong, nothing stays mapped."""
        pages = self._verified_pages()
        memory = {
            offset: _tensor(pages, self.header.size + offset, dtype, numel)
            for offset, (dtype, numel) in self.header.regions.items()
        }
        return self.header.state_in(memory)

    def _verified_pages(self) -> memoryview:
        try:
            mapping = self.storage.map(self.file, self.shard.size)
        except ValueError:
            raise CheckpointError(f"{self.path}: became shorter while it was read") from None
        try:
            with memoryview(mapping)[self.header.size :] as unread:
                self.digest.update(unread)
            self._compare()
        except BaseException:
            mapping.close()
            raise
        self.file.close()  # the mapping has a descriptor of its own
        return memoryview(mapping)  # not the mapping: as long as a tensor holds a view of it, it cannot be closed


def _tensor(pages: memoryview, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return the `numel` elements from byte `start` on, 1-d: the pages themselves, if they are aligned there."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if start % dtype.itemsize == 0:
        return torch.frombuffer(pages, dtype=dtype, count=numel, offset=start)
    return torch.frombuffer(pages, dtype=torch.uint8, count=numel * dtype.itemsize, offset=start).clone().view(dtype)
