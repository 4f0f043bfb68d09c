"""Backward in two parts: input gradients at once, for the previous stage waits for them; weight gradients later.

While a stage runs under `WeightsLater`, each linear layer's backward computes the gradient of its input alone, and puts
down what its weight's gradient takes. What is no `F.linear` of a parameter (a norm, an embedding) is not split: its
gradients come with the input's.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode


class _Linear(torch.autograd.Function):
    """x W' + b, whose backward leaves the gradients of W and b for later."""

    @staticmethod
    def forward(ctx, x, weight, bias, later):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.weight, ctx.bias, x.detach(), gradient))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class WeightsLater(TorchFunctionMode):
    """In this context linear layers put the second part of their backward into the list `later`."""

    def __init__(self, later: list):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Replace F.linear where its weight is a parameter; under autocast, whose casts it would miss, leave it."""
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            parameters = isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
            if parameters and not torch.is_autocast_enabled(x.device.type):
                return _Linear.apply(x, weight, bias, self.later)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def add_weight_gradients(later: list) -> None:
    """Do the second part, with the same arithmetic as autograd: the gradients have the same bits. Empties `later`.

    Hooks on parameters do not run: autograd does not know of these gradients.
    """
    while later:
        weight, bias, x, gradient = later.pop(0)
        gradient, x = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])  # (rows, out), (rows, in)
        if weight.requires_grad:
            _accumulate(weight, gradient.t() @ x)
        if bias is not None and bias.requires_grad:
            _accumulate(bias, gradient.sum(0))


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _arguments(input, weight, bias=None):  # the names of F.linear
    return input, weight, bias
