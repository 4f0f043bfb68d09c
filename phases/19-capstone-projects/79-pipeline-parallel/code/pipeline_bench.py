"""Side by side with torch.distributed.pipelining: the same stages, the same microbatches, the same schedules."""

from functools import partial

import demo
import torch
from comm import TorchComm
from pipeline import Pipeline
from ranks import run_ranks
from schedule import make_schedule
from sidebyside import compare, slowest
from torch import nn
from torch.nn.functional import mse_loss

STEPS = 3  # a measurement is the mean of so many steps


def bench(args) -> int:
    """Compare on `args.world_size` ranks, print the table, return the exit code."""
    claims, m = demo.Claims(), args.microbatches
    results = run_ranks(bench_worker, args.world_size, m, args.seed, backend=args.backend)
    demo.table(
        ["schedule", "ours, ms", "torch's, ms", "ratio", "low", "high"],
        [[name, *row] for name, (_, *row) in results[0].items()],
        f"torch.distributed.pipelining beside ours: {args.world_size} ranks, M = {m}, {args.backend}, torch "
        f"{torch.__version__}; ratio > 1: ours is faster",
    )
    claims.check("gradients have the same bits", all(row[0] for result in results for row in result.values()))
    return claims.verdict("LESSON 79: BENCH")


def bench_worker(rank: int, world_size: int, microbatches: int, seed: int, pairs: int = 15) -> dict[str, tuple]:
    """Return {schedule: (gradients have torch's bits, our milliseconds a step, torch's, ratio, low, high)}."""
    comm = TorchComm()
    width, rows, layers = (512, 64, 4) if comm.device.type == "cpu" else (4096, 1024, 8)
    data = torch.randn(2, microbatches * rows, width, generator=torch.Generator().manual_seed(seed)).to(comm.device)
    found = {}
    for name in ("gpipe", "1f1b"):
        ours, theirs = (_stage(rank, width, layers, seed).to(comm.device) for _ in range(2))
        run_ours = _ours(comm, name, ours, rows, data, microbatches)
        run_theirs = _theirs(comm, name, theirs, data, microbatches)
        run_ours()
        run_theirs()
        pairs_of_gradients = zip(ours.parameters(), theirs.parameters(), strict=True)
        same = all(torch.equal(a.grad, b.grad) for a, b in pairs_of_gradients)
        own, torchs = compare(
            {name: partial(slowest, run, comm, STEPS) for name, run in (("ours", run_ours), ("torch", run_theirs))},
            pairs,
        )
        found[name] = (same, 1e3 * own.seconds, 1e3 * torchs.seconds, torchs.ratio, torchs.low, torchs.high)
    return found


def _stage(rank: int, width: int, layers: int, seed: int) -> nn.Module:
    torch.manual_seed(seed + rank)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def _ours(comm, name, stage, rows, data, microbatches):
    n = comm.world_size
    shapes = [(rows, data.shape[-1])] * n
    pipeline = Pipeline(stage, make_schedule(name, n, microbatches), mse_loss, shapes, comm=comm)

    def run():
        stage.zero_grad(set_to_none=False)
        pipeline.step(data[0].chunk(microbatches), data[1].chunk(microbatches))

    return run


def _theirs(comm, name, stage, data, microbatches):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    first, last = comm.rank == 0, comm.rank == comm.world_size - 1
    schedule = kind(PipelineStage(stage, comm.rank, comm.world_size, comm.device), microbatches, loss_fn=mse_loss)

    def run():
        stage.zero_grad(set_to_none=False)
        schedule.step(*([data[0]] if first else []), **({"target": data[1], "losses": []} if last else {}))

    return run
