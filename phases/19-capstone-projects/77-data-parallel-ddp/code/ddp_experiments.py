"""Small experiments: what a barrier does not do, how many messages there are, what share of a step they take."""

import statistics
import time
from collections.abc import Callable

import torch
from flat import gather_flat_params
from naive import naive_sync
from torch import nn
from toy import MiniMLP, global_batch, rank_slice, sgd_step


def barrier_only(module: nn.Module, comm) -> None:
    """Wait for all ranks. Nobody's gradients change: they are in step, and drift apart."""
    comm.agree(None)


def drift(comm, steps: int, synchronise: Callable = naive_sync, lr: float = 0.1) -> list[float]:
    """Train equal models, each rank on its own rows, with `synchronise(module, comm)` after each backward.

    Returns, after every step, how far the farthest parameter of any rank is from rank 0's (the same on all ranks).
    """
    module, found = MiniMLP(), []
    for step in range(steps):
        x, y = (rank_slice(part, comm.rank, comm.world_size) for part in global_batch(step, 8 * comm.world_size))
        nn.functional.mse_loss(module(x), y).backward()
        synchronise(module, comm)
        sgd_step(module, lr)
        mine = gather_flat_params(module)
        everyone = mine.new_empty(comm.world_size * mine.numel())
        comm.all_gather(everyone, mine)
        everyone = everyone.view(comm.world_size, -1)
        found.append((everyone - everyone[0]).abs().max().item())
    return found


def calls_a_step(ddp, x: torch.Tensor, counters) -> int:
    """Take one forward and backward through `ddp` (DistributedDataParallel); return how many all-reduces it made."""
    before = counters.calls["all_reduce"]
    ddp(x).square().mean().backward()
    return counters.calls["all_reduce"] - before


def share_of_sync(ddp, x: torch.Tensor, steps: int = 15, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return which share of a step, forward to means, synchronising takes if it begins after backward. Median of steps.

    Backward runs under `no_sync`, so the two can be told apart. `clock` returns seconds.
    """
    shares = []
    for _ in range(steps):
        ddp.zero_grad(set_to_none=False)
        begin = clock()
        loss = ddp(x).square().mean()  # outside no_sync: it is this forward that is to be synchronised
        with ddp.no_sync():
            loss.backward()
        middle = clock()
        ddp.sync_grads()
        end = clock()
        shares.append((end - middle) / (end - begin))
    return statistics.median(shares)
