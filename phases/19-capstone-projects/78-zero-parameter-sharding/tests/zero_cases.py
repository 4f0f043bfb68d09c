"""What the tests of lesson 78 share: odd models, gradients known in advance, and references to compare with."""

import json
import logging

import torch
from comm import Comm
from mesh_comm import MeshComm
from flat import gather_flat_params
from ranks import RankError
from torch import nn
from torch.optim.adam import adam
from virtual import VirtualCluster
from zero import ZeroOptimizer

LR = 1e-2
logging.getLogger("zero").addHandler(logging.NullHandler())  # a skipped step is no news to a test


class Odd(nn.Module):
    """46 parameters: a tied weight, a 0-dim one, biases; 46 is divisible by 1 and 2 only, among the N tested."""

    def __init__(self, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.left, self.right = (
                nn.Linear(3, 5),
                nn.Linear(5, 5, bias=False),
                nn.Linear(5, 5, bias=False),
            )
            self.right.weight = self.left.weight
            self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3) -> (batch, 5)."""
        return self.right(torch.tanh(self.left(torch.tanh(self.first(x))))) * self.scale


class Flat(nn.Module):
    """One vector parameter of given values."""

    def __init__(self, values: torch.Tensor):
        super().__init__()
        self.vector = nn.Parameter(values.clone())


def virtual(world_size: int, worker, *args) -> list:
    """Run `worker(comm, *args)` on virtual ranks; an error of a rank is raised as it was."""
    try:
        return VirtualCluster(world_size).run(lambda mesh: worker(MeshComm(mesh), *args))
    except RankError as error:
        raise error.__cause__ from None


def optimizer_for(module: nn.Module, comm: Comm, lr: float = LR, **settings) -> ZeroOptimizer:
    """Build a ZeroOptimizer for this rank."""
    return ZeroOptimizer(module, comm.world_size, comm.rank, lr, comm=comm, **settings)


def known_gradient(numel: int, rank: int, step: int) -> torch.Tensor:
    """Return a gradient (numel,) that differs at every rank, step and position; its scale differs by element, too."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator) * torch.logspace(-3, 1, numel)


def put_gradients(module: nn.Module, rank: int, step: int) -> None:
    """Give every trainable parameter its part of the known gradient, as new tensors, as autograd would."""
    params = [param for param in module.parameters() if param.requires_grad]
    flat = known_gradient(sum(param.numel() for param in params), rank, step)
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view(param.shape).to(param.dtype)


def mean_and_bound(grads: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact mean in float64, and how far fp32 may be from it: N-1 sums and a division round once each."""
    exact = torch.stack(grads).double()
    return exact.mean(0), len(grads) * torch.finfo(torch.float32).eps * exact.abs().mean(0)


class TorchAdam:
    """torch's own functional Adam(W) on one flat tensor."""

    def __init__(self, param: torch.Tensor, lr: float = LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.param, self.count = param.clone(), torch.zeros(())
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
        self.options = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> torch.Tensor:
        """Update and return the parameters."""
        fixed = {"amsgrad": False, "maximize": False, "foreach": False, "decoupled_weight_decay": True}
        state = [[self.param], [grad], [self.exp_avg], [self.exp_avg_sq], [], [self.count]]
        adam(*state, **fixed, **self.options)
        return self.param.clone()


def refusals(world_size: int, worker, *args) -> list:
    """Return what each rank's worker raised as ValueError (the message), or None where it did not."""

    def guarded(comm, *args):
        try:
            worker(comm, *args)
        except ValueError as error:
            return str(error)

    return virtual(world_size, guarded, *args)


def snapshot(module: nn.Module, optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """Return copies of everything that a step may change."""
    state = [tensor.clone() for shard in optimizer.shards for tensor in shard.tensors().values()]
    return [gather_flat_params(module), *state, torch.tensor([optimizer.steps])]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    """Compare bit for bit (NaN equals NaN)."""
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(one, two, strict=True)
    )


def copy_of(state):
    """Copy a state as a file would: tensors cloned, the rest through JSON."""
    tensors = {unit: {name: t.clone() for name, t in named.items()} for unit, named in state["state"].items()}
    return json.loads(json.dumps({key: value for key, value in state.items() if key != "state"})) | {"state": tensors}
