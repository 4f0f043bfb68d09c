"""The golden run: a recipe in one process, in a plain loop that knows nothing of ranks. All others must repeat it."""

import math

import torch
import torch.nn.functional as F
from recipe import IGNORED, Reader, Recipe


def golden_run(recipe: Recipe, microbatches: int = 1, dtype: torch.dtype = torch.float32) -> list[dict]:
    """Train; return a dict a step: its loss, gradient norm, and the squared gradient norm of each parameter.

    The loss of bfloat16's logits is computed in fp32, and Adam steps on masters in fp32, which the parameters follow.
    """
    from torch.optim.adam import adam  # torch's own, as a function

    model, reader, log = recipe.build().to(dtype), Reader(recipe), []
    params, wide = list(model.parameters()), torch.promote_types(dtype, torch.float32)
    masters = [param.detach().to(wide) for param in params]  # no copies where the parameters are as wide
    exp_avg, exp_avg_sq = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    counts = [torch.tensor(0.0) for _ in params]
    for step in range(1, recipe.steps + 1):
        tokens, targets = reader.batch(step)
        count, loss = (targets != IGNORED).sum().item(), 0.0
        size = math.ceil(recipe.rows / microbatches)
        for x, y in zip(tokens.split(size), targets.split(size), strict=True):
            logits = model(x).to(wide).flatten(0, 1)
            nats = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
            part = nats / count
            part.backward()
            loss += part.item()
        grads = [param.grad for param in params]
        squares = [grad.double().square().sum().item() for grad in grads]
        norm = math.sqrt(sum(squares))
        for grad in grads:
            grad *= min(1.0, recipe.clip / (norm + 1e-6))
        settings = {"beta1": 0.9, "beta2": 0.999, "lr": recipe.learning_rate(step), "weight_decay": 0.0, "eps": 1e-8}
        settings |= {"amsgrad": False, "maximize": False, "foreach": False}
        with torch.no_grad():
            adam(masters, [grad.to(wide) for grad in grads], exp_avg, exp_avg_sq, [], counts, **settings)
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        model.zero_grad()
        log.append({"loss": loss, "norm": norm, "squares": squares})
    return log
