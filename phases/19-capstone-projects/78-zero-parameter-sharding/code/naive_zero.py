"""ZeRO-1 as one would write it first: a rank owns whole parameters, and each travels by itself."""

import torch
from adam import AdamSettings, adam_step
from comm import Comm
from flat import sync_module, trainable_parameters
from torch import nn


class NaiveZero:
    """Adam whose state is sharded by whole parameters: parameter i belongs to rank i mod N.

    The same training as `ZeroOptimizer`, with two collectives a parameter, and shards as unequal as the parameters are.
    """

    def __init__(self, module: nn.Module, lr: float, comm: Comm):
        sync_module(module, comm)
        self.params, self.lr, self.comm, self.steps = (
            [p for _, p in trainable_parameters(module)],
            lr,
            comm.unchecked(),
            0,
        )
        self.owned = {i: param for i, param in enumerate(self.params) if i % comm.world_size == comm.rank}
        self.moments = {i: (torch.zeros_like(p), torch.zeros_like(p)) for i, p in self.owned.items()}

    @torch.no_grad()
    def step(self) -> None:
        """All-reduce each gradient (a missing one as zeros); Adam on what this rank owns; its owner broadcasts each."""
        self.steps += 1
        for index, param in enumerate(self.params):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            self.comm.all_reduce(grad, op="avg")
            if index in self.owned:
                adam_step(
                    param.data.view(-1),
                    grad.reshape(-1),
                    *(moment.view(-1) for moment in self.moments[index]),
                    self.steps,
                    AdamSettings(self.lr),
                )
        for index, param in enumerate(self.params):
            self.comm.broadcast(param.data, src=index % self.comm.world_size)

    def shard_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank: both moments of what it owns (there is no master copy)."""
        return sum(2 * param.numel() * param.element_size() for param in self.owned.values())
