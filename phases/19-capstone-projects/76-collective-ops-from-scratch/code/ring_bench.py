"""`--bench`: our ring all-reduce beside gloo's, over queues and over gloo's own point-to-point messages."""

from functools import partial

import demo
import shared_bench
import torch
import torch.distributed as dist
from collectives import ring_allreduce
from comm import TorchComm
from mesh import QueueMesh
from ranks import run_ranks, start_method
from sidebyside import compare, slowest
from torch_mesh import TorchMesh

SIZES = {"4 KB": 1 << 10, "256 KB": 1 << 16, "4 MB": 1 << 20}  # elements of float32


def race(rank: int, world_size: int, boxes: list, pairs: int) -> tuple[list, bool]:
    """Be one rank: run ours and gloo's in turn, each as slow as its slowest rank; return (rows, all sums equal)."""
    comm, rows, equal = TorchComm(), [], True
    meshes = {"queues": QueueMesh(rank, world_size, boxes), "gloo send and recv": TorchMesh()}

    def pair(mesh, x):
        calls = {"ours": lambda: ring_allreduce(mesh, x, check=False), "gloo": lambda: dist.all_reduce(x.clone())}
        return compare({name: partial(slowest, call, comm) for name, call in calls.items()}, pairs)

    for size, numel in SIZES.items():
        x = (torch.arange(numel) % 1000 + rank).float()  # sums are exact in any order
        dist.all_reduce(expected := x.clone())
        for transport, mesh in meshes.items():
            equal = equal and torch.equal(ring_allreduce(mesh, x), expected)
            ours, gloo = pair(mesh, x)
            interval = f"{gloo.low:.2f} - {gloo.high:.2f}"
            rows.append([world_size, size, transport, 1e3 * ours.seconds, 1e3 * gloo.seconds, gloo.ratio, interval])
    return rows, equal


def bench(claims: demo.Claims, world_size: int, pairs: int = 9) -> int:
    """Print the table and return the exit code: 0 if all sums were equal, however fast they came."""
    rows, equal, sizes = [], True, sorted({2, max(2, world_size)})
    for n in sizes:
        boxes = QueueMesh.inboxes(n, start_method("gloo"))
        found, same = run_ranks(race, n, boxes, pairs)[0]
        rows, equal = rows + found, equal and same
    columns = ["N", "size", "ours goes over", "ours ms", "gloo ms", "gloo / ours", "95% interval"]
    demo.table(columns, rows, f"all-reduce of float32, medians of {pairs} pairs, checks off; above 1 ours is faster")
    demo.say()
    demo.say(
        "Ours copies each chunk into a message, through a queue or a socket, and out again; gloo sends from the tensor"
    )
    demo.say("itself and adds straight into it, from threads that never wait for Python.")
    equal = all([shared_bench.show(n, pairs) for n in sizes]) and equal
    claims.check("ours and gloo's sums are equal, through shared memory in every bit", equal)
    return claims.verdict("LESSON 76, BENCH")
