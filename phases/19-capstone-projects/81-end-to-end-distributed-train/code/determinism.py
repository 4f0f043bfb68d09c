"""What makes a run repeatable beside its seed: where each rank's noise stands, and algorithms that add in one order.

The loop draws from torch's generators only. Python's `random` and numpy's are not drawn from, so they are not saved.
"""

import os

import torch

STRIDE = 10_000_019  # between the seeds of two steps: more than there are ranks


def noise_seed(seed: int, step: int, stream: int) -> int:
    """Return the seed of a rank's noise after `step` steps. `stream`: the rank, or another number of its own."""
    return seed + 1 + stream + STRIDE * step


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return where this rank's noise stands: torch's generator on the CPU, and on the GPU if there is one."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def check_random_state(saved: dict[str, torch.Tensor], now: dict[str, torch.Tensor], device: torch.device) -> None:
    """Raise ValueError unless `saved` has the names, dtypes and shapes of `now`, and generators can go on from it.

    Other generators than those in use try it.
    """
    found, expected = ({name: (x.dtype, x.shape) for name, x in each.items()} for each in (saved, now))
    if found != expected:
        raise ValueError(f"random state: expected {expected}, found {found}")
    for name, state in saved.items():
        try:
            torch.Generator("cpu" if name == "cpu" else device).set_state(state)
        except RuntimeError as error:
            raise ValueError(f"random state {name!r} is none that a generator can have: {error}") from None


def set_random_state(saved: dict[str, torch.Tensor]) -> None:
    """Set what `random_state` returned."""
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])


def be_deterministic(device: torch.device) -> None:
    """On a GPU, let only algorithms run that give the same bits again. (On a CPU, with one thread a rank, all do.)"""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
