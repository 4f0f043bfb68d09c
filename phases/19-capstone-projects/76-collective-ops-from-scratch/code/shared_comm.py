"""`SharedComm`: collectives of ranks that see each other's memory. No message is sent: a rank reads what it needs.

A tensor goes through windows, a segment at a time: each rank copies its segment in, all meet at a barrier, each reads
what the others put there. Tensors that live in the arena's heap skip the copies. Sums are made in gloo's own order, so
that their bits equal gloo's.
"""

import itertools

import collectives
import plain
import torch
from arena import ALIGNMENT, Arena
from comm import Comm, TorchComm, check_buffer
from mesh import must_agree

BLOCK = 1 << 15  # elements that are summed at a time
GLOO_SEGMENT = 1 << 20  # bytes: gloo's largest segment


def gloo_chunks(numel: int, itemsize: int, world_size: int) -> list[tuple[int, int]]:
    """Return (start, end) of the chunks that gloo's ring all-reduce cuts a tensor into; the last may be empty.

    Chunk c is summed as ((x[c-1] + x[c-2]) + ...) + x[c], indices modulo N. Found by experiment (torch 2.11, 2.13).
    """
    total = numel * itemsize
    segments = max(_round_up(-(-total // GLOO_SEGMENT), world_size), 2 * world_size)
    segment = _round_up(-(-total // segments), itemsize)
    chunk = segments // world_size * segment // itemsize
    return [(min(c * chunk, numel), min((c + 1) * chunk, numel)) for c in range(world_size)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class SharedComm(Comm):
    """`Comm` of ranks on one machine over an `Arena`. Launched work is complete when the call returns.

    Facts, point-to-point messages and sub-groups go through `comm`, another communicator of the same ranks (default:
    the process group), with its deadline; `timeout` is that of barriers, the only one of unchecked collectives. All
    ranks must allocate with `empty` in the same order: a buffer then has one place in every rank's heap, where the
    others find it; checked calls compare that place, too. Raises ValueError if the arena is for another number of
    ranks.
    """

    def __init__(self, arena: Arena, comm: Comm | None = None, timeout: float = 60.0):
        super().__init__()
        self.comm = comm or TorchComm()
        if arena.world_size != self.comm.world_size:
            raise ValueError(f"the arena is for {arena.world_size} ranks, there are {self.comm.world_size}")
        self.arena, self.timeout = arena, timeout
        self.rank, self.world_size, self.device = self.comm.rank, self.comm.world_size, torch.device("cpu")
        self._heaps = [arena.heap(rank) for rank in range(arena.world_size)]
        self._turn, self._used = itertools.cycle(range(arena.windows)), [0]  # shared with copies, as the arena is

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer in this rank's heap while there is room; after that, one in memory of its own."""
        check_buffer(numel, dtype)
        start, size = self._used[0], numel * dtype.itemsize
        end = start + _round_up(size, ALIGNMENT)
        if end > self.arena.heap_bytes:
            return super().empty(numel, dtype)
        self._used[0] = end
        return self._heaps[self.rank][start : start + size].view(dtype)

    def split(self, color: int, key: int = 0) -> Comm:
        """Return the communicator of the ranks that gave the same color; it does not use the arena."""
        return self.comm.split(color, key)

    def _agree(self, facts):
        return self.comm.agree(facts)

    def _exchange(self, sends, recvs):
        return self.comm.exchange(sends, recvs).wait

    def _all_reduce(self, x, op):
        if shared := self._everyones(x):
            self._reduce_in_place([plain.reals(each) for each in shared], op)
            return
        work = plain.flat(x)
        self._reduce_through_windows(plain.reals(work), op)
        plain.fill(x, work)

    def _reduce_through_windows(self, flat, op: str) -> None:
        """Three steps a segment: copy the other ranks' parts in; sum one's own part; copy all parts out.

        While the sum of a segment is made, the next one is copied in and the last one out: one barrier a segment.
        """
        segments = list(self._segments(flat))
        for stage in range(len(segments) + 2 if segments else 0):
            if stage < len(segments):
                self._put(flat, *segments[stage])
            if 0 < stage <= len(segments):
                self._sum(flat, op, *segments[stage - 1])
            if stage > 1:
                start, end, slots = segments[stage - 2]
                for rank, slot in enumerate(slots):
                    lo, hi = _part(end - start, rank, self.world_size)
                    flat[start + lo : start + hi].copy_(slot[lo:hi])
            if stage <= len(segments):
                self._barrier()

    def _put(self, flat, start: int, end: int, slots: list) -> None:
        lo, hi = _part(end - start, self.rank, self.world_size)
        slots[self.rank][:lo].copy_(flat[start : start + lo])
        slots[self.rank][hi:].copy_(flat[start + hi : end])

    def _sum(self, flat, op: str, start: int, end: int, slots: list) -> None:
        lo, hi = _part(end - start, self.rank, self.world_size)
        for a, b, order in self._orders(flat, start + lo, start + hi):
            piece = slice(a - start, b - start)
            parts = [flat[a:b] if rank == self.rank else slot[piece] for rank, slot in enumerate(slots)]
            self._combine(parts, order, op, slots[self.rank][piece])

    def _reduce_in_place(self, shared: list[torch.Tensor], op: str) -> None:
        mine = shared[self.rank]
        self._barrier()  # all have their values in place
        lo, hi = _part(len(mine), self.rank, self.world_size)
        for a, b, order in self._orders(mine, lo, hi):
            self._combine([x[a:b] for x in shared], order, op, mine[a:b])
        self._barrier()  # all parts are summed
        for rank, x in enumerate(shared):
            if rank != self.rank:
                lo, hi = _part(len(mine), rank, self.world_size)
                mine[lo:hi].copy_(x[lo:hi])
        self._barrier()  # nobody reads this rank's memory any more

    def _orders(self, flat, start: int, end: int):
        """Cut [start, end) where gloo's chunks end; yield each piece with the order in which its ranks are summed."""
        n = self.world_size
        for chunk, (a, b) in enumerate(gloo_chunks(flat.numel(), flat.element_size(), n)):
            a, b = max(a, start), min(b, end)
            if a < b:
                yield a, b, [(chunk - 1 - i) % n for i in range(n)]

    def _combine(self, parts, order, op: str, out) -> None:
        """Write the sum (avg, max) of all ranks' parts, in the given order, to `out`, which may be one of them."""
        if self.world_size == 1:
            out.copy_(parts[0])
            return
        combine = collectives.REDUCTIONS[op]
        first, *others, last = (parts[rank] for rank in order)
        partial = torch.empty(min(BLOCK, len(out)), dtype=out.dtype)
        for start in range(0, len(out), BLOCK):  # partial sums stay in the cache, and `out` is written last
            block = slice(start, start + BLOCK)
            total = first[block]
            for other in others:
                total = combine(total, other[block], out=partial[: len(total)])
            combine(total, last[block], out=out[block])
            if op == "avg":
                out[block].div_(self.world_size)

    def _reduce_scatter(self, out, x, op):
        flat, work = plain.reals(plain.flat(x)), plain.flat(out)
        target = plain.reals(work)
        size = target.numel()
        if shared := self._everyones(x):
            self._barrier()  # all have their values in place
            first, parts = self.rank * size, [plain.reals(each) for each in shared]
            for a, b, order in self._orders(flat, first, first + size):
                self._combine([part[a:b] for part in parts], order, op, target[a - first : b - first])
            self._barrier()  # nobody reads this rank's memory any more
            plain.fill(out, work)
            return
        for start, end, slots in self._segments(target, share=self.world_size):
            width = end - start
            for rank in range(self.world_size):
                if rank != self.rank:
                    theirs = flat[rank * size + start : rank * size + end]
                    slots[self.rank][rank * width : (rank + 1) * width].copy_(theirs)
            self._barrier()
            first = self.rank * size + start  # of the whole tensor; in the windows it is rank * width
            for a, b, order in self._orders(flat, first, first + width):
                place = slice(a - first + self.rank * width, b - first + self.rank * width)
                parts = [flat[a:b] if rank == self.rank else slot[place] for rank, slot in enumerate(slots)]
                self._combine(parts, order, op, target[a - self.rank * size : b - self.rank * size])
        plain.fill(out, work)

    def _all_gather(self, out, x):
        flat, target = plain.flat(x), plain.flat(out)
        if shared := self._everyones(out):
            size = flat.numel()
            plain.fill(target[self.rank * size : (self.rank + 1) * size], flat)
            self._barrier()  # all have their part in place
            for rank, theirs in enumerate(shared):
                if rank != self.rank:
                    target[rank * size : (rank + 1) * size].copy_(theirs[rank * size : (rank + 1) * size])
            self._barrier()  # nobody reads this rank's memory any more
            return
        for start, end, slots in self._segments(flat):
            slots[self.rank].copy_(flat[start:end])
            self._barrier()
            for rank, slot in enumerate(slots):
                part = flat[start:end] if rank == self.rank else slot
                target[rank * flat.numel() + start : rank * flat.numel() + end].copy_(part)
        plain.fill(out, target)

    def _broadcast(self, x, src):
        flat = plain.flat(x)
        for start, end, slots in self._segments(flat):
            if self.rank == src:
                slots[src].copy_(flat[start:end])
            self._barrier()
            if self.rank != src:
                flat[start:end].copy_(slots[src])
        plain.fill(x, flat)

    def _segments(self, flat, share: int = 1):
        """Cut a tensor into what fits a window (a `share`-th of one); yield (start, end, [that window of each rank]).

        Windows are used in turn, three of them: while a slow rank still reads the last one, nobody writes into it.
        """
        step = self.arena.window_bytes // flat.element_size() // share
        for start in range(0, flat.numel(), step):
            end = min(start + step, flat.numel())
            index, width = next(self._turn), (end - start) * share
            yield start, end, [self.arena.window(r, index, flat.dtype)[:width] for r in range(self.world_size)]

    def _everyones(self, x) -> list[torch.Tensor] | None:
        """Return all ranks' memory at x's place in the heap, 1-d, in rank order; None if x does not live there."""
        place = self._place(x)
        if self.checks:  # ranks that took different ways would wait for each other, or read what lies elsewhere
            must_agree(self, "where the tensor lives", {"place in the heap": place})
        size = x.numel() * x.element_size()
        return None if place is None else [heap[place : place + size].view(x.dtype) for heap in self._heaps]

    def _place(self, x) -> int | None:
        """Return the byte at which x begins in this rank's heap; None if it lives elsewhere, or is not contiguous."""
        start, size = x.data_ptr() - self._heaps[self.rank].data_ptr(), x.numel() * x.element_size()
        inside = size > 0 and 0 <= start and start + size <= self.arena.heap_bytes
        return start if inside and x.is_contiguous() else None

    def _barrier(self) -> None:
        self.arena.barrier(self.rank, self.timeout)


def _part(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, end) of a rank's part of the work."""
    return numel * rank // world_size, numel * (rank + 1) // world_size
