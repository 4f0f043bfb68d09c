"""The model that is cut into stages, its data, and its training over a pipeline."""

import torch
from balance import equal_bounds
from comm import Comm, TorchComm
from instructions import check_sizes
from pipeline import Pipeline
from ranks import run_ranks
from schedule import check_name, make_schedule, stages_per_rank
from torch import nn
from torch.nn.functional import mse_loss

SEED = 7
LEARNING_RATE = 0.05
SIZES = (16, 24, 40, 32, 24, 40, 32, 24, 4)  # of 8 layers; unequal, so that a message on the wrong way does not fit


class StageMLP(nn.Module):
    """Stage `stage` of a ReLU network whose layers are dealt out in order; stage 0 of 1 is the whole network.

    Each layer draws its weights from a seed of its own: however the model is cut, the layers have the same bits.
    """

    def __init__(self, stage: int, num_stages: int, sizes: tuple[int, ...] = SIZES, seed: int = SEED):
        super().__init__()
        check_stages(num_stages, sizes)
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < num_stages:
            raise ValueError(f"stage must be from 0 to {num_stages - 1}, got {stage!r}")
        self.first, self.last = stage_bounds(stage, num_stages, sizes)
        self.is_head = self.last == len(sizes) - 1
        self.layers = nn.ModuleList(_layer(i, sizes, seed) for i in range(self.first, self.last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, sizes[first]) -> (rows, sizes[last])."""
        for layer in self.layers:
            x = layer(x)
            if layer is not self.layers[-1] or not self.is_head:
                x = torch.relu(x)
        return x


def _layer(index: int, sizes, seed: int) -> nn.Linear:
    layer = nn.Linear(sizes[index], sizes[index + 1])
    generator = torch.Generator().manual_seed(1000 * seed + index)
    with torch.no_grad():
        layer.weight.normal_(0, (2 / sizes[index]) ** 0.5, generator=generator)  # He et al., 2015
        layer.bias.normal_(0, 0.1, generator=generator)
    return layer


def stage_bounds(stage: int, num_stages: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, int]:
    """Return (first, one past the last) of the layers of a stage; stages differ by at most one layer.

    Raises ValueError if there is no such stage.
    """
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, {num_stages}), got {stage}")
    return equal_bounds(len(sizes) - 1, num_stages)[stage]


def stage_shapes(num_stages: int, batch: int, sizes: tuple[int, ...] = SIZES) -> list[tuple[int, int]]:
    """Return the input shape of each stage for one microbatch of `batch` rows."""
    check_sizes(batch=batch)
    return [(batch, sizes[stage_bounds(stage, num_stages, sizes)[0]]) for stage in range(num_stages)]


def check_stages(num_stages: int, sizes: tuple[int, ...] = SIZES) -> None:
    """Raise ValueError unless each stage gets at least one layer."""
    equal_bounds(len(sizes) - 1, num_stages)


def make_batch(step: int, rows: int, seed: int = SEED, sizes: tuple[int, ...] = SIZES):
    """Return input (rows, sizes[0]) and target (rows, sizes[-1]) of a step: a function of (seed, step, rows) only."""
    check_sizes(rows=rows)
    teacher = torch.randn(sizes[0], sizes[-1], generator=torch.Generator().manual_seed(seed))
    x = torch.randn(rows, sizes[0], generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + step))
    return x, torch.tanh(x @ teacher / sizes[0] ** 0.5)


def sgd_step(module: nn.Module, lr: float = LEARNING_RATE) -> None:
    """Plain SGD: move each parameter against its gradient, then set the gradient to zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
                parameter.grad.zero_()


def build_pipeline(
    comm: Comm, batch: int, microbatches: int, schedule: str = "gpipe", seed: int = SEED, **options
) -> Pipeline:
    """Return a rank's part of the pipeline over the MLP; `batch` is rows per microbatch, `options` are Pipeline's."""
    num_stages = comm.world_size * stages_per_rank(schedule)
    ours = range(comm.rank, num_stages, comm.world_size)
    stages = [StageMLP(stage, num_stages, seed=seed).to(comm.device) for stage in ours]
    program = make_schedule(schedule, comm.world_size, microbatches)
    return Pipeline(stages, program, mse_loss, stage_shapes(num_stages, batch), comm=comm, **options)


def train_stage(pipeline: Pipeline, steps: int, seed: int = SEED) -> tuple[list[float], float]:
    """Train; return (losses of all microbatches of all steps, final norm of the whole model), equal on all ranks."""
    comm, stages, losses = pipeline.comm, pipeline.stages.values(), []
    rows = pipeline.shapes[0][0] * pipeline.num_microbatches
    for step in range(steps):
        x, target = (t.to(comm.device) for t in make_batch(step, rows, seed))
        losses += pipeline.step(x.chunk(pipeline.num_microbatches), target.chunk(pipeline.num_microbatches)).tolist()
        for stage in stages:
            sgd_step(stage)
    square = sum(p.detach().double().square().sum() for stage in stages for p in stage.parameters()).reshape(1)
    comm.all_reduce(square)
    return losses, square.sqrt().item()


def run_pipeline(
    steps: int,
    batch: int,
    microbatches: int,
    num_stages: int = 2,
    schedule: str = "gpipe",
    backend: str = "gloo",
    seed: int = SEED,
) -> dict[int, tuple[list[float], float]]:
    """Train the MLP over `num_stages` processes; return {rank: (losses, norm)}.

    `batch` is rows per microbatch. `losses` holds steps x microbatches values, in order, the same on every rank; `norm`
    is the final norm of all parameters of the whole model, the same on every rank. Interleaved, each process holds two
    stages. Raises ValueError for a size below 1, more stages than layers, or an unknown schedule, before any process
    starts.
    """
    check_sizes(steps=steps, batch=batch, microbatches=microbatches, num_stages=num_stages)
    check_name(schedule)
    check_stages(num_stages * stages_per_rank(schedule))
    results = run_ranks(_worker, num_stages, steps, batch, microbatches, schedule, seed, backend=backend)
    return dict(enumerate(results))


def _worker(rank, world_size, steps, batch, microbatches, schedule, seed):
    return train_stage(build_pipeline(TorchComm(), batch, microbatches, schedule, seed), steps, seed)
