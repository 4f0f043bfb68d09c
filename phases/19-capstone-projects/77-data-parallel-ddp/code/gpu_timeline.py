"""What a GPU does during one step: computing, communicating, or both at once; as numbers and as a picture."""

from collections.abc import Callable

import demo
import torch
from comm import Comm


def record(step: Callable[[], object], comm: Comm) -> dict[str, list[tuple[float, float]]]:
    """Take one step under torch's profiler; return when this rank's GPU was busy: {"computing", "communicating"}.

    Spans (begin, end) are in ms from the first kernel on, merged where they touch. A kernel of NCCL also waits: for the
    other ranks, and for what has to be sent.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        comm.agree(None)  # ranks start together: a profiler needs its time, and not everywhere the same
        torch.cuda._sleep(1)  # a kernel of another name than all others: here the step begins
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    begin = max(event.time_range.end for event in events if "spin_kernel" in event.name)
    kernels = {"computing": [], "communicating": []}
    for event in events:
        if event.time_range.start >= begin and not event.name.startswith("nccl:") and "#" not in event.name:
            kind = "communicating" if "nccl" in event.name.lower() else "computing"
            kernels[kind].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    origin = min(begin for spans in kernels.values() for begin, _ in spans)
    return {kind: merged((begin - origin, end - origin) for begin, end in spans) for kind, spans in kernels.items()}


def merged(spans) -> list[tuple[float, float]]:
    """Return spans in order, those that overlap as one."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def shares(timeline: dict[str, list[tuple[float, float]]]) -> tuple[float, float, float]:
    """Return (ms of the whole step, the share of it with communication, the share of that hidden under computing)."""
    both = [span for spans in timeline.values() for span in spans]
    whole = max(end for _, end in both)
    sent = sum(end - begin for begin, end in timeline["communicating"])
    busy = sum(end - begin for begin, end in merged(both))
    hidden = sent + sum(end - begin for begin, end in timeline["computing"]) - busy
    return whole, sent / whole, hidden / sent if sent else 0.0


def report(timelines: dict[str, dict], path, title: str) -> None:
    """Print each contender's shares, and draw all timelines into a file."""
    rows = []
    for name, timeline in timelines.items():
        whole, sent, hidden = shares(timeline)
        rows.append([name, round(whole, 1), f"{sent:.0%}", f"{hidden:.0%}"])
    demo.say()
    columns = ["", "ms under the profiler", "of it communication", "of that hidden under computing"]
    demo.table(columns, rows, "one step of rank 0's GPU")
    draw(timelines, path, title)
    demo.say(f"\npicture: {path}")


def draw(timelines: dict[str, dict], path, title: str) -> None:
    """Draw two lanes a contender over one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(timelines), 1, figsize=(10, 1.1 * len(timelines) + 1.2), sharex=True)
    for panel, (name, timeline) in zip(panels if len(timelines) > 1 else [panels], timelines.items(), strict=True):
        for lane, (kind, color) in enumerate((("communicating", "tab:orange"), ("computing", "tab:blue"))):
            panel.broken_barh([(a, b - a) for a, b in timeline[kind]], (lane + 0.1, 0.8), color=color)
        _, sent, hidden = shares(timeline)
        panel.set(yticks=[0.5, 1.5], yticklabels=["communicating", "computing"])
        panel.set_title(f"{name}: {sent:.0%} communication, {hidden:.0%} of it hidden", loc="left", fontsize=9)
    figure.axes[-1].set_xlabel("ms since the first kernel")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
