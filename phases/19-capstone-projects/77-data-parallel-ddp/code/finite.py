"""NaN and infinity: one rank's bad gradient makes every rank's mean bad. Here all ranks say so, and whose it was."""

import torch


class NonFiniteGradient(FloatingPointError):
    """The mean gradient is not finite. `ranks`: whose own was not; `names`: which parameters. Equal on all ranks."""

    def __init__(self, ranks: list[int], names: list[str]):
        super().__init__(ranks, names)
        self.ranks, self.names = ranks, names

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        if not self.ranks:
            return f"the mean gradient of {shown} is not finite, though every rank's own was: the sum overflowed"
        return f"the gradient of {shown} is not finite on rank {', '.join(map(str, self.ranks))}"


def is_finite(flat: torch.Tensor) -> torch.Tensor:
    """Return, as a 0-dim bool on its device, whether all elements are finite. One pass, no copy.

    NaN passes through a minimum and a maximum. (On a CPU the largest |x| as a norm takes ten times as long.)
    """
    return torch.isfinite(torch.stack(torch.aminmax(flat))).all() if flat.numel() else torch.tensor(True)


def check_buckets(buckets: list) -> None:
    """Raise NonFiniteGradient if a bucket's mean is not finite: every rank has the same mean, so all raise or none."""
    bad = [bucket for bucket in buckets if not is_finite(bucket.grad)]
    if bad:
        ranks = {rank for bucket in bad for rank in bucket.nonfinite_ranks()}
        slots = [(slot, view) for bucket in bad for slot, view in zip(bucket.slots, bucket.views, strict=True)]
        raise NonFiniteGradient(sorted(ranks), [slot.name for slot, view in slots if not is_finite(view)])
