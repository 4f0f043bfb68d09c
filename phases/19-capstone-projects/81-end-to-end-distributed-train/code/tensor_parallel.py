"""Tensor parallelism: the ranks of a group share each layer's matrices; attention and MLP cost one all-reduce each way.

A first matrix is cut by its outputs (column parallel), a second by its inputs (row parallel). Between the two every
rank works on its own slice without a word, heads or hidden units being independent; the sum over ranks comes at the
end. Source: Shoeybi et al., Megatron-LM, 2019.
"""

import torch
import torch.nn.functional as F
from comm import Comm
from gpt import Attention, Block
from noise import Noise
from torch import nn


class _CopyToRanks(torch.autograd.Function):
    """Forward: nothing, all ranks have the same x. Backward: each has a part of its gradient, the sum is all of it."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    """Forward: the sum of all ranks' parts. Backward: nothing, each part counts once in the sum."""

    @staticmethod
    def forward(ctx, part, comm):
        total = part.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ColumnLinear(nn.Module):
    """A rank's outputs of a Linear layer: rows of its weight and bias. The input is the same on all ranks.

    `groups`: the outputs are so many matrices side by side (queries, keys, values), and each of them is cut.
    """

    def __init__(self, whole: nn.Linear, comm: Comm, groups: int = 1):
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(own_slice(whole.weight, comm, groups))  # (outputs / N, inputs)
        self.bias = nn.Parameter(own_slice(whole.bias, comm, groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs / N)."""
        return F.linear(_CopyToRanks.apply(x, self.comm), self.weight, self.bias)


class RowLinear(nn.Module):
    """A rank's inputs of a Linear layer: columns of its weight. The output is the same on all ranks, bias included."""

    def __init__(self, whole: nn.Linear, comm: Comm):
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(own_slice(whole.weight.T, comm).T.contiguous())  # (outputs, inputs / N)
        self.bias = whole.bias  # added once, after the sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs / N) -> (..., outputs)."""
        return _SumOverRanks.apply(F.linear(x, self.weight), self.comm) + self.bias


class SplitAttention(Attention):
    """A rank's heads of an attention layer, with dropout of their own: other heads must not drop the same weights."""

    def __init__(self, whole: Attention, comm: Comm, noise: Noise):
        nn.Module.__init__(self)
        self.heads, self.dropout, self.noise = whole.heads // comm.world_size, whole.dropout, noise
        self.qkv, self.out = ColumnLinear(whole.qkv, comm, groups=3), RowLinear(whole.out, comm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim), the same on all ranks."""
        if not self.training or self.dropout == 0:
            return super().forward(x)
        with self.noise:
            return super().forward(x)


def split_block(block: Block, comm: Comm, noise: Noise) -> Block:
    """Leave this rank its slices of a whole block's matrices; return the block. Norms and row biases stay whole.

    Raises ValueError unless the number of ranks divides heads and hidden units.
    """
    check_divides(comm.world_size, heads=block.attention.heads, hidden=block.mlp[0].out_features)
    block.attention = SplitAttention(block.attention, comm, noise)
    block.mlp = nn.Sequential(ColumnLinear(block.mlp[0], comm), block.mlp[1], RowLinear(block.mlp[2], comm))
    return block


def is_split(name: str) -> bool:
    """Say whether a block's parameter of this name is cut, so that each rank has other elements of it."""
    return name.endswith(("qkv.weight", "qkv.bias", "out.weight", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight"))


def own_slice(whole: torch.Tensor, comm: Comm, groups: int = 1) -> torch.Tensor:
    """Return a copy of this rank's rows: of each of `groups` equal parts of dimension 0, the rank's chunk."""
    parts = whole.detach().unflatten(0, (groups, comm.world_size, -1))
    return parts[:, comm.rank].flatten(0, 1).clone(memory_format=torch.contiguous_format)


def check_divides(world_size: int, **sizes: int) -> None:
    """Raise ValueError unless `world_size` ranks can share each of these equally."""
    for name, size in sizes.items():
        if size % world_size:
            raise ValueError(f"{size} {name} cannot be shared by {world_size} tensor parallel ranks")
