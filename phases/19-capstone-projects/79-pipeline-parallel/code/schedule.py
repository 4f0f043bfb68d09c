"""Pipeline schedules as plain data: what each rank computes, in which order, and which messages fly in between.

A schedule is {rank: [instruction]}. The same object is checked (schedule_check.py), drawn (gantt.py), costed
(`measure_bubble`) and executed (pipeline.py), so the picture and the program cannot disagree. N stages, M microbatches.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """One stage works on one microbatch: kind "F" is its forward pass, "B" its backward pass."""

    kind: str
    stage: int
    microbatch: int

    @property
    def tag(self) -> int:
        """The tag of the message that feeds this computation: one number for direction, stage and microbatch."""
        return self.microbatch << 12 | self.stage << 1 | (self.kind == "B")

    def __str__(self):
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Message:
    """The tensor that `feeds` a computation: an activation feeds an F, a gradient a B. `peer` has its other end."""

    peer: int
    feeds: Compute


@dataclass(frozen=True)
class Exchange:
    """Messages that are posted together: none of them waits for another of the same exchange."""

    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()

    def __str__(self):
        parts = [f"send to rank {m.peer} for {m.feeds}" for m in self.sends]
        return " + ".join(parts + [f"receive from rank {m.peer} for {m.feeds}" for m in self.recvs])


class ScheduleError(ValueError):
    """A schedule is wrong at `instruction`, which is number `index` of `rank` (None: it should be there and is not)."""

    def __init__(self, rank: int, index: int | None, instruction, problem: str):
        where = f"rank {rank}" if index is None else f"rank {rank}, instruction {index}"
        super().__init__(f"{where} ({instruction}): {problem}")
        self.rank, self.index, self.instruction = rank, index, instruction


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


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


# --- from the order of work to a program with messages ----------------------------------------------------------------


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 2
) -> dict[int, list[Compute | Exchange]]:
    """Return {rank: [instruction]}. Raises ValueError for an unknown name or a size below 1.

    `virtual_stages` is the number of stages a rank holds in an interleaved schedule; GPipe and 1F1B hold one.
    """
    check_sizes(virtual_stages=virtual_stages)
    return add_messages(make_orders(name, num_stages, num_microbatches))


def make_orders(name: str, num_stages: int, num_microbatches: int) -> dict[int, list[Compute]]:
    """Return {rank: [what it computes, in order]}, without messages. Raises ValueError like `make_schedule`."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    return {rank: list(SCHEDULES[name](rank, num_stages, num_microbatches)) for rank in range(num_stages)}


def add_messages(orders: dict[int, list[Compute]]) -> dict[int, list[Compute | Exchange]]:
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


def add_lone_messages(orders: dict[int, list[Compute]]) -> dict[int, list[Compute | Exchange]]:
    """Insert messages as one would at first: receive right before a computation, send right after it, each alone.

    Where a lone send waits for its receiver (large messages, NCCL), 1F1B written like this deadlocks.
    """
    num_ranks, num_stages = len(orders), count_stages(orders)
    program: dict[int, list] = {rank: [] for rank in orders}
    for rank, order in orders.items():
        for compute in order:
            producers = [c for c in needs(compute, num_stages) if c.stage % num_ranks != rank]
            program[rank] += [Exchange(recvs=(Message(c.stage % num_ranks, compute),)) for c in producers]
            program[rank].append(compute)
            feeds = consumer(compute, num_stages)
            if feeds is not None and feeds.stage % num_ranks != rank:
                program[rank].append(Exchange(sends=(Message(feeds.stage % num_ranks, feeds),)))
    return program


def needs(compute: Compute, num_stages: int) -> list[Compute]:
    """Return the computations whose results this one takes."""
    kind, stage, m = compute.kind, compute.stage, compute.microbatch
    if kind == "F":
        return [Compute("F", stage - 1, m)] if stage > 0 else []
    return [Compute("F", stage, m)] + ([Compute("B", stage + 1, m)] if stage + 1 < num_stages else [])


def consumer(compute: Compute, num_stages: int) -> Compute | None:
    """Return the computation of the next stage (F) or the previous one (B) that takes this one's result."""
    stage = compute.stage + (1 if compute.kind == "F" else -1)
    return Compute(compute.kind, stage, compute.microbatch) if 0 <= stage < num_stages else None


# --- what it costs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """When a rank computes what: from `start` to `end`, in the unit of the costs."""

    start: float
    end: float
    rank: int
    compute: Compute


def timeline(schedule, forward: float = 1, backward: float = 1) -> list[Slot]:
    """Simulate: each rank computes in its own order, as soon as what it needs is there. Messages take no time.

    `schedule` is {rank: [instruction]} or a list of (cycle, stage, microbatch, "F" or "B"). Sorted by (start, rank).
    """
    orders, costs = compute_orders(schedule), {"F": forward, "B": backward}
    num_stages = count_stages(orders)
    todo = {rank: deque(enumerate(order)) for rank, order in orders.items()}
    free, end, slots = dict.fromkeys(orders, 0), {}, []
    while any(todo.values()):
        ready = [r for r, line in todo.items() if line and all(c in end for c in needs(line[0][1], num_stages))]
        if not ready:
            rank, (index, compute) = next((r, line[0]) for r, line in todo.items() if line)
            missing = next(c for c in needs(compute, num_stages) if c not in end)
            raise ScheduleError(rank, index, compute, f"can never run: {missing} does not come before it")
        for rank in ready:
            _, compute = todo[rank].popleft()
            start = max([free[rank], *(end[c] for c in needs(compute, num_stages))])
            free[rank] = end[compute] = start + costs[compute.kind]
            slots.append(Slot(start, end[compute], rank, compute))
    return sorted(slots, key=lambda slot: (slot.start, slot.rank))


def _cycles(orders: dict[int, list[Compute]]) -> list[list[Slot]]:
    """Group the timeline of unit costs by cycle."""
    cycles: dict[float, list[Slot]] = {}
    for slot in timeline(orders):
        cycles.setdefault(slot.start, []).append(slot)
    return list(cycles.values())


def measure_bubble(
    schedule,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    forward: float = 1,
    backward: float = 1,
) -> float:
    """Return the fraction of the ranks' time in which they wait, measured on the simulated schedule.

    `forward` and `backward` are the costs of one F and one B. Sizes, where given, must be the schedule's own.
    """
    orders = compute_orders(schedule, num_stages, num_microbatches)
    for name, cost in (("forward", forward), ("backward", backward)):
        if isinstance(cost, bool) or not cost > 0:
            raise ValueError(f"{name} must cost more than 0, got {cost!r}")
    slots = timeline(orders, forward, backward)
    busy, span = sum(slot.end - slot.start for slot in slots), max(slot.end for slot in slots)
    return 1 - busy / (len(orders) * span)


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Return (N - 1) / (M + N - 1), the bubble of GPipe and 1F1B. Raises ValueError for a size below 1."""
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def gpipe_schedule(num_stages: int, num_microbatches: int) -> list[tuple[int, int, int, str]]:
    """Return GPipe as a list of (cycle, stage, microbatch, "F" or "B"), a cycle being one F or one B."""
    slots = timeline(make_orders("gpipe", num_stages, num_microbatches))
    return [(slot.start, slot.compute.stage, slot.compute.microbatch, slot.compute.kind) for slot in slots]


def compute_orders(schedule, num_stages: int | None = None, num_microbatches: int | None = None):
    """Return {rank: [Compute]} of a schedule in either form; if sizes are given, check that they are its own."""
    if isinstance(schedule, dict):
        orders = {r: [i for i in program if isinstance(i, Compute)] for r, program in schedule.items()}
    else:
        orders = {stage: [] for stage in sorted({stage for _, stage, _, _ in schedule})}
        for _, stage, microbatch, kind in sorted(schedule):
            orders[stage].append(Compute(kind, stage, microbatch))
    work = [compute for order in orders.values() for compute in order]
    if not work:
        raise ValueError("the schedule is empty")
    for name, given, own in (
        ("num_stages", num_stages, len(orders)),
        ("num_microbatches", num_microbatches, 1 + max(c.microbatch for c in work)),
    ):
        if given is not None:
            check_sizes(**{name: given})
            if given != own:
                raise ValueError(f"{name} is {given}, but the schedule has {own}")
    return orders


def count_stages(orders: dict[int, list[Compute]]) -> int:
    """Return the number of stages over all ranks."""
    return 1 + max(compute.stage for order in orders.values() for compute in order)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless each is a whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
