"""`--bench --size 124M` or `774M`: GPT-2 on GPUs, our recipes beside torch's usual ones, with each row's dtypes."""

from functools import partial
from types import SimpleNamespace

import torch
from comm import Comm
from gpt2_bench import LR, Contender, check_peak, compare, gpt  # 77: the harness
from zero import ZeroOptimizer

BF16, FP32 = "ours, bf16", "ours, fp32"
SECOND, THIRD = "ours, stage 2", "ours, stage 3"
ZRO, ZRO_TUNED = "DDP + ZeroRedundancyOptimizer", "DDP + ZeroRedundancyOptimizer, tuned"
FSDP, FSDP_KEEPS = "FSDP2", "FSDP2, keeps parameters"
LIMIT = "forward and backward alone"


def ours(size: str, comm: Comm, dtype: torch.dtype, **options) -> tuple:
    """Return (what to call, the optimizer, whether to autocast)."""
    module = gpt(size, comm.device, dtype)
    options |= {"comm": comm, "fused": True, "overlap": True, "weight_decay": 0.01}
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
    """Return the same of FSDP2: fp32 shards, bf16 when gathered; `reshard`: blocks are freed after forward.

    What is in no block stays until the end of backward: that is torch's default, and what ours does.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = gpt(size, comm.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in module.blocks:
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    return module, torch.optim.AdamW(module.parameters(), LR, fused=True), False


def neither_sent_nor_updated(size: str, comm: Comm) -> tuple:
    """Return the same without an optimizer: no way of training this model can be faster than its gradients are."""
    module = gpt(size, comm.device, torch.bfloat16)
    return module, SimpleNamespace(step=lambda: None, zero_grad=module.zero_grad), False


AUTOCAST = "fp32 / fp32 / fp32 / fp32 moments; autocast"
MASTERS = "bf16 / bf16 / bf16 / fp32 master, moments"
MIXED = "fp32, used as bf16 / fp32 / bf16 / fp32 moments"
THEIRS = {
    FSDP: Contender(partial(fsdp, reshard=True), MIXED),
    FSDP_KEEPS: Contender(partial(fsdp, reshard=False), MIXED),
}


def first_stage(bucket_mb: float) -> dict[str, Contender]:
    """Return the rows in which only optimizer state is sharded, at equal dtypes and in bf16; and FSDP2."""
    return {
        BF16: Contender(partial(ours, bucket_cap_mb=bucket_mb, dtype=torch.bfloat16), MASTERS),
        FP32: Contender(partial(ours, bucket_cap_mb=bucket_mb, dtype=torch.float32), AUTOCAST),
        ZRO: Contender(partial(sharded, tuned=False), AUTOCAST),
        ZRO_TUNED: Contender(partial(sharded, tuned=True), AUTOCAST),
        LIMIT: Contender(neither_sent_nor_updated, "bf16 / bf16 / none / none", trains=False),
    } | THEIRS


def later_stages() -> dict[str, Contender]:
    """Return the rows in which gradients (stage 2; FSDP2 that keeps parameters) or all (stage 3; FSDP2) are sharded."""
    stages = {2: SECOND, 3: THIRD}
    mine = {
        name: Contender(partial(ours, dtype=torch.bfloat16, stage=stage), MASTERS) for stage, name in stages.items()
    }
    return mine | THEIRS


def targets(size: str, batch: int) -> dict[tuple[str, str], float | None]:
    """Return {(ours, theirs): how many times as fast ours must be} for stage 1; recipes have one for 774M only.

    FSDP2's usual setting frees parameters after forward; the other is a row beside it.
    """
    recipe = {4: 1.5, 16: 1.1}.get(batch) if size == "774M" else None
    return {
        (FP32, ZRO): 1.0,
        (FP32, ZRO_TUNED): None,
        (BF16, ZRO): recipe,
        (BF16, ZRO_TUNED): None,
        (BF16, FSDP): recipe,
        (BF16, FSDP_KEEPS): recipe if batch == 4 else None,
        (LIMIT, FSDP_KEEPS): None,
    }


def bench(args) -> int:
    """Compare; return the exit code: the same losses, no target missed, no larger peak of memory.

    Stage 1's peak is compared with that of DDP: FSDP2 shards gradients and parameters, too.
    """
    if args.stages:
        return bench_stages(args)
    claims, peaks = compare(args, first_stage(args.bucket_mb), targets(args.size, args.batch))
    if args.backend == "nccl":
        for mine in (BF16, FP32):
            for theirs in (ZRO, ZRO_TUNED):
                check_peak(claims, mine, theirs, peaks)
    return claims.verdict("ZeRO-1 beside torch's own on GPT-2")


def bench_stages(args) -> int:
    """Compare stages 2 and 3 with FSDP2; return the exit code."""
    pairs = {(SECOND, FSDP_KEEPS): 1.0, (THIRD, FSDP): 1.0}
    claims, peaks = compare(args, later_stages(), pairs)
    for mine, theirs in pairs if args.backend == "nccl" else ():
        check_peak(claims, mine, theirs, peaks)
    return claims.verdict("ZeRO-2 and ZeRO-3 beside FSDP2 on GPT-2")
