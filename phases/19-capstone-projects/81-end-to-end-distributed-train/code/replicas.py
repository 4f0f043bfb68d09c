"""`ReplicatedAdam`: data parallelism without sharding, with the same calls as lesson 78's ZeroOptimizer."""

from contextlib import nullcontext

import torch
from adam import AdamSettings, adam_step
from comm import Comm
from memory import live_bytes
from pipeline_data import StageGradients
from torch import nn


class ReplicatedAdam:
    """Every rank has the whole mean gradient (lesson 77's flat buffers, one all-reduce) and the whole state of Adam.

    Give `launch` to the pipeline: gradients leave when the stage has done its last backward.
    """

    def __init__(self, stage: nn.Module, number: int, lr: float, comm: Comm):
        gradients, self.comm = StageGradients({number: stage}, comm), comm.unchecked()
        self.launch, self.units, self.steps = gradients.launch, gradients.units[number], 0
        self.param_groups = [{"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}]
        for unit in self.units:
            unit.own_parameters()
        self.moments = [[torch.zeros_like(unit.data) for _ in range(2)] for unit in self.units]

    def no_sync(self):
        """Do nothing: gradients leave once a step anyhow."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Do nothing: the pipeline has launched it."""

    def step(self) -> None:
        """Adam, on all parameters at once."""
        self.steps += 1
        for unit, moments in zip(self.units, self.moments, strict=True):
            adam_step(unit.data, unit.grad, *moments, self.steps, AdamSettings.of(self.param_groups[0]))

    def zero_grad(self) -> None:
        """Fill the flat gradients, whose views the parameters' gradients are, with zeros."""
        for unit in self.units:
            unit.grad.zero_()

    def memory(self) -> dict[str, int]:
        """Return the bytes of live storages, by kind."""
        params = [slot.param for unit in self.units for slot in unit.slots]
        return {
            "parameters": live_bytes([unit.data for unit in self.units] + params),
            "gradients": live_bytes([unit.memory for unit in self.units] + [param.grad for param in params]),
            "optimizer": live_bytes([tensor for pair in self.moments for tensor in pair]),
        }

    def layout(self) -> list[dict]:
        """Return which elements of each flat unit this rank saves: the first replica all, the others none."""
        return [
            {
                "unit": f"unit{i}",
                "start": 0 if self.comm.rank == 0 else unit.numel,
                "end": unit.numel,
                "total": unit.numel,
            }
            for i, unit in enumerate(self.units)
        ]

    def state_dict(self) -> dict:
        """Return what this rank saves, the live tensors: all of it on the first replica, no elements on the others."""
        names = ("master", "exp_avg", "exp_avg_sq")
        tensors = [[unit.data, *moments] for unit, moments in zip(self.units, self.moments, strict=True)]
        return {
            "state": {
                place["unit"]: {
                    name: tensor[place["start"] : place["end"]] for name, tensor in zip(names, own, strict=True)
                }
                for place, own in zip(self.layout(), tensors, strict=True)
            },
            "steps": self.steps,
            "skipped_steps": 0,
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restore what `state_dict` returned; the other replicas get it from the first. All of them call it."""
        self.steps = saved["steps"]
        for (unit, own), whole, moments in zip(
            self.state_dict()["state"].items(), self.units, self.moments, strict=True
        ):
            for name, tensor in own.items():
                tensor.copy_(saved["state"][unit][name])
            for tensor in (whole.data, *moments):
                self.comm.broadcast(tensor)
