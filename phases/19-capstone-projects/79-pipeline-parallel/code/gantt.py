"""Draw schedules, in the terminal and as a PNG: the timeline, simulated or measured, of what runs."""

from pathlib import Path

from instructions import Compute, check_sizes, compute_orders, count_stages
from simulator import Simulation, Slot, timeline

COLOURS = {"F": "#8ecae6", "B": "#f4a261", "W": "#b5e48c"}


def render_gantt(schedule, num_stages: int, num_microbatches: int) -> str:
    """Return the chart as text: a line a rank, a column a cycle, F3 and B3 for microbatch 3, dots for waiting.

    Where ranks hold several stages, F3a is on a rank's first one, F3b on its second. `schedule` is
    {rank: [instruction]} or the list that `gpipe_schedule` returns. Raises ValueError if it has other sizes than the
    two given; `num_stages` counts ranks.
    """
    orders = compute_orders(schedule, num_stages, num_microbatches)
    slots, chunks = timeline(orders), count_stages(orders) // len(orders)
    cycles = int(max(slot.end for slot in slots))
    name = "stage" if chunks == 1 else "rank"
    cells = {(slot.rank, slot.start): cell_text(slot.compute, len(orders), chunks) for slot in slots}
    width = max(len(str(cycles - 1)), *map(len, cells.values()))
    label = max(len("cycle"), len(f"{name} {num_stages - 1}"))
    lines = ["cycle".ljust(label) + "".join(f"  {cycle:<{width}}" for cycle in range(cycles))]
    for rank in sorted(orders):
        row = [cells.get((rank, cycle), "." * width) for cycle in range(cycles)]
        lines.append(f"{name} {rank}".ljust(label) + "".join(f"  {cell:<{width}}" for cell in row))
    return "\n".join(lines)


def cell_text(compute: Compute, num_ranks: int, chunks: int) -> str:
    """Return what stands in a chart for a computation."""
    letter = "" if chunks == 1 else "abcdefghijklmnopqrstuvwxyz"[compute.stage // num_ranks % 26]
    return f"{compute.kind}{compute.microbatch}{letter}"


def render_timeline(slots: list[Slot], columns: int = 100) -> str:
    """Return a timeline drawn to scale, as text: a line a rank; each computation fills the columns that it takes.

    A slot shows as much of its name as fits, then its kind: "F0FFF" took five columns. Dots are waiting.
    """
    check_sizes(columns=columns)
    begin, end = min(slot.start for slot in slots), max(slot.end for slot in slots)
    chunks = _chunks(slots)
    num_ranks = 1 + max(slot.rank for slot in slots)
    rows = {rank: ["."] * columns for rank in range(num_ranks)}
    for slot in slots:
        first, last = (round(columns * (time - begin) / (end - begin)) for time in (slot.start, slot.end))
        text = cell_text(slot.compute, num_ranks, chunks)[: last - first].ljust(last - first, slot.compute.kind)
        rows[slot.rank][first:last] = text
    return "\n".join(f"rank {rank}  {''.join(row)}" for rank, row in rows.items())


def save_gantt(charts: dict[str, dict | list[Slot]], path: Path, forward=1, backward=2, weight=1) -> Path:
    """Save charts {title: schedule or timeline} as a PNG, below each other, on one time axis.

    A schedule is simulated with the three times given; a timeline is drawn as it is.
    """
    drawn = {
        title: timeline(chart, forward, backward, weight) if isinstance(chart, dict) else chart
        for title, chart in charts.items()
    }
    ranks = {title: 1 + max(slot.rank for slot in slots) for title, slots in drawn.items()}
    longest = max(slot.end for slots in drawn.values() for slot in slots)
    figure, axes = _axes([0.6 + 0.35 * count for count in ranks.values()])
    for axis, (title, slots) in zip(axes, drawn.items(), strict=True):
        chunks = _chunks(slots)
        for slot in slots:
            length, colour = slot.end - slot.start, COLOURS[slot.compute.kind]
            axis.broken_barh([(slot.start, length)], (slot.rank - 0.4, 0.8), color=colour, edgecolor="white")
            text = cell_text(slot.compute, ranks[title], chunks)
            if length > len(text) * longest / 200:  # else it would cover its neighbours
                axis.text(slot.start + length / 2, slot.rank, text, ha="center", va="center", fontsize=7)
        name = "stage" if chunks == 1 else "rank"
        labels = [f"{name} {rank}" for rank in range(ranks[title])]
        axis.set(title=title, yticks=range(ranks[title]), yticklabels=labels)
        axis.invert_yaxis()
    axes[-1].set(xlabel="time", xlim=(0, longest))  # of all: they share it
    figure.savefig(path, dpi=100)
    return path


def save_memory(simulations: dict[str, Simulation], path: Path) -> Path:
    """Save the activations alive over time on each rank as a PNG, one panel a simulation {title: simulation}."""
    figure, axes = _axes([2.0] * len(simulations))
    for axis, (title, simulation) in zip(axes, simulations.items(), strict=True):
        for rank, steps in simulation.memory.items():
            axis.step(*zip(*[(0, 0), *steps], strict=True), where="post", label=f"rank {rank}")
        axis.set(title=title, ylabel="alive")
        axis.legend(loc="upper right", fontsize=7)
    axes[-1].set_xlabel("time")
    figure.savefig(path, dpi=100)
    return path


def _axes(heights: list[float]):
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    height = sum(heights) + 0.8
    figure = Figure(figsize=(12, height))
    figure.subplots_adjust(left=0.06, right=0.99, top=1 - 0.4 / height, bottom=0.5 / height, hspace=0.5)
    return figure, figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0]


def _chunks(slots: list[Slot]) -> int:
    return (1 + max(slot.compute.stage for slot in slots)) // (1 + max(slot.rank for slot in slots))
