"""The small model and data that the demonstrations of lessons 77 and 78 train."""

import torch
from torch import nn

SEED = 7


class MiniMLP(nn.Module):
    """Linear, ReLU, Linear. Deterministic for a seed."""

    def __init__(self, dim: int = 16, hidden: int = 32, out: int = 4, seed: int = SEED):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> (batch, out)."""
        return self.layers(x)


def global_batch(
    step: int, rows: int, dim: int = 16, out: int = 4, seed: int = SEED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's batch for all ranks: inputs (rows, dim), targets (rows, out). Depends on (seed, step) alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    x = torch.randn(rows, dim, generator=generator)
    teacher = torch.randn(dim, out, generator=torch.Generator().manual_seed(seed))
    return x, torch.tanh(x @ teacher)


def rank_slice(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's rows of a global batch."""
    return tensor.chunk(world_size)[rank]


@torch.no_grad()
def sgd_step(module: nn.Module, lr: float) -> None:
    """Plain SGD, then forget the gradients. (Any torch.optim optimizer would import torch._dynamo: 1.2 s a process.)"""
    for param in module.parameters():
        if param.grad is not None:
            param.sub_(param.grad, alpha=lr)
            param.grad = None
