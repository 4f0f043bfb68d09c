"""How gradients come to the shards and parameters come back: which collectives, for which part of a flat unit.

The rule is one reduce-scatter and one all-gather. Where a part is frozen, only the rest travels. And gloo carries large
units faster in another way, with the same result.
"""

import itertools

import plain
import torch
from comm import Comm, TorchComm, Work
from flat import FlatUnit
from shard import Shard

LARGE = 1 << 22  # bytes


def goes_whole(comm: Comm, shard: Shard) -> bool:
    """Return whether one reduce-scatter and one all-gather carry this shard's unit.

    Not if a part of it is frozen: both need equal chunks for all ranks, which are those of the whole unit.
    """
    return shard.live == [(0, shard.unit.numel)] and not by_ranges(comm, shard.unit)


def by_ranges(comm: Comm, unit: FlatUnit) -> bool:
    """Return whether a unit goes faster another way: over gloo, if it is large.

    Measured with 2 and 4 ranks on one machine, gloo's all-reduce takes from the time of its reduce-scatter (which first
    copies all of its input) down to half of it, and a broadcast from each rank a half of its all-gather.
    """
    over_gloo = isinstance(comm, TorchComm) and comm.device.type == "cpu"
    return over_gloo and unit.padded * unit.data.element_size() > LARGE


def reduce_to_shards(comm: Comm, shard: Shard, out: torch.Tensor) -> Work:
    """Make `out` (as long as the shard; it may be the shard's part of `unit.grad`) the mean over ranks, after `wait()`.

    Where the unit goes whole, the rest of `unit.grad` keeps this rank's own gradient.
    """
    unit = shard.unit
    if goes_whole(comm, shard):
        return comm.reduce_scatter(out, unit.grad, op="avg", async_op=True)
    works = [comm.all_reduce(unit.grad[start:end], async_op=True) for start, end in shard.live]

    def finish() -> None:
        for work in works:
            work.wait()
        torch.div(unit.grad[shard.start : shard.end], comm.world_size, out=out)  # zeros, where nothing has come

    return Work("all_reduce", finish)


def gather_from_shards(comm: Comm, shard: Shard, everything: bool = False) -> list[Work]:
    """Fill `unit.data` with what every rank has, after `wait()` of all that is returned.

    Only where a gradient is required, that is, where anything may have changed; unless `everything` is asked for.
    """
    unit, ranges = shard.unit, [(0, shard.unit.numel)] if everything else shard.live
    mine, whole = unit.data[shard.start : shard.end], ranges == [(0, unit.numel)] and not by_ranges(comm, unit)
    if whole and shard.params.dtype == unit.dtype:
        return [comm.all_gather(unit.data, shard.params, async_op=True)]
    plain.fill(mine, shard.params)  # in stage 3 they lie elsewhere
    if whole:
        return [comm.all_gather(unit.data, mine, async_op=True)]
    size, works = shard.end - shard.start, []
    for owner, (start, end) in itertools.product(range(comm.world_size), ranges):
        a, b = max(start, owner * size), min(end, (owner + 1) * size)
        if a < b:
            works.append(comm.broadcast(unit.data[a:b], src=owner, async_op=True))
    return works
