"""`--bench`: our DDP beside torch's own, and beside the simpler ways of lesson 77. Same model, data and SGD."""

from collections.abc import Callable
from functools import partial

import demo
import sidebyside
import torch
from comm import Comm, TorchComm
from ddp import DistributedDataParallel
from flat import gather_flat_grads, gather_flat_params
from naive import flat_sync, naive_sync
from ranks import run_ranks
from torch import nn
from toy import MiniMLP, sgd_step

LR = 0.01
OURS, DEFAULT, TUNED = "ours", "torch DDP, default", "torch DDP, tuned"
NAIVE, FLAT = "naive: a call a parameter", "flat: one call"
LATE, SMALL = "ours, 2 MB buckets after backward", "ours, 2 MB buckets"  # what overlap alone gains
ALONE = "no communication"  # not the same training: what a step would cost if messages were free


def mini_mlp() -> nn.Module:
    """Return lesson 77's toy: a step is almost nothing but latency."""
    return MiniMLP()


def transformer() -> nn.Module:
    """Return a transformer encoder of 3.2M parameters, equal on all ranks."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS = {  # name: build, shape of a rank's input, pairs, steps timed as one
    "MiniMLP": (mini_mlp, (8, 16), 21, 20),
    "transformer": (transformer, (2, 64, 256), 15, 1),  # (batch, seq, dim)
}
TARGETS = {DEFAULT: 0.95, NAIVE: 1.2}  # on gloo, with either model: how many times as fast as that row ours must be


def variants(build: Callable, x: torch.Tensor, comm: Comm) -> dict[str, tuple[nn.Module, Callable]]:
    """Return {name: (module, step)}. A step is forward, backward and synchronisation on this rank's `x`, then SGD."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    unchecked = comm.unchecked()  # ours runs without checks too: compare like with like

    def ours(module, bucket_cap_mb=25):
        return DistributedDataParallel(module, bucket_cap_mb, comm)

    def tuned(module):
        return TorchDDP(module, gradient_as_bucket_view=True, static_graph=True)

    def bare(module):
        return module

    def backward(_model, loss):
        loss.backward()

    def backward_then_naive(model, loss):
        loss.backward()
        naive_sync(model, unchecked)

    def backward_then_flat(model, loss):
        loss.backward()
        flat_sync(model, unchecked)

    def backward_then_buckets(ddp, loss):
        with ddp.no_sync():
            loss.backward()
        ddp.sync_grads()

    def make(wrap, backward):
        module = build().to(comm.device)
        model = wrap(module)

        def step() -> None:
            backward(model, model(x).square().mean())
            sgd_step(module, LR)

        return module, step

    return {
        OURS: make(ours, backward),
        DEFAULT: make(TorchDDP, backward),
        TUNED: make(tuned, backward),
        NAIVE: make(bare, backward_then_naive),
        FLAT: make(bare, backward_then_flat),
        LATE: make(partial(ours, bucket_cap_mb=2), backward_then_buckets),
        SMALL: make(partial(ours, bucket_cap_mb=2), backward),
        ALONE: make(bare, backward),
    }


def exact_step(module: nn.Module, x: torch.Tensor, comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters after one step with the exact mean of all ranks' gradients, and a bound on the error.

    The bound: a sum of N numbers in any order, 2(N-1) eps sum|g|; then the division, and the rounding of p - lr g.
    """
    before, eps, n = gather_flat_params(module).double(), torch.finfo(torch.float32).eps, comm.world_size
    module(x).square().mean().backward()
    mine = gather_flat_grads(module)
    everyone = mine.new_empty(n * mine.numel())
    comm.all_gather(everyone, mine)
    grads = everyone.view(n, -1).double()
    bound = 2 * n * LR * eps * grads.abs().mean(0) + 2 * eps * before.abs()
    return before - LR * grads.mean(0), bound


def counted(step: Callable, comm: Comm, control: list[int]) -> None:
    """Take a step; add to `control` the number of control messages it sent."""
    before = comm.counters.control_calls
    step()
    control.append(comm.counters.control_calls - before)


def measure(rank: int, world_size: int, models: dict) -> dict[str, dict]:
    """Be one rank of the comparison: {model: its rows, and what was checked on the way}."""
    comm = TorchComm()
    return {name: compare(comm, *settings) for name, settings in models.items()}


def compare(comm: Comm, build: Callable, shape: tuple[int, ...], pairs: int, repeats: int) -> dict:
    """Let every contender take one step and check it, then time them all, interleaved."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(comm.rank)).to(comm.device)
    exact, bound = exact_step(build().to(comm.device), x, comm)
    contenders, after, control = variants(build, x, comm), {}, []
    for name, (module, step) in contenders.items():
        step()
        after[name] = gather_flat_params(module)
    del after[ALONE]
    timed = {
        name: partial(sidebyside.slowest, partial(counted, step, comm, control), comm, repeats)
        for name, (_, step) in contenders.items()
    }
    return {
        "rows": sidebyside.compare(timed, pairs, warmup=3),
        "numel": exact.numel(),
        "within": all(bool(((params - exact).abs() <= bound).all()) for params in after.values()),
        "equal": all(torch.equal(params, after[OURS]) for params in after.values()),
        "checks": sum(control),
    }


def report(claims: demo.Claims, title: str, model: str, found: list[dict], targets: dict[str, float]) -> None:
    """Print one model's rows, and check the claims about them. `found` holds what each rank found."""
    rows = {row.name: row for row in found[0]["rows"]}
    cells = [[row.name, row.seconds * 1e3, row.ratio, f"{row.low:.2f} to {row.high:.2f}"] for row in rows.values()]
    demo.table(["", "ms a step", "ours is x times as fast", "95% interval"], cells, title)
    demo.say()
    claims.check(f"{model}: each row's first step is the exact one, within its bound", all(f["within"] for f in found))
    if len(found) <= 2:
        claims.check(f"{model}: after it all rows hold the same bits", all(f["equal"] for f in found))
    claims.check(f"{model}: no rank sent a check before a call while timed", all(f["checks"] == 0 for f in found))
    for name, target in targets.items():
        row = rows[name]
        detail = f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
        claims.check(f"{model}: ours is at least {target} times as fast as row {name!r}", row.high >= target, detail)


def bench(args) -> int:
    """Compare on `args.world_size` ranks; return the exit code.

    A target is missed only if the whole interval is below it. On NCCL there are rows, but no targets: these models are
    small for a GPU.
    """
    claims, targets = demo.Claims(), TARGETS if args.backend == "gloo" else {}
    found = run_ranks(measure, args.world_size, MODELS, backend=args.backend)
    for model, (_, _, pairs, repeats) in MODELS.items():
        where = f"{found[0][model]['numel']:,} parameters, {args.world_size} ranks, {args.backend}"
        report(
            claims,
            f"{model}, {where}: {pairs} pairs of {repeats} step(s)",
            model,
            [each[model] for each in found],
            targets,
        )
    return claims.verdict("DDP beside torch's own: the same training, timed")
