"""Write a timeline as Chrome-trace JSON: open it in https://ui.perfetto.dev or chrome://tracing."""

import json
from pathlib import Path

from instructions import consumer
from simulator import Slot, summarise


def trace_events(slots: list[Slot], process: int = 0, title: str = "pipeline", unit: float = 1e6) -> list[dict]:
    """Return the events of one timeline, as one process of the viewer: a thread a rank, an arrow a message.

    `unit` is how many microseconds one unit of the timeline is: 1e6 where it is in seconds. A counter a rank shows the
    activations alive. Format: the Trace Event Format's complete (X), flow (s, f), counter (C) and metadata (M) events.
    """
    num_stages = 1 + max(slot.compute.stage for slot in slots)
    begin = min(slot.start for slot in slots)
    found = {slot.compute: slot for slot in slots}
    events = [_name("process_name", title, process)]
    events += [_name("thread_name", f"rank {rank}", process, rank) for rank in sorted({slot.rank for slot in slots})]
    for number, slot in enumerate(slots):
        start, end = ((time - begin) * unit for time in (slot.start, slot.end))
        place = {"pid": process, "tid": slot.rank}
        facts = {"stage": slot.compute.stage, "microbatch": slot.compute.microbatch}
        event = {"ph": "X", "name": str(slot.compute), "cat": slot.compute.kind, "ts": start, "dur": end - start}
        events.append(event | place | {"args": facts})
        fed = found.get(consumer(slot.compute, num_stages))
        if fed is not None and fed.rank != slot.rank:
            arrow = {"name": f"for {fed.compute}", "cat": "message", "id": f"{process}.{number}", "pid": process}
            events.append(arrow | {"ph": "s", "ts": (start + end) / 2, "tid": slot.rank})
            middle = (fed.start + fed.end) / 2 - begin
            events.append(arrow | {"ph": "f", "bp": "e", "ts": middle * unit, "tid": fed.rank})
    for rank, steps in summarise(slots).memory.items():
        for time, alive in steps:
            event = {"ph": "C", "name": f"activations, rank {rank}", "pid": process, "ts": (time - begin) * unit}
            events.append(event | {"args": {"alive": alive}})
    return events


def save_trace(timelines: dict[str, list[Slot]], path: Path | str, unit: float = 1e6) -> Path:
    """Save timelines {title: slots}, one process of the viewer each."""
    events = [e for i, (title, slots) in enumerate(timelines.items()) for e in trace_events(slots, i, title, unit)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return Path(path)


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
