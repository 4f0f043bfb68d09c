"""`--bench`: each of our ways to do a collective beside gloo's, and beside a plain copy of the same bytes."""

import json
from functools import partial

import demo
import torch
from arena import Arena, why_not
from comm import Comm, TorchComm
from mesh_comm import MeshComm
from listeners import FAMILIES, Listeners
from mesh import QueueMesh
from ranks import run_ranks, start_method
from shared_comm import SharedComm
from shared_mesh import SharedMesh, Slots
from sidebyside import compare, slowest
from socket_mesh import SocketMesh
from torch_mesh import TorchMesh

SIZES = {"4 KB": 1 << 10, "64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}  # float32 elements
MODEST = 1 << 20  # elements: ways that take seconds for more are left out there
GLOO, COPY, HEAP, WINDOWS = "gloo", "a copy", "shared memory, in the heap", "shared memory, windows"
QUEUES, P2P = "ring, queues", "ring, gloo's send and recv"


def hubs(n: int) -> dict:
    """Make, in the launcher, what each way needs: way -> arena, slots, listeners or queues."""
    made = {} if why_not() else {WINDOWS: Arena(n, heap_bytes=4 * sum(SIZES.values()) + 4096), "ring, slots": Slots(n)}
    for family in FAMILIES:
        made[f"ring, {family} sockets"] = Listeners(n, family)
    return made | {QUEUES: QueueMesh.inboxes(n, start_method("gloo")), P2P: None}


def ways(rank: int, n: int, made: dict) -> dict[str, Comm]:
    """Make this rank's end of each way, a `Comm` without checks."""
    comms = {GLOO: TorchComm()}
    for name, hub in made.items():
        if name == WINDOWS:
            comms[name] = comms[HEAP] = SharedComm(hub, comms[GLOO])
        elif name == P2P:
            comms[name] = MeshComm(TorchMesh())
        else:
            mesh = {"ring, slots": SharedMesh, QUEUES: QueueMesh}.get(name, SocketMesh)
            comms[name] = MeshComm(mesh(rank, n, hub))
    return {name: comm.unchecked() for name, comm in comms.items()}


def call(op: str, comm: Comm, x: torch.Tensor, part: torch.Tensor):
    """Return a function that runs the collective: x (numel,) is the whole, part (numel / N,) this rank's."""
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "reduce_scatter": lambda: comm.reduce_scatter(part, x),
        "all_gather": lambda: comm.all_gather(x, part),
        "broadcast": lambda: comm.broadcast(x),
    }[op]


def race(rank: int, n: int, made: dict, pairs: int) -> tuple[list[dict], list[str]]:
    """Be one rank: every collective and size, all ways in turn, as slow as the slowest rank; (rows, wrong sums)."""
    comms, rows, wrong = ways(rank, n, made), [], []
    for size, numel in SIZES.items():
        held = comms[HEAP].empty(numel, torch.float32) if HEAP in comms else None
        for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            calls, results = {}, {}
            for name, comm in comms.items():
                if (op != "all_reduce" and not name.startswith(("gloo", WINDOWS))) or (
                    name in (QUEUES, P2P) and numel > MODEST
                ):
                    continue
                x = held if name == HEAP else torch.empty(numel)
                x.copy_(torch.arange(numel) % 1000 + rank)  # sums are exact in any order
                part = x[numel // n * rank : numel // n * (rank + 1)].clone()
                calls[name] = call(op, comm, x, part)
                calls[name]()
                results[name] = part.clone() if op == "reduce_scatter" else x.clone()
                x.zero_()  # or many sums would end as infinity
                part.zero_()
            wrong += [f"{op} {size} {name}" for name, y in results.items() if not torch.equal(y, results[GLOO])]
            calls[COPY] = partial(torch.empty(numel).copy_, torch.zeros(numel))
            timed = {
                name: partial(slowest, each, comms[GLOO], max(1, (1 << 14) // numel)) for name, each in calls.items()
            }
            found = {row.name: row for row in compare(timed, pairs)}
            rows += [
                {"op": op, "N": n, "size": size, "bytes": 4 * numel, "way": name, "seconds": row.seconds}
                | {"gloo": found[GLOO].seconds, "ratio": 1 / row.ratio, "low": 1 / row.high, "high": 1 / row.low}
                | {"memcpy": found[COPY].seconds / row.seconds}
                for name, row in found.items()
                if name != COPY
            ]
    return rows, wrong


def bench(claims: demo.Claims, args) -> int:
    """Print a table a collective, save plot and rows; the exit code is 0 if all results were equal, however fast."""
    pairs, rows, wrong = 9, [], []
    if reason := why_not():
        demo.say(f"shared memory is left out: {reason}")
    for n in sorted({2, 4, max(2, args.world_size)}):
        found, faults = run_ranks(race, n, hubs(n), pairs)[0]
        rows, wrong = rows + found, wrong + faults
    columns = ["N", "size", "by", "ms", "gloo ms", "gloo / ours", "95% interval", "of memcpy"]
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = [
            [
                *(row["N"], row["size"], row["way"], 1e3 * row["seconds"], 1e3 * row["gloo"]),
                *(f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['memcpy']:.3f}"),
            ]
            for row in rows
            if row["op"] == op and row["way"] != GLOO
        ]
        demo.table(columns, cells, f"{op} of float32, medians of {pairs} pairs, checks off; above 1 ours is faster")
    folder = demo.out_dir(args)
    (folder / "bench.json").write_text(json.dumps(rows, indent=1))
    plot(rows, folder / "bench.png")
    demo.say(f"\nrows: {folder / 'bench.json'}, plot: {folder / 'bench.png'}")
    claims.check("all results equal gloo's", not wrong, "; ".join(wrong[:5]))
    return claims.verdict("LESSON 76, BENCH")


def plot(rows: list[dict], path) -> None:
    """Draw, for each number of ranks, how fast each all-reduce moves its bytes over their size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row["N"] for row in rows})
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(6.5 * len(sizes), 5), sharey=True, squeeze=False)
    for n, panel in zip(sizes, panels[0], strict=True):
        mine = [row for row in rows if row["N"] == n and row["op"] == "all_reduce"]
        for way in dict.fromkeys(row["way"] for row in mine):
            points = [(row["bytes"], row["bytes"] / row["seconds"] / 1e9) for row in mine if row["way"] == way]
            panel.loglog(*zip(*points, strict=True), "k--o" if way == GLOO else "-o", label=way)
        copies = [
            (row["bytes"], row["bytes"] / row["seconds"] / row["memcpy"] / 1e9) for row in mine if row["way"] == GLOO
        ]
        panel.loglog(*zip(*copies, strict=True), "k:", label=COPY)
        panel.set(title=f"all-reduce, {n} ranks", xlabel="bytes a rank", ylabel="tensor bytes / second (GB/s)")
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
