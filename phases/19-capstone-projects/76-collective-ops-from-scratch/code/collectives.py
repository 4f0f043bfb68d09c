"""The four collectives, from nothing but send and recv: ring all-reduce, tree broadcast, all-gather, reduce-scatter.

N ranks, T bytes a rank. Cost a rank: all-reduce 2T(N-1)/N bytes in 2(N-1) rounds; reduce-scatter and all-gather half of
that each (T is the whole input of the one, the whole output of the other); broadcast T bytes to each rank in
ceil(log2 N) rounds. No function changes its input: each returns a new tensor.
"""

import functools
from contextlib import contextmanager

import flight
import plain
import torch
import wire
from mesh import Mesh, check_rank, check_tensor, must_agree

MESSAGE = 1 << 20  # bytes: how much travels at once where a collective works in place
REDUCTIONS = {"sum": torch.add, "avg": torch.add, "max": torch.maximum}
MOVES = object()  # in the place of a reduction: nothing is combined


def ring_allreduce(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    A rank sends 2T - (its own chunk) - (its left neighbour's chunk) bytes: 2T(N-1)/N when N divides the length. Nothing
    is padded: chunks differ by at most one element. Source: Patarasu and Yuan, 2009.
    """
    with collective_call(mesh, "all_reduce", tensor, op=op, check=check):
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        chunks = list(result.view(-1).tensor_split(mesh.world_size))  # views: writing a chunk writes the result
        ring_reduce(mesh, chunks, op)
        ring_gather(mesh, chunks)
    return result


def ring_in_place(mesh: Mesh, flat: torch.Tensor, op: str = "sum") -> None:
    """All-reduce a 1-d contiguous tensor where it lies: the same ring, a segment of it after the other.

    The same bytes, more rounds: but a message of 1 MB is still in the cache when it is added, and its memory is used
    again, where a new tensor of 64 MB costs more time for its pages than for its bytes.
    """
    for segment in flat.split(max(1, mesh.world_size * MESSAGE // flat.element_size())):
        chunks = list(segment.tensor_split(mesh.world_size))
        ring_reduce(mesh, chunks, op)
        ring_gather(mesh, chunks)


def reduce_scatter(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return chunk `rank` of the sum over all ranks: N equal chunks of dimension 0. Sends T(N-1)/N bytes a rank."""
    check_chunks(tensor, mesh.world_size)
    with collective_call(mesh, "reduce_scatter", tensor, op=op, check=check):
        work = tensor.detach().clone(memory_format=torch.contiguous_format)
        chunks = list(work.tensor_split(mesh.world_size))
        ring_reduce(mesh, chunks, op)
    return chunks[mesh.rank].clone()


def allgather(mesh: Mesh, tensor: torch.Tensor, check: bool = True) -> torch.Tensor:
    """Return all ranks' tensors concatenated along dimension 0; 0-dim inputs give shape (N,).

    Sends (N-1)T bytes a rank, T being one rank's input.
    """
    with collective_call(mesh, "all_gather", tensor, check=check):
        shape = tuple(tensor.shape) or (1,)
        result = tensor.new_empty((mesh.world_size * shape[0], *shape[1:]))
        chunks = list(result.tensor_split(mesh.world_size))
        chunks[mesh.rank].copy_(tensor.detach().reshape(shape))
        ring_gather(mesh, chunks)
    return result


def broadcast(mesh: Mesh, tensor: torch.Tensor, src: int = 0, check: bool = True) -> torch.Tensor:
    """Return rank `src`'s tensor on every rank, along a binomial tree.

    Other ranks bring a tensor of the same shape and dtype, whatever it holds. Ranks counted from `src`: v receives from
    the one without v's highest bit, then sends to v + 2^k for each higher k. Each round doubles the number of ranks
    that hold the data.
    """
    with collective_call(mesh, "broadcast", tensor, src=src, check=check):
        n, position = mesh.world_size, (mesh.rank - src) % mesh.world_size
        distance = 1 << position.bit_length()  # the first rank it sends to, once it holds the data, is this far away
        if position == 0:
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            result = mesh.recv((mesh.rank - distance // 2) % n)
        while position + distance < n:
            mesh.send((mesh.rank + distance) % n, result)
            distance *= 2
    return result


def ring_reduce(mesh: Mesh, chunks: list[torch.Tensor], op: str, ring: list[int] | None = None) -> None:
    """N-1 rounds to the left, after which chunk r is complete on rank r: ((x[r-1] + x[r-2]) + ...) + x[r].

    The other chunks are left with partial sums. This is the order in which gloo sums, too. `ring` lists the N ranks
    that take part, in order (default: all); chunk i then ends on rank ring[i].
    """
    (n, here, left, right), combine = _neighbours(mesh, ring), REDUCTIONS[op]
    for step in range(n - 1):
        partial = mesh.sendrecv(left, chunks[(here + 1 + step) % n], right)
        mine = chunks[(here + 2 + step) % n]
        combine(partial, mine, out=mine)
    if op == "avg":
        plain.divide(chunks[here], n)


def ring_gather(mesh: Mesh, chunks: list[torch.Tensor], ring: list[int] | None = None) -> None:
    """N-1 rounds to the left, after which every rank holds chunk r as rank r had it."""
    n, here, left, right = _neighbours(mesh, ring)
    for step in range(n - 1):
        chunks[(here + 1 + step) % n].copy_(mesh.sendrecv(left, chunks[(here + step) % n], right))


def _neighbours(mesh: Mesh, ring: list[int] | None) -> tuple[int, int, int, int]:
    """Return the ring's length, this rank's place in it, and the ranks to the left and to the right."""
    ring = ring or list(range(mesh.world_size))
    here = ring.index(mesh.rank)
    return len(ring), here, ring[here - 1], ring[(here + 1) % len(ring)]


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `op` can combine elements of `dtype`."""
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"avg needs floating-point elements, got {wire.dtype_name(dtype)}")
    if not _combines(op, dtype):
        raise ValueError(f"{op} is not defined for elements of {wire.dtype_name(dtype)}")


@functools.cache
def _combines(op: str, dtype: torch.dtype) -> bool:
    none = torch.empty(0, dtype=dtype)
    try:
        REDUCTIONS[op](none, none)
    except RuntimeError:  # complex numbers have no order; torch does not add uint16 or float8
        return False
    return True


def check_call(
    what: str, world_size: int, tensor: torch.Tensor, op: str = MOVES, src: int = 0, device: torch.device | None = None
) -> None:
    """Raise ValueError for what one rank can see is wrong with a collective, without any communication."""
    check_tensor(what, tensor, device)
    check_rank(f"{what} {'destination' if what == 'reduce' else 'source'}", src, world_size)
    if op is not MOVES:
        check_reduction(op, tensor.dtype)


def check_chunks(tensor: torch.Tensor, n: int, what: str = "reduce_scatter") -> None:
    """Raise ValueError unless dimension 0 can be cut into n equal chunks."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        return  # refused by `check_call`
    if tensor.dim() == 0 or tensor.shape[0] % n:
        shape = tuple(tensor.shape)
        raise ValueError(f"{what} cuts dimension 0 into {n} equal chunks, which shape {shape} does not allow")


@contextmanager
def collective_call(
    mesh: Mesh, what: str, tensor: torch.Tensor, op: str = MOVES, src: int = 0, check: bool = True, **settings
):
    """Look for local faults; then, as one recorded communication, compare all ranks' calls and do the block.

    `settings` are what else all ranks must have chosen alike.
    """
    check_call(what, mesh.world_size, tensor, op, src, mesh.device)
    with flight.inside(what):
        if check:
            facts = {"operation": what, "shape": list(tensor.shape), "dtype": wire.dtype_name(tensor.dtype)}
            reduction = None if op is MOVES else op
            must_agree(mesh, "a collective", facts | {"reduction": reduction, "source": src} | settings)
        yield


PRIMITIVES = {
    "allreduce": ring_allreduce,
    "broadcast": broadcast,
    "allgather": allgather,
    "reduce_scatter": reduce_scatter,
}
