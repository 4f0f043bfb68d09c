"""`--bench`: our DDP beside torch's own, and beside the simpler ways of lesson 77. Same model, data and SGD."""

from collections.abc import Callable
from functools import partial

import demo
import sidebyside
import torch
from arena import Arena, why_not
from comm import Comm, TorchComm
from ddp import DistributedDataParallel
from flat import flat_param_numel, gather_flat_grads, gather_flat_params
from naive import flat_sync, naive_sync
from ranks import run_ranks
from shared_comm import SharedComm
from torch import nn
from toy import MiniMLP, sgd_step

LR = 0.01
SHARED, OURS = "ours, shared memory", "ours, process group"
DEFAULT, TUNED = "torch DDP, default", "torch DDP, tuned"
NAIVE, FLAT = "naive: a call a parameter", "flat: one call"
LATE, SMALL = "ours, 2 MB buckets after backward", "ours, 2 MB buckets"  # what overlap alone gains
ALONE = "no communication"  # not the same training: what a step would cost if messages were free


def mini_mlp() -> nn.Module:
    """Return lesson 77's toy: a step is almost nothing but latency."""
    return MiniMLP()


def mini_gpt() -> nn.Module:
    """Return lesson 81's GPT with 10.5M parameters; its input is (batch, seq) of token ids."""
    from gpt import MiniGPT  # a later lesson's: here only something to train

    return MiniGPT(vocab=1024, dim=320, heads=5, blocks=8, seq=64)


def rows_of(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return numbers (a rank's own) to feed the toy."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def tokens_of(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return token ids (a rank's own) to feed the GPT."""
    return torch.randint(1024, shape, generator=torch.Generator().manual_seed(rank))


MODELS = {  # name: build, input, shape of a rank's input, pairs, steps timed as one
    "MiniMLP": (mini_mlp, rows_of, (8, 16), 21, 20),
    "MiniGPT": (mini_gpt, tokens_of, (4, 64), 9, 1),  # (batch, seq)
}
TARGETS = {  # on CPUs: (ours, row): {model: how many times as fast as that row ours must be}
    (SHARED, DEFAULT): {"MiniMLP": 2.0, "MiniGPT": 1.1},
    (OURS, DEFAULT): {"MiniMLP": 0.95, "MiniGPT": 0.95},
    (OURS, NAIVE): {"MiniMLP": 1.2, "MiniGPT": 1.2},
}


def variants(build: Callable, x: torch.Tensor, comm: Comm, shared: Comm | None) -> dict[str, tuple]:
    """Return {name: (module, step)}. A step is forward, backward and synchronisation on this rank's `x`, then SGD."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    unchecked = comm.unchecked()  # ours runs without checks too: compare like with like

    def ours(module, bucket_cap_mb=25, through=comm):
        return DistributedDataParallel(module, bucket_cap_mb, through)

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

    found = {
        OURS: make(ours, backward),
        DEFAULT: make(TorchDDP, backward),
        TUNED: make(tuned, backward),
        NAIVE: make(bare, backward_then_naive),
        FLAT: make(bare, backward_then_flat),
        LATE: make(partial(ours, bucket_cap_mb=2), backward_then_buckets),
        SMALL: make(partial(ours, bucket_cap_mb=2), backward),
        ALONE: make(bare, backward),
    }
    return found if shared is None else {SHARED: make(partial(ours, through=shared), backward)} | found


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


def heap_for(models: dict, world_size: int) -> Arena | None:
    """Make the shared memory in which the gradients of every model have room; None where ranks cannot share any."""
    if why_not():
        return None
    numel = sum(flat_param_numel(build()) for build, *_ in models.values())
    return Arena(world_size, heap_bytes=(4 * numel + (4 << 20)) // 64 * 64)  # and flags, notes, alignment


def measure(rank: int, world_size: int, models: dict, arena: Arena | None) -> dict[str, dict]:
    """Be one rank of the comparison: {model: its rows, and what was checked on the way}."""
    comm = TorchComm()
    shared = None if arena is None else SharedComm(arena, comm)
    return {name: compare(comm, shared, *settings) for name, settings in models.items()}


def compare(comm: Comm, shared: Comm | None, build, feed, shape: tuple[int, ...], pairs: int, repeats: int) -> dict:
    """Let every contender take one step and check it, then time them all, interleaved."""
    x = feed(shape, comm.rank).to(comm.device)
    exact, bound = exact_step(build().to(comm.device), x, comm)
    contenders, after, control, times = variants(build, x, comm, shared), {}, [], {}
    for name, (module, step) in contenders.items():
        step()
        after[name] = gather_flat_params(module)
    del after[ALONE]

    def timed(name: str, step: Callable) -> float:
        seconds = sidebyside.slowest(partial(counted, step, comm, control), comm, repeats)
        times.setdefault(name, []).append(seconds)
        return seconds

    runs = {name: partial(timed, name, step) for name, (_, step) in contenders.items()}
    sidebyside.compare(runs, pairs, warmup=3)
    return {
        "times": {name: each[-pairs:] for name, each in times.items()},
        "numel": exact.numel(),
        "within": all(bool(((params - exact).abs() <= bound).all()) for params in after.values()),
        "equal": all(torch.equal(params, after[OURS]) for params in after.values()),
        "checks": sum(control),
    }


def report(claims: demo.Claims, title: str, model: str, found: list[dict], targets: dict) -> None:
    """Print one model's rows, and check the claims about them. `found` holds what each rank found."""
    times = found[0]["times"]
    columns, cells = ["", "ms a step"], [[name] for name in times]
    for ours in (name for name in (SHARED, OURS) if name in times):
        columns += [f"/ {ours}", "95% interval"]
        for row, name in zip(cells, times, strict=True):
            result = sidebyside.summary(name, times[name], times[ours])
            row += [result.seconds * 1e3] if len(row) == 1 else []
            row += [f"{result.ratio:.2f}", f"{result.low:.2f} to {result.high:.2f}"]
    demo.table(columns, cells, title)
    if claims.checked:
        demo.say()
    claims.check(f"{model}: each row's first step is the exact one, within its bound", all(f["within"] for f in found))
    if len(found) <= 2:
        claims.check(f"{model}: after it all rows hold the same bits", all(f["equal"] for f in found))
    claims.check(f"{model}: no rank sent a check before a call while timed", all(f["checks"] == 0 for f in found))
    for (ours, theirs), target in targets.items():
        if ours in times:
            row = sidebyside.summary(theirs, times[theirs], times[ours])
            claim = f"{model}: target: row {ours!r} at least {target[model]} times as fast as row {theirs!r}"
            claims.check(claim, *row.against(target[model]))


def bench(args) -> int:
    """Compare on `args.world_size` ranks; return the exit code.

    A target is missed only if the whole interval is below it. On NCCL there are rows, but no targets: these models are
    small for a GPU.
    """
    cpu = args.backend == "gloo"
    claims, targets = demo.Claims(), TARGETS if cpu else {}
    arena = heap_for(MODELS, args.world_size) if cpu else None
    if cpu and arena is None:
        demo.say(f"shared memory is left out: {why_not()}")
    found = run_ranks(measure, args.world_size, MODELS, arena, backend=args.backend)
    for model, (*_, pairs, repeats) in MODELS.items():
        where = f"{found[0][model]['numel']:,} parameters, {args.world_size} ranks, {args.backend}"
        title = f"{model}, {where}: {pairs} pairs of {repeats} step(s)"
        report(claims, title, model, [each[model] for each in found], targets)
    return claims.verdict("DDP beside torch's own: the same training, timed")
