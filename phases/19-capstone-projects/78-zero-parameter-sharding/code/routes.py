"""How gradients come to the shards and parameters come back: which collectives, for which part of a flat unit.

The rule is one reduce-scatter and one all-gather. Where a part is frozen, only the rest travels. And gloo carries large
units faster in another way, with the same result.
"""

import itertools

from comm import Comm, TorchComm, Work
from flat import FlatUnit
from shard import Shard

PIECE = 1 << 22  # bytes


def goes_whole(comm: Comm, shard: Shard) -> bool:
    """Return whether one reduce-scatter and one all-gather carry this shard's unit.

    Not if a part of it is frozen: both need equal chunks for all ranks, which are those of the whole unit. Nor over
    gloo if it is larger than a piece: measured with 2 and 4 ranks on one machine, gloo's all-reduces of 4 MB take from
    the time of its reduce-scatter (which first copies all of its input) down to half of it, and a broadcast from each
    rank a half of its all-gather.
    """
    over_gloo, unit = isinstance(comm, TorchComm) and comm.device.type == "cpu", shard.unit
    large = unit.padded * unit.data.element_size() > PIECE
    return shard.live == [(0, unit.numel)] and not (over_gloo and large)


def reduce_to_shards(comm: Comm, shard: Shard) -> Work:
    """Make `shard.grad` the mean over ranks, after `wait()`. The rest of `unit.grad` keeps this rank's own gradient."""
    unit = shard.unit
    if goes_whole(comm, shard):
        return comm.reduce_scatter(shard.grad, unit.grad, op="avg", async_op=True)
    step, on_the_way = PIECE // unit.grad.element_size(), None
    pieces = [(a, min(a + step, end)) for start, end in shard.live for a in range(start, end, step)]
    for start, end in pieces:
        mean = unit.grad[start:end].clone()
        work = comm.all_reduce(mean, op="avg", async_op=True)
        _take(on_the_way, unit, shard)  # while this piece travels
        on_the_way = work, mean, start, end
    return Work("all_reduce", lambda: _take(on_the_way, unit, shard))


def _take(arriving, unit: FlatUnit, shard: Shard) -> None:
    if arriving is not None:
        work, mean, start, end = arriving
        work.wait()
        a, b = max(start, shard.start), min(end, shard.end)
        if a < b:
            unit.grad[a:b] = mean[a - start : b - start]


def gather_from_shards(comm: Comm, shard: Shard) -> list[Work]:
    """Fill the live part of `unit.data` with what every rank has updated, after `wait()` of all that is returned."""
    unit = shard.unit
    if goes_whole(comm, shard):
        return [comm.all_gather(unit.data, shard.params, async_op=True)]
    size, works = shard.end - shard.start, []
    for owner, (start, end) in itertools.product(range(comm.world_size), shard.live):
        a, b = max(start, owner * size), min(end, (owner + 1) * size)
        if a < b:
            works.append(comm.broadcast(unit.data[a:b], src=owner, async_op=True))
    return works
