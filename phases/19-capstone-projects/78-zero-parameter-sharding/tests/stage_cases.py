"""What the tests of stages 2 and 3 share: a model with blocks, and a training that keeps what can be compared."""

import copy

import torch
from torch import nn
from zero_cases import optimizer_for, virtual

STEP = {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 1}  # a Tower's, in stage 3


class Part(nn.Module):
    """A block of 5 x 5 matrices: a 0-dim gain, and one matrix that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.third.weight = self.second.weight
        self.gain = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 5) -> (batch, 5)."""
        return x + self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.gain


class Tower(nn.Module):
    """Three blocks between an inlet and an outlet; the first and the last block share `first.bias`, so the root has it.

    A part has 56 elements; without the shared bias 51. So the units of a depth of 3 have 51, 56, 51, and the root's 50.
    """

    def __init__(self, seed: int = 0, depth: int = 3):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inlet, self.outlet = nn.Linear(3, 5), nn.Linear(5, 4)
            self.parts = nn.ModuleList(Part() for _ in range(depth))
            self.scale = nn.Parameter(torch.rand(()) + 0.5)
        if depth > 1:
            self.parts[-1].first.bias = self.parts[0].first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3) -> (batch, 4)."""
        x = self.inlet(x)
        for part in self.parts:
            x = part(x)
        return self.outlet(x) * self.scale


def batch(step: int, rank: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    return module(batch(step, rank, dtype)).square().sum()


def named_grads(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter's gradient; zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def params_of(module: nn.Module, optimizer) -> dict[str, torch.Tensor]:
    with optimizer.gathered():
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def plain_copy(module: nn.Module, optimizer) -> nn.Module:
    """Return a model of one process with the same parameters, which nobody shards."""
    values = params_of(module, optimizer)
    with optimizer.gathered():
        other = copy.deepcopy(module)
    for each in other.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
    for name, param in other.named_parameters():
        param._post_accumulate_grad_hooks = None
        param.grad = None
        assert torch.equal(param, values[name])
    return other


def train(comm, stage, steps=3, build=Tower, micro=1, no_sync=True, before=None, clip=None, **settings):
    """Be one rank, from a seed of its own; returns what each step began with, its own gradients, shards, and costs."""
    module = build(seed=comm.rank)
    optimizer = optimizer_for(module, comm, stage=stage, **settings)
    log = {"params": [params_of(module, optimizer)], "own": [], "shards": [], "costs": [], "held": [], "after": []}
    log["names"] = [[(slot.name, slot.start, slot.end) for slot in unit.slots] for unit in optimizer.units]
    for step in range(steps):
        if before is not None:
            before(module, step)
        plain = plain_copy(module, optimizer)
        for part in range(micro):
            loss_of(plain, step + 50 * part, comm.rank).backward()
        log["own"].append(named_grads(plain))
        counted = comm.counters.calls.copy(), comm.counters.bytes.copy(), comm.counters.control_calls
        if no_sync:
            with optimizer.no_sync():
                for part in range(micro - 1):
                    loss_of(module, step + 50 * part, comm.rank).backward()
            loss_of(module, step + 50 * (micro - 1), comm.rank).backward()
        else:
            for part in range(micro):
                loss_of(module, step + 50 * part, comm.rank).backward()
        log["held"].append(optimizer.memory())
        if clip is not None:
            log.setdefault("norms", []).append(optimizer.clip_grad_norm_(1.0, clip).item())
        optimizer.reduce_gradients()
        log["shards"].append([shard.grad.clone() for shard in optimizer.shards])
        optimizer.step()
        log["after"].append(optimizer.memory())
        optimizer.zero_grad()
        calls, sent = comm.counters.calls - counted[0], comm.counters.bytes - counted[1]
        log["costs"].append((dict(calls), dict(sent), comm.counters.control_calls - counted[2]))
        log["params"].append(params_of(module, optimizer))
    return log


def mean_gradients(logs: list, step: int) -> dict[str, torch.Tensor]:
    """Put the shards of a step together: {name: mean gradient, flat}."""
    found = {}
    for number, places in enumerate(logs[0]["names"]):
        flat = torch.cat([log["shards"][step][number] for log in logs])
        found |= {name: flat[start:end] for name, start, end in places}
    return found


def step_of(module, optimizer, comm, step=0):
    """Train one step; return the collectives it took."""
    before = comm.counters.calls.copy()
    loss_of(module, step, comm.rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    return dict(comm.counters.calls - before)


def same_as_stage_1(test, worker, base=1):
    """`worker(comm, stage)` must return the same parameters in stages 1 (or another) and 3; returns them."""
    one, three = (virtual(2, worker, stage) for stage in (base, 3))
    for found in three:
        for name, expected in one[0].items():
            test.assertTrue(torch.equal(found[name], expected), name)
    return one[0]


def whole(optimizer) -> list[int]:
    """Return the numbers of the units whose parameters have memory."""
    return [i for i, unit in enumerate(optimizer.units) if unit.data.untyped_storage().nbytes()]
