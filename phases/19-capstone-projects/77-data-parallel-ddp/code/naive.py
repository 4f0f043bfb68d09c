"""Two ways to average gradients that come before buckets: a call for each parameter, and one call for all of them.

Both begin when backward has ended, so that the network idles during the one and the processors during the other.
"""

from flat import gather_flat_grads
from torch import nn


def naive_sync(module: nn.Module, comm) -> None:
    """Replace each gradient by the mean over ranks, one all-reduce a parameter: as many latencies as parameters.

    Wrong, without an error, if ranks miss different gradients: the k-th call of one rank meets the k-th of another.
    """
    for param in module.parameters():
        if param.grad is not None:
            comm.all_reduce(param.grad, op="avg")


def flat_sync(module: nn.Module, comm) -> None:
    """Replace all gradients by the mean over ranks with one all-reduce: one latency, but a copy of every gradient.

    One dtype only. A missing gradient goes, and comes back, as zeros: an optimizer with momentum would move it.
    """
    flat = gather_flat_grads(module)
    comm.all_reduce(flat, op="avg")
    params = list(module.parameters())
    for param, mean in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = mean.view(param.shape)
