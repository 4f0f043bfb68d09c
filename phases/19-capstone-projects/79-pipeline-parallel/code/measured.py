"""The measured timeline beside the predicted one: stage times from the stopwatch go into the simulator."""

import torch
from comm import Comm, TorchComm
from pipeline import Pipeline
from schedule import SCHEDULES, make_schedule, stages_per_rank
from simulator import Simulation, Slot, summarise, timeline
from stopwatch import Stopwatch, stage_times
from torch import nn
from torch.nn.functional import mse_loss

LAYERS = 8  # of a rank, whatever its number of stages: all schedules do the same work


def wide_stages(rank: int, count: int, width: int, seed: int) -> list[nn.Module]:
    """Return `count` stages of a rank: together LAYERS layers of Linear(width, width) and ReLU."""
    torch.manual_seed(seed + rank)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    size = len(layers) // count
    return [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(count)]


def wide_pipeline(comm: Comm, name: str, microbatches: int, rows: int, width: int, seed: int) -> Pipeline:
    """Return a pipeline of `wide_stages`."""
    count = stages_per_rank(name)
    stages = [stage.to(comm.device) for stage in wide_stages(comm.rank, count, width, seed)]
    shapes = [(rows, width)] * (count * comm.world_size)
    return Pipeline(stages, make_schedule(name, comm.world_size, microbatches), mse_loss, shapes, comm=comm)


def measure_steps(pipeline: Pipeline, microbatches, targets, steps: int = 5) -> list[list[Slot]]:
    """Return the measured timelines of some steps, shortest first, after one that is not measured."""
    found = []
    pipeline.stopwatch = Stopwatch(pipeline.comm)
    for _ in range(steps + 1):
        pipeline.step(microbatches, targets)
        found.append(pipeline.stopwatch.slots())
    pipeline.stopwatch = None
    return sorted(found[1:], key=lambda slots: summarise(slots).step)


def measure_worker(rank: int, world_size: int, microbatches: int, rows: int, width: int, seed: int) -> dict:
    """Be one rank: return {schedule: timeline of the shortest of some steps}, of all ranks."""
    comm, found = TorchComm(), {}
    data = torch.randn(2, microbatches * rows, width, generator=torch.Generator().manual_seed(seed)).to(comm.device)
    for name in SCHEDULES:
        pipeline = wide_pipeline(comm, name, microbatches, rows, width, seed)
        found[name] = measure_steps(pipeline, data[0].chunk(microbatches), data[1].chunk(microbatches))[0]
    return found


def predict(slots: list[Slot]) -> Simulation:
    """Simulate the schedule that was measured, with the median time of each stage's F, B and W. Messages take none."""
    times = stage_times(slots)
    orders: dict[int, list] = {}
    for slot in slots:
        orders.setdefault(slot.rank, []).append(slot.compute)
    return summarise(timeline(orders, times["F"], times["B"], times.get("W", 1)))
