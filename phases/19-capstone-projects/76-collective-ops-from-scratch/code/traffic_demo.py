"""`--trace`, second part: every collective recorded message by message, and what the lines add up to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import cost
import demo
import torch
from alltoall import alltoall
from barrier import barrier
from choose import ALGORITHMS
from collectives import allgather, broadcast, reduce_scatter
from cost import Cost
from hierarchical import hierarchical_allreduce
from pipelined import pipelined_broadcast
from traffic import Recorder, read_traffic, totals
from tree import reduce
from virtual import VirtualCluster


def every_collective(n: int, nbytes: int, node_size: int) -> dict[str, tuple[Callable, Cost]]:
    """Return name -> (the code, its predicted cost) for `n` ranks of `nbytes` each, float32."""
    others = {
        "broadcast": broadcast,
        "pipelined_broadcast": pipelined_broadcast,
        "reduce": reduce,
        "reduce_scatter": reduce_scatter,
        "allgather": allgather,
        "alltoall": alltoall,
        "barrier": lambda mesh, tensor, check: barrier(mesh),
    }
    found = {name: (call, cost.ALLREDUCE[name](n, nbytes)) for name, call in ALGORITHMS.items()}
    two_levels = partial(hierarchical_allreduce, node_size=node_size)
    found[f"two levels, nodes of {node_size}"] = two_levels, cost.hierarchical(n, nbytes, node_size)
    return found | {name: (call, cost.OTHERS[name](n, nbytes)) for name, call in others.items()}


def bill(claims: demo.Claims, folder: Path, n: int = 8, nbytes: int = 1024, node_size: int = 4) -> None:
    """Record every collective in one file, read it again, and compare its sums with the formulas of `cost.py`."""
    path, table, equal = folder / "traffic.jsonl", [], True
    recorder, collectives, sent_by_rank = Recorder(path), every_collective(n, nbytes, node_size), {}
    for name, (call, _) in collectives.items():

        def work(mesh, call=call, name=name):
            mesh.observer = partial(recorder, collective=name)
            call(mesh, torch.ones(nbytes // 4), check=False)
            return mesh.counters.bytes_sent

        sent_by_rank[name] = VirtualCluster(n).run(work)
    messages = read_traffic([path])
    for name, (_, formula) in collectives.items():
        sent, links, rounds = totals(each for each in messages if each.collective == name)
        found = rounds, max(sent.values(), default=0), max(links.values(), default=0)
        pairs = list(zip((formula.rounds, formula.sent, formula.link), found, strict=True))
        equal = equal and all(predicted == counted for predicted, counted in pairs)
        equal = equal and [sent[rank] for rank in range(n)] == sent_by_rank[name]
        table.append([name, *(f"{predicted:,} = {counted:,}" for predicted, counted in pairs)])
    columns = ["collective", "rounds", "busiest rank sends", "busiest link"]
    demo.table(columns, table, f"N = {n}, T = {nbytes:,} bytes: formula = sum of the recorded messages")
    demo.say(f"\n{len(messages)} messages: {path}")
    claims.check("the recorded messages add up to the formulas", equal, "and, for each rank, to its counters")
