"""Where the time of a step goes: forward and backward, reduction, update, gather."""

import time
from collections.abc import Callable

import torch
from comm import Work
from shard import Shard
from zero import ZeroOptimizer

PARTS = ("forward and backward", "reduce", "update", "gather")


def split_step(optimizer: ZeroOptimizer, loss: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Take one step and return the seconds of its PARTS on this rank. Without `overlap`, so that they do not mix.

    Waiting for a slower rank counts where it happens: in the reduction. "update" is what is left of `step()`: the flag
    and Adam. Not with the fused kernel on a GPU, where Python does not wait for either.
    """
    seconds, gather = dict.fromkeys(PARTS, 0.0), optimizer._gather

    def timed(part: str, work: Callable) -> None:
        began = time.perf_counter()
        work()
        if optimizer.comm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[part] += time.perf_counter() - began

    def gather_now(shard: Shard) -> list[Work]:
        timed("gather", lambda: [work.wait() for work in gather(shard)])
        return []

    timed("forward and backward", lambda: loss().backward())
    timed("reduce", optimizer.reduce_gradients)
    optimizer._gather = gather_now
    try:
        timed("update", optimizer.step)
    finally:
        del optimizer._gather
    seconds["update"] -= seconds["gather"]
    return seconds
