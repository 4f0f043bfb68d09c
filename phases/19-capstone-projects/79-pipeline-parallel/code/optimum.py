"""The fastest possible schedule, found by trying everything: what the clever ones are measured against. Small sizes."""

from itertools import product

from instructions import check_sizes

MOST_STATES = 300_000


def fastest_span(
    num_ranks: int, num_microbatches: int, kinds: str = "FB", most_alive: int | None = None, virtual_stages: int = 1
) -> int:
    """Return the cycles of the shortest step over all schedules. Each F, B and W takes one cycle.

    `kinds` is "FB", or "FBW" where backward is split. No rank has more than `most_alive` activations alive at once.
    Raises ValueError for a size below 1, or if there is too much to try.

    Microbatches are alike, so each stage may take them in order, and where all stands is told by counts: how often
    each stage has done each kind. Cycle by cycle, all places that can be reached are kept. No rank rests when it could
    work: as all work is of one length, resting never helps.
    """
    check_sizes(num_stages=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages)
    if most_alive is not None and type(most_alive) is not int:
        raise ValueError(f"most_alive must be a whole number, got {most_alive!r}")
    if kinds not in ("FB", "FBW"):
        raise ValueError(f"kinds must be FB or FBW, got {kinds!r}")
    stages, limit = num_ranks * virtual_stages, num_microbatches if most_alive is None else most_alive
    limit = limit * (virtual_stages if most_alive is None else 1)
    states, goal, cycles = {((0,) * len(kinds),) * stages}, ((num_microbatches,) * len(kinds),) * stages, 0
    while goal not in states:
        found = set()
        for done in states:
            works = [
                _choices(done, range(rank, stages, num_ranks), kinds, num_microbatches, limit)
                for rank in range(num_ranks)
            ]
            found.update(_after(done, chosen) for chosen in product(*works))
        if found == states or len(found) > MOST_STATES:
            raise ValueError(f"{num_ranks} ranks and {num_microbatches} microbatches: impossible, or too many to try")
        states, cycles = found, cycles + 1
    return cycles


def _choices(done: tuple, stages: range, kinds: str, num_microbatches: int, limit: int) -> list:
    """Return the (stage, kind's number) that a rank with these stages can do next; [None] if it must wait."""
    alive, found = sum(done[stage][0] - done[stage][-1] for stage in stages), []
    for stage in stages:
        arrived = done[stage - 1][0] if stage > 0 else num_microbatches
        returned = done[stage + 1][1] if stage + 1 < len(done) else num_microbatches
        if done[stage][0] < arrived and alive < limit:
            found.append((stage, 0))
        if done[stage][1] < min(done[stage][0], returned):
            found.append((stage, 1))
        if kinds == "FBW" and done[stage][2] < done[stage][1]:
            found.append((stage, 2))
    return found or [None]


def _after(done: tuple, chosen: tuple) -> tuple:
    """Return the counts after one cycle."""
    counts = [list(stage) for stage in done]
    for stage, kind in filter(None, chosen):
        counts[stage][kind] += 1
    return tuple(map(tuple, counts))
