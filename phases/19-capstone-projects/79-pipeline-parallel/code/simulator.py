"""The simulator: when does each rank compute what, how long do ranks wait, how much memory is in use at each moment?"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from instructions import Compute, ScheduleError, check_sizes, compute_orders, count_stages, is_split, needs

Times = float | Sequence[float]  # one for all stages, or one a stage


@dataclass(frozen=True)
class Slot:
    """When a rank computes what: from `start` to `end`, in the unit of the costs."""

    start: float
    end: float
    rank: int
    compute: Compute


def timeline(schedule, forward: Times = 1, backward: Times = 1, weight: Times = 1, link: Times = 0) -> list[Slot]:
    """Simulate: each rank computes in its own order, as soon as what it needs is there. Sorted by (start, rank).

    `schedule` is {rank: [instruction]} or a list of (cycle, stage, microbatch, "F" or "B"). `forward`, `backward` and
    `weight` are the times of one F, B and W, one number or one a stage; `link` those of a message, one number or one a
    border between stages. A message takes none of its ranks' time, nor another message's.

    If no rank can go on, it raises ScheduleError for the first rank that is not done and the instruction that it is at,
    with the name of a computation that this one lacks.
    """
    orders = compute_orders(schedule)
    num_stages = count_stages(orders)
    costs = {
        "F": _per_stage("forward", forward, num_stages),
        "B": _per_stage("backward", backward, num_stages, zero=True),
        "W": _per_stage("weight", weight, num_stages, zero=True),
    }
    links = _per_stage("link", link, num_stages - 1, zero=True)
    rank_of = {compute.stage: rank for rank, order in orders.items() for compute in order}
    todo = {rank: deque(enumerate(order)) for rank, order in orders.items()}
    free, end, slots = dict.fromkeys(orders, 0), {}, []

    def arrival(source: Compute, rank: int, stage: int) -> float:
        """When a result is there: at once on the same rank, else after its message."""
        return end[source] + (0 if rank_of[source.stage] == rank else links[min(source.stage, stage)])

    while any(todo.values()):
        ready = [r for r, line in todo.items() if line and all(c in end for c in needs(line[0][1], num_stages))]
        if not ready:
            rank, (index, compute) = next((r, line[0]) for r, line in todo.items() if line)
            missing = next(c for c in needs(compute, num_stages) if c not in end)
            raise ScheduleError(rank, index, compute, f"can never run: {missing} does not come before it")
        for rank in ready:
            _, compute = todo[rank].popleft()
            arrivals = [arrival(c, rank, compute.stage) for c in needs(compute, num_stages)]
            start = max([free[rank], *arrivals])
            free[rank] = end[compute] = start + costs[compute.kind][compute.stage]
            slots.append(Slot(start, end[compute], rank, compute))
    return sorted(slots, key=lambda slot: (slot.start, slot.rank))


def _per_stage(what: str, times: Times, count: int, zero: bool = False) -> list[float]:
    """Return one time for each. Raises ValueError for a wrong number of them, or one that is no time; `zero`: 0 is."""
    several = isinstance(times, Sequence) and not isinstance(times, str)
    listed = list(times) if several else [times] * count
    if len(listed) != count:
        raise ValueError(f"{what} needs {count} times, one for each, got {len(listed)}")
    for value in listed:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not (0 <= value < float("inf") if zero else 0 < value < float("inf")):
            raise ValueError(f"{what} must cost {'at least 0' if zero else 'more than 0'}, got {value!r}")
    return listed


@dataclass(frozen=True)
class Simulation:
    """What a step costs. `step` is its time; the dicts have an entry a rank.

    `bubbles`: the fraction of the step in which the rank waits. `memory`: [(time, size of the activations alive from
    then on)]; an activation lives from the begin of its F to the end of its B, or of its W where backward is split.
    """

    slots: list[Slot]
    step: float
    bubbles: dict[int, float]
    memory: dict[int, list[tuple[float, float]]]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they wait."""
        return sum(self.bubbles.values()) / len(self.bubbles)

    @property
    def peaks(self) -> dict[int, float]:
        """The most that is alive at once, a rank."""
        return {rank: max(size for _, size in steps) for rank, steps in self.memory.items()}


def simulate(
    schedule,
    forward: Times = 1,
    input_gradient: Times = 1,
    weight_gradient: Times = 1,
    link: Times = 0,
    activation: Times = 1,
) -> Simulation:
    """Simulate a step. Times are one number or one a stage (`link`: one a border); `activation` is a stage's memory.

    Where a schedule does not split backward, a B takes both gradients' time. A gradient may take none: a frozen stage
    has no weight gradient, the first stage no input gradient.
    """
    orders = compute_orders(schedule)
    num_stages = count_stages(orders)
    backward = _per_stage("input_gradient", input_gradient, num_stages, zero=True)
    weight = _per_stage("weight_gradient", weight_gradient, num_stages, zero=True)
    if not is_split(orders):
        backward = [a + b for a, b in zip(backward, weight, strict=True)]
    slots = timeline(orders, forward, backward, weight, link)
    return summarise(slots, _per_stage("activation", activation, num_stages, zero=True))


def summarise(slots: list[Slot], activation: Sequence[float] | None = None) -> Simulation:
    """Return what a timeline, simulated or measured, costs: from the begin of its first slot to the end of its last."""
    begin, end = min(slot.start for slot in slots), max(slot.end for slot in slots)
    ranks = sorted({slot.rank for slot in slots})
    busy = {rank: sum(slot.end - slot.start for slot in slots if slot.rank == rank) for rank in ranks}
    last = "W" if any(slot.compute.kind == "W" for slot in slots) else "B"
    memory = {}
    for rank in ranks:
        changes = []  # (time, size); a release and a begin at one moment are one step
        for slot in (slot for slot in slots if slot.rank == rank):
            size = 1 if activation is None else activation[slot.compute.stage]
            if slot.compute.kind == "F":
                changes.append((slot.start, size))
            elif slot.compute.kind == last:
                changes.append((slot.end, -size))
        steps, alive = {}, 0
        for time, size in sorted(changes):
            alive += size
            steps[time] = alive
        memory[rank] = [*steps.items()]
    return Simulation(slots, end - begin, {r: 1 - busy[r] / (end - begin) for r in ranks}, memory)


def measure_bubble(
    schedule,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    forward: Times = 1,
    backward: Times = 1,
    weight: Times = 1,
    link: Times = 0,
) -> float:
    """Return the fraction of the ranks' time in which they wait, measured on the simulated schedule.

    Times are those of `timeline`. Sizes, where given, must be the schedule's own.
    """
    orders = compute_orders(schedule, num_stages, num_microbatches)
    return summarise(timeline(orders, forward, backward, weight, link)).bubble


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Return (N - 1) / (M + N - 1), the bubble of GPipe and 1F1B. Raises ValueError for a size below 1."""
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def bubble_formula(name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 2) -> float:
    """Return a schedule's bubble in closed form: for equal stages, and F, B (and W) that take equal times.

    For M >= N it is (N-1)/(M+N-1), interleaved (N-1)/(vM+N-1), ZB-H1 (N-1)/(3M+N-1). With fewer microbatches than
    ranks the last two have other forms. Raises ValueError for a size below 1 or an unknown name.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    n, m, v = num_stages, num_microbatches, virtual_stages
    if name in ("gpipe", "1f1b"):
        return bubble_fraction(n, m)
    if name == "interleaved":
        return (n - 1) / (v * m + n - 1) if m >= n else 1 - v * m / (v * n + m - 1)
    if name == "zb-h1":
        return (n - 1) / (3 * m + n - 1) if m >= n else 1 - 3 * m / (2 * (m + n) - 1)
    raise ValueError(f"there is no formula for a schedule named {name!r}")
