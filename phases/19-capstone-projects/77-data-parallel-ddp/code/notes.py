"""What a rank says beside its gradients: its weight, and whether they are all finite. It travels in the bucket itself.

Each rank has a place of its own in the bucket's tail, where the others add zeros. A weight is written as the eight
hexadecimal digits of its float32: whole numbers below 16 survive a mean over N ranks, and any rounding of it, in every
dtype. (Summed as a plain number, 300 + 301 samples would become 600 in bf16, and a mean would be wrong by that.)
"""

import math
import struct

import torch

SIZE = 9  # elements a rank: eight digits, lowest first, and 1 if a gradient is not finite


def check_weight(weight: float) -> float:
    """Return a weight as float32 has it. Raises ValueError unless it is a finite number of at least 0."""
    good = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight <= 3e38  # NaN is not
    if not good:
        raise ValueError(f"samples must be a finite number of at least 0, got {weight!r}")
    rounded = struct.unpack("<f", struct.pack("<f", weight))[0]
    if weight > 0 and rounded == 0:
        raise ValueError(f"samples must be 0 or at least 1e-45, got {weight!r}")
    return math.fabs(rounded)  # -0.0 has another bit pattern


def digits(weight: float) -> list[float]:
    """Return a checked weight, and "finite", as SIZE small whole numbers."""
    word = struct.unpack("<I", struct.pack("<f", weight))[0]
    return [float(word >> 4 * i & 15) for i in range(8)] + [0.0]


def page(weight: float, rank: int, world_size: int, like: torch.Tensor) -> torch.Tensor:
    """Return what a rank adds to the notes of all, (N SIZE,), in the dtype and on the device of `like`."""
    place = [0.0] * (SIZE * world_size)
    place[rank * SIZE : (rank + 1) * SIZE] = digits(weight)
    return torch.tensor(place, dtype=like.dtype, device=like.device)


def read(mean: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (every rank's weight (N,) in float64, whether its gradients were not finite (N,)) from the mean of notes.

    Works on the device, without a wait for it.
    """
    numbers = (mean.float() * world_size).round().long().view(world_size, SIZE)
    shifts = torch.arange(0, 32, 4, device=mean.device)
    words = (numbers[:, :8] << shifts).sum(1)  # below 2^31: a weight has no sign
    return words.int().view(torch.float32).double(), numbers[:, 8] > 0
