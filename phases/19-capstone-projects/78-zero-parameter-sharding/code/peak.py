"""The most memory that parameters, gradients and optimizer state need within a step: predicted, and measured.

Measured: a look at all their storages after every operation of torch, in forward, backward and step. Predicted: the
sum of what stages 2 and 3 hold at each place of backward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from memory import live_bytes, shard_bounds, unit_bytes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMeter(TorchDispatchMode):
    """While it is on, looks how much `held()`, {what: tensors}, has: after each operation, and each new gradient.

    `peak` is the largest sum seen, each storage counted once, `parts` what it consisted of. Activations are not in it,
    nor what lives only inside an operation, nor gradients on their way through autograd.
    """

    def __init__(self, held: Callable[[], dict[str, list[torch.Tensor]]], params: list[nn.Parameter]):
        super().__init__()
        self.held, self.params, self.peak, self.parts, self.looking = held, params, 0, {}, False
        self.hooks: list = []

    def __enter__(self):
        self.hooks = [param.register_post_accumulate_grad_hook(lambda _: self.look()) for param in self.params]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.look()
        return result

    def look(self) -> None:
        """Take notice of what is held now."""
        if self.looking:  # the look itself may call operations
            return
        self.looking = True
        parts = {name: live_bytes(tensors) for name, tensors in self.held().items()}
        self.looking = False
        if sum(parts.values()) > self.peak:
            self.peak, self.parts = sum(parts.values()), parts


@dataclass(frozen=True)
class Chain:
    """A model of blocks, one after another, inside a root: elements of each, and bytes an element.

    `tail` are those of the root's elements whose gradients come before the blocks': a final norm, a head.
    """

    blocks: list[int]
    root: int
    tail: int
    size: int = 4

    def units(self) -> list[tuple[int, int]]:
        """Return the flat units that `unit_bytes` takes."""
        return [(numel, self.size) for numel in [*reversed(self.blocks), self.root] if numel]


def step_moments(chain: Chain, world_size: int, stage: int) -> list[tuple[str, int, int]]:
    """Return (moment, bytes of parameters, bytes of gradients) on a rank, in the order of a step of stage 2 or 3.

    "B2" is the end of block 2's backward, when autograd has all its gradients; "L2", when they have been copied into
    flat memory and leave. One unit at a time has flat memory, until the next one leaves. In stage 3 the
    root's parameters are there, and those of a block and of the next.
    """
    size, last = chain.size, len(chain.blocks) - 1
    elements = [*chain.blocks, chain.root]  # of each block, and last of the root
    own = [size * numel for numel in elements]
    chunk = [size * shard_bounds(numel, world_size, 0)[2] for numel in elements]
    flat = [world_size * each for each in chunk]
    steady = unit_bytes(chain.units(), world_size, stage)["parameters"]

    def there(*places: int) -> int:
        """Parameters: in stage 3 the shards, and what is gathered; a place that there is not counts nothing."""
        return steady + (sum(flat[place] for place in places if -1 <= place <= last) if stage == 3 else 0)

    moments = [(f"F{place}", there(-1, place, place + 1), 0) for place in range(last + 1)]
    flying = 0  # flat memory of the unit that has left last: the one before it has been reduced by then
    arrived, waiting = 0, size * chain.tail  # gradients: in shards, and of the root
    for place in range(last, -1, -1):
        following = [place - 1] if place else []
        grads = arrived + waiting + own[place]
        moments.append((f"B{place}", there(-1, place, *following), grads + flying))
        if place or stage == 2:
            flying = flat[place]
            moments.append((f"L{place}", there(-1, *following), grads + flying))
            arrived += chunk[place]
    if stage == 3 and chain.blocks:  # the first block is over with the root
        moments.append(("B root", there(-1, 0), arrived + own[-1] + own[0] + flying))
        flying = flat[0]
        moments.append(("L0", there(), arrived + own[-1] + own[0] + flying))
        arrived += chunk[0]
    else:
        moments.append(("B root", there(-1), arrived + own[-1] + flying))
    if chain.root:
        flying = flat[-1]
        moments.append(("L root", there(), arrived + own[-1] + flying))
    return moments


def peak_bytes(chain: Chain, world_size: int, stage: int) -> int:
    """Return the largest sum of bytes of parameters, gradients and optimizer state on a rank within a step.

    Data parallelism and stage 1 hold the same all the time.
    """
    held = unit_bytes(chain.units(), world_size, stage)
    if stage < 2:
        return sum(held.values())
    return held["optimizer"] + max(params + grads for _, params, grads in step_moments(chain, world_size, stage))
