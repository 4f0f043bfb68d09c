"""`--bench --size 124M` or `774M`: GPT-2 on GPUs, our recipes beside torch's usual ones, with the dtypes of each row.

Two contenders at a time are held and timed in turn: together they would not fit. Peak memory is each one's alone.
"""

import gc
from functools import partial

import demo
import sidebyside
import torch
import torch.nn.functional as F
from comm import Comm, TorchComm
from ranks import run_ranks
from torch import nn
from zero import ZeroOptimizer

LR, CHECKED_STEPS, PAIRS, GAP = 1e-4, 4, 15, 0.05  # GAP: nats between rows' losses; bf16 keeps 8 bits
SIZES = {  # GPT-2's, with a tied head; the last one is for a test
    "124M": {"vocab": 50257, "dim": 768, "heads": 12, "blocks": 12, "seq": 1024},
    "774M": {"vocab": 50257, "dim": 1280, "heads": 20, "blocks": 36, "seq": 1024},
    "tiny": {"vocab": 64, "dim": 32, "heads": 4, "blocks": 2, "seq": 16},
}
BF16, FP32 = "ours, bf16", "ours, fp32"
ZRO, ZRO_TUNED = "DDP + ZeroRedundancyOptimizer", "DDP + ZeroRedundancyOptimizer, tuned"
FSDP, FSDP_KEEPS = "FSDP2", "FSDP2, keeps parameters"


def gpt(size: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return lesson 81's GPT on a device, head and token embedding tied as in GPT-2."""
    from gpt import MiniGPT  # 81

    with device:
        module = MiniGPT(**SIZES[size])
    module.head.weight = module.tokens.weight
    return module.to(dtype)


def loss_of(call: nn.Module, tokens: torch.Tensor, autocast: bool) -> torch.Tensor:
    """Return the mean loss of (batch, seq + 1) tokens; with autocast, matrices are multiplied in bf16."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        return F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def ours(size: str, comm: Comm, bucket_mb: float, dtype: torch.dtype) -> tuple:
    """Return (what to call, the optimizer, whether to autocast)."""
    module = gpt(size, comm.device, dtype)
    options = {"comm": comm, "fused": True, "overlap": True, "bucket_cap_mb": bucket_mb, "weight_decay": 0.01}
    optimizer = ZeroOptimizer(module, comm.world_size, comm.rank, LR, **options)
    return module, optimizer, dtype == torch.float32


def sharded(size: str, comm: Comm, bucket_mb: float, tuned: bool) -> tuple:
    """Return the same of DDP with torch's sharded AdamW; tuned: buckets without copies, and the fused kernel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module = gpt(size, comm.device)
    options = {"parameters_as_bucket_view": True, "fused": True} if tuned else {}
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=LR, **options)
    return DistributedDataParallel(module, gradient_as_bucket_view=tuned, static_graph=tuned), optimizer, True


def fsdp(size: str, comm: Comm, bucket_mb: float, reshard: bool) -> tuple:
    """Return the same of FSDP2: fp32 shards, bf16 when gathered; `reshard`: freed after forward, gathered again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = gpt(size, comm.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in [*module.blocks, module]:
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
    return module, torch.optim.AdamW(module.parameters(), LR, fused=True), False


CONTENDERS = {  # name: how to build it, dtypes of parameters / gradients / what is sent of gradients / state
    BF16: (partial(ours, dtype=torch.bfloat16), "bf16 / bf16 / bf16 / fp32 master, moments"),
    FP32: (partial(ours, dtype=torch.float32), "fp32 / fp32 / fp32 / fp32 master, moments; autocast"),
    ZRO: (partial(sharded, tuned=False), "fp32 / fp32 / fp32 / fp32 moments; autocast"),
    ZRO_TUNED: (partial(sharded, tuned=True), "fp32 / fp32 / fp32 / fp32 moments; autocast"),
    FSDP: (partial(fsdp, reshard=True), "fp32, used as bf16 / fp32 / bf16 / fp32 moments"),
    FSDP_KEEPS: (partial(fsdp, reshard=False), "fp32, used as bf16 / fp32 / bf16 / fp32 moments"),
}
COMPARED = [(FP32, ZRO), (FP32, ZRO_TUNED), (BF16, ZRO), (BF16, ZRO_TUNED), (BF16, FSDP), (BF16, FSDP_KEEPS)]


def build(name: str, comm: Comm, size: str, batch: int, bucket_mb: float):
    """Return a function that takes one step of a contender and returns its loss."""
    call, optimizer, autocast = CONTENDERS[name][0](size, comm, bucket_mb)
    where = {"generator": torch.Generator().manual_seed(comm.rank)}
    tokens = torch.randint(SIZES[size]["vocab"], (batch, SIZES[size]["seq"] + 1), **where).to(comm.device)

    def step() -> torch.Tensor:
        loss = loss_of(call, tokens, autocast)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def alone(name: str, comm: Comm, *settings) -> dict:
    """Return a contender's losses (mean over ranks), and the peak of its memory in bytes; 0 where there is no GPU."""
    step = build(name, comm, *settings)
    own = torch.stack([step() for _ in range(CHECKED_STEPS - 1)])
    if comm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    own = torch.cat([own, step().reshape(1)]).double()
    comm.all_reduce(own, op="avg")
    peak = torch.cuda.max_memory_allocated() if comm.device.type == "cuda" else 0
    return {"losses": own.tolist(), "peak": max(comm.agree(peak))}


def forget(comm: Comm) -> None:
    """Free what the last contenders held."""
    gc.collect()
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()
    comm.agree(None)


def measure(rank: int, world_size: int, *settings) -> dict:
    """Be one rank: each contender alone, then two by two, interleaved."""
    comm, found = TorchComm(), {"alone": {}, "rows": {}}
    for name in CONTENDERS:
        found["alone"][name] = alone(name, comm, *settings)
        forget(comm)
    for pair in COMPARED:
        steps = {name: partial(sidebyside.slowest, build(name, comm, *settings), comm) for name in pair}
        found["rows"][pair] = sidebyside.compare(steps, PAIRS, warmup=3)
        del steps
        forget(comm)
    device = torch.cuda.get_device_name() if comm.device.type == "cuda" else "CPU"
    return found | {"where": f"{world_size} x {device}, torch {torch.__version__}"}


def targets(size: str, batch: int) -> dict[tuple[str, str], float]:
    """Return {(ours, theirs): how many times as fast ours must be}; for the recipes of 774M only."""
    equal = {(FP32, ZRO): 1.0, (FP32, ZRO_TUNED): 1.0}
    recipe = {4: 1.5, 16: 1.1}.get(batch) if size == "774M" else None
    return equal if recipe is None else equal | {(BF16, theirs): recipe for theirs in (ZRO, FSDP, FSDP_KEEPS)}


def bench(args) -> int:
    """Compare; return the exit code: the same losses, no target missed (by its whole interval), no larger peak.

    On CPU ranks there are rows, but no targets: that only shows that the program runs.
    """
    found = run_ranks(measure, args.world_size, args.size, args.batch, args.bucket_mb, backend=args.backend)[0]
    seq, gpu = SIZES[args.size]["seq"], args.backend == "nccl"
    title = f"GPT-2 {args.size}, {args.batch} x {seq} tokens a rank, {found['where']}"
    columns = ["", "parameters / gradients / sent / state", "peak MiB", f"loss of step {CHECKED_STEPS}"]
    rows = [
        [name, CONTENDERS[name][1], round(each["peak"] / 2**20), f"{each['losses'][-1]:.3f}"]
        for name, each in found["alone"].items()
    ]
    demo.table(columns, rows, title)
    demo.say()
    rows = []
    for pair, (mine, other) in found["rows"].items():
        ratio = [f"{other.ratio:.2f}", f"{other.low:.2f} to {other.high:.2f}"]
        rows.append([*pair, round(mine.seconds * 1e3, 1), round(other.seconds * 1e3, 1), *ratio])
    columns = ["ours", "theirs", "ours, ms", "theirs, ms", "ours is x times as fast", "95% interval"]
    demo.table(columns, rows, f"ms a step, {PAIRS} interleaved pairs, no checks")
    demo.say()
    claims = demo.Claims()
    losses = [each["losses"] for each in found["alone"].values()]
    gap = max(abs(a - b) for each in losses for a, b in zip(each, losses[0], strict=True))
    claims.check(f"all rows' losses are the same within {GAP:g} nats", gap <= GAP, f"{gap:.2g}")
    for (mine, theirs), target in targets(args.size, args.batch).items() if gpu else ():
        row = found["rows"][mine, theirs][1]
        claim = f"row {mine!r} is at least {target} times as fast as row {theirs!r}"
        claims.check(claim, row.high >= target, f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})")
    if gpu:
        peaks = {name: each["peak"] for name, each in found["alone"].items()}
        others = min(peak for name, peak in peaks.items() if name not in (BF16, FP32))
        detail = f"{peaks[BF16] / 2**20:,.0f} MiB, the least of theirs {others / 2**20:,.0f}"
        claims.check(f"row {BF16!r} needs no more memory than any of torch's", peaks[BF16] <= others, detail)
    return claims.verdict("ZeRO-1 beside torch's own on GPT-2")
