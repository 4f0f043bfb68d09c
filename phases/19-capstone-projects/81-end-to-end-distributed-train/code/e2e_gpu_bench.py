"""`--bench --size 774M`: tokens/s and MFU of GPT-2 on GPUs, our DDP and ZeRO-1 beside torch's DDP and FSDP2.

With `--compile` the blocks and the head of every row's model go through torch.compile, each by itself. `--whole` adds a
row: torch's DDP compiled as a whole, which takes minutes to compile.
"""

from functools import partial

import ddp_gpu_bench  # 77
import demo  # 76
import torch
import zero_gpu_bench  # 78
from comm import Comm
from gpt2_bench import PAIRS, REPEATS, SIZES, Contender, check_losses, gpt, measure, show_alone  # 77: the harness
from ranks import run_ranks  # 76

DDP, ZERO = "ours, DDP", "ours, ZeRO-1"
TORCH, TUNED, WHOLE = "torch DDP", "torch DDP, tuned", "torch DDP, compiled whole"
FSDP, FSDP_KEEPS = zero_gpu_bench.FSDP, zero_gpu_bench.FSDP_KEEPS
FSDP_BF16 = "FSDP2, keeps, bf16 moments"
TARGETS = {  # (ours, theirs): how many times as fast ours must be. Dtypes are the same within a pair
    (DDP, TORCH): 1.0,
    (DDP, TUNED): 1.0,
    (DDP, FSDP_BF16): 1.0,
    (ZERO, FSDP): 1.0,
    (ZERO, FSDP_KEEPS): 1.0,
}
PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12}  # dense bf16, of the SXM cards, from NVIDIA's data sheets


def flops_per_token(parameters: int, blocks: int, dim: int, seq: int) -> int:
    """Return the FLOPs that training on one token needs: 6 P + 12 blocks dim seq (PaLM, appendix B).

    A multiplication and an addition for each parameter forward, twice that backward; and the same for the two products
    of attention, as if no position were masked. Embedding and head are one matrix here, and multiplied once.
    """
    return 6 * parameters + 12 * blocks * dim * seq


def peak_flops(card: str) -> float | None:
    """Return the dense bf16 FLOP/s that a card's data sheet promises; None for a card that is not listed."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in card), None)


def sharded_ddp_dtypes(size: str, comm: Comm) -> tuple:
    """Return FSDP2 with parameters, gradients and moments in bf16, as in the DDP rows; parameters stay gathered."""
    from torch.distributed.fsdp import fully_shard

    module = gpt(size, comm.device, torch.bfloat16)
    for part in [*module.blocks, module]:
        fully_shard(part, reshard_after_forward=False)
    return module, ddp_gpu_bench.adamw(module), False


def by_parts(size: str, comm: Comm, build, backend: str) -> tuple:
    """Build a contender, and have each block and the head compiled by itself, so that gradients still come one by one.

    The head has an odd number of columns, which the compiler pads. Its `forward` is compiled, as torch.compile passes
    over a module of torch's own.
    """
    call, optimizer, autocast = build(size, comm)
    module = getattr(call, "module", call)
    for block in module.blocks:
        block.compile(backend=backend)
    module.head.forward = torch.compile(module.head.forward, backend=backend)
    return call, optimizer, autocast


def as_a_whole(size: str, comm: Comm, build, backend: str) -> tuple:
    """Build a contender and compile all of it: torch's DDP is then cut into graphs where its buckets end."""
    call, optimizer, autocast = build(size, comm)
    return torch.compile(call, backend=backend), optimizer, autocast


def contenders(bucket_mb: float, backend: str | None = None, whole: bool = False) -> dict[str, Contender]:
    """Return all rows, compiled by a backend of torch.compile or, with None, as they are; `whole`: and WHOLE."""
    tuned = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": bucket_mb}
    bf16, stage_one = ddp_gpu_bench.BF16, zero_gpu_bench.first_stage(bucket_mb)
    rows = {
        DDP: Contender(partial(ddp_gpu_bench.ours, bucket_mb=bucket_mb), bf16),
        ZERO: stage_one[zero_gpu_bench.BF16],
        TORCH: Contender(ddp_gpu_bench.torchs, bf16),
        TUNED: Contender(partial(ddp_gpu_bench.torchs, **tuned), bf16),
        FSDP_BF16: Contender(sharded_ddp_dtypes, bf16),
        FSDP: stage_one[FSDP],
        FSDP_KEEPS: stage_one[FSDP_KEEPS],
    }
    if backend is None:
        return rows
    compiled = {
        name: Contender(partial(by_parts, build=each.build, backend=backend), each.dtypes)
        for name, each in rows.items()
    }
    more = {WHOLE: Contender(partial(as_a_whole, build=ddp_gpu_bench.torchs, backend=backend), bf16)}
    return compiled | (more if whole else {})


def bench(args) -> int:
    """Compare; return the exit code: the same losses in all rows and, over NCCL, no target missed."""
    rows, targets = contenders(args.bucket_mb, args.compile, args.whole), dict(TARGETS)
    if WHOLE in rows:
        targets[DDP, WHOLE] = 1.0
    found = run_ranks(measure, args.world_size, rows, list(targets), args.size, args.batch, backend=args.backend)[0]
    card = found["where"].partition(", torch")[0]  # as the ranks have seen it
    demo.head(card, torch.__version__)
    show_alone(rows, found["alone"], "each alone")
    show_pairs(found["rows"], args, card)
    demo.say()
    claims = demo.Claims()
    check_losses(claims, {name: each["losses"] for name, each in found["alone"].items()})
    for (mine, theirs), target in targets.items() if args.backend == "nccl" else ():
        claim = f"target: row {mine!r} at least {target} times as fast as row {theirs!r}"
        claims.check(claim, *found["rows"][mine, theirs][1].against(target))
    return claims.verdict("tokens/s of GPT-2 beside torch's own")


def show_pairs(pairs: dict[tuple[str, str], list], args, card: str) -> None:
    """Print tokens/s and MFU of the contenders, two by two."""
    sizes = SIZES[args.size]
    parameters = sum(param.numel() for param in gpt(args.size, torch.device("meta")).parameters())
    needed = flops_per_token(parameters, sizes["blocks"], sizes["dim"], sizes["seq"])
    peak, tokens, table = peak_flops(card), args.batch * sizes["seq"], []
    for names, (mine, other) in pairs.items():
        speeds = [tokens / row.seconds for row in (mine, other)]  # of a rank
        shares = [f"{speed * needed / peak:.1%}" if peak else "-" for speed in speeds]
        total = [round(speed * args.world_size) for speed in speeds]
        table.append([*names, *total, *shares, f"{other.ratio:.3f}", f"{other.low:.3f} to {other.high:.3f}"])
    columns = ["ours", "theirs", "tokens/s", "theirs", "MFU", "theirs", "ours is x times as fast", "95% interval"]
    how = f"blocks and head compiled by {args.compile}" if args.compile else "not compiled"
    work = f"GPT-2 {args.size}, P = {parameters:,}, {args.batch} x {sizes['seq']} tokens a rank, {how}"
    demo.table(columns, table, f"{work}; {PAIRS} interleaved pairs of {REPEATS} steps; tokens/s of all ranks")
    promised = f"{peak / 1e12:,.0f} TFLOP/s, dense bf16" if peak else "not known"
    demo.say(
        f"MFU: tokens/s of a rank x (6 P + 12 blocks dim seq = {needed:,} FLOPs) / peak; peak of the card: {promised}"
    )
