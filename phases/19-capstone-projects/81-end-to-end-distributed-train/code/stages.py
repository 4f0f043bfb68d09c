"""A GPT as a list of named layers: a stage is a range of them, and a parameter has the same name on every rank."""

from collections import OrderedDict

import torch
from balance import equal_bounds
from gpt import MiniGPT
from torch import nn


class Embedding(nn.Module):
    """The first layer: tokens to activations."""

    def __init__(self, model: MiniGPT):
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) -> (batch, seq, dim)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.dropout(x)


class Head(nn.Module):
    """The last layer: activations to logits."""

    def __init__(self, model: MiniGPT):
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, vocab)."""
        return self.head(self.norm(x))


def layers_of(blocks: int, stage: int = 0, num_stages: int = 1) -> list[str]:
    """Return the names of a stage's layers. Raises ValueError if there are more stages than blocks."""
    first, end = equal_bounds(blocks, num_stages)[stage]
    names = [f"block{i}" for i in range(first, end)]
    return ["embedding"] * (stage == 0) + names + ["head"] * (stage == num_stages - 1)


def take_layers(model: MiniGPT, names: list[str]) -> nn.Sequential:
    """Return these layers of a model, with the model's own parameters."""
    blocks = {f"block{i}": block for i, block in enumerate(model.blocks)}
    made = {"embedding": lambda: Embedding(model), "head": lambda: Head(model)}
    return nn.Sequential(OrderedDict((name, blocks[name] if name in blocks else made[name]()) for name in names))
