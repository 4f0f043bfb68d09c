"""`SharedMesh`: a mesh whose streams are slots of memory that forked ranks see, with semaphores that count them."""

import itertools
import mmap
import os
import time
from multiprocessing import get_context

from arena import PATIENCE, why_not
from ranks import check_world_size
from stream_mesh import StreamMesh

_LENGTH = 64  # bytes at the head of a slot, which say how many are used: a cache line of its own


class Slots:
    """For each ordered pair of ranks a few slots of `slot_bytes`, made by the launcher before it forks the ranks.

    The default is the fastest here: while one slot is read, others are filled, and all of them stay in the cache.
    Per pair one semaphore counts the slots that are full, one those that are free; each rank has a bell, which others
    ring when something has changed for it. Like an `Arena` it has no name: nothing is left when the ranks have ended.
    Raises ValueError for a bad size, RuntimeError where ranks are not forked.
    """

    def __init__(self, world_size: int, slot_bytes: int = 1 << 18, slots: int = 4):
        check_world_size(world_size)
        for name, value in (("slot_bytes", slot_bytes), ("slots", slots)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if reason := why_not():
            raise RuntimeError(reason)
        self.world_size, self.slots, self.slot_bytes = world_size, slots, _LENGTH + slot_bytes
        self._memory = memoryview(mmap.mmap(-1, world_size * world_size * slots * self.slot_bytes))
        context = get_context("fork")
        pairs = list(itertools.permutations(range(world_size), 2))
        self.full = {pair: context.Semaphore(0) for pair in pairs}
        self.free = {pair: context.Semaphore(slots) for pair in pairs}
        self.bells = [context.Semaphore(0) for _ in range(world_size)]
        self.tickets = [context.Semaphore(1) for _ in range(world_size)]  # each rank may use the slots once

    def slot(self, src: int, dst: int, index: int) -> memoryview:
        """Return one slot of the stream from `src` to `dst`; `index` counts on for ever."""
        start = ((src * self.world_size + dst) * self.slots + index % self.slots) * self.slot_bytes
        return self._memory[start : start + self.slot_bytes]


class SharedMesh(StreamMesh):
    """A mesh over `Slots`: each byte is copied twice, into a slot and out of it, and no system call moves it.

    Memory tells nobody that a rank has ended: who waits for that rank waits until its deadline.
    """

    def __init__(self, rank: int, world_size: int, slots: Slots, timeout: float = 60.0):
        if slots.world_size != world_size:
            raise ValueError(f"the slots are for {slots.world_size} ranks, there are {world_size}")
        super().__init__(rank, world_size, timeout)
        if not slots.tickets[rank].acquire(block=False):
            raise ValueError(f"rank {rank} has used these slots before: what is in them may be half a message")
        self._slots, self._bell, self._me = slots, slots.bells[rank], rank
        others = [peer for peer in range(world_size) if peer != rank]
        self._filled = {dst: itertools.count() for dst in others}
        self._emptied = {src: itertools.count() for src in others}
        self._open: dict[int, memoryview] = {}  # what is left in the slot that is being read
        self._may_fill: set[int] = set()  # ranks of whose stream this rank has taken a free slot, not yet filled

    def _push(self, dst, data):
        if not self._has_room(dst):
            return 0
        self._may_fill.remove(dst)
        slot = self._slots.slot(self._me, dst, next(self._filled[dst]))
        count = min(len(data), len(slot) - _LENGTH)
        slot[:8] = count.to_bytes(8, "little")
        slot[_LENGTH : _LENGTH + count] = data[:count]
        self._slots.full[self._me, dst].release()
        self._slots.bells[dst].release()
        return count

    def _pull(self, src, memory):
        left = self._open.pop(src)
        count = min(len(left), len(memory))
        memory[:count] = left[:count]
        if count < len(left):
            self._open[src] = left[count:]
        else:
            self._slots.free[src, self._me].release()
            self._slots.bells[src].release()
        return count

    def _ready(self, seconds, dst):
        deadline, looks = time.monotonic() + seconds, 0
        while True:
            ready = [src for src in self._emptied if self._has_come(src)]
            if ready or (dst is not None and self._has_room(dst)):
                return ready
            looks += 1
            if looks < PATIENCE:
                os.sched_yield()
            elif not self._bell.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return []

    def _has_come(self, src) -> bool:
        if src not in self._open and self._slots.full[src, self._me].acquire(block=False):
            self._bell.acquire(block=False)  # it was rung for this
            slot = self._slots.slot(src, self._me, next(self._emptied[src]))
            self._open[src] = slot[_LENGTH : _LENGTH + int.from_bytes(slot[:8], "little")]
        return src in self._open

    def _has_room(self, dst) -> bool:
        if dst not in self._may_fill and self._slots.free[self._me, dst].acquire(block=False):
            self._bell.acquire(block=False)
            self._may_fill.add(dst)
        return dst in self._may_fill
