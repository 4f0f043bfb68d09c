"""The loop over a grid: any plan, the same run."""

import math
from pathlib import Path

from comm import Comm
from grid import Grid
from grid_checkpoint import GridCheckpoints
from mesh import must_agree
from part import Part
from plan import Plan
from recipe import Reader, Recipe
from train import NonFiniteError


def train_on_grid(
    comm: Comm, plan: Plan, recipe: Recipe, save_at: tuple[int, ...] = (), folder: Path | None = None, resume=None
) -> dict:
    """Be one rank of a plan; return its log: a row a step, and the bytes that it holds before an update.

    After the steps in `save_at` all ranks save into `folder`/step_<n>; `resume` is such a checkpoint to go on from.

    Raises ValueError if the model cannot be cut so (before any communication), or, on every rank, if they disagree on
    plan or recipe; NonFiniteError on every rank, before any parameter has changed; CheckpointError on every rank.
    """
    plan.check(recipe)
    when = {"save_at": save_at, "resume": None if resume is None else str(resume)}
    must_agree(comm, "plan and recipe", plan.facts() | recipe.facts() | when)
    part, reader, rows = Part(Grid(comm, plan.dp, plan.pp, plan.tp), plan, recipe), Reader(recipe), []
    checkpoints = GridCheckpoints(part, reader)
    start = 0 if resume is None else checkpoints.load(resume)
    for step in range(start + 1, recipe.steps + 1):
        before = part.sent()
        share = part.backward(*reader.batch(step))
        loss, squares = part.totals(share)
        norm = math.sqrt(sum(squares))
        check_finite(step, loss, dict(zip(part.names, squares, strict=True)))
        part.scale_gradients(min(1.0, recipe.clip / (norm + 1e-6)))
        held = part.memory()
        part.optimizer.param_groups[0]["lr"] = recipe.learning_rate(step)
        part.optimizer.step()
        part.optimizer.zero_grad()
        sent = {name: size - before.get(name, 0) for name, size in part.sent().items()}
        rows.append({"loss": loss, "norm": norm, "squares": squares, "sent": sent, "held": held})
        if step in save_at:
            checkpoints.save(Path(folder) / f"step_{step}", step)
    return {"place": part.grid.place, "rows": rows}


def check_finite(step: int, loss: float, squares: dict[str, float]) -> None:
    """Raise NonFiniteError if a number is not finite. All ranks have the same, so all raise, or none."""
    guilty = [name for name, square in squares.items() if not math.isfinite(square)]
    if guilty or not math.isfinite(loss):
        what = f"the gradient of {', '.join(guilty[:3])}" if guilty else f"the loss, {loss},"
        raise NonFiniteError(f"step {step}: {what} is not finite; no parameter was changed")
