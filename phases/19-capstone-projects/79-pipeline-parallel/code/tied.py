"""One weight on two stages: a token embedding on the first and an output head on the last that are the same matrix."""

import torch
import wire
from comm import Comm
from torch import nn


class TiedWeight:
    """This rank's copy of a tied weight, or None on ranks that have none. All ranks of the pipeline make one.

    All copies begin as the first holder's. After each step all have the sum of their gradients, so that equal copies
    stay equal. Raises ValueError, on every rank and before anything is changed, if nobody holds one, or if shapes or
    dtypes differ.
    """

    def __init__(self, parameter: nn.Parameter | None, comm: Comm):
        kind = None if parameter is None else [list(parameter.shape), wire.dtype_name(parameter.dtype)]
        kinds = comm.agree(kind)
        holders = [rank for rank, each in enumerate(kinds) if each is not None]
        if not holders:
            raise ValueError("no rank holds the tied weight")
        for rank in holders:
            if kinds[rank] != kinds[holders[0]]:
                text = " and ".join(f"{kinds[r][1]} {tuple(kinds[r][0])} on rank {r}" for r in (holders[0], rank))
                raise ValueError(f"the copies of a tied weight differ: {text}")
        self.parameter, self.is_first = parameter, comm.rank == holders[0]
        self._group = comm.split(int(parameter is None)).unchecked()
        if parameter is not None:
            self._group.broadcast(parameter.data)

    def begin(self) -> None:
        """Before a step: gradients of earlier steps are sums already, so one copy keeps them, and the others none."""
        if self.parameter is not None and not self.is_first and self.parameter.grad is not None:
            self.parameter.grad.zero_()

    def sum_gradients(self) -> None:
        """After the last backward: give every copy the sum over all."""
        if self.parameter is not None:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            self._group.all_reduce(self.parameter.grad)
