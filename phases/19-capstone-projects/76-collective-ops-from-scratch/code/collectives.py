"""The four collectives, from nothing but send and recv: ring all-reduce, tree broadcast, all-gather, reduce-scatter.

N ranks, T bytes a rank. Cost a rank: all-reduce 2T(N-1)/N bytes in 2(N-1) rounds; reduce-scatter and all-gather half of
that each (T is the whole input of the one, the whole output of the other); broadcast T bytes to each rank in
ceil(log2 N) rounds. No function changes its input: each returns a new tensor.
"""

import flight
import torch
import wire
from mesh import Mesh, must_agree

REDUCTIONS = {"sum": torch.add, "avg": torch.add, "max": torch.maximum}


def ring_allreduce(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    A rank sends 2T - (its own chunk) - (its left neighbour's chunk) bytes: 2T(N-1)/N when N divides the length. Nothing
    is padded: chunks differ by at most one element. Source: Patarasu and Yuan, 2009.
    """
    _check(mesh, "all_reduce", tensor, op=op, check=check)
    with flight.inside("all_reduce"):
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        chunks = list(result.view(-1).tensor_split(mesh.world_size))  # views: writing a chunk writes the result
        _ring_reduce(mesh, chunks, op)
        _ring_gather(mesh, chunks)
    return result


def reduce_scatter(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return chunk `rank` of the sum over all ranks: N equal chunks of dimension 0. Sends T(N-1)/N bytes a rank."""
    _check(mesh, "reduce_scatter", tensor, op=op, check=check, divides=True)
    with flight.inside("reduce_scatter"):
        work = tensor.detach().clone(memory_format=torch.contiguous_format)
        chunks = list(work.tensor_split(mesh.world_size))
        _ring_reduce(mesh, chunks, op)
    return chunks[mesh.rank].clone()


def allgather(mesh: Mesh, tensor: torch.Tensor, check: bool = True) -> torch.Tensor:
    """Return all ranks' tensors concatenated along dimension 0; 0-dim inputs give shape (N,).

    Sends (N-1)T bytes a rank, T being one rank's input.
    """
    _check(mesh, "all_gather", tensor, check=check)
    shape = tuple(tensor.shape) or (1,)
    with flight.inside("all_gather"):
        result = tensor.new_empty((mesh.world_size * shape[0], *shape[1:]))
        chunks = list(result.tensor_split(mesh.world_size))
        chunks[mesh.rank].copy_(tensor.detach().reshape(shape))
        _ring_gather(mesh, chunks)
    return result


def broadcast(mesh: Mesh, tensor: torch.Tensor, src: int = 0, check: bool = True) -> torch.Tensor:
    """Return rank `src`'s tensor on every rank, along a binomial tree.

    Other ranks bring a tensor of the same shape and dtype, whatever it holds.
    With ranks counted from `src`, rank v receives from the rank without v's highest bit, then sends to v + 2^k for each
    higher k: each round doubles the number of ranks that hold the data.
    """
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < mesh.world_size:
        raise ValueError(f"broadcast source must be a rank from 0 to {mesh.world_size - 1}, got {src!r}")
    _check(mesh, "broadcast", tensor, src=src, check=check)
    with flight.inside("broadcast"):
        position = (mesh.rank - src) % mesh.world_size
        distance = 1
        if position == 0:
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            distance = 1 << position.bit_length()
            result = mesh.recv((src + position - distance // 2) % mesh.world_size)
        while distance + position < mesh.world_size:
            mesh.send((src + position + distance) % mesh.world_size, result)
            distance *= 2
    return result


def _ring_reduce(mesh: Mesh, chunks: list[torch.Tensor], op: str) -> None:
    """N-1 rounds to the left, after which chunk r is complete on rank r: ((x[r-1] + x[r-2]) + ...) + x[r].

    The other chunks are left with partial sums. This is the order in which gloo sums, too.
    """
    n, combine = mesh.world_size, REDUCTIONS[op]
    for step in range(n - 1):
        mesh.send((mesh.rank - 1) % n, chunks[(mesh.rank + 1 + step) % n])
        mine = chunks[(mesh.rank + 2 + step) % n]
        combine(mesh.recv((mesh.rank + 1) % n), mine, out=mine)
    if op == "avg":
        chunks[mesh.rank].div_(n)


def _ring_gather(mesh: Mesh, chunks: list[torch.Tensor]) -> None:
    """N-1 rounds to the left, after which every rank holds chunk r as rank r had it."""
    n = mesh.world_size
    for step in range(n - 1):
        mesh.send((mesh.rank - 1) % n, chunks[(mesh.rank + step) % n])
        chunks[(mesh.rank + 1 + step) % n].copy_(mesh.recv((mesh.rank + 1) % n))


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `op` can combine elements of `dtype`."""
    if op not in REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"avg needs floating-point elements, got {wire.dtype_name(dtype)}")
    if op == "max" and dtype.is_complex:
        raise ValueError(f"max needs elements with an order, got {wire.dtype_name(dtype)}")


def _check(mesh: Mesh, what: str, tensor, op: str = "sum", src: int = 0, check: bool = True, divides=False) -> None:
    """Local faults first, without communication; then all ranks compare what they were asked to do."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} needs a tensor, got {type(tensor).__name__}")
    check_reduction(op, tensor.dtype)
    if divides and (tensor.dim() == 0 or tensor.shape[0] % mesh.world_size):
        shape = tuple(tensor.shape)
        raise ValueError(
            f"{what} cuts dimension 0 into {mesh.world_size} equal chunks, which shape {shape} does not allow"
        )
    if check:
        facts = {"operation": what, "shape": list(tensor.shape), "dtype": wire.dtype_name(tensor.dtype)}
        must_agree(mesh, "a collective", facts | {"reduction": op, "source": src})


PRIMITIVES = {
    "allreduce": ring_allreduce,
    "broadcast": broadcast,
    "allgather": allgather,
    "reduce_scatter": reduce_scatter,
}
