"""`--bench --stages`: stages 2 and 3 beside FSDP2, 10M parameters on CPU ranks. Same model, data, fp32 everywhere."""

import statistics
import time
from functools import partial

import demo
import memory
import sidebyside
import torch
from arena import Arena, why_not
from comm import Comm, TorchComm
from ranks import run_ranks
from shared_comm import SharedComm
from torch import nn
from zero import ZeroOptimizer
from zero_bench import BATCH, CHECKED_STEPS, LR, SEQ, gpt, moments

PAIRS = 11
SHARED, GLOO = "ours, stage {}, shared memory", "ours, stage {}, gloo"
FSDP, FSDP_KEEPS = "FSDP2", "FSDP2, keeps parameters"
THEIRS = {2: FSDP_KEEPS, 3: FSDP}  # which of its settings shards as much
TARGET = 1.6  # two ranks, shared memory: times as fast


def ours(comm: Comm, stage: int) -> tuple:
    """Return (the module, its optimizer, its parameters as one function, the tensors of its state)."""
    module = gpt()
    optimizer = ZeroOptimizer(module, comm.world_size, comm.rank, LR, comm=comm, stage=stage, fused=True)

    def params() -> list[torch.Tensor]:
        with optimizer.gathered():
            return [param.detach().clone() for param in module.parameters()]

    return module, optimizer, params, lambda: [t for s in optimizer.shards for t in (s.exp_avg, s.exp_avg_sq)]


def fsdp(comm: Comm, reshard: bool, fused: bool) -> tuple:
    """Return the same of FSDP2, a block a unit as ours; `reshard`: blocks are freed after forward, gathered again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = gpt()
    mesh = init_device_mesh("cpu", (comm.world_size,))
    for part in module.blocks:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)  # torch's default for what is in no block; ours, too
    optimizer = torch.optim.Adam(module.parameters(), LR, fused=fused or None)  # False is not the default
    local = [lambda: [tensor.to_local() for tensor in moments(optimizer)]]
    return module, optimizer, lambda: [p.full_tensor().detach() for p in module.parameters()], local[0]


def contenders(comm: Comm, arena: Arena | None) -> dict[str, partial]:
    """Return what builds each row."""
    rows = {GLOO.format(stage): partial(ours, comm, stage) for stage in THEIRS}
    for reshard, name in ((False, FSDP_KEEPS), (True, FSDP)):
        rows |= {f"{name}, default": partial(fsdp, comm, reshard, False)}
        rows |= {f"{name}, tuned": partial(fsdp, comm, reshard, True)}
    if arena is not None:
        shared = SharedComm(arena, comm)
        rows = {SHARED.format(stage): partial(ours, shared, stage) for stage in THEIRS} | rows
    return rows


def measure(rank: int, world_size: int, arena: Arena | None) -> dict:
    """Be one rank: let every contender take a few steps, keep what they hold, then time all, interleaved."""
    comm = TorchComm()
    tokens = torch.randint(256, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(rank))
    params, state, times, busy, runs = {}, {}, {}, {}, {}
    for name, make in contenders(comm, arena).items():
        module, optimizer, read, held = make()

        def step(module=module, optimizer=optimizer) -> None:
            logits = module(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(CHECKED_STEPS):
            step()
        params[name] = torch.cat([tensor.flatten() for tensor in read()])
        state[name] = memory.logical_bytes(held())

        def timed(name=name, step=step) -> float:
            began = time.process_time()
            times.setdefault(name, []).append(sidebyside.slowest(step, comm))
            busy.setdefault(name, []).append(time.process_time() - began)
            return times[name][-1]

        runs[name] = timed
    sidebyside.compare(runs, PAIRS)
    first = next(iter(params.values()))
    return {
        "numel": first.numel(),
        "difference": {name: (theirs - first).abs().max().item() for name, theirs in params.items()},
        "state": state,
        "times": {name: each[-PAIRS:] for name, each in times.items()},
        "busy": {name: each[-PAIRS:] for name, each in busy.items()},
    }


def bench(args) -> int:
    """Compare on `args.world_size` CPU ranks; return the exit code: the same model in all rows, no target missed.

    "At work" is the processor's time on rank 0. Other programs on the machine make a step longer, and waiting costs a
    rank that spins or blocks at barriers more than one whose library threads go on; they change work less.
    """
    arena = None if why_not() else Arena(args.world_size, heap_bytes=1 << 27)
    if arena is None:
        demo.say(f"shared memory is left out: {why_not()}")
    found = run_ranks(measure, args.world_size, arena)
    times, busy, numel = found[0]["times"], found[0]["busy"], found[0]["numel"]
    worst = {name: max(each["difference"][name] for each in found) for name in times}
    state = {name: max(each["state"][name] for each in found) for name in times}
    rows = []
    for name in times:
        medians = (round(statistics.median(each[name]) * 1e3, 1) for each in (times, busy))
        rows.append([name, *medians, state[name], f"{worst[name]:.1g}"])
    where = f"{args.world_size} ranks, {BATCH} x {SEQ} tokens a rank, {PAIRS} interleaved steps; ours with fused Adam"
    columns = ["", "ms a step", "of them at work", "bytes of moments a rank", "max |a-b|"]
    demo.table(columns, rows, f"GPT of {numel:,}, fp32; {where}; no checks")
    ratios = []
    for stage, theirs in THEIRS.items():
        for mine in (SHARED.format(stage), GLOO.format(stage)):
            for other in (f"{theirs}, default", f"{theirs}, tuned") if mine in times else ():
                row, work = (sidebyside.summary(other, each[other], each[mine]) for each in (times, busy))
                spans = (f"{each.low:.2f} to {each.high:.2f}" for each in (row, work))
                ratios.append([mine, other, f"{row.ratio:.2f}", next(spans), f"{work.ratio:.2f}", next(spans), row])
    columns = ["ours", "theirs", "times as fast", "95% interval", "times less work", "95% interval"]
    demo.table(columns, [row[:-1] for row in ratios])
    demo.say()
    claims = demo.Claims()
    claims.check(f"the same model after {CHECKED_STEPS} steps, within lr / 10", max(worst.values()) <= LR / 10)
    for mine, other, *_, row in ratios:
        if "shared memory" in mine and args.world_size == 2:
            claim = f"target: row {mine!r} at least {TARGET} times as fast as row {other!r}"
            claims.check(claim, *row.against(TARGET))
    return claims.verdict("ZeRO-2 and ZeRO-3 beside FSDP2: the same training, timed")
