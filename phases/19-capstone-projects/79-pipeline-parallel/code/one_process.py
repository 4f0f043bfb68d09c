"""The same training without a pipeline, to compare with."""

import torch
from stage_mlp import SEED, StageMLP, make_batch, sgd_step
from torch import nn
from torch.nn.functional import mse_loss


def train_one_process(
    steps: int, batch: int, microbatches: int, seed: int = SEED, device: str | torch.device = "cpu"
) -> tuple[list[float], float, StageMLP]:
    """Train the whole model, one microbatch after the other; return (losses, norm, model).

    Each number is computed from the same numbers in the same order as in a pipeline, so the results have the same bits.
    """
    model, losses = StageMLP(0, 1, seed=seed).to(device), []
    for step in range(steps):
        x, target = (t.to(device) for t in make_batch(step, batch * microbatches, seed))
        for microbatch, its_target in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            loss = mse_loss(model(microbatch), its_target)
            (loss / microbatches).backward()
            losses.append(loss.item())
        sgd_step(model)
    square = sum(p.detach().double().square().sum() for p in model.parameters())
    return losses, square.sqrt().item(), model


def full_batch_gradients(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the mean loss over all rows at once."""
    return list(torch.autograd.grad(mse_loss(model(x), target), list(model.parameters())))


def whole_numbers(stage: nn.Module) -> nn.Module:
    """Make a stage's parameters whole numbers, in double precision, in place.

    With whole inputs every sum is exact, in any order (below 2^53), and so is a mean over a power of two of elements:
    two computations of one gradient must then agree bit by bit, or one of them is wrong.
    """
    stage.double()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(2).round_()
    return stage


def whole_batch(rows: int, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target of `make_batch`, as whole numbers in double precision."""
    x, target = make_batch(0, rows, seed)
    return (2 * x).round().double(), (8 * target).round().double()
