"""A small language model whose token embedding, on its first stage, is its output matrix, on its last."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM = 11, 6


class TiedStage(nn.Module):
    """Stage `stage` of: embedding, a Linear and tanh a stage, and the embedding again as output matrix.

    `matrix` is the tied weight, (VOCAB, DIM), or None on stages between the first and the last.
    """

    def __init__(self, stage: int, num_stages: int, matrix: nn.Parameter | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + stage)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.linear = nn.Linear(DIM, DIM)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.normal_(0, 0.4, generator=generator)
        if self.is_first or self.is_last:
            values = torch.randn(VOCAB, DIM, generator=generator)  # another on each stage, until they are tied
            self.matrix = nn.Parameter(values) if matrix is None else matrix
        else:
            self.matrix = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (rows, seq) or activations (rows, seq, DIM) -> activations, or logits (rows, seq, VOCAB)."""
        x = F.embedding(x, self.matrix) if self.is_first else x
        x = torch.tanh(self.linear(x))
        return F.linear(x, self.matrix) if self.is_last else x


def whole_model(num_stages: int) -> nn.Sequential:
    """Return all stages in one process, with one matrix."""
    first = TiedStage(0, num_stages)
    return nn.Sequential(first, *(TiedStage(stage, num_stages, first.matrix) for stage in range(1, num_stages)))


def tokens(step: int, rows: int, seq: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's tokens and the ones to predict, (rows, seq) each."""
    found = torch.randint(VOCAB, (2, rows, seq), generator=torch.Generator().manual_seed(step))
    return found[0], found[1]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
