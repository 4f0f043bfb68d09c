"""`--bench`: tokens a second of our loop, beside DDP with torch's ZeroRedundancyOptimizer or Adam."""

from collections.abc import Callable
from functools import partial

import demo
import sidebyside
import torch
import torch.nn.functional as F
from comm import Comm, TorchComm
from corpus import Batches, synthetic
from ranks import run_ranks
from torch import nn
from train import Job, guard
from zero_bench import CONTENDERS, OURS  # 78: {name: how to make what is called, and its optimizer}

GUARDED = "ours, with the NaN guard"  # torch's rows have none
CHECKED_STEPS, TOLERANCE = 5, 1e-4  # nats; sums in another order and fused kernels round differently
JOBS = {  # name: (job, pairs)
    "lesson 81's GPT": (Job(synthetic(seed=7), dropout=0.0), 51),
    "a larger GPT": (Job(synthetic(seed=7), dropout=0.0, seq=64, model={"dim": 192, "heads": 6, "blocks": 4}), 21),
}


def make_step(name: str, make: Callable, job: Job, comm: Comm) -> tuple[nn.Module, Callable]:
    """Return (model, step): `step(sequences)` trains on this rank's (batch, seq + 1) and returns its loss."""
    model = job.build().to(comm.device)
    call, optimizer, _ = make(model, comm)

    def clip() -> None:
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(job.clip)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)

    def step(sequences: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(call(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        loss.backward()
        if name == GUARDED:
            guard(comm, 1, loss.item(), optimizer)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def compare(comm: Comm, job: Job, pairs: int) -> dict:
    """Let every contender take a few steps and keep its losses, then time them all, interleaved."""
    batches = Batches(job.corpus.train, job.batch * comm.world_size, job.seq, job.seed)
    mine = [batches.batch(i).chunk(comm.world_size)[comm.rank].to(comm.device) for i in range(100)]
    losses, timed = {}, {}
    for name, make in {**CONTENDERS, GUARDED: CONTENDERS[OURS]}.items():
        model, step = make_step(name, make, job, comm)
        own = torch.stack([step(mine[i]) for i in range(CHECKED_STEPS)]).double()
        comm.all_reduce(own, op="avg")  # (CHECKED_STEPS,): the mean over all ranks, of each step
        losses[name] = own.tolist()
        turn = iter(mine * (1 + (pairs + 1) // len(mine)))
        timed[name] = partial(sidebyside.slowest, lambda step=step, turn=turn: step(next(turn)), comm)
    numel = sum(param.numel() for param in model.parameters())
    return {"numel": numel, "losses": losses, "rows": sidebyside.compare(timed, pairs)}


def measure(rank: int, world_size: int, jobs: dict) -> dict[str, dict]:
    """Be one rank of the comparison: {name of the job: what was found}."""
    return {name: compare(TorchComm(), job, pairs) for name, (job, pairs) in jobs.items()}


def bench(args) -> int:
    """Compare on `args.world_size` ranks; return the exit code: whether all rows train the same model."""
    claims = demo.Claims()
    for name, found in run_ranks(measure, args.world_size, JOBS, backend=args.backend)[0].items():
        job, pairs = JOBS[name]
        tokens = job.batch * job.seq * args.world_size
        where = (
            f"{found['numel']:,} parameters in fp32, {tokens} tokens a step, {args.world_size} ranks, {args.backend}"
        )
        rows = [
            [row.name, round(tokens / row.seconds), row.seconds * 1e3, row.ratio, f"{row.low:.2f} to {row.high:.2f}"]
            for row in found["rows"]
        ]
        columns = ["", "tokens/s", "ms a step", "ours is x times as fast", "95% interval"]
        demo.table(columns, rows, f"{name}: {where}, {pairs} interleaved steps")
        ours = found["losses"][OURS]
        gaps = [abs(a - b) for theirs in found["losses"].values() for a, b in zip(theirs, ours, strict=True)]
        claim = f"{name}: in all rows the losses of {CHECKED_STEPS} steps are the same, within {TOLERANCE:g} nats"
        claims.check(claim, all(gap <= TOLERANCE for gap in gaps), f"largest difference {max(gaps):.1g}")
    return claims.verdict("a GPT's training beside torch's own: the same steps, timed")
