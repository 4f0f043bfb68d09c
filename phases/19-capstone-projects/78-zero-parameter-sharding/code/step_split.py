"""Where the time of a step goes: forward and backward, reduction, update, gather."""

import time
from collections.abc import Callable

import torch
from zero import ZeroOptimizer

PARTS = ("forward and backward", "reduce", "update", "gather")


def split_step(optimizer: ZeroOptimizer, loss: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Take one step and return the seconds of its PARTS on this rank. Without `overlap`, so that they do not mix.

    Waiting for a slower rank counts where it happens: in the reduction. "update" is what is left of `step()`: the flag
    and Adam. Not with the fused kernel on a GPU, where Python does not wait for either.
    """
    seconds, gather = {}, optimizer._gather_parameters

    def timed(part: str, work: Callable) -> None:
        began = time.perf_counter()
        work()
        if optimizer.comm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[part] = time.perf_counter() - began

    timed("forward and backward", lambda: loss().backward())
    timed("reduce", optimizer.reduce_gradients)
    optimizer._gather_parameters = lambda: timed("gather", gather)
    try:
        timed("update", optimizer.step)
    finally:
        del optimizer._gather_parameters
    seconds.setdefault("gather", 0.0)  # where the step was skipped
    seconds["update"] -= seconds["gather"]
    return {part: seconds[part] for part in PARTS}
