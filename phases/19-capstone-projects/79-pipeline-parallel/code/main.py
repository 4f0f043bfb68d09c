"""Lesson 79: pipeline parallelism. A schedule is data: here it is drawn, costed, proven, and run."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, the verdict
import torch
from comm import TorchComm  # 76: the one interface to gloo, NCCL and the virtual cluster
from mesh_comm import MeshComm  # 76: the same over a mesh
from gantt import render_gantt, save_gantt  # a schedule as a picture
from one_process import full_batch_gradients, train_one_process, whole_batch, whole_numbers  # without a pipeline
from pipeline import Pipeline, pass_messages  # the interpreter that runs a schedule
from pipeline_bench import bench  # side by side with torch.distributed.pipelining, for --bench
from ranks import RankError, run_ranks  # 76: processes
from schedule import (  # schedules as data
    SCHEDULES,
    ScheduleError,
    add_lone_messages,
    bubble_fraction,
    gpipe_schedule,
    make_orders,
    make_schedule,
    measure_bubble,
    timeline,
)
from schedule_check import check_schedule  # the proof that a schedule can run
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
    """Claim: both schedules need 2 (M + N - 1) cycles; they differ in the order of work."""
    n, m = args.world_size, args.microbatches
    schedules = {name: make_schedule(name, n, m) for name in SCHEDULES}
    for name, schedule in schedules.items():
        demo.say(f"\n{name}, N = {n} stages, M = {m} microbatches\n{render_gantt(schedule, n, m)}")
    cycles = {name: max(slot.end for slot in timeline(schedule)) for name, schedule in schedules.items()}
    claims.check("both take 2 (M + N - 1) cycles", set(cycles.values()) == {2 * (m + n - 1)}, str(cycles))
    if demo.is_main():
        titles = {f"{name}, N = {n}, M = {m}": schedule for name, schedule in schedules.items()}
        demo.say(f"      saved as a picture: {save_gantt(titles, demo.out_dir(args) / 'gantt.png')}")


def bubble(claims: demo.Claims) -> None:
    """Claim: the bubble that the simulator measures is (N - 1) / (M + N - 1), whatever F and B cost."""
    rows, worst = [], 0.0
    for n, m in ((2, 2), (2, 8), (4, 2), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
        row = []
        for name in SCHEDULES:
            schedule = make_schedule(name, n, m)
            row += [measure_bubble(schedule), measure_bubble(schedule, forward=1, backward=2)]
        formula = bubble_fraction(n, m)
        worst = max(worst, *(abs(measured - formula) for measured in row))
        rows.append([n, m, *row, formula])
    costs = [f"{name} {cost}" for name in SCHEDULES for cost in ("B = F", "B = 2F")]
    demo.table(["N", "M", *costs, "(N-1)/(M+N-1)"], rows, "Bubble: the fraction of time that ranks wait")
    claims.check("the measured bubble is the formula", worst < 1e-12, f"largest difference {worst:.1e}")


def memory(claims: demo.Claims) -> None:
    """Claim: GPipe holds M activations on each stage; 1F1B holds min(M, N - stage), however large M is."""
    rows, good = [], True
    for name in SCHEDULES:
        for m in (2, 8, 32):
            peaks = check_schedule(make_schedule(name, 4, m)).peak_live
            good &= peaks == {stage: m if name == "gpipe" else min(m, 4 - stage) for stage in range(4)}
            rows.append([name, m, *peaks.values()])
    demo.table(["schedule", "M", *(f"stage {stage}" for stage in range(4))], rows, "Activations alive at once, N = 4")
    claims.check("peaks: GPipe M, 1F1B min(M, N - stage)", good)


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
    rows = [[name, rank, *rank_rows[name]] for name in SCHEDULES for rank, rank_rows in enumerate(results)]
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
        pipeline = build_pipeline(comm, batch, microbatches, name, seed)
        found, _ = train_stage(pipeline, steps, seed)
        stage = pipeline.stages[rank]
        layers = zip(stage.layers, alone.layers[stage.first : stage.last], strict=True)
        same = found == losses and all(
            torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias) for a, b in layers
        )
        first, last = (sum(part) / microbatches for part in (found[:microbatches], found[-microbatches:]))
        rows[name] = [first, last, same, pipeline.peak_live]
    return rows


def mean(claims: demo.Claims) -> None:
    """Claim: cut 8 rows into 1, 2, 4 or 8 microbatches, and the gradients stay those of all rows at once, exactly."""
    rows, (x, target) = [], whole_batch(8)
    full = full_batch_gradients(whole_numbers(StageMLP(0, 1)), x, target)
    for m in (1, 2, 4, 8):
        for name in SCHEDULES:
            found = [g for stage in VirtualCluster(4).run(whole_worker, name, m) for g in stage]
            same = all(torch.equal(a, b) for a, b in zip(found, full, strict=True))
            norms = [sum(g.square().sum().item() for g in grads) ** 0.5 for grads in (found, full)]
            rows.append([name, m, 8 // m, *norms, same])
    columns = ["schedule", "M", "rows each", "gradient norm", "all rows at once", "same bits"]
    demo.table(columns, rows, "One batch of 8 rows, cut into M microbatches; whole numbers, so that sums are exact")
    claims.check("gradients are those of the full batch, exactly", all(row[-1] for row in rows))


def whole_worker(mesh, name: str, microbatches: int) -> list[torch.Tensor]:
    """Return one stage's gradients for the batch of whole numbers, on a virtual rank."""
    stage, n = whole_numbers(StageMLP(mesh.rank, mesh.world_size)), mesh.world_size
    x, target = whole_batch(8)
    shapes = stage_shapes(n, 8 // microbatches)
    pipeline = Pipeline(stage, make_schedule(name, n, microbatches), mse_loss, shapes, torch.float64, MeshComm(mesh))
    pipeline.step(x.chunk(microbatches), target.chunk(microbatches))
    return [parameter.grad for parameter in stage.parameters()]


def main() -> int:
    """Run the lesson's story; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--microbatches", type=demo.positive, default=8, metavar="M", help="microbatches a batch (8)")
    parser.add_argument("--batch", type=demo.positive, default=4, metavar="ROWS", help="rows a microbatch (4)")
    parser.add_argument("--steps", type=demo.positive, default=5, help="training steps (default: 5)")
    args, claims = demo.parse(parser, lesson=79), demo.Claims()
    if args.world_size > len(SIZES) - 1:
        parser.error(f"the model has {len(SIZES) - 1} layers, too few for {args.world_size} stages")
    if args.bench:
        return bench(args)
    draw(args, claims)
    bubble(claims)
    memory(claims)
    deadlock(claims)
    train(args, claims)
    mean(claims)
    return claims.verdict("LESSON 79: PIPELINE VERIFIED")


if __name__ == "__main__":
    sys.exit(main())
