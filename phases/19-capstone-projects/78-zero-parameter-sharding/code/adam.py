"""Adam on flat tensors, in place: the arithmetic of torch.optim.AdamW, in the same order, so that the bits agree.

`fused_adam_steps` is the same update by PyTorch's fused kernel: one pass over memory in place of seven, other rounding.
"""

import math
from dataclasses import dataclass

import torch

BLOCK = 1 << 18  # elements: on a CPU, 256K of each tensor stay in the cache from one operation to the next


@dataclass(frozen=True)
class AdamSettings:
    """Learning rate, decay rates of both moments, epsilon, and decoupled weight decay (0: plain Adam)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def check(self) -> None:
        """Raise ValueError for a value that is no number or outside its range."""
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not (pair and all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}")

    @classmethod
    def of(cls, group: dict) -> "AdamSettings":
        """Return the settings of a parameter group. Raises ValueError as `check` does: a schedule may have set them."""
        settings = cls(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        settings.check()
        return settings


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@torch.no_grad()
def adam_step(
    param: torch.Tensor,  # (n,), updated
    grad: torch.Tensor,  # (n,), of any dtype
    exp_avg: torch.Tensor,  # (n,), updated
    exp_avg_sq: torch.Tensor,  # (n,), updated
    step: int,
    settings: AdamSettings,
) -> None:
    """Update `param` and both moments; all three are of one dtype. `step` counts from 1.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for the decay.
    """
    block = BLOCK if param.is_cpu else max(1, param.numel())
    for parts in zip(*(tensor.split(block) for tensor in (param, grad, exp_avg, exp_avg_sq)), strict=True):
        _adam_block(*parts, step, settings)


def _adam_block(p, g, m, v, step: int, settings: AdamSettings) -> None:
    beta1, beta2 = settings.betas
    g = g.to(p.dtype)
    if settings.weight_decay:
        p.mul_(1 - settings.lr * settings.weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(settings.eps)
    p.addcdiv_(m, denominator, value=-settings.lr / (1 - beta1**step))


@torch.no_grad()
def fused_adam_steps(
    params: list[torch.Tensor],  # updated
    grads: list[torch.Tensor],  # of any dtype
    exp_avgs: list[torch.Tensor],  # updated
    exp_avg_sqs: list[torch.Tensor],  # updated
    step: torch.Tensor,  # () float, on the same device; counts from 1
    settings: AdamSettings,
    skip: torch.Tensor | None = None,  # (1,) float, on the same device: if it is 1, nothing changes
) -> None:
    """Update several tensors with one call. Nothing is read back: a GPU's queue need not run empty for it."""
    torch._fused_adamw_(  # what torch.optim.AdamW(fused=True) calls; the class would import torch._dynamo
        params,
        [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(params),
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )
