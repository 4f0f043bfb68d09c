"""`--memory`: bytes of data parallelism and of stages 1 to 3, predicted and measured, as a table and a picture."""

from contextlib import nullcontext

import demo
import torch
from adam import AdamSettings, adam_step
from comm import TorchComm
from ddp import DistributedDataParallel
from memory import STAGES, live_bytes, logical_bytes, unit_bytes
from peak import Chain, PeakMeter, peak_bytes
from ranks import run_ranks
from torch import nn
from zero import ZeroOptimizer

WHAT = ("parameters", "gradients", "optimizer")
SIZE = {"vocab": 61, "dim": 36, "heads": 4, "blocks": 4, "seq": 16}  # most N do not divide it


def gpt(dtype: torch.dtype) -> nn.Module:
    """Return lesson 81's GPT, small."""
    from gpt import MiniGPT  # 81

    return MiniGPT(**SIZE).to(dtype)


def chain_of(module: nn.Module) -> Chain:
    """Describe a MiniGPT as `peak_bytes` wants it."""
    blocks = [sum(param.numel() for param in block.parameters()) for block in module.blocks]
    total = sum(param.numel() for param in module.parameters())
    tail = sum(param.numel() for part in (module.norm, module.head) for param in part.parameters())
    return Chain(blocks, total - sum(blocks), tail, next(module.parameters()).element_size())


class ReplicatedAdam:
    """Adam, whole on every rank, beside lesson 77's data parallelism. fp32: PyTorch's own would import torch._dynamo.

    Its buckets carry one flag a parameter with the gradients; they are counted as gradients.
    """

    def __init__(self, module: nn.Module, comm):
        self.call, self.steps = DistributedDataParallel(module, comm=comm), 0
        self.params = list(module.parameters())
        self.moments = [torch.zeros_like(param) for param in self.params for _ in range(2)]

    def step(self) -> None:
        """Update all parameters from the mean gradients."""
        self.steps += 1
        for index, param in enumerate(self.params):
            flat = (t.view(-1) for t in (param.data, param.grad, *self.moments[2 * index : 2 * index + 2]))
            adam_step(*flat, self.steps, AdamSettings(1e-2))

    def zero_grad(self) -> None:
        """Let gradients begin at zero, where they are."""
        for param in self.params:
            param.grad.zero_()

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return all tensors there are, as `ZeroOptimizer.held` does."""
        grads = [param.grad for param in self.params if param.grad is not None] + self._buckets()
        return {"parameters": self.params, "gradients": grads, "optimizer": self.moments}

    def memory(self) -> dict[str, tuple[int, int]]:
        """Return (logical, live) bytes, as `ZeroOptimizer.memory` does."""
        held = self.held()
        logical = held | {"gradients": self._buckets()}
        return {name: (logical_bytes(logical[name]), live_bytes(held[name])) for name in held}

    def _buckets(self) -> list[torch.Tensor]:
        return [bucket.memory for bucket in self.call.reducer.buckets]


def measure(rank: int, world_size: int, dtypes: list[torch.dtype]) -> dict:
    """Be one rank: two steps of each stage. Returns {(dtype, stage): (held after backward, after the step, peak)}."""
    comm, found = TorchComm(), {}
    tokens = torch.randint(SIZE["vocab"], (2, SIZE["seq"] + 1), generator=torch.Generator().manual_seed(rank))
    for dtype in dtypes:
        for stage in range(len(STAGES)) if dtype == torch.float32 else range(1, len(STAGES)):
            module = gpt(dtype)
            if stage:
                optimizer = ZeroOptimizer(module, world_size, rank, 1e-2, comm=comm, stage=stage)
                call, held = module, optimizer.held
            else:
                optimizer = ReplicatedAdam(module, comm)
                call, held = optimizer.call, optimizer.held
            meter = PeakMeter(held, list(module.parameters()))
            for when in (nullcontext(), meter):  # in the first step, gradients find their places
                with when:
                    logits = call(tokens[:, :-1])
                    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                    after_backward = optimizer.memory()
                    optimizer.step()
                after_step = optimizer.memory()
                optimizer.zero_grad()
            found[str(dtype)[6:], stage] = after_backward, after_step, meter.peak
    return found


def predicted(chain: Chain, world_size: int, stage: int, flags: int) -> tuple[dict[str, int], int]:
    """Return what the formulas say: bytes by what they are, and the peak. `flags`: bytes of DDP's, one a parameter."""
    if stage > 1:
        return unit_bytes(chain.units(), world_size, stage), peak_bytes(chain, world_size, stage)
    held = unit_bytes([(sum(numel for numel, _ in chain.units()), chain.size)], world_size, stage)  # one unit
    held["gradients"] += flags if stage == 0 else 0
    return held, sum(held.values())  # the same all the time


def report(args) -> int:
    """Measure on `args.world_size` ranks, print, draw; return the exit code."""
    logs, rows, claims = run_ranks(measure, args.world_size, [torch.float32, torch.bfloat16]), [], demo.Claims()
    exact, peaks, gone = True, True, True
    for (dtype, stage), _ in logs[0].items():
        module = gpt(getattr(torch, dtype))
        flags = 4 * sum(1 for _ in module.parameters())
        said, top = predicted(chain_of(module), args.world_size, stage, flags)
        for log in logs:
            after_backward, after_step, peak = log[dtype, stage]
            exact &= all(after_backward[name] == (said[name], said[name]) for name in WHAT)
            peaks &= peak == top
            gone &= stage < 2 or after_step["gradients"][1] == 0
        after_backward, _, peak = logs[0][dtype, stage]
        cells = [after_backward[name][1] for name in WHAT]
        rows.append([dtype, STAGES[stage], *cells, sum(cells), sum(said.values()), peak, top])
    total = sum(param.numel() for param in gpt(torch.float32).parameters())
    columns = ["", "bytes a rank", *WHAT, "sum", "formula", "peak", "predicted"]
    demo.table(
        columns, rows, f"MiniGPT of {total:,} parameters on {args.world_size} ranks; live storages after backward"
    )
    demo.say()
    claims.check("logical = live = formula, for parameters, gradients and state, on every rank", exact)
    claims.check("stages 2 and 3 hold no gradients after a step", gone)
    claims.check("the peak within a step is the predicted one", peaks)
    claims.check("the picture is drawn", draw(args, rows))
    return claims.verdict(f"memory on {args.world_size} ranks is the formulas'")


def draw(args, rows: list) -> bool:
    """Draw each row as a stacked bar with a mark at its peak. Returns whether there is a file."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes, bottom = figure.subplots(), [0.0] * len(rows)
    labels = [f"{name}\n{dtype}" for dtype, name, *_ in rows]
    for index, what in enumerate(WHAT):
        heights = [row[2 + index] / 1e6 for row in rows]
        axes.bar(labels, heights, bottom=bottom, label=what)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.plot(labels, [row[7] / 1e6 for row in rows], "k_", markersize=24, label="peak within a step")
    axes.set_ylabel("MB a rank")
    axes.set_title(f"after backward, {args.world_size} ranks")
    axes.legend()
    path = demo.out_dir(args) / "memory.png"
    figure.savefig(path)
    demo.say(f"\npicture: {path}")
    return path.stat().st_size > 0
