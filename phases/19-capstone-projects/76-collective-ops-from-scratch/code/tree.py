"""Reduce to one rank along a tree, and all-reduce along it: fewer rounds than the ring, more bytes.

With L = ceil(log2 N): 2L rounds of T bytes, where the ring has 2(N-1) of T/N. `choose.py` says which is faster when.
"""

import plain
import torch
from collectives import REDUCTIONS, broadcast, collective_call
from mesh import Mesh


def reduce(mesh: Mesh, tensor: torch.Tensor, dst: int = 0, op: str = "sum", check: bool = True) -> torch.Tensor | None:
    """Return the sum (or avg, max) over all ranks' tensors on rank `dst`, None elsewhere.

    The broadcast's tree, from the leaves to the root: each rank but `dst` sends T bytes once; ceil(log2 N) rounds.
    """
    with collective_call(mesh, "reduce", tensor, op=op, src=dst, check=check):
        n, position = mesh.world_size, (mesh.rank - dst) % mesh.world_size
        parent_distance = 1 << position.bit_length() >> 1
        distance = 1 << (n - 1).bit_length()
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        while distance > parent_distance:  # the far branches first: they are small and ready early
            if position + distance < n:
                REDUCTIONS[op](result, mesh.recv((mesh.rank + distance) % n), out=result)
            distance >>= 1
        if position > 0:
            mesh.send((mesh.rank - parent_distance) % n, result)
            return None
    return plain.divide(result, n) if op == "avg" else result


def tree_allreduce(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    Up the tree to rank 0 and down again: 2 ceil(log2 N) rounds; the busiest rank sends ceil(log2 N) T bytes.
    """
    with collective_call(mesh, "tree_all_reduce", tensor, op=op, check=check):
        total = reduce(mesh, tensor, 0, op, check=False)
        return broadcast(mesh, tensor if total is None else total, 0, check=False)
