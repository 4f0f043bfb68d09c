"""All-reduce along a tree: fewer rounds than the ring, more bytes. And the choice between the two by size.

With a latency of alpha seconds a message and beta seconds a byte, L = ceil(log2 N):
ring 2(N-1) alpha + 2(N-1)/N T beta, tree 2L (alpha + T beta). Small messages cost latency, so they take the tree.
"""

import torch
from collectives import REDUCTIONS, broadcast, collective_call, ring_allreduce
from mesh import Mesh

ALPHA, BETA = 1e-4, 1e-9  # 0.1 ms a message, 1 GB/s: about what queues between processes reach


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
    return result.div_(n) if op == "avg" else result


def tree_allreduce(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    Up the tree to rank 0 and down again: 2 ceil(log2 N) rounds; the busiest rank sends ceil(log2 N) T bytes.
    """
    with collective_call(mesh, "tree_all_reduce", tensor, op=op, check=check):
        total = reduce(mesh, tensor, 0, op, check=False)
        return broadcast(mesh, tensor if total is None else total, 0, check=False)


def crossover_bytes(world_size: int, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Return the size of tensor, in bytes, from which on the ring is the faster one."""
    n, depth = world_size, (world_size - 1).bit_length()
    return alpha * (n - 1 - depth) / (beta * (depth - (n - 1) / n)) if n > 1 else 0.0


def allreduce(
    mesh: Mesh, tensor: torch.Tensor, op: str = "sum", alpha: float = ALPHA, beta: float = BETA
) -> torch.Tensor:
    """All-reduce along the tree if the tensor is small, around the ring if it is large. All ranks choose the same."""
    small = tensor.numel() * tensor.element_size() < crossover_bytes(mesh.world_size, alpha, beta)
    return (tree_allreduce if small else ring_allreduce)(mesh, tensor, op)
