"""Lesson 79: pipeline parallelism. A schedule is data: here it is drawn, costed, proven, and run."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, the verdict
import torch
from chrome_trace import save_trace  # a timeline for Perfetto
from comm import TorchComm  # 76: the one interface to gloo, NCCL and the virtual cluster
from given_flags import allow_only  # 76: a flag that would do nothing is refused
from endings import say_why  # 76: a line in the place of a traceback
from gantt import render_gantt, render_timeline, save_gantt, save_memory  # a timeline as a picture
from instructions import ScheduleError  # names the instruction that is wrong
from lone_messages import add_lone_messages, pass_messages  # what deadlocks
from measured import measure_worker, predict  # the measured timeline, beside the predicted one
from mesh_comm import MeshComm  # 76: the same interface over a mesh
from one_process import full_batch_gradients, train_one_process, whole_batch, whole_numbers  # without a pipeline
from optimum import fastest_span  # the shortest of all schedules
from pipeline import Pipeline  # the interpreter that runs a schedule
from pipeline_bench import bench  # side by side with torch.distributed.pipelining, for --bench
from pipeline_deeper import deeper  # tied weights, checkpointing, balance, two dimensions, for --deeper
from ranks import RankError, run_ranks, under_torchrun  # 76: processes
from schedule import SCHEDULES, gpipe_schedule, make_orders, make_schedule, stages_per_rank  # schedules as data
from schedule_check import check_schedule  # the proof that a schedule can run
from simulator import bubble_formula, bubble_fraction, measure_bubble, simulate, summarise, timeline  # what it costs
from stage_mlp import (  # what is cut and trained
    SEED,
    SIZES,
    StageMLP,
    build_pipeline,
    run_pipeline,
    stage_shapes,
    train_stage,
)
from torch.nn.functional import mse_loss  # the mean over a microbatch
from virtual import DeadlockError, VirtualCluster  # 76: ranks as threads; finds deadlocks

__all__ = [
    "SCHEDULES",
    "SEED",
    "Pipeline",
    "RankError",
    "ScheduleError",
    "StageMLP",
    "bubble_fraction",
    "check_schedule",
    "gpipe_schedule",
    "make_schedule",
    "measure_bubble",
    "render_gantt",
    "run_pipeline",
    "train_one_process",
]


def draw(args, claims: demo.Claims) -> None:
    """Claim: GPipe and 1F1B need 2 (M + N - 1) cycles; they differ in the order of work."""
    n, m = args.world_size, args.microbatches
    schedules = {name: make_schedule(name, n, m) for name in SCHEDULES}
    for name in SCHEDULES:
        shown = min(n, m) if name == "interleaved" else m  # twice as many computations: too wide for a terminal
        demo.say(f"\n{name}, N = {n}, M = {shown}\n{render_gantt(make_schedule(name, n, shown), n, shown)}")
    cycles = {name: max(slot.end for slot in timeline(schedules[name])) for name in ("gpipe", "1f1b")}
    claims.check("GPipe and 1F1B take 2 (M + N - 1) cycles", set(cycles.values()) == {2 * (m + n - 1)}, str(cycles))
    if demo.is_main():
        simulations = {}
        for name, schedule in schedules.items():
            part = 1 / stages_per_rank(name)  # of a rank's layers
            title = f"{name}, N = {n}, M = {m}: F, and each half of B, take 1"
            simulations[title] = simulate(schedule, part, part, part, activation=part)
        slots, out = {title: found.slots for title, found in simulations.items()}, demo.out_dir(args)
        demo.say(f"      saved as a picture: {save_gantt(slots, out / 'gantt.png')}")
        demo.say(f"      activations over time: {save_memory(simulations, out / 'memory.png')}")
        demo.say(f"      for ui.perfetto.dev: {save_trace(slots, out / 'predicted.json', unit=1000)}")


def bubble(claims: demo.Claims) -> None:
    """Claim: the bubble that the simulator measures is each schedule's formula; of GPipe and 1F1B at any times."""
    rows, worst = [], 0.0
    for n, m in ((2, 2), (2, 8), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
        measured = {name: measure_bubble(make_schedule(name, n, m)) for name in SCHEDULES}
        formulas = {name: bubble_formula(name, n, m) for name in SCHEDULES}
        slower = [measure_bubble(make_schedule(name, n, m), backward=2) for name in ("gpipe", "1f1b")]
        worst = max(worst, *(abs(measured[name] - formulas[name]) for name in SCHEDULES))
        worst = max(worst, *(abs(found - bubble_fraction(n, m)) for found in slower))
        rows.append([n, m, *measured.values(), *(f"{formulas[name]:.4f}" for name in ("1f1b", "interleaved", "zb-h1"))])
    formulas = ("(N-1)/(M+N-1)", "(N-1)/(2M+N-1)", "(N-1)/(3M+N-1)")
    demo.table(["N", "M", *SCHEDULES, *formulas], rows, "Bubble: the fraction of time that ranks wait, simulated")
    claims.check("the simulated bubbles are the formulas", worst < 1e-12, f"largest difference {worst:.1e}")


def optimum(claims: demo.Claims) -> None:
    """Claim: nobody can do better. All schedules of small sizes are tried: none is shorter."""
    rows = []
    for n, m in ((2, 3), (3, 2), (3, 4), (4, 4)):
        spans = {name: int(max(slot.end for slot in timeline(make_orders(name, n, m)))) for name in SCHEDULES}
        best = [fastest_span(n, m), fastest_span(n, m, virtual_stages=2), fastest_span(n, m, "FBW", most_alive=n)]
        rows.append([n, m, spans["1f1b"], best[0], spans["interleaved"], best[1], spans["zb-h1"], best[2]])
    columns = ["N", "M", "1f1b", "shortest", "interleaved", "shortest", "zb-h1", "shortest"]
    demo.table(columns, rows, "Cycles of a step; beside each the shortest of all schedules (ZB-H1: with N activations)")
    claims.check("no schedule is shorter", all(row[i] == row[i + 1] for row in rows for i in (2, 4, 6)))


def memory(claims: demo.Claims) -> None:
    """Claim: GPipe holds M activations on each stage, 1F1B min(M, N - stage), ZB-H1 min(M, N): however large M is."""
    rows, good = [], True
    for name in SCHEDULES:
        for m in (2, 8, 32):
            peaks = check_schedule(make_schedule(name, 4, m)).peak_live
            expected = {"gpipe": [m] * 4, "1f1b": [min(m, 4 - rank) for rank in range(4)], "zb-h1": [min(m, 4)] * 4}
            good &= name not in expected or [*peaks.values()] == expected[name]
            rows.append([name, m, *peaks.values()])
    demo.table(["schedule", "M", *(f"rank {rank}" for rank in range(4))], rows, "Activations alive at once, N = 4")
    same = {name: {tuple(row[2:]) for row in rows if row[0] == name and row[1] > 2} for name in SCHEDULES}
    claims.check("peaks: GPipe M, 1F1B min(M, N - stage), ZB-H1 min(M, N)", good)
    claims.check("but for GPipe they do not grow with M", [len(found) for found in same.values()] == [2, 1, 1, 1])


def deadlock(claims: demo.Claims) -> None:
    """Claim: 1F1B with each message on its own deadlocks where sends block; paired messages do not."""
    paired = make_schedule("1f1b", 4, 8)
    lone = add_lone_messages(make_orders("1f1b", 4, 8))
    cluster = VirtualCluster(4, buffered=False)  # here a lone send waits for its receiver
    demo.say()
    try:
        cluster.run(pass_messages, lone)
        found = ""
    except DeadlockError as error:
        found = str(error)
    claims.check("1F1B with lone sends deadlocks", bool(found), found)
    try:
        check_schedule(lone)
        problem = ""
    except ScheduleError as error:
        problem = str(error)
    claims.check("check_schedule foresees it", "deadlock" in problem, problem)
    cluster.run(pass_messages, paired)  # would raise
    claims.check("1F1B with paired messages runs", check_schedule(paired).num_ranks == 4)


def train(args, claims: demo.Claims) -> None:
    """Claim: over real processes, losses and parameters have the bits of one process that loops over microbatches."""
    n, m = args.world_size, args.microbatches
    results = run_ranks(train_worker, n, args.steps, args.batch, m, args.seed, backend=args.backend)
    rows = [[name, rank, *rank_rows[name]] for name in results[0] for rank, rank_rows in enumerate(results)]
    demo.table(
        ["schedule", "rank", "first loss", "last loss", "same bits", "alive at once"],
        rows,
        f"{args.steps} steps of {m} microbatches of {args.batch} rows, {n} processes ({args.backend})",
    )
    claims.check("losses and trained parameters have the bits of one process", all(row[4] for row in rows))
    claims.check("every rank knows the losses", len({(row[2], row[3]) for row in rows}) == 1)


def train_worker(rank: int, world_size: int, steps: int, batch: int, microbatches: int, seed: int) -> dict[str, list]:
    """Train with each schedule, and alone; compare. Returns {schedule: this rank's row of the table}."""
    comm, rows = TorchComm(), {}
    losses, _, alone = train_one_process(steps, batch, microbatches, seed, comm.device)
    for name in SCHEDULES:
        if world_size * stages_per_rank(name) > len(SIZES) - 1:
            continue  # too few layers for two stages a rank
        pipeline = build_pipeline(comm, batch, microbatches, name, seed)
        found, _ = train_stage(pipeline, steps, seed)
        same = found == losses
        for stage in pipeline.stages.values():
            for a, b in zip(stage.layers, alone.layers[stage.first : stage.last], strict=True):
                same &= torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)
        first, last = (sum(part) / microbatches for part in (found[:microbatches], found[-microbatches:]))
        rows[name] = [first, last, same, pipeline.peak_live]
    return rows


def measure(args, claims: demo.Claims) -> None:
    """Claim: what the simulator foresaw is what runs: the same computations on each rank, in the same order."""
    n, m = args.world_size, args.microbatches
    found = run_ranks(measure_worker, n, m, 64, 256, args.seed, backend=args.backend)[0]
    rows, same, timelines = [], True, {}
    for name, slots in found.items():
        predicted, measured = predict(slots), summarise(slots)
        orders = make_orders(name, n, m)
        same &= {r: [s.compute for s in slots if s.rank == r] for r in orders} == orders
        rows.append([name, bubble_formula(name, n, m), predicted.bubble, measured.bubble, 1e3 * measured.step])
        timelines |= {f"{name}, predicted": predicted.slots, f"{name}, measured": slots}
    columns = ["schedule", "formula", "simulated", "measured", "step, ms"]
    demo.table(columns, rows, f"Bubble, N = {n}, M = {m}; simulated with the measured time of each stage")
    for name in ("1f1b", "zb-h1"):
        drawn = [render_timeline(timelines[f"{name}, {which}"]) for which in ("predicted", "measured")]
        demo.say(f"\n{name}, predicted (above) and measured (below)\n" + "\n\n".join(drawn))
    demo.say()
    claims.check("each rank ran what was simulated, in that order", same)
    if demo.is_main():
        out = demo.out_dir(args)
        demo.say(f"      saved as a picture: {save_gantt(timelines, out / 'measured.png')}")
        demo.say(f"      for ui.perfetto.dev: {save_trace(timelines, out / 'measured.json')}")


def mean(claims: demo.Claims) -> None:
    """Claim: cut 8 rows into 1, 2, 4 or 8 microbatches, and the gradients stay those of all rows at once, exactly."""
    rows, (x, target) = [], whole_batch(8)
    full = full_batch_gradients(whole_numbers(StageMLP(0, 1)), x, target)
    for m in (1, 2, 4, 8):
        for name in SCHEDULES:
            by_stage = {i: grads for rank in VirtualCluster(4).run(whole_worker, name, m) for i, grads in rank.items()}
            found = [g for stage in sorted(by_stage) for g in by_stage[stage]]
            same = all(torch.equal(a, b) for a, b in zip(found, full, strict=True))
            norms = [sum(g.square().sum().item() for g in grads) ** 0.5 for grads in (found, full)]
            rows.append([name, m, 8 // m, *norms, same])
    columns = ["schedule", "M", "rows each", "gradient norm", "all rows at once", "same bits"]
    demo.table(columns, rows, "One batch of 8 rows, cut into M microbatches; whole numbers, so that sums are exact")
    claims.check("gradients are those of the full batch, exactly", all(row[-1] for row in rows))


def whole_worker(mesh, name: str, microbatches: int) -> dict[int, list[torch.Tensor]]:
    """Return {stage: gradients} of a virtual rank, for the batch of whole numbers."""
    n, count = mesh.world_size, mesh.world_size * stages_per_rank(name)
    stages = [whole_numbers(StageMLP(stage, count)) for stage in range(mesh.rank, count, n)]
    x, target = whole_batch(8)
    shapes = stage_shapes(count, 8 // microbatches)
    pipeline = Pipeline(stages, make_schedule(name, n, microbatches), mse_loss, shapes, torch.float64, MeshComm(mesh))
    pipeline.step(x.chunk(microbatches), target.chunk(microbatches))
    return {i: [parameter.grad for parameter in stage.parameters()] for i, stage in pipeline.stages.items()}


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--microbatches", type=demo.positive, default=8, metavar="M", help="microbatches a batch (8)")
    parser.add_argument("--batch", type=demo.positive, default=4, metavar="ROWS", help="rows a microbatch (4)")
    parser.add_argument("--steps", type=demo.positive, default=5, help="training steps (default: 5)")
    parser.add_argument(
        "--deeper", action="store_true", help="tied weights, checkpointing, balance, two dimensions; sizes are fixed"
    )
    args = demo.parse(parser, lesson=79)
    if args.world_size > len(SIZES) - 1:
        parser.error(f"the model has {len(SIZES) - 1} layers, too few for {args.world_size} stages")
    if args.deeper and args.bench:
        parser.error("--deeper and --bench are two programs: choose one")
    if args.deeper and under_torchrun():
        parser.error("--deeper starts its own CPU ranks: run it without torchrun")
    if args.deeper:
        allow_only(parser, "--deeper, whose sizes are fixed", "deeper")
    if args.bench:
        allow_only(parser, "--bench", "bench world_size microbatches seed backend")
        if args.microbatches % args.world_size:
            parser.error(
                f"--bench: torch's interleaved schedules need a multiple of {args.world_size} microbatches, "
                f"got {args.microbatches}"
            )
    return say_why(lambda: bench(args) if args.bench else deeper(args) if args.deeper else tell(args))


def tell(args) -> int:
    """Tell the story, a claim after the other; return the exit code."""
    claims = demo.Claims()
    draw(args, claims)
    bubble(claims)
    optimum(claims)
    memory(claims)
    deadlock(claims)
    train(args, claims)
    mean(claims)
    measure(args, claims)
    return claims.verdict("LESSON 79: PIPELINE VERIFIED")


if __name__ == "__main__":
    sys.exit(main())
