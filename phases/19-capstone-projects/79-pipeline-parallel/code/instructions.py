"""What a pipeline schedule is made of: computations, and messages that are posted together. Plain data, no behaviour.

A schedule is {rank: [instruction]}; stage s is on rank s mod N. The same object is checked (schedule_check.py), drawn
(gantt.py), costed (simulator.py) and executed (pipeline.py), so the picture and the program cannot disagree.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """One stage works on one microbatch: kind "F" is its forward pass, "B" its backward pass.

    A schedule may cut backward in two: then "B" is only the gradient of the input, for which the previous stage waits,
    and "W" the gradients of the weights, for which nobody does.
    """

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


Schedule = dict[int, list[Compute | Exchange]]


class ScheduleError(ValueError):
    """A schedule is wrong at `instruction`, which is number `index` of `rank` (None: it should be there and is not)."""

    def __init__(self, rank: int, index: int | None, instruction, problem: str):
        where = f"rank {rank}" if index is None else f"rank {rank}, instruction {index}"
        super().__init__(f"{where} ({instruction}): {problem}")
        self.rank, self.index, self.instruction = rank, index, instruction


def needs(compute: Compute, num_stages: int) -> list[Compute]:
    """Return the computations whose results this one takes."""
    kind, stage, m = compute.kind, compute.stage, compute.microbatch
    if kind == "W":
        return [Compute("B", stage, m)]
    if kind == "F":
        return [Compute("F", stage - 1, m)] if stage > 0 else []
    return [Compute("F", stage, m)] + ([Compute("B", stage + 1, m)] if stage + 1 < num_stages else [])


def consumer(compute: Compute, num_stages: int) -> Compute | None:
    """Return the computation of the next stage (F) or the previous one (B) that takes this one's result. W has none."""
    stage = compute.stage + {"F": 1, "B": -1, "W": num_stages}[compute.kind]
    return Compute(compute.kind, stage, compute.microbatch) if 0 <= stage < num_stages else None


def is_split(orders: dict[int, list]) -> bool:
    """Say whether a schedule cuts backward passes in two."""
    return any(isinstance(item, Compute) and item.kind == "W" for order in orders.values() for item in order)


def compute_orders(schedule, num_stages: int | None = None, num_microbatches: int | None = None):
    """Return {rank: [Compute]} of a schedule; if sizes are given, check that they are its own.

    `schedule` is {rank: [instruction]} or a list of (cycle, stage, microbatch, "F" or "B"). `num_stages` counts ranks.
    """
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
