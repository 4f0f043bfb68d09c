"""Adam on flat tensors, in place: the arithmetic of torch.optim.AdamW, in the same order, so that the bits agree."""

import math
from dataclasses import dataclass

import torch

BLOCK = 1 << 16  # elements: 64K of each of five fp32 tensors stay in a core's cache from one operation to the next


@dataclass(frozen=True)
class AdamSettings:
    """Learning rate, decay rates of both moments, epsilon, and decoupled weight decay (0: plain Adam)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def check(self) -> None:
        """Raise ValueError for a value outside its range."""
        for name, value, good in (
            ("lr", self.lr, self.lr >= 0),
            ("betas", self.betas, len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)),
            ("eps", self.eps, self.eps >= 0),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0),
        ):
            if not good:
                raise ValueError(f"{name} is out of range: {value!r}")


@torch.no_grad()
def adam_step(param, grad, exp_avg, exp_avg_sq, step: int, settings: AdamSettings) -> None:
    """Update `param` and both moments, 1-d tensors of one length and dtype. `step` counts from 1.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for the decay.
    """
    blocks = (tensor.split(BLOCK if tensor.is_cpu else max(1, tensor.numel())) for tensor in (param, grad))
    moments = (tensor.split(BLOCK if tensor.is_cpu else max(1, tensor.numel())) for tensor in (exp_avg, exp_avg_sq))
    for p, g, m, v in zip(*blocks, *moments, strict=True):
        _adam_block(p, g, m, v, step, settings)


def _adam_block(p, g, m, v, step: int, settings: AdamSettings) -> None:
    beta1, beta2 = settings.betas
    if settings.weight_decay:
        p.mul_(1 - settings.lr * settings.weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(settings.eps)
    p.addcdiv_(m, denominator, value=-settings.lr / (1 - beta1**step))
