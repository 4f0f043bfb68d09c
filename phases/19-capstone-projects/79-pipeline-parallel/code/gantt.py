"""Draw a schedule: in the terminal, and as a PNG. Both draw the simulated timeline of the schedule that runs."""

from pathlib import Path

from schedule import compute_orders, timeline


def render_gantt(schedule, num_stages: int, num_microbatches: int) -> str:
    """Return the chart as text: a line a rank, a column a cycle, F3 and B3 for microbatch 3, dots for waiting.

    `schedule` is {rank: [instruction]} or the list that `gpipe_schedule` returns. Raises ValueError if it has other
    sizes than the two given.
    """
    orders = compute_orders(schedule, num_stages, num_microbatches)
    slots = timeline(orders)
    cycles = int(max(slot.end for slot in slots))
    width = max(len(str(cycles - 1)), 1 + len(str(num_microbatches - 1)))
    label = max(len("cycle"), len(f"stage {num_stages - 1}"))
    cells = {(slot.rank, slot.start): f"{slot.compute.kind}{slot.compute.microbatch}" for slot in slots}
    lines = ["cycle".ljust(label) + "".join(f"  {cycle:<{width}}" for cycle in range(cycles))]
    for rank in sorted(orders):
        row = [cells.get((rank, cycle), "." * width) for cycle in range(cycles)]
        lines.append(f"stage {rank}".ljust(label) + "".join(f"  {cell:<{width}}" for cell in row))
    return "\n".join(lines)


def save_gantt(schedules: dict[str, dict], path: Path, forward: float = 1, backward: float = 2) -> Path:
    """Save one chart a schedule, {title: schedule}, as a PNG below each other, on one time axis."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    colours = {"F": "#8ecae6", "B": "#f4a261"}
    figure = Figure(figsize=(12, sum(1 + 0.35 * len(schedule) for schedule in schedules.values())))
    figure.subplots_adjust(left=0.07, right=0.99, top=0.94, bottom=0.1)
    axes = figure.subplots(len(schedules), squeeze=False, sharex=True)[:, 0]
    for axis, (title, schedule) in zip(axes, schedules.items(), strict=True):
        for slot in timeline(schedule, forward, backward):
            length, kind = slot.end - slot.start, slot.compute.kind
            axis.broken_barh([(slot.start, length)], (slot.rank - 0.4, 0.8), color=colours[kind], edgecolor="white")
            axis.text(slot.start + length / 2, slot.rank, f"{kind}{slot.compute.microbatch}", ha="center", va="center")
        axis.set(
            title=title, yticks=range(len(schedule)), yticklabels=[f"stage {rank}" for rank in range(len(schedule))]
        )
        axis.invert_yaxis()
        axis.set_xlim(left=0)
    axes[-1].set_xlabel(f"time (a forward takes {forward:g}, a backward {backward:g})")
    figure.savefig(path, dpi=100)
    return path
