"""What several tests of lesson 81 need: runs in the virtual cluster, and the same training in a plain loop."""

from dataclasses import dataclass

import torch
from mesh_comm import MeshComm
from corpus import Batches
from train import Job, train
from virtual import VirtualCluster


def virtual(world_size: int, job: Job, seed: int = 0) -> list[dict]:
    """Run the job on virtual ranks; return each rank's log."""
    torch.set_num_threads(1)
    cluster = VirtualCluster(world_size, seed)
    return cluster.run(lambda mesh: train(mesh.rank, world_size, job, MeshComm(mesh)))


def outcomes(log: dict) -> list[dict]:
    """All that a run is, but for how long it took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in log["rows"]]


@dataclass(frozen=True)
class DoubleJob(Job):
    """A job in fp64: rounding is 2^-29 times that of fp32, everything else is the same."""

    def build(self):
        return super().build().double()


def plain_loop(job: Job, world_size: int) -> tuple[list[float], list[float], torch.Tensor]:
    """Train in one process, on the global batches of `world_size` ranks; return (losses, gradient norms, parameters).

    Parameters are views of one vector, so that torch's own Adam, as a function, is one call.
    """
    from torch.optim.adam import adam

    model, batches = job.build(), Batches(job.corpus.train, job.batch * world_size, job.seq, job.seed)
    params = list(model.parameters())
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    for param, view in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = view.view_as(param)
    exp_avg, exp_avg_sq, count = torch.zeros_like(flat), torch.zeros_like(flat), torch.tensor(0.0)
    losses, norms = [], []
    for step in range(1, job.steps + 1):
        sequences = batches.batch(step - 1)
        loss = model.loss(sequences[:, :-1], sequences[:, 1:])
        grad = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, params)])
        norm = torch.linalg.vector_norm(grad)
        grad *= (job.clip / (norm + 1e-6)).clamp(max=1.0)
        settings = {"beta1": 0.9, "beta2": 0.999, "lr": job.lr * min(1.0, step / job.warmup), "weight_decay": 0.0}
        more = {"amsgrad": False, "maximize": False, "eps": 1e-8, "foreach": False}
        adam([flat], [grad], [exp_avg], [exp_avg_sq], [], [count], **settings, **more)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, flat


class Keeping(DoubleJob):
    """A job whose models can be looked at afterwards."""

    models: list = []  # noqa: RUF012  of all such jobs; a test clears it

    def build(self):
        self.models.append(super().build())
        return self.models[-1]
