"""Activation checkpointing: keep a stage's input alone, and run its forward pass once more when backward comes.

Source: Chen et al., 2016. For a third more computing, a stage keeps one tensor a microbatch instead of one a layer.
"""

from contextlib import contextmanager

import torch


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the random generators that a stage on `device` may use."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


@contextmanager
def replayed(state: list[torch.Tensor], device: torch.device):
    """Draw the random numbers of `state` again (dropout must drop the same elements), then go on where we were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.set_rng_state(state[0])
        for its_state in state[1:]:
            torch.cuda.set_rng_state(its_state, device)
        yield
