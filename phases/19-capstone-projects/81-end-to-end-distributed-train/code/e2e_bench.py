"""`--bench`: tokens a second of our loop, beside DDP with torch's ZeroRedundancyOptimizer or Adam."""

from collections.abc import Callable
from functools import partial

import demo
import sidebyside
import torch
import torch.nn.functional as F
from arena import Arena, why_not  # 76: memory that ranks share
from comm import Comm, TorchComm
from corpus import Batches, synthetic
from ranks import run_ranks
from shared_comm import SharedComm
from torch import nn
from train import Job, guard
from zero_bench import (  # 78: {name: how to make what is called, and its optimizer}, and what shared memory needs
    CONTENDERS,
    DEFAULT,
    MODEL,
    OURS,
    SHARED,
    TUNED,
    heap_for,
    ours,
)

GUARDED = "ours, with the NaN guard"  # torch's rows have none
CHECKED_STEPS, TOLERANCE = 5, 1e-5  # nats; sums in another order and fused kernels round differently
TEN_MILLION = "a GPT of 10M parameters"
SIZES = {name: MODEL[name] for name in ("dim", "heads", "blocks")}
JOBS = {  # name: (job, pairs)
    "lesson 81's GPT": (Job(synthetic(seed=7), dropout=0.0), 51),
    "a larger GPT": (Job(synthetic(seed=7), dropout=0.0, seq=64, model={"dim": 192, "heads": 6, "blocks": 4}), 21),
    TEN_MILLION: (Job(synthetic(seed=7), dropout=0.0, seq=MODEL["seq"], model=SIZES), 15),
    f"{TEN_MILLION}, 8 times the tokens": (Job(synthetic(seed=7), dropout=0.0, batch=8, seq=128, model=SIZES), 9),
}
TARGETS = {TEN_MILLION: {DEFAULT: 1.3, TUNED: 1.1}}  # how many times as fast SHARED must be, on two CPU ranks


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


def compare(comm: Comm, job: Job, pairs: int, arena: Arena | None) -> dict:
    """Let every contender take a few steps and keep its losses, then time them all, interleaved.

    The first, with which the others are compared, is ours over shared memory if there is an arena.
    """
    batches = Batches(job.corpus.train, job.batch * comm.world_size, job.seq, job.seed)
    mine = [batches.batch(i).chunk(comm.world_size)[comm.rank].to(comm.device) for i in range(100)]
    losses, timed = {}, {}
    contenders = {name: (make, comm) for name, make in {**CONTENDERS, GUARDED: CONTENDERS[OURS]}.items()}
    if arena is not None:
        contenders = {SHARED: (partial(ours, fused=True), SharedComm(arena, comm))} | contenders
    for name, (make, its_comm) in contenders.items():
        model, step = make_step(name, make, job, its_comm)
        own = torch.stack([step(mine[i]) for i in range(CHECKED_STEPS)]).double()
        comm.all_reduce(own, op="avg")  # (CHECKED_STEPS,): the mean over all ranks, of each step
        losses[name] = own.tolist()
        turn = iter(mine * (1 + (pairs + 1) // len(mine)))
        timed[name] = partial(sidebyside.slowest, lambda step=step, turn=turn: step(next(turn)), comm)
    numel = sum(param.numel() for param in model.parameters())
    return {"numel": numel, "losses": losses, "rows": sidebyside.compare(timed, pairs)}


def measure(rank: int, world_size: int, jobs: dict, arenas: dict) -> dict[str, dict]:
    """Be one rank of the comparison: {name of the job: what was found}."""
    return {name: compare(TorchComm(), *jobs[name], arenas[name]) for name in jobs}


def arenas_for(args) -> dict[str, Arena | None]:
    """Make shared memory for each job; say why if there is none."""
    cpu = args.backend == "gloo"
    if cpu and why_not():
        demo.say(f"shared memory is left out: {why_not()}")
    return {name: heap_for(job.build, args.world_size) if cpu else None for name, (job, _) in JOBS.items()}


def bench(args) -> int:
    """Compare on `args.world_size` ranks; return the exit code: the same model in all rows, and no target missed."""
    claims = demo.Claims()
    for name, found in run_ranks(measure, args.world_size, JOBS, arenas_for(args), backend=args.backend)[0].items():
        job, pairs = JOBS[name]
        tokens = job.batch * job.seq * args.world_size
        where = (
            f"{found['numel']:,} parameters in fp32, {tokens} tokens a step, {args.world_size} ranks, {args.backend}"
        )
        rows = [
            [row.name, round(tokens / row.seconds), row.seconds * 1e3, row.ratio, f"{row.low:.2f} to {row.high:.2f}"]
            for row in found["rows"]
        ]
        columns = ["", "tokens/s", "ms a step", f"{rows[0][0]!r} is x times as fast", "95% interval"]
        demo.table(columns, rows, f"{name}: {where}, {pairs} interleaved steps")
        base = found["losses"][OURS]
        gaps = [abs(a - b) for theirs in found["losses"].values() for a, b in zip(theirs, base, strict=True)]
        claim = f"{name}: in all rows the losses of {CHECKED_STEPS} steps are the same, within {TOLERANCE:g} nats"
        claims.check(claim, all(gap <= TOLERANCE for gap in gaps), f"largest difference {max(gaps):.1g}")
        if rows[0][0] == SHARED and args.world_size == 2:
            check_targets(claims, {row.name: row for row in found["rows"]}, TARGETS.get(name, {}))
    return claims.verdict("a GPT's training beside torch's own: the same steps, timed")


def check_targets(claims: demo.Claims, rows: dict[str, sidebyside.Row], targets: dict[str, float]) -> None:
    """A target is missed only if the whole interval is below it."""
    for other, target in targets.items():
        claim = f"target: row {SHARED!r} at least {target} times as fast as row {other!r}"
        claims.check(claim, *rows[other].against(target))
