"""The learning rate of a step: a line up, then half a cosine down. It has no state, so a resume cannot bend it."""

import math


def warmup_cosine(step: int, peak: float, warmup: int, end: int = 0, floor: float = 1.0) -> float:
    """Return the rate of a step (from 1): up to `peak` at step `warmup`, down to `floor * peak` at step `end`.

    From `end` on it stays there; an `end` of 0 means that it stays at `peak`.
    """
    if step <= warmup:
        return peak * (step / warmup)
    if end == 0:
        return peak
    turn = min(1.0, (step - warmup) / max(1, end - warmup))  # 0 to 1
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * turn)) / 2)
