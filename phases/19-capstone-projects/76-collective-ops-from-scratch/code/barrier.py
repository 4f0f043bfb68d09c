"""A barrier: nobody leaves before everybody has come."""

import flight
import torch
from mesh import Mesh


def barrier(mesh: Mesh) -> None:
    """Return when all ranks have called it: ceil(log2 N) rounds, one message without content a rank and round.

    In round k each rank tells the one 2^k further on that it, and all it has heard of, are here; after the last round
    everybody has heard of all. Source: Hensgen, Finkel and Manber, 1988 (the dissemination barrier).
    """
    n, nothing = mesh.world_size, torch.empty(0, dtype=torch.uint8, device=mesh.device)
    with flight.inside("barrier"):
        for distance in (1 << k for k in range((n - 1).bit_length())):
            mesh.sendrecv((mesh.rank + distance) % n, nothing, (mesh.rank - distance) % n)
