"""Cutting a checkpoint of N ranks anew for M: what has to move where, as plain data.

A plan is a list of moves for one new rank. The same list is checked (every element arrives, once), printed, and
executed by `reshard_load`. N and M need not divide anything, not each other and not the number of elements.
"""

from dataclasses import astuple, dataclass

from layout import check_layout
from memory import shard_bounds
from strictjson import CheckpointError, check_integer


@dataclass(frozen=True)
class Move:
    """Elements [source_start, source_end) of the range of a unit that rank `source` saved become [start, end) of ours.

    Both are counted from the beginning of the holder's own range.
    """

    unit: str
    source: int
    source_start: int
    source_end: int
    start: int
    end: int

    def row(self) -> tuple:
        """Return the cells of a table: unit, source rank, source range, own range, number of elements."""
        unit, source, *ends = astuple(self)
        return unit, source, f"[{ends[0]}, {ends[1]})", f"[{ends[2]}, {ends[3]})", self.end - self.start


def even_layout(saved: list[list[dict]], world_size: int, rank: int) -> list[dict]:
    """Return the layout of a rank if each unit is cut into M equal ranges: the last may be shorter, or empty.

    `saved` are the layouts of the ranks that saved. It is how ZeRO cuts, padding left out.
    """
    check_integer("world_size", world_size, least=1)
    result = []
    for unit, total in totals(saved).items():
        start, end, _ = shard_bounds(total, world_size, rank)
        result.append({"unit": unit, "start": start, "end": end, "total": total})
    return result


def totals(layouts: list[list[dict]]) -> dict[str, int]:
    """Return each unit's number of elements over all ranks."""
    return {item["unit"]: item["total"] for layout in layouts for item in layout}


def check_wanted(wanted: list[dict], saved: list[list[dict]]) -> None:
    """Check that a new rank's layout is of the units that were saved. Raises CheckpointError listing what is not."""
    check_layout(wanted)
    have, want = totals(saved), totals([wanted])
    faults = [f"missing unit {unit!r}" for unit in have if unit not in want]
    faults += [f"unexpected unit {unit!r}" for unit in want if unit not in have]
    faults += [
        f"{unit!r} has {have[unit]} elements in the checkpoint, {total} here"
        for unit, total in want.items()
        if have.get(unit, total) != total
    ]
    if len(want) != len(wanted):
        faults.append("a unit twice")
    if faults:
        raise CheckpointError(f"the layout to load into: {', '.join(faults)}")


def make_plan(saved: list[list[dict]], wanted: list[dict]) -> list[Move]:
    """Return the moves that fill the ranges `wanted` by one new rank from those that the old ranks have saved."""
    moves = []
    for item in wanted:
        for source, layout in enumerate(saved):
            for held in layout:
                start, end = max(held["start"], item["start"]), min(held["end"], item["end"])
                if held["unit"] == item["unit"] and start < end:
                    ranges = (start - held["start"], end - held["start"], start - item["start"], end - item["start"])
                    moves.append(Move(item["unit"], source, *ranges))
    return moves


def check_plan(plan: list[Move], saved: list[list[dict]], wanted: list[dict]) -> None:
    """Check that a plan fills every range wanted, once, with the same elements of the unit. Raises CheckpointError."""
    for item in wanted:
        covered = 0
        for move in sorted((m for m in plan if m.unit == item["unit"]), key=lambda m: m.start):
            held = next((each for each in saved[move.source] if each["unit"] == move.unit), None)
            if held is None or not 0 <= move.source_start < move.source_end <= held["end"] - held["start"]:
                raise CheckpointError(f"plan: rank {move.source} did not save that: {move}")
            if held["start"] + move.source_start != item["start"] + move.start:
                raise CheckpointError(f"plan: other elements than wanted: {move}")
            if move.start != covered or move.end - move.start != move.source_end - move.source_start:
                raise CheckpointError(f"plan: [{item['start'] + covered}, ...) of {item['unit']!r} comes next: {move}")
            covered = move.end
        if covered != item["end"] - item["start"]:
            raise CheckpointError(f"plan: nothing fills elements from {item['start'] + covered} of {item['unit']!r}")
