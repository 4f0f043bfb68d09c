"""All or none: a piece of work that every rank finishes, or every rank hears why not."""

from collections.abc import Callable
from dataclasses import dataclass

from strictjson import CheckpointError


@dataclass
class Team:
    """The ranks of one save or load, and which of them live in this process: one of N, or all."""

    world_size: int
    ranks: list[int]
    agree: Callable[[list], list]

    @classmethod
    def of_comm(cls, comm=None) -> "Team":
        """One rank a process; None is the default process group."""
        if comm is None:
            from comm import TorchComm

            comm = TorchComm()
        return cls(comm.world_size, [comm.rank], comm.agree)

    @classmethod
    def of_one_process(cls, world_size: int) -> "Team":
        """All ranks in this process, which agrees with itself."""
        return cls(world_size, list(range(world_size)), lambda facts: [facts])

    def together(self, work: Callable[[int], object]) -> list:
        """Run `work(rank)` on every rank. Returns all results (small JSON values), on every rank, in rank order.

        If it raises on any rank, every rank raises the same CheckpointError: `rank 2 failed: ` and what `_describe`
        says of the error. Ranks with one text share it (`rank 0, 2 failed: `), several texts are joined by `; `; where
        all ranks fail with one text, it stands alone. This is also a barrier.
        """
        facts, cause = [], None
        for rank in self.ranks:
            try:
                facts.append([rank, True, work(rank)])
            except Exception as error:
                cause = error
                facts.append([rank, False, _describe(error)])
        everyone = sorted(fact for of_process in self.agree(facts) for fact in of_process)
        failed = {}  # message -> the ranks that failed with it
        for rank, ok, value in everyone:
            if not ok:
                failed.setdefault(value, []).append(rank)
        if len(failed) == 1 and len(*failed.values()) == self.world_size:
            raise CheckpointError(*failed) from cause
        if failed:
            parts = [f"rank {', '.join(map(str, ranks))} failed: {message}" for message, ranks in failed.items()]
            raise CheckpointError("; ".join(parts)) from cause
        return [value for _, _, value in everyone]

    def on_rank_0(self, work: Callable[[], object]):
        """Run `work` on rank 0; return its result on every rank."""
        return self.together(lambda rank: work() if rank == 0 else None)[0]


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
