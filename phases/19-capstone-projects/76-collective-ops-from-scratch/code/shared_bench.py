"""`--bench`: shared memory beside gloo, and beside a plain copy of the same bytes."""

from functools import partial

import demo
import torch
import torch.distributed as dist
from arena import Arena, why_not
from comm import TorchComm
from ranks import run_ranks
from shared_comm import SharedComm
from sidebyside import compare, slowest

SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}  # elements of float32
OURS, HEAP, GLOO, COPY = "ours, through windows", "ours, in the heap", "gloo", "a copy"


def race(rank: int, world_size: int, arena: Arena, pairs: int) -> tuple[list, bool]:
    """Be one rank: all-reduce by each contender in turn, as slow as the slowest rank; return (rows, all bits equal)."""
    comm, rows, equal = TorchComm(), [], True
    shared = SharedComm(arena, comm).unchecked()
    for size, numel in SIZES.items():
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        mine, theirs, held, other = x.clone(), x.clone(), shared.empty(numel, x.dtype).copy_(x), torch.empty_like(x)
        contenders = {
            GLOO: lambda theirs=theirs: dist.all_reduce(theirs),
            OURS: lambda mine=mine: shared.all_reduce(mine),
            HEAP: lambda held=held: shared.all_reduce(held),
            COPY: lambda other=other, x=x: other.copy_(x),
        }
        for name in (GLOO, OURS, HEAP):
            contenders[name]()
        equal &= torch.equal(mine, theirs) and torch.equal(held, theirs)
        repeats = max(1, (1 << 18) // numel)
        found = compare({name: partial(slowest, call, comm, repeats) for name, call in contenders.items()}, pairs)
        for row in found:
            interval = f"{1 / row.high:.2f} to {1 / row.low:.2f}"
            rows.append([world_size, size, row.name, 1e3 * row.seconds, 1 / row.ratio, interval])
    return rows, equal


def show(world_size: int, pairs: int) -> bool:
    """Print the table of `world_size` ranks; return whether all sums had gloo's bits."""
    if reason := why_not():
        demo.say(f"\nshared memory is left out: {reason}")
        return True
    room = 2 * 4 * sum(SIZES.values())
    rows, equal = run_ranks(race, world_size, Arena(world_size, heap_bytes=room), pairs)[0]
    columns = ["N", "size", "all-reduce by", "ms", "x times as fast as gloo", "95% interval"]
    demo.table(columns, rows, f"through shared memory, float32, medians of {pairs} pairs, checks off")
    return equal
