"""All-to-all: every rank has something else for every rank: tokens for experts, blocks of a matrix to transpose."""

import torch
from collectives import check_chunks, collective_call
from mesh import Mesh


def alltoall(mesh: Mesh, tensor: torch.Tensor, check: bool = True) -> torch.Tensor:
    """Return, one after the other, chunk `rank` of every rank's tensor: N equal chunks of dimension 0.

    Sends T(N-1)/N bytes a rank in N-1 rounds, T/N on each link: in round s to the rank s further on, so that no two
    ranks send to the same one at once. Nothing is added up, so nothing can be saved.
    """
    check_chunks(tensor, mesh.world_size, "alltoall")
    with collective_call(mesh, "all_to_all", tensor, check=check):
        n, rank = mesh.world_size, mesh.rank
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        outgoing, incoming = tensor.detach().tensor_split(n), result.tensor_split(n)
        for step in range(1, n):
            src = (rank - step) % n
            incoming[src].copy_(mesh.sendrecv((rank + step) % n, outgoing[(rank + step) % n], src))
    return result
