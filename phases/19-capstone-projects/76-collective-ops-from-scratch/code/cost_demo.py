"""`--cost`, `--explain`, `--cluster`: predict, then measure; what is chosen and why; what a described cluster takes."""

import json
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cost
import demo
import torch
from arena import why_not
from choose import ALGORITHMS, QUEUES, choose, crossover_bytes, explain
from cluster import H100, Cluster, read_cluster
from cluster_cost import cluster_table, default_sizes
from collectives import broadcast
from cost import ALLREDUCE, Cost, Link, best_chunks
from fit import SIZES, fit_link, load_link, measure_link, measured_crossover, save_link, timed
from hierarchical import hierarchical_allreduce
from mesh import Mesh, QueueMesh
from pipelined import pipelined_broadcast
from ranks import run_ranks, start_method
from virtual import VirtualCluster

MOST = 1 << 26  # bytes: 64 MB
TRANSPORTS = ("shared", "sockets", "queues")
SAVED = "link.json"


def transport(name: str | None, world_size: int) -> tuple[str, Callable, object]:
    """Return a transport's name, its class, and what the launcher makes for it; the default is the fastest there is."""
    name = name or ("sockets" if why_not() else "shared")
    if name == "queues":
        return name, QueueMesh, QueueMesh.inboxes(world_size, start_method(None))
    if name == "sockets":
        from listeners import Listeners
        from socket_mesh import SocketMesh

        return name, SocketMesh, Listeners(world_size)
    if reason := why_not():
        raise ValueError(reason)
    from shared_mesh import SharedMesh, Slots

    return name, SharedMesh, Slots(world_size)


def contenders(n: int, nbytes: int, link: Link) -> dict[str, tuple[Callable, Cost]]:
    """Return name -> (the code to run, its predicted cost)."""
    chunks = best_chunks(n, nbytes, link)
    found = {name: (call, ALLREDUCE[name](n, nbytes)) for name, call in ALGORITHMS.items()}
    if n > 2 and n % 2 == 0:
        found["two levels"] = partial(hierarchical_allreduce, node_size=2), cost.hierarchical(n, nbytes, 2)
    found["broadcast"] = broadcast, cost.broadcast(n, nbytes)
    found["pipelined"] = partial(pipelined_broadcast, chunks=chunks), cost.pipelined_broadcast(n, nbytes, chunks)
    return found


def measure(rank: int, world_size: int, make: Callable, made, most: int) -> tuple[Link, list, bool]:
    """Be one rank: fit the link, then time every algorithm at every size.

    Returns (link, [(bytes, name, seconds, bytes sent by the busiest rank, chunks)], all results right).
    """
    mesh: Mesh = make(rank, world_size, made)
    fitted = [size for size in SIZES if size <= max(most, SIZES[1])]
    link = fit_link(fitted, measure_link(mesh, fitted))
    rows, right = [], True
    for nbytes in sizes_up_to(most):
        page = torch.arange(nbytes // 4) % 1000
        mine = (page + rank).float()  # sums are exact in any order
        total, first = (world_size * page + world_size * (world_size - 1) // 2).float(), page.float()
        repeats = 9 if nbytes <= 1 << 18 else 5 if nbytes < 1 << 24 else 3
        for name, (call, _) in contenders(world_size, nbytes, link).items():
            before = mesh.counters.bytes_sent
            result = call(mesh, mine, check=False)
            right &= torch.equal(result, first if name in ("broadcast", "pipelined") else total)
            sent = max(mesh.agree(mesh.counters.bytes_sent - before))
            del result
            rows.append((nbytes, name, timed(mesh, lambda: call(mesh, mine, check=False), repeats), sent))  # noqa: B023
    return link, rows, all(mesh.agree(right))


def sizes_up_to(most: int) -> list[int]:
    """Return 1 KB, 4 KB, 16 KB ... up to `most` bytes."""
    return [1 << k for k in range(10, 63, 2) if 1 << k <= most]


def show(claims: demo.Claims, args: Namespace) -> int:
    """Do what the flags ask for and return the exit code. Raises ValueError for flags that cannot be followed."""
    return (show_cost if args.cost else show_explanation if args.explain else show_cluster)(claims, args)


def show_cost(claims: demo.Claims, args: Namespace) -> int:
    """`--cost`: fit, predict, measure, plot. How close the times are is shown, not claimed."""
    n, most = args.world_size, args.max_size
    if n < 2 or most < 1 << 12:
        raise ValueError(f"--cost needs at least 2 ranks and a --max-size of 4096, got {n} and {most}")
    folder = demo.out_dir(args)
    name, make, made = transport(args.transport, n)
    link, rows, right = run_ranks(measure, n, make, made, most, backend=None, timeout=600)[0]
    about = f"{n} ranks over {name}"
    save_link(folder / SAVED, link, about)
    demo.say(f"fitted on {about}: alpha = {1e6 * link.alpha:.1f} us a message, beta = {1e9 * link.beta:.3f} ns a byte")
    found, table = {}, []
    for nbytes, algorithm, seconds, sent in rows:
        predicted = contenders(n, nbytes, link)[algorithm][1]
        found.setdefault(algorithm, []).append((nbytes, predicted.seconds(link), seconds, sent == predicted.sent))
        ms = 1e3 * predicted.seconds(link), 1e3 * seconds
        table.append([words(nbytes), algorithm, predicted.rounds, *ms, ms[1] / ms[0]])
    columns = ["size", "algorithm", "rounds", "predicted ms", "measured ms", "measured / predicted"]
    demo.table(columns, table, f"{about}, float32, slowest rank, median")
    crossings = say_crossovers(n, link, found)
    say_ratios(n, link, found)
    plot(folder / "cost.png", about, n, link, found, crossings)
    record = {"about": about, "alpha": link.alpha, "beta": link.beta, "crossover_bytes": crossings}
    keys = ("bytes", "predicted", "measured")
    record["seconds"] = {key: [dict(zip(keys, row[:3], strict=True)) for row in curve] for key, curve in found.items()}
    (folder / "cost.json").write_text(json.dumps(record, indent=1) + "\n")
    claims.check("all results are right", right)
    claims.check(
        "bytes sent by the busiest rank are the formulas'", all(row[3] for curve in found.values() for row in curve)
    )
    claims.check("rounds are the formulas'", rounds_are_counted(n, link), f"counted in the virtual cluster, N = {n}")
    saved = [folder / each for each in ("cost.png", "cost.json", SAVED)]
    claims.check("plot and numbers are saved", all(path.stat().st_size > 0 for path in saved), f"{folder}/cost.*")
    return claims.verdict("LESSON 76, COST")


def rounds_are_counted(n: int, link: Link) -> bool:
    """Run every contender in the virtual cluster and compare its rounds with the formula."""
    equal = True
    for call, predicted in contenders(n, 4096, link).values():

        def work(mesh, call=call):
            call(mesh, torch.ones(1024), check=False)
            return mesh.counters.rounds

        equal = equal and max(VirtualCluster(n).run(work)) == predicted.rounds
    return equal


def say_crossovers(n: int, link: Link, found: dict) -> dict[str, float | None]:
    """Say from which size on the ring is faster than the tree: predicted and measured."""
    sizes = [row[0] for row in found["ring"]]
    seen = measured_crossover(sizes, *([row[2] for row in found[name]] for name in ("ring", "tree")))
    predicted = crossover_bytes(n, link)
    demo.say()
    demo.say(
        f"the ring is faster than the tree from {predicted:,.0f} bytes on by the model, "
        + (f"from {seen:,.0f} as measured" if seen else "and as measured the curves do not cross")
    )
    return {"predicted": predicted, "measured": seen}


def say_ratios(n: int, link: Link, found: dict) -> None:
    """Say how far off the model was, and what its choices would have cost."""
    for name, curve in found.items():
        ratios = [seconds / predicted for _, predicted, seconds, _ in curve]
        demo.say(f"{name:11}measured / predicted: {min(ratios):.2f} to {max(ratios):.2f}")
    lost, hits = [], 0
    for i, (nbytes, *_) in enumerate(found["ring"]):
        times = {name: found[name][i][2] for name in ALLREDUCE}
        chosen = choose(n, nbytes, link)
        lost.append(times[chosen] / min(times.values()))
        hits += lost[-1] == 1
    demo.say(
        f"the model's choice was the fastest at {hits} of {len(lost)} sizes; at worst it took {max(lost):.2f} times"
    )
    demo.say("as long as the fastest. The model knows nothing of sums and copies, nor of ranks that share a processor.")


def plot(path: Path, about: str, n: int, link: Link, found: dict, crossings: dict) -> None:
    """Draw predictions as lines and measurements as points, on logarithmic axes, with both crossovers."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    most = max(row[0] for row in found["ring"])
    dense = [int(1024 * (most / 1024) ** (i / 60)) // 4 * 4 for i in range(61)]
    for i, (name, curve) in enumerate(found.items()):
        axis.plot(dense, [contenders(n, b, link)[name][1].seconds(link) for b in dense], color=f"C{i}", lw=1)
        axis.plot([row[0] for row in curve], [row[2] for row in curve], "o", color=f"C{i}", label=name)
    for (which, size), style in zip(crossings.items(), ("--", ":"), strict=True):
        if size:
            axis.axvline(size, color="grey", ls=style, label=f"ring / tree, {which}: {size:,.0f} bytes")
    axis.set(xscale="log", yscale="log", xlabel="bytes a rank", ylabel="seconds")
    axis.set_title(f"{about}: predicted (lines), measured (points)")
    axis.legend()
    figure.savefig(path, dpi=120)


def show_explanation(claims: demo.Claims, args: Namespace) -> int:
    """`--explain`: the choice for one size, with the link that `--cost` has saved, or a default."""
    link, about = QUEUES, "constants of a slow transport (run --cost to fit this machine)"
    if (args.out / SAVED).exists():
        link, about = load_link(args.out / SAVED)
        about = f"fitted: {about}"
    demo.say(about)
    for line in explain(args.world_size, args.size or 1 << 20, link):
        demo.say(line)
    n = min(args.world_size, 16)
    claims.check("rounds are the formulas'", rounds_are_counted(n, link), f"counted in the virtual cluster, N = {n}")
    return claims.verdict("LESSON 76, EXPLAIN")


def show_cluster(claims: demo.Claims, args: Namespace) -> int:
    """`--cluster`: predicted rounds and times of a described cluster, for a small and a large message."""
    cluster = read_cluster(args.cluster) if args.cluster else H100
    inside, between = cluster.inside, cluster.between
    demo.say(f"{cluster.name}: {cluster.nodes:,} nodes of {cluster.ranks_per_node:,} ranks, {cluster.uplinks} uplinks")
    for name, link in (("inside", inside), ("between", between)):
        demo.say(f"{name:8}{1e6 * link.alpha:8.3g} us a message, {1e-9 / link.beta:.4g} GB/s")
    for nbytes in [args.size] if args.size else [1 << 16, 1 << 28]:
        rows = []
        for n, found in cluster_table(cluster, nbytes).items():
            best = next(iter(found))
            names = ("ring", "tree", "halving", "hierarchical")
            cells = [f"{found[k].rounds:5,}  {1e3 * found[k].seconds:8.4g}{' *' if k == best else ''}" for k in names]
            rows.append([n, *cells])
        demo.table(["ranks", *names], rows, f"all-reduce of {nbytes:,} bytes: rounds and ms, predicted; * the fastest")
    n = max((size for size in default_sizes(cluster) if size <= 16), default=min(cluster.ranks_per_node, 16))
    equal = all(real == told for real, told in rounds_of(cluster, n))
    claims.check("rounds are those of the real code", equal, f"four all-reduces in the virtual cluster, N = {n}")
    return claims.verdict("LESSON 76, CLUSTER")


def rounds_of(cluster: Cluster, n: int) -> list[tuple[int, int]]:
    """Return (rounds counted, rounds predicted) of each all-reduce on the cluster's first `n` ranks."""
    node_size = min(n, cluster.ranks_per_node)
    calls = ALGORITHMS | {"hierarchical": partial(hierarchical_allreduce, node_size=node_size)}
    pairs = []
    for name, told in cluster_table(cluster, 4096, [n])[n].items():

        def work(mesh, call=calls[name]):
            call(mesh, torch.ones(1024), check=False)
            return mesh.counters.rounds

        pairs.append((max(VirtualCluster(n).run(work)), told.rounds))
    return pairs


def words(nbytes: int) -> str:
    """Return a number of bytes in KB or MB (2^10 and 2^20)."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
