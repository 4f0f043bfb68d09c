"""Two levels: an all-reduce for nodes whose own links are fast, and between which links are slow.

Reduce-scatter inside each node, all-reduce each slice across the nodes, all-gather inside. Of K nodes of L ranks each
rank sends 2T(L-1)/L bytes inside its node and 2T(K-1)/(KL) out of it, in 2(L-1) fast and 2(K-1) slow rounds. One ring
around all N ranks sends about as many bytes out of a node, 2T(N-1)/N instead of 2T(K-1)/K, but all of them by one rank;
and it has 2(N-1) rounds, each as slow as its slowest link.
"""

import plain
import torch
from collectives import collective_call, ring_gather, ring_reduce
from mesh import Mesh


def hierarchical_allreduce(
    mesh: Mesh, tensor: torch.Tensor, node_size: int, op: str = "sum", check: bool = True
) -> torch.Tensor:
    """Return the sum (or avg, max) over all ranks' tensors, the same bits on every rank.

    Ranks 0 to node_size - 1 are on the first node, and so on; the last one may have fewer. Each node cuts the tensor
    into `node_size` slices and gives each slice an owner; in a smaller node some ranks own several.
    """
    check_node_size(node_size, mesh.world_size)
    with collective_call(mesh, "hierarchical_all_reduce", tensor, op=op, check=check, node_size=node_size):
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        slices = list(result.view(-1).tensor_split(node_size))
        nodes = nodes_of(mesh.world_size, node_size)
        node = nodes[mesh.rank // node_size]
        held = _held(result.view(-1), slices, len(node))
        add = "max" if op == "max" else "sum"
        ring_reduce(mesh, held, add, node)
        for index, piece in enumerate(slices):
            owners = [members[owner(index, node_size, len(members))] for members in nodes]
            if mesh.rank in owners:
                parts = list(piece.tensor_split(len(nodes)))
                ring_reduce(mesh, parts, add, owners)
                ring_gather(mesh, parts, owners)
        if op == "avg":
            plain.divide(held[node.index(mesh.rank)], mesh.world_size)
        ring_gather(mesh, held, node)
    return result


def nodes_of(world_size: int, node_size: int) -> list[list[int]]:
    """Return the ranks of each node."""
    return [list(range(first, min(first + node_size, world_size))) for first in range(0, world_size, node_size)]


def owner(index: int, node_size: int, members: int) -> int:
    """Return which of a node's `members` ranks owns slice `index` of `node_size`: neighbouring slices go together."""
    return index * members // node_size


def check_node_size(node_size: int, world_size: int) -> None:
    """Raise ValueError unless nodes of this size can be made of `world_size` ranks."""
    if isinstance(node_size, bool) or not isinstance(node_size, int) or not 1 <= node_size <= world_size:
        raise ValueError(f"node_size must be a whole number from 1 to {world_size}, the ranks, got {node_size!r}")


def _held(flat: torch.Tensor, slices: list[torch.Tensor], members: int) -> list[torch.Tensor]:
    """Return, for each of a node's members, all the slices it owns, as one view of `flat`."""
    sizes = [0] * members
    for index, piece in enumerate(slices):
        sizes[owner(index, len(slices), members)] += len(piece)
    return list(flat.split(sizes))
