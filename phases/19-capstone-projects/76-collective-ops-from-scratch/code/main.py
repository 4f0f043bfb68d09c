"""Lesson 76: collectives from nothing but send and receive: equal to gloo's, at the predicted cost, clear errors."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import cost as cost_of  # 76: what each algorithm costs
import demo  # 76: flags, tables, verdict
import torch
from choose import ALGORITHMS  # 76: the all-reduces
from collectives import PRIMITIVES, allgather, broadcast, reduce_scatter, ring_allreduce  # 76: the four collectives
from comm import Comm, TorchComm  # 76: the interface of all later lessons
from endings import say_why  # 76: a line in the place of a traceback
from given_flags import allow_only  # 76: a flag that would do nothing is refused
from mesh_comm import MeshComm  # 76: the same over a mesh
from hello import hello  # 76: the first program
from hierarchical import hierarchical_allreduce  # 76: one for nodes with fast links of their own
from mesh import Mesh  # 76: point-to-point messages that are counted
from ranks import RankError, run_ranks, under_torchrun  # 76: N processes, their results, and who is to blame
from verify import Case, compare, gloo_reference, run_mesh, verify_against_gloo, verify_cases  # 76: next to gloo's own
from virtual import DeadlockError, VirtualCluster  # 76: N ranks in one process

__all__ = [
    "PRIMITIVES",
    "Comm",
    "DeadlockError",
    "Mesh",
    "MeshComm",
    "RankError",
    "TorchComm",
    "VirtualCluster",
    "allgather",
    "broadcast",
    "gloo_reference",
    "reduce_scatter",
    "ring_allreduce",
    "run_mesh",
    "run_ranks",
    "verify_against_gloo",
]


def first_program(claims: demo.Claims) -> None:
    """Two processes, one message."""
    said = run_ranks(hello, 2)
    for line in said:
        demo.say(line)
    claims.check("one message arrives", said[1] == "rank 1 has received [1.0, 2.0, 3.0]")


def inputs(kind: str, world_size: int, seed: int) -> list[torch.Tensor]:
    """Return one tensor a rank: distinct values for each rank and position."""
    generator = torch.Generator().manual_seed(seed)
    pages = [torch.randn(2 * world_size, 3, generator=generator) * 10 for _ in range(world_size)]
    make = {
        "float32": lambda page: page,
        "bfloat16": lambda page: page.to(torch.bfloat16),
        "int64": lambda page: page.to(torch.int64),
        "int16 (gloo: int32)": lambda page: page.to(torch.int16),
        "bool (or)": lambda page: page > 0,
        "a column (strided)": lambda page: page[:, 1],
        "empty": lambda page: page[:, :0],
        "0-dim": lambda page: page[0, 0],
    }
    return [make[kind](page) for page in pages]


KINDS = ("float32", "bfloat16", "int64", "int16 (gloo: int32)", "bool (or)", "a column (strided)", "empty", "0-dim")


def equals_gloo(claims: demo.Claims, world_size: int, seed: int) -> None:
    """Each collective on each kind of tensor, our result next to torch.distributed's own."""
    sizes = sorted({1, 2, 3, world_size})
    keys = [(op, kind) for kind in KINDS for op in PRIMITIVES if (op, kind) != ("reduce_scatter", "0-dim")]
    worst, match = dict.fromkeys(keys, 0.0), True
    for n in sizes:
        verdicts = verify_cases(
            n, [Case(op, inputs(kind, n, seed), src=(n - 1) * (op == "broadcast")) for op, kind in keys]
        )
        for key, verdict in zip(keys, verdicts, strict=True):
            worst[key], match = max(worst[key], verdict.max_abs_diff), match and verdict.match
    cell = {key: "same bits" if gap == 0 else f"within {gap:.2g}" for key, gap in worst.items()}
    rows = [[kind, *(cell.get((op, kind), "-") for op in PRIMITIVES)] for kind in KINDS]
    demo.table(["input", *PRIMITIVES], rows, f"ours next to gloo's, N = {', '.join(map(str, sizes))}")
    claims.check("all results equal gloo's", match, "bit for bit, or within 2 (N-1) eps sum|x| where floats are added")


def every_way(claims: demo.Claims, world_size: int, seed: int) -> None:
    """Each algorithm's all-reduce of random floats, next to gloo's."""
    tensors, rows, match = inputs("float32", world_size, seed), [], True
    theirs = gloo_reference("allreduce", world_size, tensors)
    two_levels = partial(hierarchical_allreduce, node_size=max(1, world_size // 2))
    for name, allreduce in {**ALGORITHMS, "two levels": two_levels}.items():
        ours = VirtualCluster(world_size, seed).run(lambda mesh, call=allreduce: call(mesh, tensors[mesh.rank]))
        equal, gap = compare("allreduce", tensors, ours, theirs)
        rows, match = [*rows, [name, "same bits" if gap == 0 else f"within {gap:.2g}"]], match and equal
    demo.table(["all-reduce by", "next to gloo's"], rows, f"every algorithm, float32, N = {world_size}")
    claims.check("every algorithm's sums equal gloo's", match, "bit for bit, or within 2 (N-1) eps sum|x|")


def predicted(op: str, n: int, numel: int) -> tuple[int, int]:
    """Return what the formulas say for `numel` float32 elements a rank: bytes the busiest rank sends, and rounds."""
    cost = (cost_of.ring if op == "allreduce" else cost_of.OTHERS[op])(n, 4 * numel)
    return cost.sent, cost.rounds


def counted(op: str, n: int, numel: int) -> tuple[int, int]:
    """Return the same from the counters of a virtual cluster."""

    def work(mesh):
        PRIMITIVES[op](mesh, torch.ones(numel))
        return mesh.counters

    counters = VirtualCluster(n).run(work)
    return max(count.bytes_sent for count in counters), max(count.rounds for count in counters)


def costs(claims: demo.Claims) -> None:
    """Bytes and rounds: the formula, and what the transport counted."""
    numel = {"allreduce": 1000, "broadcast": 1000, "allgather": 100, "reduce_scatter": 840}
    rows, equal = [], True
    for n in range(1, 9):
        row = [n]
        for op in PRIMITIVES:
            formula, count = predicted(op, n, numel[op]), counted(op, n, numel[op])
            equal = equal and formula == count
            row.append(f"{formula[0]} = {count[0]}, {formula[1]} = {count[1]}")
        rows.append(row)
    columns = ["N", *(f"{op} ({numel[op]})" for op in PRIMITIVES)]
    demo.table(
        columns, rows, "bytes sent by the busiest rank, and rounds: formula = counted (elements of float32 a rank)"
    )
    claims.check("bytes and rounds are the formulas", equal, "N = 1-8, also where N does not divide the length")


def deadlock(claims: demo.Claims) -> None:
    """Two ranks that both receive before they send wait for each other for ever: the scheduler sees it at once."""

    def both_receive_first(mesh):
        peer = 1 - mesh.rank
        received = mesh.recv(peer)
        mesh.send(peer, received)

    words = ""
    try:
        VirtualCluster(2).run(both_receive_first)
    except DeadlockError as error:
        words = str(error)
    cycle = "rank 0 waits for rank 1 (receive from rank 1), rank 1 waits for rank 0 (receive from rank 0)"
    claims.check("a deadlock is shown as a cycle", words == f"deadlock: {cycle}", words)


def dies_in_the_second_collective(rank: int, world_size: int) -> None:
    """Be a worker whose last rank is killed, as by a machine that runs out of memory."""
    comm = TorchComm()
    comm.all_reduce(torch.ones(4))
    if rank == world_size - 1:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    comm.all_reduce(torch.ones(4))


def killed(claims: demo.Claims, world_size: int) -> None:
    """A killed rank ends the run at once, and the error names it, not its victims."""
    found, words = None, ""
    try:
        run_ranks(dies_in_the_second_collective, world_size)
    except RankError as error:
        found, words = error.rank, str(error).replace("\n", "; ")
    claims.check("a killed rank is named", found == world_size - 1, words)


def trace(claims: demo.Claims, n: int = 4) -> None:
    """One ring all-reduce of n chunks, message by message. The real code runs: its numbers are sets.

    Chunk c of rank r is the number with only bit (r + n c) set, so that a partial sum says which ranks are in it.
    """
    sent = {}

    def contributors(chunk: torch.Tensor) -> str:
        bits = [bit for bit in range(n * n) if chunk.item() >> bit & 1]
        return f"chunk {bits[0] // n}: {'+'.join(str(bit % n) for bit in bits)}"

    def work(mesh):
        mesh.observer = lambda round, src, dst, tensor: sent.update({(round, src): contributors(tensor)})
        return ring_allreduce(mesh, torch.tensor([1 << (mesh.rank + n * chunk) for chunk in range(n)]))

    results = VirtualCluster(n).run(work)
    columns = ["round", *(f"rank {rank} -> {(rank - 1) % n}" for rank in range(n))]
    rows = [[round, *(sent[round, rank] for rank in range(n))] for round in range(1, 2 * n - 1)]
    demo.table(columns, rows, f"ring all-reduce, {n} ranks, {n} chunks: which chunk is sent, with whose terms in it")
    everyone = "+".join(map(str, range(n)))
    complete = all(contributors(chunk).endswith(f": {everyone}") for result in results for chunk in result)
    claims.check("every rank ends with every rank's term in every chunk", complete)


ALSO_USED = {  # flags of each program, beside its own and those that all have
    "trace": "",
    "drill": "",
    "cost": "max_size transport",
    "explain": "size",
    "cluster": "size",
    "bench": "",
    "default": "seed",
}


def main() -> int:
    """Run the demonstration; return its exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--trace", action="store_true", help="a ring all-reduce round by round; every message saved")
    drills = ("kill", "stall", "raise", "mismatch", "mismatch-shape", "deadlock")
    parser.add_argument("--drill", choices=drills, help="let a run fail in this way, and explain the report")
    parser.add_argument("--cost", action="store_true", help="fit this machine, predict every algorithm, measure")
    parser.add_argument("--explain", action="store_true", help="say which all-reduce is chosen for --size, and why")
    parser.add_argument("--cluster", nargs="?", const="", metavar="FILE", help="predict up to 4,096 ranks (JSON file)")
    parser.add_argument("--size", type=demo.positive, metavar="BYTES", help="of --explain and --cluster")
    parser.add_argument("--max-size", type=demo.positive, metavar="BYTES", default=1 << 26, help="of --cost")
    parser.add_argument("--transport", choices=["shared", "sockets", "queues"], help="of --cost (default: shared)")
    args = demo.parse(parser, lesson=76)
    if under_torchrun() or args.backend != "gloo":
        parser.error("this lesson starts ranks of its own and compares with gloo; torchrun and nccl come in lesson 77")
    modes = [mode for mode in ("trace", "drill", "cost", "explain", "bench") if getattr(args, mode)]
    modes += ["cluster"] if args.cluster is not None else []
    if len(modes) > 1:
        parser.error(f"one at a time: --{', --'.join(modes)}")
    for option, takers in (("size", ("explain", "cluster")), ("transport", ("cost",))):
        if getattr(args, option) and not set(modes) & set(takers):
            parser.error(f"--{option} goes with --{' or --'.join(takers)}")
    mode = modes[0] if modes else "default"
    said = "this lesson without another program" if not modes else f"--{mode}"
    allow_only(parser, said, f"world_size backend out {mode} {ALSO_USED[mode]}")
    if args.drill and args.world_size < 2:
        parser.error(f"--drill needs at least 2 ranks, got --world-size {args.world_size}")
    return say_why(lambda: tell(args, parser))


def tell(args, parser) -> int:
    """Run the program that the flags choose; return its exit code."""
    if args.drill:
        from drills import drill  # 76: failures on purpose

        return drill(args.drill, args.world_size)
    claims = demo.Claims()
    if args.trace:
        from traffic_demo import bill  # 76: every message as a line of JSON, added up

        folder = demo.out_dir(args)
        trace(claims)
        bill(claims, folder)
        return claims.verdict("LESSON 76, TRACE")
    if args.cost or args.explain or args.cluster is not None:
        from cost_demo import show  # 76: predicted, measured, explained

        try:
            return show(claims, args)
        except ValueError as error:
            parser.error(str(error))
    if args.bench:
        from collectives_bench import bench  # 76: ours beside gloo's

        return bench(claims, args)
    first_program(claims)
    equals_gloo(claims, args.world_size, args.seed)
    every_way(claims, args.world_size, args.seed)
    costs(claims)
    deadlock(claims)
    killed(claims, args.world_size)
    return claims.verdict("LESSON 76: COLLECTIVES FROM SCRATCH")


if __name__ == "__main__":
    sys.exit(main())
