"""GPT-2 on GPUs: contenders at stated dtypes, each alone for its losses, memory and timeline, then two by two for time.

Two contenders at a time are held and timed in turn: together all would not fit. Peak memory is each one's alone.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import demo
import gpu_timeline
import sidebyside
import torch
import torch.nn.functional as F
from comm import Comm, TorchComm
from ranks import run_ranks
from torch import nn

LR, CHECKED_STEPS, PAIRS, REPEATS = 1e-4, 4, 11, 3
FIRST_GAP, LAST_GAP = 2**-8, 0.02  # by what share losses may differ: one that is bf16 is rounded by up to 2^-8
SIZES = {  # GPT-2's, with a tied head; the last one is for a test
    "124M": {"vocab": 50257, "dim": 768, "heads": 12, "blocks": 12, "seq": 1024},
    "774M": {"vocab": 50257, "dim": 1280, "heads": 20, "blocks": 36, "seq": 1024},
    "tiny": {"vocab": 64, "dim": 32, "heads": 4, "blocks": 2, "seq": 16},
}


@dataclass(frozen=True)
class Contender:
    """How to build one, and the dtypes of its row: parameters / gradients / gradients as sent / optimizer state.

    `build(size, comm)` returns (what to call, the optimizer, whether to autocast). `trains`: must its losses be the
    other rows'?
    """

    build: Callable[[str, Comm], tuple]
    dtypes: str
    trains: bool = True


class Peak(NamedTuple):
    """Bytes at the peak of a step: what was asked for, and what the caching allocator set aside for it.

    It may hand out a free block that is up to 1 MiB larger than what was asked for, so the second number depends on
    what was freed before: up to 1% from the first, more or less at random. The first is the program's own.
    """

    requested: int
    allocated: int


def peak_of_gpu() -> tuple[int, int]:
    """Return (requested, allocated) bytes since the last reset."""
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"]


def gpt(size: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return lesson 81's GPT on a device, head and token embedding tied as in GPT-2."""
    from gpt import MiniGPT  # a later lesson's: here only something to train

    with device:
        module = MiniGPT(**SIZES[size])
    module.head.weight = module.tokens.weight
    return module.to(dtype)


def loss_of(call: nn.Module, tokens: torch.Tensor, autocast: bool) -> torch.Tensor:
    """Return the mean loss of (batch, seq + 1) tokens; with autocast, matrices are multiplied in bf16."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        return F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build(contender: Contender, comm: Comm, size: str, batch: int) -> Callable[[], torch.Tensor]:
    """Return a function that takes one step of a contender and returns its loss."""
    call, optimizer, autocast = contender.build(size, comm)
    where = {"generator": torch.Generator().manual_seed(comm.rank)}
    tokens = torch.randint(SIZES[size]["vocab"], (batch, SIZES[size]["seq"] + 1), **where).to(comm.device)

    def step() -> torch.Tensor:
        loss = loss_of(call, tokens, autocast)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def alone(contender: Contender, comm: Comm, *settings) -> dict:
    """Return a contender's losses (mean over ranks), the peak of its memory, and what its GPU did when.

    Without a GPU the peak is 0 bytes, and there is no timeline.
    """
    step = build(contender, comm, *settings)
    own, gpu = [step() for _ in range(CHECKED_STEPS - 1)], comm.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    own = torch.stack([*own, step()]).double()
    comm.all_reduce(own, op="avg")
    peak = Peak(*map(max, zip(*comm.agree(peak_of_gpu() if gpu else (0, 0)), strict=True)))
    return {"losses": own.tolist(), "peak": peak, "timeline": gpu_timeline.record(step, comm) if gpu else None}


def forget(comm: Comm) -> None:
    """Free what the last contenders held."""
    gc.collect()
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()
    comm.agree(None)


def measure(rank: int, world_size: int, contenders: dict[str, Contender], pairs: list, *settings) -> dict:
    """Be one rank: each contender alone, then two by two, interleaved."""
    comm, found = TorchComm(), {"alone": {}, "rows": {}}
    for name, contender in contenders.items():
        found["alone"][name] = alone(contender, comm, *settings)
        forget(comm)
    for pair in pairs:
        steps = {name: build(contenders[name], comm, *settings) for name in pair}
        runs = {name: partial(sidebyside.slowest, step, comm, REPEATS) for name, step in steps.items()}
        found["rows"][pair] = sidebyside.compare(runs, PAIRS, warmup=3)
        del steps, runs
        forget(comm)
    device = torch.cuda.get_device_name() if comm.device.type == "cuda" else "CPU"
    return found | {"where": f"{world_size} x {device}, torch {torch.__version__}"}


def compare(args, contenders: dict[str, Contender], targets: dict[tuple[str, str], float | None]) -> tuple:
    """Run on `args.world_size` ranks and print all rows; return (the claims so far, {name: Peak}).

    `targets`: {(ours, theirs): how many times as fast ours must be, None for a row without a target}. One is missed
    only if the whole interval is below it. On CPU ranks there are rows, but no targets: that only shows that the
    program runs.
    """
    settings = args.size, args.batch
    found = run_ranks(measure, args.world_size, contenders, list(targets), *settings, backend=args.backend)[0]
    if args.backend == "nccl":
        demo.head(found["where"].partition(", torch")[0], torch.__version__)
    title = f"GPT-2 {args.size}, {args.batch} x {SIZES[args.size]['seq']} tokens a rank, {found['where']}"
    show_alone(contenders, found["alone"], title)
    timelines = {name: each["timeline"] for name, each in found["alone"].items() if each["timeline"]}
    if timelines:
        gpu_timeline.report(timelines, demo.out_dir(args) / f"gpu_timeline_{args.size}_{args.batch}.png", title)
    demo.say()
    rows = []
    for pair, (mine, other) in found["rows"].items():
        ratio = [f"{other.ratio:.2f}", f"{other.low:.2f} to {other.high:.2f}"]
        rows.append([*pair, round(mine.seconds * 1e3, 1), round(other.seconds * 1e3, 1), *ratio])
    columns = ["ours", "theirs", "ours, ms", "theirs, ms", "ours is x times as fast", "95% interval"]
    demo.table(columns, rows, f"ms a step, {PAIRS} interleaved pairs of {REPEATS} steps, no checks")
    demo.say()
    claims = demo.Claims()
    check_losses(claims, {name: each["losses"] for name, each in found["alone"].items() if contenders[name].trains})
    for (mine, theirs), target in targets.items() if args.backend == "nccl" else ():
        if target is not None:
            row = found["rows"][mine, theirs][1]
            claim = f"target: row {mine!r} at least {target} times as fast as row {theirs!r}"
            claims.check(claim, *row.against(target))
    return claims, {name: each["peak"] for name, each in found["alone"].items()}


def show_alone(contenders: dict[str, Contender], alone: dict[str, dict], title: str) -> None:
    """Print what each contender holds, and two of its losses."""
    rows = [
        [
            name,
            contenders[name].dtypes,
            *(f"{size / 2**20:,.1f}" for size in each["peak"]),
            *(f"{each['losses'][i]:.3f}" for i in (0, -1)),
        ]
        for name, each in alone.items()
    ]
    columns = ["", "parameters / gradients / sent / state", "peak MiB asked for", "set aside"]
    demo.table([*columns, "first loss", f"loss of step {CHECKED_STEPS}"], rows, title)


def check_peak(claims: demo.Claims, mine: str, theirs: str, peaks: dict[str, Peak]) -> None:
    """Compare peaks of memory. The 0.01% is for small tensors of ours, such as a flag a parameter."""
    for what, share in (("asks", 1e-4), ("is given", 5e-3)):
        own, other = (peaks[name][what == "is given"] for name in (mine, theirs))
        claim = f"row {mine!r} {what} at most {share:.2%} more memory than {theirs}"
        claims.check(claim, own <= (1 + share) * other, f"{own / 2**20:,.1f} MiB, theirs {other / 2**20:,.1f}")


def check_losses(claims: demo.Claims, losses: dict[str, list[float]]) -> None:
    """All contenders train the same model on the same data. (Rounding to bf16 makes the later losses differ.)"""
    for when, step, allowed in (("begin with the same loss", 0, FIRST_GAP), ("end with the same loss", -1, LAST_GAP)):
        found = [each[step] for each in losses.values()]
        gap = max(found) / min(found) - 1
        claims.check(f"all rows {when}, within {allowed:.1%}", gap <= allowed, f"{gap:.2%}")
