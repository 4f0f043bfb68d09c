"""Communication hooks: what a bucket does in place of its all-reduce.

A hook is a function (comm, memory) -> Work. After `wait()`, `memory` must be its mean over all ranks, the same bits on
each. It holds gradients, and behind them small whole numbers (flags, notes): these must come through within 1 / (2N).
A hook's attribute `dtypes` says which buckets it can take.
"""

import torch
from comm import Comm, Work


def average(comm: Comm, memory: torch.Tensor) -> Work:
    """Take the mean with one all-reduce: what a bucket does without a hook."""
    return comm.all_reduce(memory, op="avg", async_op=True)


def bf16_compress(comm: Comm, memory: torch.Tensor) -> Work:
    """Send bfloat16: half the bytes of float32, and an error of at most `bf16_bound`.

    bfloat16 has float32's range, so nothing overflows that did not before, and 8 significant bits.
    """
    small = memory.to(torch.bfloat16)
    work = comm.all_reduce(small, op="avg", async_op=True)

    def widen() -> None:
        work.wait()
        memory.copy_(small)

    return Work("bf16_compress", widen)


bf16_compress.dtypes = (torch.float32,)


def bf16_bound(per_rank: torch.Tensor) -> torch.Tensor:
    """Return how far `bf16_compress` may be from the exact mean of (N, ...) gradients, for each element.

    Each number is rounded once, each of N - 1 additions rounds, and so does the division: N + 1 factors (1 + d) with
    |d| <= u = 2^-8. So the error is at most ((1 + u)^(N + 1) - 1) times the mean of |g|. (Numbers below 1e-38 aside.)
    """
    unit = torch.finfo(torch.bfloat16).eps / 2
    return ((1 + unit) ** (len(per_rank) + 1) - 1) * per_rank.double().abs().mean(0)


def hook_name(hook) -> str:
    """Return the name by which ranks compare their hooks."""
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


def check_hook(hook, named_params: list) -> None:
    """Raise ValueError unless `hook` is a function that takes buckets of every parameter's dtype."""
    if not callable(hook):
        raise ValueError(f"hook must be a function (comm, memory) -> Work, got {hook!r}")
    dtypes = getattr(hook, "dtypes", None)
    for name, param in named_params if dtypes is not None else ():
        if param.dtype not in dtypes:
            takes = ", ".join(map(str, dtypes))
            raise ValueError(f"hook {hook_name(hook)} takes {takes}, but parameter {name} is {param.dtype}")
