"""`--bench --size 124M` or `774M`: GPT-2 on GPUs, our recipes beside torch's usual ones, with each row's dtypes."""

from functools import partial

import torch
from comm import Comm
from gpt2_bench import LR, Contender, compare, gpt  # 77: the harness
from zero import ZeroOptimizer

BF16, FP32 = "ours, bf16", "ours, fp32"
ZRO, ZRO_TUNED = "DDP + ZeroRedundancyOptimizer", "DDP + ZeroRedundancyOptimizer, tuned"
FSDP, FSDP_KEEPS = "FSDP2", "FSDP2, keeps parameters"


def ours(size: str, comm: Comm, bucket_mb: float, dtype: torch.dtype) -> tuple:
    """Return (what to call, the optimizer, whether to autocast)."""
    module = gpt(size, comm.device, dtype)
    options = {"comm": comm, "fused": True, "overlap": True, "bucket_cap_mb": bucket_mb, "weight_decay": 0.01}
    optimizer = ZeroOptimizer(module, comm.world_size, comm.rank, LR, **options)
    return module, optimizer, dtype == torch.float32


def sharded(size: str, comm: Comm, tuned: bool) -> tuple:
    """Return the same of DDP with torch's sharded AdamW; tuned: buckets without copies, and the fused kernel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module = gpt(size, comm.device)
    options = {"parameters_as_bucket_view": True, "fused": True} if tuned else {}
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=LR, **options)
    return DistributedDataParallel(module, gradient_as_bucket_view=tuned, static_graph=tuned), optimizer, True


def fsdp(size: str, comm: Comm, reshard: bool) -> tuple:
    """Return the same of FSDP2: fp32 shards, bf16 when gathered; `reshard`: freed after forward, gathered again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = gpt(size, comm.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in [*module.blocks, module]:
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
    return module, torch.optim.AdamW(module.parameters(), LR, fused=True), False


def contenders(bucket_mb: float) -> dict[str, Contender]:
    """Return all rows."""
    autocast = "fp32 / fp32 / fp32 / fp32 moments; autocast"
    mixed = "fp32, used as bf16 / fp32 / bf16 / fp32 moments"
    return {
        BF16: Contender(
            partial(ours, bucket_mb=bucket_mb, dtype=torch.bfloat16), "bf16 / bf16 / bf16 / fp32 master, moments"
        ),
        FP32: Contender(partial(ours, bucket_mb=bucket_mb, dtype=torch.float32), autocast),
        ZRO: Contender(partial(sharded, tuned=False), autocast),
        ZRO_TUNED: Contender(partial(sharded, tuned=True), autocast),
        FSDP: Contender(partial(fsdp, reshard=True), mixed),
        FSDP_KEEPS: Contender(partial(fsdp, reshard=False), mixed),
    }


def targets(size: str, batch: int) -> dict[tuple[str, str], float | None]:
    """Return {(ours, theirs): how many times as fast ours must be}; for the recipes of 774M only."""
    recipe = {4: 1.5, 16: 1.1}.get(batch) if size == "774M" else None
    return {
        (FP32, ZRO): 1.0,
        (FP32, ZRO_TUNED): None,
        (BF16, ZRO): recipe,
        (BF16, ZRO_TUNED): None,
        (BF16, FSDP): recipe,
        (BF16, FSDP_KEEPS): recipe,
    }


def bench(args) -> int:
    """Compare; return the exit code: the same losses, no target missed, no larger peak of memory.

    Peaks are compared with those of DDP: FSDP2 shards parameters and gradients, too (lesson's stages 2 and 3).
    """
    claims, peaks = compare(args, contenders(args.bucket_mb), targets(args.size, args.batch))
    if args.backend == "nccl":
        for mine in (BF16, FP32):
            least = min(peaks[ZRO], peaks[ZRO_TUNED])
            detail = f"{peaks[mine] / 2**20:,.0f} MiB, theirs {least / 2**20:,.0f}"
            claims.check(
                f"row {mine!r} needs at most 0.5% more memory than {ZRO}", peaks[mine] <= 1.005 * least, detail
            )
    return claims.verdict("ZeRO-1 beside torch's own on GPT-2")
