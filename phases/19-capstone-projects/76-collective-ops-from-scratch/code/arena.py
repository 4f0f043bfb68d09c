"""`Arena`: memory that all ranks of one machine see, and the semaphores with which they take turns.

The launcher makes it before it forks; the ranks inherit the mapping. It has no name and no file: the kernel takes it
back when the last process is gone, however it ended. So it needs fork: `why_not()` says when there is none.
"""

import mmap
import os
import sys
from multiprocessing import get_context

import torch
from mesh import MeshTimeout
from ranks import check_world_size, start_method

PATIENCE = 40  # looks at a semaphore, each giving up the processor, before a wait blocks
ALIGNMENT = 64  # bytes: a cache line, and more than any element


def why_not() -> str | None:
    """Return why there can be no arena on this machine, or None if there can be one."""
    if sys.platform != "linux":
        return f"shared memory is inherited through fork, which is not used on {sys.platform}"
    method = start_method(None)
    return None if method == "fork" else f"shared memory is inherited through fork; here ranks start by {method}"


class Arena:
    """For each rank three windows of `window_bytes`, through which collectives pass data, and a heap.

    Tensors that live in the heap (`SharedComm.empty`) are read by the other ranks in place, without a copy. Raises
    ValueError for a bad size, RuntimeError where ranks are not forked.
    """

    windows = 3  # while a slow rank still reads the last one, nobody may write into it: two would not do

    def __init__(self, world_size: int, heap_bytes: int = 0, window_bytes: int = 1 << 21):
        check_world_size(world_size)
        for name, size, least in (("heap_bytes", heap_bytes, 0), ("window_bytes", window_bytes, 4096)):
            if isinstance(size, bool) or not isinstance(size, int) or size < least or size % ALIGNMENT:
                raise ValueError(f"{name} must be a multiple of {ALIGNMENT}, at least {least}, got {size!r}")
        if reason := why_not():
            raise RuntimeError(reason)
        self.world_size, self.heap_bytes = world_size, heap_bytes
        self.window_bytes = window_bytes
        region = self.windows * window_bytes + heap_bytes
        self._memory = mmap.mmap(-1, world_size * region)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.regions = [memory[rank * region : (rank + 1) * region] for rank in range(world_size)]
        context = get_context("fork")
        self._turnstiles = [
            [context.Semaphore(0) for _ in range((world_size - 1).bit_length())] for _ in range(world_size)
        ]

    def window(self, rank: int, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one of a rank's windows as a 1-d tensor of `dtype`."""
        start = index * self.window_bytes
        return self.regions[rank][start : start + self.window_bytes].view(dtype)

    def heap(self, rank: int) -> torch.Tensor:
        """Return a rank's heap (heap_bytes,) as bytes."""
        return self.regions[rank][self.windows * self.window_bytes :]

    def barrier(self, rank: int, timeout: float) -> None:
        """Return when all ranks have called it: after ceil(log2 N) rounds each has heard, through others, of all.

        Raises MeshTimeout if one does not come within `timeout` seconds. Source: Hensgen, Finkel and Manber, 1988.
        """
        for turn, distance in enumerate(1 << i for i in range(len(self._turnstiles[rank]))):
            self._turnstiles[(rank + distance) % self.world_size][turn].release()
            acquire(self._turnstiles[rank][turn], timeout, rank, (rank - distance) % self.world_size)


def acquire(semaphore, timeout: float, rank: int, peer: int) -> None:
    """Take a semaphore that `peer` releases: look a few times first, since to block costs a switch of processes."""
    for _ in range(PATIENCE):
        if semaphore.acquire(block=False):
            return
        os.sched_yield()
    if not semaphore.acquire(timeout=timeout):
        raise MeshTimeout(f"rank {rank} waited {timeout:g} s for rank {peer} at a barrier", peer)
