"""What the checkpoint tests share: comparing states bit by bit, and small states that differ in every place."""

import torch


def same(a, b) -> bool:
    """Same structure, types, dtypes, shapes and bits."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        bits = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()).view(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*bits)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def small_states(world_size: int, base: float = 0.0) -> list[dict]:
    """One state a rank: a shard of a flat buffer of 10 elements and a number; no two places hold the same value."""
    bounds = [(10 * r // world_size, 10 * (r + 1) // world_size) for r in range(world_size)]
    flat = torch.arange(10.0) + base
    return [
        {
            "flat": flat[start:end],
            "own": torch.tensor([base + 100 + rank]),
            "steps": rank,
            "layout": [{"unit": "flat", "start": start, "end": end, "total": 10}],
        }
        for rank, (start, end) in enumerate(bounds)
    ]
