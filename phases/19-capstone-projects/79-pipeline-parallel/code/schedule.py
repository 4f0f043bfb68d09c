"""Pipeline schedules: what each rank computes, in which order, and which messages fly in between.

A generator a schedule says what one rank computes; it knows nothing of messages. `add_messages` makes a program of it.
N stages, M microbatches.
"""

from collections.abc import Iterator

from instructions import Compute, Exchange, Message, Schedule, check_sizes, consumer, count_stages
from simulator import Slot, timeline

# --- what a rank computes, in order: one small generator a schedule ---------------------------------------------------


def gpipe(rank: int, num_stages: int, num_microbatches: int) -> Iterator[Compute]:
    """All forwards, then all backwards: M activations are alive in between. Source: Huang et al., 2019."""
    for m in range(num_microbatches):
        yield Compute("F", rank, m)
    for m in range(num_microbatches):
        yield Compute("B", rank, m)


def one_f_one_b(rank: int, num_stages: int, num_microbatches: int) -> Iterator[Compute]:
    """Fill the pipeline, then one forward, one backward: N - stage activations. Source: Narayanan et al., 2021."""
    warmup = min(num_microbatches, num_stages - 1 - rank)
    for m in range(warmup):
        yield Compute("F", rank, m)
    for m in range(warmup, num_microbatches):
        yield Compute("F", rank, m)
        yield Compute("B", rank, m - warmup)
    for m in range(num_microbatches - warmup, num_microbatches):
        yield Compute("B", rank, m)


def interleaved(rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int) -> Iterator[Compute]:
    """1F1B with v stages a rank: stages rank, rank + N, ... A shorter bubble, v times the messages.

    A group of about N microbatches goes through all of a rank's stages before the next group begins. Any M will do; N
    divides M in the source: Narayanan et al., 2021.
    """
    count = max(1, num_microbatches // num_ranks)
    groups = [range(g * num_microbatches // count, (g + 1) * num_microbatches // count) for g in range(count)]
    chunks = range(rank, virtual_stages * num_ranks, num_ranks)
    forwards = [Compute("F", stage, m) for group in groups for stage in chunks for m in group]
    backwards = [Compute("B", stage, m) for group in groups for stage in reversed(chunks) for m in group]
    ahead = (virtual_stages - 1) * max(map(len, groups)) + 2 * (num_ranks - 1 - rank)
    warmup = min(len(forwards), ahead)
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def zb_h1(rank: int, num_stages: int, num_microbatches: int) -> Iterator[Compute]:
    """1F1B with backward cut in two: W fills what was bubble. At most N activations. Source: Qi et al., 2024.

    Nobody waits for a W. A rank puts off `rank` of them, so that its last B is done early and the drain begins sooner.
    """
    warmup = min(num_microbatches, num_stages - 1 - rank)
    for m in range(warmup):
        yield Compute("F", rank, m)
    for m in range(num_microbatches):
        if warmup + m < num_microbatches:
            yield Compute("F", rank, warmup + m)
        yield Compute("B", rank, m)
        if m >= rank:
            yield Compute("W", rank, m - rank)
    for m in range(max(0, num_microbatches - rank), num_microbatches):
        yield Compute("W", rank, m)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1}


# --- from the order of work to a program with messages ----------------------------------------------------------------


def make_schedule(name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Return {rank: [instruction]}. Raises ValueError for an unknown name or a size below 1.

    The interleaved schedule has `num_stages` ranks and `virtual_stages` stages on each; the others one stage a rank.
    """
    return add_messages(make_orders(name, num_stages, num_microbatches, virtual_stages))


def make_orders(name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 2) -> dict[int, list[Compute]]:
    """Return {rank: [what it computes, in order]}, without messages. Raises ValueError like `make_schedule`."""
    check_name(name)
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    sizes = (num_stages, num_microbatches, *([virtual_stages] if name == "interleaved" else []))
    return {rank: list(SCHEDULES[name](rank, *sizes)) for rank in range(num_stages)}


def stages_per_rank(name: str, virtual_stages: int = 2) -> int:
    """Return how many stages a rank holds in a schedule of this name."""
    check_name(name)
    check_sizes(virtual_stages=virtual_stages)
    return virtual_stages if name == "interleaved" else 1


def check_name(name: str) -> None:
    """Raise ValueError unless there is a schedule of this name."""
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")


def add_messages(orders: dict[int, list[Compute]]) -> Schedule:
    """Insert the messages: after each cycle, all that it produced for other ranks flies, one exchange a rank.

    Both ends post a message after the same cycle. So the cycle number is one global order: nobody waits in a circle,
    even where every exchange blocks until all its messages have met their other end.
    """
    num_ranks, num_stages = len(orders), count_stages(orders)
    program: dict[int, list] = {rank: [] for rank in orders}
    for cycle in _cycles(orders):
        sends, recvs = {}, {}
        for slot in cycle:
            program[slot.rank].append(slot.compute)
            feeds = consumer(slot.compute, num_stages)
            if feeds is not None and feeds.stage % num_ranks != slot.rank:
                peer = feeds.stage % num_ranks
                sends.setdefault(slot.rank, []).append(Message(peer, feeds))
                recvs.setdefault(peer, []).append(Message(slot.rank, feeds))
        for rank in sorted(sends.keys() | recvs.keys()):
            program[rank].append(Exchange(tuple(sends.get(rank, ())), tuple(recvs.get(rank, ()))))
    return program


def _cycles(orders: dict[int, list[Compute]]) -> list[list[Slot]]:
    """Group the timeline of unit costs by cycle."""
    cycles: dict[float, list[Slot]] = {}
    for slot in timeline(orders):
        cycles.setdefault(slot.start, []).append(slot)
    return list(cycles.values())


def gpipe_schedule(num_stages: int, num_microbatches: int) -> list[tuple[int, int, int, str]]:
    """Return GPipe as a list of (cycle, stage, microbatch, "F" or "B"), a cycle being one F or one B."""
    slots = timeline(make_orders("gpipe", num_stages, num_microbatches))
    return [(slot.start, slot.compute.stage, slot.compute.microbatch, slot.compute.kind) for slot in slots]
