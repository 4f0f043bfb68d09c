"""What the tests of lesson 77 share: virtual ranks, a communicator that takes notes, models with every difficulty."""

import torch
from mesh_comm import MeshComm
from ranks import RankError
from torch import nn
from virtual import VirtualCluster

EPS = torch.finfo(torch.float32).eps


class Fails(torch.autograd.Function):
    """The identity, whose backward ends with an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


class NotingComm(MeshComm):
    """Notes each all-reduce as ("all_reduce", elements) and each broadcast in `notes`, in the order of their launch."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.notes = []

    def all_reduce(self, x, op="sum", async_op=False):
        self.notes.append(("all_reduce", x.numel()))
        return super().all_reduce(x, op, async_op)

    def broadcast(self, x, src=0, async_op=False):
        self.notes.append(("broadcast", x.numel()))
        return super().broadcast(x, src, async_op)


def virtual(world_size, fn, *args, seed=0):
    """Return [fn(comm, *args) of each rank]."""
    return VirtualCluster(world_size, seed).run(lambda mesh: fn(NotingComm(mesh), *args))


def refusals(world_size, fn, *args):
    """Return each rank's ValueError as text; None where there was none."""

    def attempt(comm):
        try:
            fn(comm, *args)
        except ValueError as error:
            return str(error)
        return None

    return virtual(world_size, attempt)


def cause(world_size, fn, *args):
    """Return (rank, original exception) of a run that must fail."""
    try:
        virtual(world_size, fn, *args)
    except RankError as error:
        return error.rank, error.__cause__
    raise AssertionError("no rank failed")


def data(rank, step=0, rows=3, dim=5):
    """Return a rank's input of a step, (rows, dim): no two ranks or steps have the same."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_and_bound(per_rank):
    """Return the exact mean of the ranks' tensors and the bound 2(N-1) eps sum|x| / N around it (float64)."""
    stack = torch.stack([tensor.double() for tensor in per_rank])
    bound = 2 * (len(per_rank) - 1) * EPS * stack.abs().mean(0)
    return stack.mean(0), bound + EPS * stack.mean(0).abs()  # and the division rounds once


def backward(module, rank, step=0):
    """Run a plain forward and backward on a rank's data; return the loss."""
    loss = module(data(rank, step)).square().mean()
    loss.backward()
    return loss.detach()


def grads(module):
    """Return {name: copy of the gradient, or None}."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


class ThreeLayers(nn.Module):
    """Six parameters of six sizes, so that a bucket is known by its size: 40, 8, 48, 6, 18, 3 elements."""

    def __init__(self, seed=1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class Everything(nn.Module):
    """Tied, frozen and 0-dim parameters."""

    def __init__(self, seed=1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(5, 5, bias=False)
            self.middle = nn.Linear(5, 5)
            self.frozen = nn.Linear(5, 5)
            self.head = nn.Linear(5, 5)
            self.scale = nn.Parameter(torch.tensor(1.5))
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.scale * self.head(self.frozen(torch.tanh(self.middle(self.embed(x)))))


class Branches(nn.Module):
    """Two branches of the same shape; a forward uses those it is told to."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x, names):
        return sum(getattr(self, name)(x).square().mean() for name in names)
