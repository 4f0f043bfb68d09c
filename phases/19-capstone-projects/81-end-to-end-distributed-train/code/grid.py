"""`Grid`: one arrangement of all ranks in three axes; each axis is a communicator.

Data, pipeline and tensor parallelism each need groups of ranks. All of them are rows of one `arange(world)`, so they
cannot contradict each other.
"""

import math

import torch
from comm import Comm
from memory import check_whole

AXES = ("dp", "pp", "tp")


class Grid:
    """This rank's place in a grid of dp x pp x tp ranks, and its communicator along each axis.

    `dp`: ranks with the same part of the model, on other rows of the batch. `pp`: the stages of one copy of the model.
    `tp`: ranks that share each layer; they talk in every layer, so they are neighbours, which a node's fast links
    connect. `world` is the communicator of all. All ranks of `comm` call it.

    Raises ValueError, before any communication, unless dp x pp x tp is the number of ranks.
    """

    def __init__(self, comm: Comm, dp: int = 1, pp: int = 1, tp: int = 1):
        self.sizes = check_grid(dp, pp, tp)
        if math.prod(self.sizes.values()) != comm.world_size:
            raise ValueError(f"dp {dp} x pp {pp} x tp {tp} is {dp * pp * tp} ranks, but there are {comm.world_size}")
        self.world, self.rank = comm, comm.rank
        places = torch.arange(comm.world_size).view(dp, pp, tp)
        self.place = dict(zip(AXES, (places == comm.rank).nonzero()[0].tolist(), strict=True))
        self.dp, self.pp, self.tp = (comm.split(self._first_neighbour(places, axis)) for axis in AXES)

    def split_row(self, axis: str, color: int) -> Comm:
        """Return the ranks of this rank's row along an axis that gave the same color. All ranks of the grid call it.

        Not `split` of the row's own communicator: a torch.distributed group is made by all ranks together, also by
        those that will not be in it, and several rows that make their own at once would wait for each other.
        """
        check_whole("color", color, least=0)
        places = torch.arange(self.world.world_size).view(*self.sizes.values())
        return self.world.split(self._first_neighbour(places, axis) + self.world.world_size * color)

    def _first_neighbour(self, places: torch.Tensor, axis: str) -> int:
        """Return the first rank of this rank's row along an axis: a number that all ranks of the row share."""
        return places[tuple((self.place | {axis: 0}).values())].item()


def check_grid(dp: int, pp: int, tp: int) -> dict[str, int]:
    """Return the sizes by axis. Raises ValueError unless each is a whole number of at least 1."""
    sizes = dict(zip(AXES, (dp, pp, tp), strict=True))
    for axis, size in sizes.items():
        check_whole(axis, size, least=1)
    return sizes
