"""`--deeper`: unequal and uneven batches, half the bytes, NaN, and two experiments, each with its claim."""

import demo
import torch
from comm import TorchComm
from ddp import DistributedDataParallel
from ddp_experiments import barrier_only, calls_a_step, drift, share_of_sync
from finite import NonFiniteGradient
from flat import flat_param_numel, gather_flat_grads, gather_flat_params
from hooks import average, bf16_bound, bf16_compress
from ranks import run_ranks
from toy import MiniMLP, sgd_step
from uneven import uneven

STEPS, LR = 4, 0.1


def rows_of(rank: int, step: int) -> torch.Tensor:
    """Return a rank's batch of a step: rank r has r + 1 rows."""
    return torch.randn(rank + 1, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def batches_of(rank: int) -> list[torch.Tensor]:
    """Return a rank's batches: rank 0 has one more than the others."""
    return [rows_of(rank, step) for step in range(STEPS if rank == 0 else STEPS - 1)]


def train_unevenly(rank: int, world_size: int, weighted: bool) -> torch.Tensor:
    """Be one rank: train on what there is; return the final parameters."""
    comm, module = TorchComm(), MiniMLP()
    ddp = DistributedDataParallel(module, comm=comm, weighted=True)
    for x in uneven(batches_of(rank), comm):
        if x is None:
            ddp.without_data()
        else:
            ddp.samples = len(x) if weighted else 1
            ddp(x).square().mean().backward()
        sgd_step(module, LR)
    return gather_flat_params(module)


def check_uneven(claims: demo.Claims, world_size: int) -> None:
    """Batches of different sizes, and of different number, against one process with the same global batches."""
    module = MiniMLP()
    for step in range(STEPS):
        batch = [batches_of(rank)[step] for rank in range(world_size) if step < len(batches_of(rank))]
        module(torch.cat(batch)).square().mean().backward()
        sgd_step(module, LR)
    true, apart = gather_flat_params(module), {}
    for weighted in (False, True):
        found = run_ranks(train_unevenly, world_size, weighted)
        apart[weighted] = (found[0] - true).abs().max().item()
        if weighted:
            claims.check("uneven data: all ranks end with the same bits", all(torch.equal(f, found[0]) for f in found))
    claims.check(
        "weighted by rows: the plain loop over the same rows", apart[True] <= 1e-6, f"off by {apart[True]:.1e}"
    )
    wrong = apart[False] > 1e-4 or world_size == 1
    claims.check("a mean of means is another training", wrong, f"off by {apart[False]:.1e}")


def compress(rank: int, world_size: int, hook) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Be one rank: one step; return (its own gradient, the mean that came back, bytes of its all-reduces)."""
    module, comm = MiniMLP(), TorchComm()
    module(rows_of(rank, 0)).square().mean().backward()
    own = gather_flat_grads(module)
    module.zero_grad()
    ddp = DistributedDataParallel(module, comm=comm, hook=hook)
    ddp(rows_of(rank, 0)).square().mean().backward()
    return own, gather_flat_grads(module), comm.counters.bytes["all_reduce"]


def check_hook(claims: demo.Claims, world_size: int) -> None:
    """bfloat16 on the wire: half the bytes, and an error within its bound."""
    rows, bound_used = [], {}
    for name, hook, unit in (("none", average, 2**-24), ("bf16_compress", bf16_compress, 2**-8)):
        found = run_ranks(compress, world_size, hook)
        local = torch.stack([own for own, _, _ in found]).double()
        error = (found[0][1].double() - local.mean(0)).abs()
        bound = bf16_bound(local) * unit / 2**-8
        bound_used[name] = (error / bound.clamp_min(1e-30)).max().item()
        relative = (error.norm() / local.mean(0).norm()).item()
        rows.append([name, found[0][2], error.max().item(), bound.max().item(), relative])
    columns = ["hook", "bytes a step", "largest error", "largest bound", "relative error"]
    demo.table(columns, rows, f"one mean of {world_size} ranks' gradients, {flat_param_numel(MiniMLP())} elements")
    demo.say()
    claims.check(
        "bf16_compress sends half the bytes", rows[0][1] == 2 * rows[1][1], f"{rows[1][1]:,} of {rows[0][1]:,}"
    )
    used = bound_used["bf16_compress"]
    claims.check("each element is within (N + 1) 2^-8 mean|g| of the exact mean", used <= 1, f"{used:.2f} of it used")


def spoil(rank: int, world_size: int, check: bool) -> tuple[str, bool]:
    """Be one rank; the last rank's input has a NaN. Return (what was raised, whether the parameters are finite)."""
    module, raised = MiniMLP(), ""
    ddp = DistributedDataParallel(module, check_finite=check)
    x = rows_of(rank, 0)
    if rank == world_size - 1:
        x[0, 0] = float("nan")
    try:
        ddp(x).square().mean().backward()
    except NonFiniteGradient as error:
        raised = str(error)
        module.zero_grad()  # and so the step is skipped
    sgd_step(module, LR)
    return raised, bool(gather_flat_params(module).isfinite().all())


def check_nan(claims: demo.Claims, world_size: int) -> None:
    """One rank's NaN: silently everywhere, or found on every rank."""
    silent, loud = run_ranks(spoil, world_size, False), run_ranks(spoil, world_size, True)
    claims.check("one rank's NaN reaches every rank, silently", all(each == ("", False) for each in silent))
    good = all(each == loud[0] and each[1] for each in loud) and f"on rank {world_size - 1}" in loud[0][0]
    claims.check("check_finite: all ranks raise, and name the rank", good, loud[0][0])


def drifting(rank: int, world_size: int) -> list[list[float]]:
    """Be one rank: train with a barrier only, then with an all-reduce."""
    return [drift(TorchComm(), 6, barrier_only), drift(TorchComm(), 6)]


def check_drift(claims: demo.Claims, world_size: int) -> None:
    """Waiting for each other is not synchronising."""
    barrier, mean = run_ranks(drifting, world_size)[0]
    rows = [[step, *pair] for step, pair in enumerate(zip(barrier, mean, strict=True), 1)]
    demo.table(["step", "barrier only", "all-reduce"], rows, "largest difference between ranks' parameters")
    demo.say()
    claims.check("with a barrier alone the ranks drift apart", min(barrier) > 0 or world_size == 1)
    claims.check("with an all-reduce they hold the same bits", not any(mean))


def shares(rank: int, world_size: int) -> tuple[list[list[int]], list[float]]:
    """Be one rank: ([[calls a step, buckets] of each cap], the share of synchronising at batch 1, 16, 256)."""
    comm, calls = TorchComm(), []
    for cap in (1e-9, 0.126, 0.13, 25):
        ddp = DistributedDataParallel(MiniMLP(64, 512, 64), cap, comm)
        calls.append([calls_a_step(ddp, torch.ones(2, 64), comm.counters), len(ddp.reducer.buckets)])
    return calls, [share_of_sync(ddp, torch.randn(rows, 64)) for rows in (1, 16, 256)]


def check_shares(claims: demo.Claims, world_size: int) -> None:
    """Calls equal buckets; and the larger the batch, the smaller the share of communication (timed, so not a claim)."""
    calls, share = run_ranks(shares, world_size)[0]
    claims.check("calls = buckets", all(a == b for a, b in calls), f"{[a for a, _ in calls]} with caps that grow")
    rows = [[rows, f"{each:.0%}"] for rows, each in zip((1, 16, 256), share, strict=True)]
    demo.table(["rows a rank", "of a step synchronises"], rows, "66,112 parameters, one bucket")


def deeper(args) -> int:
    """Run all of it; return the exit code."""
    claims = demo.Claims()
    for check in (check_uneven, check_hook, check_nan, check_drift, check_shares):
        check(claims, args.world_size)
    return claims.verdict("Uneven, compressed, checked")
