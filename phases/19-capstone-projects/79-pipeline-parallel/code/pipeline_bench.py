"""Side by side with torch.distributed.pipelining: the same stages, the same microbatches, the same schedules."""

import os
from functools import partial

import demo
import torch
from comm import TorchComm
from measured import measure_steps, predict, wide_pipeline, wide_stages
from ranks import run_ranks
from schedule import SCHEDULES, stages_per_rank
from sidebyside import Row, compare, median_interval, slowest
from simulator import bubble_formula, summarise
from torch.nn.functional import mse_loss

STEPS = 3  # a measurement is the mean of so many steps
THEIRS = {  # the class in torch.distributed.pipelining
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
}
TARGETS = {"gloo": {"gpipe": 1.0, "1f1b": 0.95}, "nccl": {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0}}
GAP = 0.06  # between a measured bubble and its formula


def bench(args) -> int:
    """Compare on `args.world_size` ranks, which divide the microbatches; print the tables, return the exit code."""
    claims, n, m = demo.Claims(), args.world_size, args.microbatches
    results = run_ranks(bench_worker, n, m, args.seed, backend=args.backend, timeout=1800)
    found = results[0]
    if args.backend == "nccl":
        demo.head(f"{n} x {found['gpipe']['where'].removeprefix('nccl, ')}", torch.__version__)
    demo.table(
        ["schedule", "torch's class", "ours, ms", "torch's, ms", "ratio", "low", "high"],
        [[name, THEIRS[name], *row["times"]] for name, row in found.items()],
        f"torch.distributed.pipelining beside ours: {n} ranks, M = {m}, {found['gpipe']['where']}, torch "
        f"{torch.__version__}; ratio > 1: ours is faster",
    )
    bubbles = [(name, width, *each) for name, row in found.items() for width, each in row["bubbles"].items()]
    demo.table(
        ["schedule", "width", "formula", "simulated", "measured", "low", "high"],
        [[name, width, bubble_formula(name, n, m), *each] for name, width, *each in bubbles],
        "Bubble, the median of many steps (formula: equal times; simulated: with each step's measured stage times)",
    )
    equal = "gradients have the same bits" if is_power_of_two(m) else "gradients are equal but for rounding"
    claims.check(equal, all(row["same"] for result in results for row in result.values()))
    for claim in judge(found, n, m, args.backend, os.cpu_count() or 1):
        claims.check(*claim)
    return claims.verdict("LESSON 79: BENCH")


def judge(found: dict, n: int, m: int, backend: str, cores: int) -> list[tuple[str, bool, str]]:
    """Return what is claimed of a rank's results on n ranks with m microbatches: (claim, does it hold, detail).

    A target is missed only if the whole interval misses it. Speed: for two ranks or more, and m >= 4. Bubbles: where
    no two ranks share a core, and at the larger width, since the formula has no messages.
    """
    judged = []
    for name, target in TARGETS[backend].items() if n > 1 and m >= 4 else ():
        row = Row(name, 0.0, *found[name]["times"][2:])
        judged.append((f"target: {name} at least {target} times as fast as torch's", *row.against(target)))
    for name in ("gpipe", "1f1b") if backend == "nccl" or n <= cores else ():  # the others' need F = B = W
        width, (_, *measured) = max(found[name]["bubbles"].items())
        gap, low, high = (bubble - bubble_formula(name, n, m) for bubble in measured)
        claim = f"width {width}: {name}'s bubble is within {GAP} of the formula"
        judged.append((claim, low <= GAP and high >= -GAP, f"{gap:+.3f} ({low:+.3f} to {high:+.3f})"))
    return judged


def bench_worker(rank, world_size, microbatches: int, seed: int, pairs: int = 15, steps: int = 20, size=None) -> dict:
    """Return {schedule: what was found}: `same` (gradients are torch's), `times` (our milliseconds a step,
    torch's, ratio, low, high), `bubbles` {width: (simulated, measured, low, high)}, `where`. `size`: (rows of a
    microbatch, width).
    """
    comm = TorchComm()
    cpu = comm.device.type == "cpu"
    rows, width = size or ((64, 512) if cpu else (1024, 4096))
    where = "gloo" if cpu else f"nccl, {torch.cuda.get_device_name()}"
    found = {}
    for name in SCHEDULES:
        same, times = beside_torch(comm, name, microbatches, rows, width, seed, pairs)
        bubbles = {wide: bubble(comm, name, microbatches, rows, wide, seed, steps) for wide in (width, 2 * width)}
        found[name] = {"same": same, "times": times, "bubbles": bubbles, "where": where}
    return found


def beside_torch(comm, name: str, microbatches: int, rows: int, width: int, seed: int, pairs: int) -> tuple:
    """Return (are the gradients the same, [our milliseconds a step, torch's, ratio, low, high])."""
    data = batch(comm, microbatches * rows, width, seed)
    pipeline = wide_pipeline(comm, name, microbatches, rows, width, seed)
    ours = list(pipeline.stages.values())
    theirs = [s.to(comm.device) for s in wide_stages(comm.rank, stages_per_rank(name), width, seed)]
    run_ours = _runner(ours, partial(pipeline.step, *(part.chunk(microbatches) for part in data)))
    run_theirs = _runner(theirs, _their_step(comm, name, theirs, data, microbatches))
    run_ours()
    run_theirs()
    grads = ([p.grad for stage in stages for p in stage.parameters()] for stages in (ours, theirs))
    same = all(same_gradients(a, b, microbatches) for a, b in zip(*grads, strict=True))
    contenders = {who: partial(slowest, run, comm, STEPS) for who, run in (("o", run_ours), ("t", run_theirs))}
    own, torchs = compare(contenders, pairs)
    return same, [1e3 * own.seconds, 1e3 * torchs.seconds, torchs.ratio, torchs.low, torchs.high]


def bubble(comm, name: str, microbatches: int, rows: int, width: int, seed: int, steps: int) -> tuple:
    """Return (simulated, measured, low, high): medians over `steps` steps, and the interval of the measured one."""
    data = batch(comm, microbatches * rows, width, seed)
    pipeline = wide_pipeline(comm, name, microbatches, rows, width, seed)
    timelines = measure_steps(pipeline, *(part.chunk(microbatches) for part in data), steps)
    simulated, measured = ([of(slots).bubble for slots in timelines] for of in (predict, summarise))
    return median_interval(simulated)[0], *median_interval(measured)


def batch(comm, rows: int, width: int, seed: int) -> torch.Tensor:
    """Return inputs and targets, (2, rows, width)."""
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(seed)).to(comm.device)


def is_power_of_two(number: int) -> bool:
    """Say whether dividing by this number is exact."""
    return number & (number - 1) == 0


def same_gradients(ours: torch.Tensor, theirs: torch.Tensor, microbatches: int) -> bool:
    """Compare bit by bit where that is possible: torch divides the sum by M, we each loss, which rounds elsewhere."""
    if is_power_of_two(microbatches):
        return torch.equal(ours, theirs)
    return (ours - theirs).abs().max().item() <= 1e-5 * theirs.abs().max().item()


def _runner(stages, step):
    def run():
        for stage in stages:
            stage.zero_grad(set_to_none=False)
        step()

    return run


def _their_step(comm, name, stages, data, microbatches):
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    n = comm.world_size
    count = n * len(stages)
    theirs = [pipelining.PipelineStage(s, comm.rank + i * n, count, comm.device) for i, s in enumerate(stages)]
    kind, several = getattr(schedules, THEIRS[name]), name not in ("gpipe", "1f1b")
    schedule = kind(theirs if several else theirs[0], microbatches, loss_fn=mse_loss)
    inputs = [data[0]] if comm.rank == 0 else []
    last = {"target": data[1], "losses": []} if comm.rank == (count - 1) % n else {}

    def step():
        last.get("losses", []).clear()
        schedule.step(*inputs, **last)

    return step
