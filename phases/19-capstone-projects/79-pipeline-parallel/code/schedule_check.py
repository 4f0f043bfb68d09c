"""Prove that a schedule can run: complete, in order, every message matched, free of deadlock, memory bounded.

`check_schedule` does not care how a schedule was made. Edit one by hand, and it names the instruction at fault.
"""

from dataclasses import dataclass
from itertools import pairwise

from instructions import Compute, Exchange, Message, ScheduleError, check_sizes, consumer, is_split

Place = tuple[int, int]  # (rank, index of the instruction)
Link = tuple[int, int, Compute]  # a message: (from rank, to rank, the computation it feeds)


@dataclass(frozen=True)
class ScheduleFacts:
    """What a sound schedule was found to be. `peak_live` is {rank: most activations alive at once}."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    peak_live: dict[int, int]


def check_schedule(schedule: dict[int, list], max_live: dict[int, int] | None = None) -> ScheduleFacts:
    """Return the facts of a sound schedule; raise ScheduleError (a ValueError) at the first instruction at fault.

    Stage s must be on rank s mod N. `max_live` limits the activations alive at once on each rank.
    """
    if not isinstance(schedule, dict) or not schedule or set(schedule) != set(range(len(schedule))):
        raise ValueError("a schedule is {rank: [instruction]}, with ranks from 0 to N - 1")
    for rank, program in schedule.items():
        if type(rank) is not int or not isinstance(program, (list, tuple)):
            raise ValueError(f"a schedule is {{rank: [instruction]}}; rank {rank!r} has a {type(program).__name__}")
    _check_limits(schedule, max_live)
    where, sent, received = _collect(schedule)
    if not where:
        raise ValueError("the schedule is empty")
    num_stages = max(len(schedule), 1 + max(compute.stage for compute in where))
    num_microbatches = 1 + max(compute.microbatch for compute in where)
    _check_complete(where, len(schedule), num_stages, num_microbatches, "FBW" if is_split(schedule) else "FB")
    _check_results(schedule, where, sent, received, num_stages)
    _check_pairs(schedule, sent, received)
    _check_deadlock(schedule)
    peaks = {r: _peak_live(r, program, (max_live or {}).get(r)) for r, program in schedule.items()}
    return ScheduleFacts(len(schedule), num_stages, num_microbatches, peaks)


def _collect(schedule) -> tuple[dict[Compute, Place], dict[Link, Place], dict[Link, Place]]:
    """Find the place of each computation, of each send, of each receive. Each instruction alone must make sense."""
    where, sent, received = {}, {}, {}
    for rank, program in schedule.items():
        for index, item in enumerate(program):
            place = (rank, index)
            if isinstance(item, Compute):
                _check_numbers(rank, index, item, item)
                if item.stage % len(schedule) != rank:
                    raise ScheduleError(
                        rank, index, item, f"stage {item.stage} is on rank {item.stage % len(schedule)}"
                    )
                found = [(where, item)]
            elif isinstance(item, Exchange):
                for message in _messages(rank, index, item):
                    _check_numbers(rank, index, item, message.feeds)
                    if type(message.peer) is not int or message.peer == rank or message.peer not in schedule:
                        raise ScheduleError(rank, index, item, f"rank {rank} has no peer {message.peer!r}")
                found = [(sent, (rank, message.peer, message.feeds)) for message in item.sends]
                found += [(received, (message.peer, rank, message.feeds)) for message in item.recvs]
            else:
                raise ScheduleError(rank, index, item, "is neither a Compute nor an Exchange")
            for places, key in found:
                if key in places:
                    raise ScheduleError(rank, index, item, f"repeats instruction {places[key][1]}")
                places[key] = place
    return where, sent, received


def _messages(rank: int, index: int, item: Exchange) -> list[Message]:
    parts = (item.sends, item.recvs)
    found = [message for part in parts if isinstance(part, (list, tuple)) for message in part]
    sound = all(isinstance(message, Message) and isinstance(message.feeds, Compute) for message in found)
    if not sound or not all(isinstance(part, (list, tuple)) for part in parts):
        raise ScheduleError(rank, index, repr(item), "sends and recvs must be tuples of Messages that feed a Compute")
    return found


def _check_limits(schedule, max_live) -> None:
    if not isinstance(max_live, (dict, type(None))):
        raise ValueError(f"max_live must be {{rank: limit}}, got {max_live!r}")
    for rank, limit in (max_live or {}).items():
        check_sizes(**{f"max_live of rank {rank!r}": limit})
        if rank not in schedule:
            raise ValueError(f"max_live has a limit for rank {rank!r}; the schedule has ranks 0 to {len(schedule) - 1}")


def _check_numbers(rank: int, index: int, item, compute: Compute) -> None:
    numbers = (compute.stage, compute.microbatch)
    if compute.kind not in ("F", "B", "W") or not all(type(n) is int and n >= 0 for n in numbers):
        raise ScheduleError(rank, index, item, "kind must be F, B or W; stage and microbatch whole numbers from 0")


def _check_complete(where, num_ranks: int, num_stages: int, num_microbatches: int, kinds: str) -> None:
    """Each stage and microbatch is there in every kind, in their order: F, B and, if there is any W at all, W."""
    for stage in range(num_stages):
        for m in range(num_microbatches):
            steps = [Compute(kind, stage, m) for kind in kinds]
            for compute in steps:
                if compute not in where:
                    raise ScheduleError(stage % num_ranks, None, compute, "is missing")
            for before, after in pairwise(steps):
                if where[after] < where[before]:
                    raise ScheduleError(*where[after], after, f"comes before {before}, whose result it needs")


def _check_results(schedule, where, sent, received, num_stages: int) -> None:
    """Each result gets to the computation that needs it: after the one, before the other. Nothing else is sent."""
    used = set()
    for compute, (rank, index) in where.items():
        feeds = consumer(compute, num_stages)
        if feeds is None:
            continue
        peer, at = where[feeds]
        link = (rank, peer, feeds)
        if peer == rank:  # two stages on one rank: no message
            if at < index:
                raise ScheduleError(peer, at, feeds, f"comes before {compute}, whose result it needs")
            continue
        if link not in sent:
            raise ScheduleError(rank, index, compute, f"its result is not sent to rank {peer}")
        if link not in received:
            raise ScheduleError(peer, at, feeds, f"what it needs is not received from rank {rank}")
        if sent[link][1] < index:
            raise ScheduleError(*sent[link], schedule[rank][sent[link][1]], f"comes before {compute}, which it sends")
        if received[link][1] > at:
            raise ScheduleError(peer, at, feeds, f"comes before instruction {received[link][1]}, which receives for it")
        used.add(link)
    for links in (sent, received):
        for link, (rank, index) in links.items():
            if link not in used:
                raise ScheduleError(rank, index, schedule[rank][index], f"no result for {link[2]} flies this way")


def _check_pairs(schedule, sent: dict[Link, Place], received: dict[Link, Place]) -> None:
    """Between two ranks, messages are received in the order in which they are sent (on NCCL that is the only tag)."""
    for src in schedule:
        for dst in schedule:
            out, into = ([link for link in links if link[:2] == (src, dst)] for links in (sent, received))
            for link, expected in zip(out, into, strict=True):
                if link != expected:
                    rank, index = sent[link]
                    problem = f"out of order: rank {dst} first expects the message for {expected[2]}"
                    raise ScheduleError(rank, index, schedule[rank][index], problem)


def _check_deadlock(schedule) -> None:
    """Run the messages with no buffer at all: an exchange blocks until the other end of each message is posted, too.

    If ranks wait in a circle, it raises ScheduleError with the word `deadlock` and the ranks of the circle. It is about
    the rank of the circle that one meets first from the lowest rank that waits, and the exchange in which that waits.
    """
    at = dict.fromkeys(schedule, 0)
    posted: set[tuple] = set()  # (rank, peer, feeds)

    def blocker(rank: int) -> int | None:
        """Post the current instruction of `rank`; return the peer it waits for."""
        item = schedule[rank][at[rank]]
        messages = (*item.sends, *item.recvs) if isinstance(item, Exchange) else ()
        posted.update((rank, m.peer, m.feeds) for m in messages)
        return next((m.peer for m in messages if (m.peer, rank, m.feeds) not in posted), None)

    moved = True
    while moved:
        moved = False
        for rank, program in schedule.items():
            while at[rank] < len(program) and blocker(rank) is None:
                at[rank], moved = at[rank] + 1, True
    waits = {rank: blocker(rank) for rank, program in schedule.items() if at[rank] < len(program)}
    if waits:
        rank, path = min(waits), []
        while rank not in path:
            path.append(rank)
            rank = waits[rank]
        first, *others = path[path.index(rank) :]
        cycle = [f"waits for rank {waits[first]}"]
        cycle += [f"rank {r}, instruction {at[r]} ({schedule[r][at[r]]}), waits for rank {waits[r]}" for r in others]
        raise ScheduleError(first, at[first], schedule[first][at[first]], "deadlock: " + "; ".join(cycle))


def _peak_live(rank: int, program: list, limit: int | None) -> int:
    """Count the activations alive at once on a rank: each lives from its F to its B, or to its W where there is one."""
    live = peak = 0
    last = "W" if is_split({rank: program}) else "B"
    for index, item in enumerate(program):
        if isinstance(item, Compute):
            live += (item.kind == "F") - (item.kind == last)
            peak = max(peak, live)
            if limit is not None and live > limit:
                raise ScheduleError(rank, index, item, f"{live} activations are alive; the limit is {limit}")
    return peak
