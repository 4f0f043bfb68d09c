"""MiniGPT: a decoder-only transformer, small enough to read and to train in a second."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (batch, heads, seq, head dim)
        return self.out(x.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised input and added to the stream."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class MiniGPT(nn.Module):
    """Token and position embeddings, blocks, a final norm and a head. Deterministic for a seed.

    `tied`: the head's matrix is the token embedding, one parameter. Raises ValueError for a size below 1, or if `heads`
    does not divide `dim`.
    """

    def __init__(self, vocab=64, dim=32, heads=4, blocks=2, seq=16, dropout=0.0, seed=7, tied=False):
        super().__init__()
        for name, size in (("vocab", vocab), ("dim", dim), ("heads", heads), ("blocks", blocks), ("seq", seq)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if dim % heads:
            raise ValueError(f"heads must divide dim: {heads} heads, dim {dim}")
        self.seq = seq
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(blocks)))
            self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) of token ids -> logits (batch, seq, vocab). Raises ValueError for any other shape."""
        if tokens.dim() != 2 or tokens.shape[1] > self.seq:
            raise ValueError(f"tokens must be (batch, seq), seq at most {self.seq}, got {tuple(tokens.shape)}")
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats a token; both arguments are (batch, seq)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
