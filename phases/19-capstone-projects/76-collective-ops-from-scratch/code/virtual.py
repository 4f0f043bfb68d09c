"""A virtual cluster: N ranks as threads of one process, one running at a time, in an order drawn from a seed.

Collectives and whole training runs are tested here in milliseconds. The scheduler sees every wait, so a deadlock is
reported at once, as the cycle of ranks that wait for each other, and a seed replays an interleaving exactly.
"""

import random
import threading
from collections import defaultdict, deque

import torch
from mesh import Mesh
from ranks import RankError, check_world_size


class DeadlockError(RuntimeError):
    """Every rank that is not finished waits for another: the message says who waits for whom."""


class _Ended(BaseException):
    """Unwinds the other ranks when one has failed."""


class VirtualMesh(Mesh):
    """One virtual rank's end of the mesh. Unbuffered, a lone `send` returns only when the message has been taken."""

    def __init__(self, rank: int, cluster: "VirtualCluster"):
        super().__init__(rank, cluster.world_size)
        self._cluster, self._arrived = cluster, defaultdict(deque)

    def _post(self, dst, tag, stamp, tensor, lone):
        cluster, me = self._cluster, self.members[self.rank]
        message = [stamp, tensor.clone(memory_format=torch.contiguous_format), False]  # the last: has it been taken?
        cluster.meshes[dst]._arrived[me, tag].append(message)
        cluster.wake(dst)
        blocks = lone and not cluster.buffered
        cluster.wait(me, dst, f"send to rank {dst}", lambda: message[2] or not blocks)

    def _take(self, src, tag):
        me, box = self.members[self.rank], self._arrived[src, tag]
        self._cluster.wait(me, src, f"receive from rank {src}", lambda: box)
        stamp, tensor, _ = message = box.popleft()
        message[2] = True
        self._cluster.wake(src)
        return stamp, tensor


class VirtualCluster:
    """`VirtualCluster(N, seed).run(fn, *args)` calls `fn(mesh, *args)` on N virtual ranks; returns their results.

    `buffered=False` makes every lone `send` block until its receiver takes the message, as a transport may: what
    deadlocks then is a program that relies on buffering. Each rank has its own state of torch's and Python's random
    generators, beginning as a copy of the caller's.
    """

    def __init__(self, world_size: int, seed: int = 0, buffered: bool = True):
        check_world_size(world_size)
        self.world_size, self.seed, self.buffered = world_size, seed, buffered

    def run(self, fn, *args) -> list:
        """Run to the end. Raises DeadlockError; RankError, from the original error, if a rank raises."""
        self.meshes = [VirtualMesh(rank, self) for rank in range(self.world_size)]
        self._order = random.Random(self.seed)
        self._turn = [threading.Semaphore(0) for _ in range(self.world_size)]
        self._waiting: dict[int, tuple[int, str]] = {}  # rank -> (the rank it waits for, doing what)
        self._running = set(range(self.world_size))
        self._results, self._error, self._failed_rank = [None] * self.world_size, None, None
        self._caller_turn = threading.Semaphore(0)
        state = _random_state()
        threads = [
            threading.Thread(target=self._rank, args=(rank, fn, args, state), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        self._pass_turn()
        self._caller_turn.acquire()
        for thread in threads:
            thread.join()
        _set_random_state(state)
        error = self._error
        if error is None:
            return self._results
        if self._failed_rank is None:  # the scheduler's own: a deadlock
            raise error
        raise RankError(self._failed_rank, None, f"raised {type(error).__name__}: {error}") from error

    def wait(self, rank: int, peer: int, doing: str, ready) -> None:
        """Let other ranks run until `ready()`; the caller is `rank`, and waits for `peer`."""
        state = _random_state()
        while True:
            if not ready():
                self._waiting[rank] = (peer, doing)
            self._pass_turn()
            self._turn[rank].acquire()
            if self._error is not None:
                raise _Ended
            if ready():
                break
        _set_random_state(state)

    def wake(self, rank: int) -> None:
        """Let `rank` look again at what it waits for."""
        self._waiting.pop(rank, None)

    def _rank(self, rank, fn, args, state) -> None:
        self._turn[rank].acquire()
        _set_random_state(state)
        try:
            if self._error is None:
                self._results[rank] = fn(self.meshes[rank], *args)
        except _Ended:
            pass
        except BaseException as error:
            if self._error is None:
                self._error, self._failed_rank = error, rank
        self._running.discard(rank)
        self._pass_turn()

    def _pass_turn(self) -> None:
        """Choose who runs next. When nobody can, that is a deadlock; when nobody is left, the caller goes on."""
        if not self._running:
            return self._caller_turn.release()
        ready = sorted(self._running - set(self._waiting))
        if not ready and self._error is None:
            self._error = DeadlockError(self._describe_deadlock())
        if self._error is not None:
            ready = sorted(self._running)  # each in turn sees the error and unwinds
        self._turn[self._order.choice(ready)].release()

    def _describe_deadlock(self) -> str:
        rank, seen = min(self._waiting), []
        while rank in self._waiting and rank not in seen:
            seen.append(rank)
            rank = self._waiting[rank][0]
        cycle = seen[seen.index(rank) :] if rank in seen else seen
        lines = [f"rank {r} waits for rank {self._waiting[r][0]} ({self._waiting[r][1]})" for r in cycle]
        ending = "" if rank in seen else ", which has finished"
        return "deadlock: " + ", ".join(lines) + ending


def _random_state():
    return torch.get_rng_state(), random.getstate()


def _set_random_state(state) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
