"""What the demonstration saves: the state of a rank of a ZeRO-1 job, small."""

import torch


def make_demo_state(rank: int, world_size: int) -> dict:
    """Return what a rank of a ZeRO-1 job would save, small: its range of the flat buffers, and the rest of its life.

    1,003 elements: no world size from 2 to 8 divides them. Every rank's values are its own, the model's are the same.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    start, end = (1003 * r // world_size for r in (rank, rank + 1))
    flat, noise = torch.arange(1003) / 1003, torch.Generator().manual_seed(80 + rank)
    embedding = torch.arange(64).view(16, 4) / 64  # (vocabulary, dim)
    return {
        "model": {
            "embed.weight": embedding,
            "head.weight": embedding,
            "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        },
        "optimizer": {
            "flat": {"master": flat[start:end], "exp_avg": flat[start:end] / 10, "exp_avg_sq": flat[start:end] ** 2},
            "betas": (0.9, 0.95),
            "steps": torch.tensor(10),
        },
        "random": {"torch": noise.get_state()},
        "data": {"epoch": 1, "next_sample": 37 * world_size + rank},
        "best_loss": float("inf"),
        "layout": [{"unit": "optimizer/flat", "start": start, "end": end, "total": 1003}],
    }


def tensor_bytes(rank: int, world_size: int) -> int:
    """Predict the tensor bytes of a rank's file: tied weights once, a view its own elements only."""
    held = 1003 * (rank + 1) // world_size - 1003 * rank // world_size  # elements of the flat buffers
    model, optimizer, random = 16 * 4 * 4 + 4 * 2, 3 * 4 * held + 8, 5056
    return model + optimizer + random
