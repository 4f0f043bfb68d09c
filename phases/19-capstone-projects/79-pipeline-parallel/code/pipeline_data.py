"""Two dimensions: every pipeline is one replica, and the same stage of all replicas is one data-parallel group."""

import flat
import torch
from comm import Comm, Work
from torch import nn


def split_grid(comm: Comm, num_stages: int) -> tuple[Comm, Comm]:
    """Return (the ranks of this pipeline, the ranks that hold the same stages), from one grid (replica, stage).

    Rank r is stage r mod N of replica r // N. All ranks call it. Raises ValueError, before any communication, unless
    the ranks can be dealt out: with their number and `num_stages`, or with that alone if it is no size.
    """
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages must be a whole number of at least 1, got {num_stages!r}")
    if comm.world_size % num_stages:
        raise ValueError(f"{comm.world_size} ranks cannot be pipelines of {num_stages} ranks each")
    grid = torch.arange(comm.world_size).view(-1, num_stages)  # (replica, stage)
    replica, stage = (grid == comm.rank).nonzero()[0].tolist()
    return comm.split(replica), comm.split(stage)


class StageGradients:
    """Averages a rank's stages over the replicas: give `launch` to a `Pipeline` as its `on_gradients`.

    A stage's gradients are views of one flat buffer a dtype (lesson 77), which leaves as soon as the stage has done its
    last backward, while earlier stages are still at work. All replicas begin with replica 0's parameters.
    """

    def __init__(self, stages: dict[int, nn.Module], comm: Comm):
        self.comm, self.units = comm.unchecked(), {}
        for number, stage in stages.items():
            flat.sync_module(stage, comm)
            plan = flat.plan_units(flat.trainable_parameters(stage), float("inf"))
            self.units[number] = [flat.FlatUnit(named, comm) for named in plan]
            for unit in self.units[number]:
                for slot, view in zip(unit.slots, unit.views, strict=True):
                    slot.param.grad = view

    def launch(self, stage: int) -> Work:
        """Begin to average a stage's gradients; they are the mean over replicas when the Work is done."""
        works = []
        for unit in self.units[stage]:
            for slot, view in zip(unit.slots, unit.views, strict=True):
                if slot.param.grad is None:  # set so by a user; it counts as zeros
                    slot.param.grad = view.zero_()
            unit.take_grads(range(len(unit.slots)))
            works.append(self.comm.all_reduce(unit.grad, "avg", async_op=True))

        def wait() -> None:
            for work in works:
                work.wait()

        return Work(f"gradients of stage {stage}", wait)
