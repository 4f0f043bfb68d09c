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

PIECE = 1 << 22  # bytes


def goes_whole(comm: Comm, shard: Shard) -> bool:
    """Return whether one reduce-scatter and one all-gather carry this shard's unit.

    Not if a part of it is frozen: both need equal chunks for all ranks, which are those of the whole unit.
    """
    return shard.live == [(0, shard.unit.numel)] and not by_pieces(comm, shard.unit)


def by_pieces(comm: Comm, unit: FlatUnit) -> bool:
    """Return whether a unit goes faster in pieces: over gloo, if it is larger than one.

    Measured with 2 and 4 ranks on one machine, gloo's all-reduces of 4 MB take from the time of its reduce-scatter
    (which first copies all of its input) down to half of it, and a broadcast from each rank a half of its all-gather.
    """
    over_gloo = isinstance(comm, TorchComm) and comm.device.type == "cpu"
    return over_gloo and unit.padded * unit.data.element_size() > PIECE


def reduce_to_shards(comm: Comm, shard: Shard, out: torch.Tensor) -> Work:
    """Make `out` (as long as the shard) the mean over ranks, after `wait()`.

    `out` may be the shard's part of `unit.grad`; the rest of that keeps this rank's own gradient.
    """
    unit = shard.unit
    if goes_whole(comm, shard):
        return comm.reduce_scatter(out, unit.grad, op="avg", async_op=True)
    if shard.live != [(0, unit.numel)]:
        plain.fill(out, unit.grad[shard.start : shard.end])  # zeros, where nothing will come
    step, on_the_way = PIECE // unit.grad.element_size(), None
    pieces = [(a, min(a + step, end)) for start, end in shard.live for a in range(start, end, step)]
    for start, end in pieces:
        mean = unit.grad[start:end].clone()
        work = comm.all_reduce(mean, op="avg", async_op=True)
        _take(on_the_way, shard, out)  # while this piece travels
        on_the_way = work, mean, start, end
    return Work("all_reduce", lambda: _take(on_the_way, shard, out))


def _take(arriving, shard: Shard, out: torch.Tensor) -> None:
    if arriving is not None:
        work, mean, start, end = arriving
        work.wait()
        a, b = max(start, shard.start), min(end, shard.end)
        if a < b:
            out[a - shard.start : b - shard.start] = mean[a - start : b - start]


def gather_from_shards(comm: Comm, shard: Shard, everything: bool = False) -> list[Work]:
    """Fill `unit.data` with what every rank has, after `wait()` of all that is returned.

    Only where a gradient is required, that is, where anything may have changed; unless `everything` is asked for.
    """
    unit, ranges = shard.unit, [(0, shard.unit.numel)] if everything else shard.live
    mine = unit.data[shard.start : shard.end]
    plain.fill(mine, shard.params)  # in stage 3 they lie elsewhere
    if ranges == [(0, unit.numel)] and not by_pieces(comm, unit):
        return [comm.all_gather(unit.data, mine, async_op=True)]
    size, works = shard.end - shard.start, []
    for owner, (start, end) in itertools.product(range(comm.world_size), ranges):
        a, b = max(start, owner * size), min(end, (owner + 1) * size)
        if a < b:
            works.append(comm.broadcast(unit.data[a:b], src=owner, async_op=True))
    return works
