"""Recursive halving and doubling: an all-reduce with the tree's few rounds and the ring's few bytes.

Partners at distance 1, 2, 4 ... exchange half of what they still work on, then a quarter, then an eighth; then the same
way back. With P = the largest power of two up to N: 2 log2 P rounds, 2T(P-1)/P bytes a rank, T on the busiest link: one
half on the way in, the other on the way back. Why is the ring used at all? Its links are few and short: here every rank
talks to log2 P others, the farther away the later. And if N is no power of two, the ranks beyond P cost 2 more rounds:
they send all T bytes first, and wait for all of them last.
Source: Rabenseifner, 2004; Thakur, Rabenseifner and Gropp, 2005.
"""

import plain
import torch
from collectives import REDUCTIONS, collective_call
from mesh import Mesh


def halving_allreduce(mesh: Mesh, tensor: torch.Tensor, op: str = "sum", check: bool = True) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    Ranks from P on lend their tensor to the rank P below, and get the result back from it.
    """
    with collective_call(mesh, "halving_all_reduce", tensor, op=op, check=check):
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        core = 1 << (mesh.world_size.bit_length() - 1)
        if mesh.rank >= core:
            mesh.send(mesh.rank - core, result)
            return mesh.recv(mesh.rank - core)
        guest = mesh.rank + core if mesh.rank + core < mesh.world_size else None
        if guest is not None:
            REDUCTIONS[op](result, mesh.recv(guest), out=result)
        _halve_and_double(mesh, result.view(-1), op, core)
        if guest is not None:
            mesh.send(guest, result)
    return result


def _halve_and_double(mesh: Mesh, flat: torch.Tensor, op: str, core: int) -> None:
    """All-reduce `flat`, in place, among the first `core` ranks, a power of two."""
    mine, steps = flat, []  # the part that this rank still works on, and how it came to be so small
    for distance in (1 << bit for bit in range(core.bit_length() - 1)):
        partner, halves = mesh.rank ^ distance, mine.tensor_split(2)
        upper = mesh.rank > partner
        mine, given = halves[upper], halves[not upper]
        REDUCTIONS[op](mine, mesh.sendrecv(partner, given, partner), out=mine)
        steps.append((partner, mine, given))
    if op == "avg":
        plain.divide(mine, mesh.world_size)
    for partner, held, missing in reversed(steps):
        missing.copy_(mesh.sendrecv(partner, held, partner))
