"""A broadcast for large tensors: a chain of ranks through which chunks flow, all links busy at once.

Along a tree every rank waits for the whole tensor before it passes it on, and the root sends it log2 N times. Cut into
C chunks and passed from neighbour to neighbour, the first chunk needs N-1 rounds to the end of the chain, and one more
arrives in each round after that: C + N - 2 rounds of T/C bytes. Every rank but the last sends T bytes, to one other.
"""

import torch
from collectives import collective_call
from mesh import Mesh


def pipelined_broadcast(
    mesh: Mesh, tensor: torch.Tensor, src: int = 0, chunks: int = 8, check: bool = True
) -> torch.Tensor:
    """Return rank `src`'s tensor on every rank, passed along src, src + 1, ... in `chunks` pieces.

    Other ranks bring a tensor of the same shape and dtype, whatever it holds. `cost.best_chunks` says how many pieces
    are best: with few the chain fills slowly, with many each costs a latency. There are no more pieces than elements.
    """
    check_count("chunks", chunks)
    with collective_call(mesh, "pipelined_broadcast", tensor, src=src, check=check, chunks=chunks):
        position = (mesh.rank - src) % mesh.world_size
        before, after = (mesh.rank - 1) % mesh.world_size, (mesh.rank + 1) % mesh.world_size
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        for chunk in result.view(-1).tensor_split(min(chunks, max(1, result.numel()))):
            if position > 0:
                chunk.copy_(mesh.recv(before))
            if position < mesh.world_size - 1:
                mesh.send(after, chunk)
    return result


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
