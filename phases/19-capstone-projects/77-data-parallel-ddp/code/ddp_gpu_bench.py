"""`--bench --size 124M` or `774M`: our DDP and torch's, each with fused AdamW, on GPT-2 in bf16, over NCCL."""

from functools import partial

import torch
from comm import Comm
from ddp import DistributedDataParallel
from gpt2_bench import LR, Contender, check_peak, compare, gpt

OURS, DEFAULT, TUNED = "ours", "torch DDP, default", "torch DDP, tuned"
BF16 = "bf16 / bf16 / bf16 / bf16 moments"


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(module.parameters(), LR, fused=True)


def ours(size: str, comm: Comm, bucket_mb: float) -> tuple:
    """Return our wrapper, its optimizer, and that nothing is to be autocast."""
    module = gpt(size, comm.device, torch.bfloat16)
    return DistributedDataParallel(module, bucket_mb, comm), adamw(module), False


def torchs(size: str, comm: Comm, **options) -> tuple:
    """Return the same of torch's wrapper."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    module = gpt(size, comm.device, torch.bfloat16)
    return TorchDDP(module, **options), adamw(module), False


def bench(args) -> int:
    """Compare; return the exit code: the same losses, no target missed, no larger peak of memory."""
    tuned = {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": args.bucket_mb}
    contenders = {
        OURS: Contender(partial(ours, bucket_mb=args.bucket_mb), BF16),
        DEFAULT: Contender(torchs, BF16),
        TUNED: Contender(partial(torchs, **tuned), BF16),
    }
    claims, peaks = compare(args, contenders, {(OURS, DEFAULT): 1.0, (OURS, TUNED): None})
    if args.backend == "nccl":
        check_peak(claims, OURS, DEFAULT, peaks)
    return claims.verdict("DDP beside torch's own on GPT-2")
