"""All-reduce by the fastest algorithm for the size at hand, and why it is that one.

Small messages cost latency, so they take the algorithm of few rounds; large ones take the one that moves few bytes.
Between ranks that all have a link of their own to each other, halving has both: nothing is faster where N is a power of
two, and the ring returns where N is none. Why do real libraries use rings for large messages all the same? Because
ranks share links. Those that exchange across half the machine all need the same cables at once, while a ring crosses
each cable once; `cluster_cost.py` counts that for the cables that leave a node. And what no such model counts: several
rings at once keep all network cards of a node busy, chunks flow through a ring without a stop, and any N will do.
"""

import math

import torch
from collectives import check_call, ring_allreduce
from cost import ALLREDUCE, Link, check
from halving import halving_allreduce
from mesh import Mesh
from tree import tree_allreduce

QUEUES = Link(alpha=1e-4, beta=1e-9)  # 0.1 ms a message, 1 GB/s: about what queues between processes reach
ALGORITHMS = {"ring": ring_allreduce, "tree": tree_allreduce, "halving": halving_allreduce}


def allreduce(
    mesh: Mesh, tensor: torch.Tensor, op: str = "sum", link: Link = QUEUES, among: tuple[str, ...] = tuple(ALLREDUCE)
) -> torch.Tensor:
    """All-reduce by the algorithm `among` these that is predicted to be the fastest.

    All ranks have the same size and should give the same link: then they choose the same without asking. If they do
    not, the same ValueError is raised on every rank.
    """
    check_call("allreduce", mesh.world_size, tensor, op)
    name = choose(mesh.world_size, tensor.numel() * tensor.element_size(), link, among)
    return ALGORITHMS[name](mesh, tensor, op)


def choose(world_size: int, nbytes: int, link: Link = QUEUES, among: tuple[str, ...] = tuple(ALLREDUCE)) -> str:
    """Return the fastest all-reduce of `nbytes` a rank. Of equally fast ones the simplest: ring, tree, halving."""
    _check_names(among)
    times = {name: cost(world_size, nbytes).seconds(link) for name, cost in ALLREDUCE.items() if name in among}
    return min(times, key=times.get)  # the first of equals


def crossover_bytes(world_size: int, link: Link = QUEUES, few_rounds: str = "tree", few_bytes: str = "ring") -> float:
    """Return the size from which on `few_bytes` is faster than `few_rounds`, in bytes.

    That is 0.0 if it is never slower, and infinite if it is never faster. Chunks count as if they could have any size.
    """
    _check_names((few_rounds, few_bytes))
    check(world_size, 0)
    unit = 4 * world_size << world_size.bit_length()  # bytes that every algorithm can cut into equal chunks
    first, then = ALLREDUCE[few_rounds](world_size, unit), ALLREDUCE[few_bytes](world_size, unit)
    lost = (then.rounds - first.rounds) * link.alpha  # seconds more for every message
    won = (first.path - then.path) / unit * link.beta  # seconds less for every byte
    if lost <= 0 <= won:
        return 0.0
    return lost / won if won > 0 else math.inf


def explain(world_size: int, nbytes: int, link: Link = QUEUES) -> list[str]:
    """Return lines of text: what each candidate costs, which is chosen, and from which size on another would be."""
    costs = {name: cost(world_size, nbytes) for name, cost in ALLREDUCE.items()}
    best = choose(world_size, nbytes, link)
    shortest = costs[best].seconds(link)
    byte = f"a byte {1e9 * link.beta:.3g} ns" + (f" ({1e-9 / link.beta:.3g} GB/s)" if link.beta else "")
    lines = [
        f"all-reduce of {nbytes:,} bytes, N = {world_size}; a message costs {_time(link.alpha)}, {byte}",
        "",
        f"{'':8}  {'rounds':>6}  {'bytes in a row':>15}  {'latency':>9} + {'bytes':>9} = {'time':>9}",
    ]
    for name, cost in costs.items():
        time = cost.seconds(link)
        parts = [f"{_time(part):>9}" for part in (cost.rounds * link.alpha, cost.path * link.beta, time)]
        verdict = "  <- chosen" if name == best else f"  {time / shortest:.2f} times as long" if shortest else ""
        lines.append(f"{name:8}  {cost.rounds:6,}  {cost.path:15,}  {parts[0]} + {parts[1]} = {parts[2]}{verdict}")
    return [*lines, "", *_crossovers(world_size, link)]


def _crossovers(world_size: int, link: Link) -> list[str]:
    """Say from which size on the ring, which moves the fewest bytes, is faster than each of the others."""
    lines = []
    for name in ("tree", "halving"):
        size = crossover_bytes(world_size, link, name, "ring")
        when = "at no size" if size == math.inf else f"from {size:,.0f} bytes on"
        lines.append(
            f"the ring is faster than the {name} {when}" if size else f"the ring is never slower than the {name}"
        )
    return lines


def _check_names(names: tuple[str, ...]) -> None:
    if not names or any(name not in ALLREDUCE for name in names):
        raise ValueError(f"all-reduces are {', '.join(ALLREDUCE)}, got {', '.join(map(repr, names)) or 'none'}")


def _time(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.4g} {unit}"
