"""`StepCounter`: steps that were taken and steps that were skipped, counted where the gradients are."""

import torch
from comm import Comm
from finite import is_finite


class StepCounter:
    """Counts on the device, so that counting never waits for it. Reading a count does.

    `bad` is 1 if the present step must not be taken, `taken` what a fused kernel reads as Adam's step.
    """

    def __init__(self, device: torch.device):
        self.bad = torch.zeros(1, device=device)
        self.taken, self._skipped, self._in_a_row = (torch.zeros((), device=device) for _ in range(3))

    def record(self, bad: torch.Tensor) -> None:
        """Count a step: `bad` (1,) is 1 if it must be skipped, else 0."""
        self.bad.copy_(bad)
        self.taken.add_(1 - self.bad[0])
        self._skipped.add_(self.bad[0])
        self._in_a_row.add_(1).mul_(self.bad[0])

    def restore(self, steps: int, skipped: int) -> None:
        """Go on from saved counts."""
        self.taken.fill_(steps)
        self._skipped.fill_(skipped)
        self._in_a_row.zero_()

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(self.taken)

    @property
    def skipped(self) -> int:
        """Steps skipped."""
        return int(self._skipped)

    @property
    def in_a_row(self) -> int:
        """Steps skipped since the last one that was taken."""
        return int(self._in_a_row)


def not_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return (1,): 1 if any element is NaN or infinite. One pass; on a GPU with few kernels for many tensors."""
    if tensors[0].is_cpu:
        good = torch.stack([is_finite(tensor) for tensor in tensors]).all()
    else:
        good = torch.isfinite(torch.stack(torch._foreach_norm(tensors, float("inf")))).all()  # NaN if any element is
    return (~good).float().reshape(1)


def blame(comm: Comm, shards: list) -> str:
    """Say whose gradient is not finite. All ranks call it."""
    bad = comm.agree(any(bool(shard.own_bad) for shard in shards if shard.own_bad is not None))
    guilty = {rank for rank, own in enumerate(bad) if own}
    if kept := [shard.unit.grad for shard in shards if shard.own_bad is None]:
        guilty |= _guilty(comm, kept)
    if not guilty:
        return "every gradient is finite, but their sum or its norm is not"
    return f"the gradient of rank {', '.join(map(str, sorted(guilty)))} is not finite"


def _guilty(comm: Comm, gradients: list[torch.Tensor]) -> set[int]:
    """Find out from flat gradients as a reduce-scatter in place leaves them.

    Chunk r of a flat gradient is then the mean on rank r, and its own on every other rank. So a rank that sees bad
    values outside its chunk has them itself. If a mean is bad and nobody else has bad values there, they are of the
    mean's own rank, or the sum of finite values has overflowed. (If others have them too, a mean's own rank cannot be
    told from a good one, and is not named.)
    """
    n = comm.world_size
    chunks = zip(*(gradient.chunk(n) for gradient in gradients), strict=True)
    seen = comm.agree([bool(not_finite(list(chunk))) for chunk in chunks])  # seen[rank][chunk]
    guilty = {rank for rank in range(n) for chunk in range(n) if chunk != rank and seen[rank][chunk]}
    return guilty | {chunk for chunk in range(n) if seen[chunk][chunk] and sum(row[chunk] for row in seen) == 1}
