"""The layout of flat buffers over the ranks: who holds which range, so that a checkpoint can be split anew.

A rank's layout lists `{"unit", "start", "end", "total"}`: at or below the key `unit` of its state, each tensor holds
the elements [start, end) of a flat buffer of `total` elements. A ZeRO shard with master, exp_avg and exp_avg_sq in a
dict at `optimizer/flat` is one such range.
"""

from strictjson import CheckpointError, check_integer, check_keys, show


def check_layout(layout) -> None:
    """Check one rank's ranges; `check_coverage` checks them against the other ranks'."""
    if not isinstance(layout, list):
        raise CheckpointError(f"layout: expected a list, found {show(layout)}")
    for i, item in enumerate(layout):
        check_keys(f"layout[{i}]", item, ["unit", "start", "end", "total"])
        if not isinstance(item["unit"], str):
            raise CheckpointError(f"layout[{i}].unit: expected a string, found {show(item['unit'])}")
        check_integer(f"layout[{i}].start", item["start"])
        check_integer(f"layout[{i}].end", item["end"], least=item["start"])
        check_integer(f"layout[{i}].total", item["total"], least=item["end"])


def check_coverage(layouts: list[list[dict]]) -> None:
    """Check that the ranks' ranges of each unit cover it exactly: no gap, no overlap, one total.

    CheckpointError names the unit, and of a gap the first element that nobody holds, of an overlap the first one that
    two ranges hold, of two totals the rank and both.
    """
    units: dict[str, list[tuple[int, int, int, int]]] = {}
    for rank, layout in enumerate(layouts):
        for item in layout:
            units.setdefault(item["unit"], []).append((item["start"], item["end"], item["total"], rank))
    for unit, ranges in units.items():
        covered, total = 0, ranges[0][2]
        for start, end, its_total, rank in sorted(ranges):
            if its_total != total:
                raise CheckpointError(f"layout of {unit!r}: rank {rank} says total {its_total}, others {total}")
            if start != covered:
                what = f"{'gap' if start > covered else 'overlap'} at element {min(start, covered)}"
                raise CheckpointError(f"layout of {unit!r}: {what}: rank {rank} holds [{start}, {end})")
            covered = end
        if covered != total:
            raise CheckpointError(f"layout of {unit!r}: no rank holds elements [{covered}, {total})")
