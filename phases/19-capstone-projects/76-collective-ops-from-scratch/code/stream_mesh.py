"""`StreamMesh`: a mesh over byte streams, one each way between any two ranks: sockets, or slots of shared memory.

A stream holds only so many bytes that nobody has taken yet. If two ranks send each other more, each would wait
for the other to receive. So a rank that waits, for whatever it is, takes in what has come meanwhile and puts it aside:
`send` is buffered however large the message, as long as the other rank is in a call of the mesh too, now and then.
"""

import struct
import time
from collections import defaultdict, deque

import torch
import wire
from mesh import Mesh

_MAX_DIM = 8
_HEADER = struct.Struct(f"<qqqHH{_MAX_DIM}q")  # context, tag, round stamp, dtype, number of dimensions, sizes
_INLINE = 8192  # bytes: a smaller payload is copied behind its header, and pushed with it
LONGEST = 1e6  # seconds: the system refuses longer waits, so they are made of several


class StreamMesh(Mesh):
    """Messages as a header and the tensor's bytes. A subclass moves bytes: `_push`, `_ready` and `_pull`."""

    most_dimensions = _MAX_DIM

    def __init__(self, rank: int, world_size: int, timeout: float = 60.0):
        super().__init__(rank, world_size, timeout)
        self._stash = defaultdict(deque)  # (source, (context, tag)) -> [(stamp, tensor)]: whole messages
        self._readers = {src: self._reader(src) for src in range(world_size) if src != rank}
        self._wanted = {src: next(reader) for src, reader in self._readers.items()}  # the memory to be filled next
        self._gone: dict[int, str] = {}  # ranks whose stream has ended, and why: noted by `_push` and `_pull`

    def _reader(self, src: int):
        """Yield, one after the other, the pieces of memory that the stream from `src` fills; stash whole messages."""
        while True:
            header = bytearray(_HEADER.size)
            yield memoryview(header)
            context, tag, stamp, dtype, dim, *sizes = _HEADER.unpack(header)
            tensor = torch.empty(sizes[:dim], dtype=wire.DTYPES[dtype])
            if tensor.numel() > 0:
                yield memory_of(tensor)
            self._stash[src, (context, tag)].append((stamp, tensor))

    def _post(self, dst, tag, stamp, tensor, lone):
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        sizes = [*plain.shape, *[0] * (_MAX_DIM - plain.dim())]
        header, payload = (
            _HEADER.pack(*tag, stamp, wire.DTYPES.index(plain.dtype), plain.dim(), *sizes),
            memory_of(plain),
        )
        deadline = time.monotonic() + self.timeout
        for part in [header + payload] if len(payload) <= _INLINE else [header, payload]:
            left = memoryview(part)
            while left := left[self._push(dst, left) :]:
                if not self._take_in(dst, deadline, room=True):
                    raise self._lost(dst, tag, self._gone.get(dst, f"not in {self.timeout:g} s"), sending=True)

    def _take(self, src, tag):
        deadline = time.monotonic() + self.timeout
        while not self._stash[src, tag]:
            if not self._take_in(src, deadline):
                raise self._lost(src, tag, self._gone.get(src, f"none came in {self.timeout:g} s"))
        return self._stash[src, tag].popleft()

    def _take_in(self, peer: int, deadline: float, room: bool = False) -> bool:
        """Take in what has come, from any rank; wait if nothing has, unless there is `room` to send more to `peer`.

        Return False if the peer is gone or time is up.
        """
        left = deadline - time.monotonic()
        if peer in self._gone or left < 0:
            return False
        try:
            for src in self._ready(min(left, LONGEST), peer if room else None):
                wanted = self._wanted[src]
                wanted = wanted[self._pull(src, wanted) :]
                self._wanted[src] = wanted or next(self._readers[src])
        except BaseException as error:  # no memory for a message, say: what follows in the stream cannot be read
            self._port.broken = error
            raise
        return True

    def _push(self, dst: int, data: memoryview) -> int:
        """Put as many bytes as there is room for into the stream to `dst`; return how many."""
        raise NotImplementedError

    def _ready(self, seconds: float, dst: int | None) -> list[int]:
        """Return the ranks whose bytes can be pulled; wait for some, or for room in the stream to `dst`, if given."""
        raise NotImplementedError

    def _pull(self, src: int, memory: memoryview) -> int:
        """Fill `memory` from the stream from `src` as far as bytes are there; return how many."""
        raise NotImplementedError


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, without a copy."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
