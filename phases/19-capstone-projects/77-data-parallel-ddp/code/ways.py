"""Four ways to average gradients, and what is wrong with the first ones: naive, flat, buckets, overlapped buckets."""

from collections.abc import Callable

import torch
from comm import TorchComm
from ddp import DistributedDataParallel
from naive import flat_sync, naive_sync
from torch import nn

CAP_MB = 2  # so that `transformer` has several buckets
NAIVE, FLAT, BUCKETS, OVERLAP = WAYS = "naive", "flat", "buckets", "overlap"


def transformer() -> nn.Module:
    """Return a transformer encoder of 3.2M parameters in 48 tensors, equal on all ranks; input (batch, seq, 256)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def way(name: str, module: nn.Module, comm) -> tuple[nn.Module, Callable]:
    """Return (the module to call, backward(loss)): after backward the module's gradients are the ranks' mean."""
    if name in (BUCKETS, OVERLAP):
        ddp = DistributedDataParallel(module, CAP_MB, comm)

        def after_backward(loss):
            with ddp.no_sync():
                loss.backward()
            ddp.sync_grads()

        return ddp, torch.Tensor.backward if name == OVERLAP else after_backward
    sync, comm = {NAIVE: naive_sync, FLAT: flat_sync}[name], comm.unchecked()

    def backward_then_sync(loss):
        loss.backward()
        sync(module, comm)

    return module, backward_then_sync


class Branches(nn.Module):
    """Three layers of one shape. A forward uses one of them; nobody ever uses `idle`."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.a, self.b, self.idle = (nn.Linear(4, 4, bias=False) for _ in "ab-")

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """(rows, 4) -> the loss, a number."""
        return getattr(self, name)(x).square().mean()


def missing_gradients(rank: int, world_size: int, name: str) -> dict[str, torch.Tensor | None]:
    """Be one rank: rank 0 uses branch a, all others branch b. Return {layer: its mean gradient, or None}."""
    module = Branches()
    x = torch.full((2, 4), rank + 1.0)
    model, backward = way(name, module, TorchComm())
    backward(model(x, "a" if rank == 0 else "b"))
    return {layer: getattr(module, layer).weight.grad for layer in ("a", "b", "idle")}


def true_means(world_size: int) -> dict[str, torch.Tensor | None]:
    """Return what `missing_gradients` should be on every rank, computed in one process."""
    module = Branches()
    for rank in range(world_size):
        (module(torch.full((2, 4), rank + 1.0), "a" if rank == 0 else "b") / world_size).backward()
    return {layer: getattr(module, layer).weight.grad for layer in ("a", "b", "idle")}
