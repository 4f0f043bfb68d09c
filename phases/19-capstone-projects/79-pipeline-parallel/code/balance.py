"""Stage balance: the slowest stage sets the pace. Time each layer, then cut where the slowest stage is fastest."""

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from numbers import Real

import torch
from instructions import check_sizes
from torch import nn


def equal_bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Return (first layer, one past the last) of each stage, where stages differ by at most one layer.

    Raises ValueError for a size below 1, or more stages than layers.
    """
    check_sizes(num_layers=num_layers, num_stages=num_stages)
    if num_stages > num_layers:
        raise ValueError(f"{num_stages} stages, but the model has only {num_layers} layers")
    return [(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages) for stage in range(num_stages)]


def balanced_bounds(times: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Return the bounds whose slowest stage is as fast as possible, given each layer's time.

    Stage after stage: the best cut of the first `end` layers is the best over all begins of its last stage. Raises
    ValueError: with the layer and the time, for what is no time of at least 0; with the number, for a size below 1;
    with both numbers, for more stages than layers.
    """
    equal_bounds(len(times), num_stages)  # refuses bad sizes
    for layer, seconds in enumerate(times):
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= seconds < float("inf"):
            raise ValueError(f"layer {layer} takes {seconds!r}: times must be at least 0")
    until = [*accumulate(times, initial=0)]  # the time of the first `end` layers
    best = {0: (0, [])}  # end -> (time of the slowest stage, bounds)
    for stage in range(num_stages):
        best = {
            end: min(
                (max(slowest, until[end] - until[begin]), [*bounds, (begin, end)])
                for begin, (slowest, bounds) in best.items()
                if begin < end
            )
            for end in range(stage + 1, len(times) + 1)
        }
    return best[len(times)][1]


def stage_sums(times: Sequence[float], bounds: list[tuple[int, int]]) -> list[float]:
    """Return each stage's time, given each layer's."""
    return [sum(times[first:last]) for first, last in bounds]


def profile_layers(layers: Sequence[nn.Module], x: torch.Tensor, repeats: int = 9) -> tuple[list[float], list[float]]:
    """Return the median seconds of each layer's forward and backward pass on one microbatch `x`, one after the other.

    The layers' gradients are left as they were. On a GPU, each measurement waits until the device is done.
    """
    check_sizes(repeats=repeats)
    forward, backward = [], []
    for layer in layers:
        x, runs = x.detach().requires_grad_(x.is_floating_point()), []
        inputs = [*([x] if x.requires_grad else []), *(p for p in layer.parameters() if p.requires_grad)]
        for _ in range(repeats + 1):
            marks = [_now(x)]
            y = layer(x)
            marks.append(_now(x))
            if inputs:
                torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
            runs.append((marks[1] - marks[0], _now(x) - marks[1]))
        for times, part in zip((forward, backward), zip(*runs[1:], strict=True), strict=True):  # the first one warms up
            times.append(statistics.median(part))
        x = y
    return forward, backward


def _now(x: torch.Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
