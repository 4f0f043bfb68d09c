"""Lesson 78: Adam, then gradients and parameters, cut into N shards: one process's training in a part of its memory."""

import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import torch
from comm import TorchComm  # 76: the interface to torch.distributed
from endings import say_why  # 76: a line in the place of a traceback
from given_flags import allow_only  # 76: a flag that would do nothing is refused
from flat import (  # 77: flat buffers whose views are the parameters
    flat_param_numel,
    gather_flat_grads,
    gather_flat_params,
    scatter_flat_to_params,
)
from memory import STAGES, memory_table, shard_bounds, unit_bytes  # 78: what the formulas say
from ranks import run_ranks  # 76: N processes and their results
from torch.optim.adam import adam  # PyTorch's own, to compare with
from toy import MiniMLP, global_batch, rank_slice  # 77: a small model and its data
from zero import ZeroOptimizer  # 78: the sharded optimizer

__all__ = [
    "MiniMLP",
    "ZeroOptimizer",
    "flat_param_numel",
    "gather_flat_grads",
    "gather_flat_params",
    "memory_table",
    "run_zero",
    "scatter_flat_to_params",
    "shard_bounds",
]

ROWS, LR, SEED = 8, 1e-2, 7


def mse(module, batch, rank, world_size):
    """Return the loss on one rank's rows of a global batch."""
    x, y = (rank_slice(tensor, rank, world_size).to(next(module.parameters()).device) for tensor in batch)
    return torch.nn.functional.mse_loss(module(x), y)


def train(rank: int, world_size: int, steps: int, seed: int = SEED, stage: int = 1) -> dict:
    """Be one rank: begin with a model of its own seed (the optimizer makes all equal), take `steps` steps."""
    comm = TorchComm()
    module = MiniMLP(seed=seed + rank).to(comm.device)
    settings = {"fused": False, "stage": stage}  # not fused on a GPU, too: bits are compared
    optimizer = ZeroOptimizer(module, world_size, rank, LR, comm=comm, **settings)
    log = {"losses": [], "grads": [], "params": [read(module, optimizer)], "calls": Counter(), "bytes": Counter()}
    for step in range(steps):
        before = comm.counters.calls.copy(), comm.counters.bytes.copy()
        loss = mse(module, global_batch(step, ROWS * world_size, seed=seed), rank, world_size)
        loss.backward()
        held = optimizer.memory()
        optimizer.reduce_gradients()  # step() would do it: here, to look at the mean gradient first
        log["grads"].append([shard.grad.clone() for shard in optimizer.shards])
        optimizer.step()
        optimizer.zero_grad()
        log["calls"] += comm.counters.calls - before[0]
        log["bytes"] += comm.counters.bytes - before[1]
        log["losses"].append(loss.item())
        log["params"].append(read(module, optimizer))
    return log | {
        "state": [{name: t.clone() for name, t in shard.tensors().items()} for shard in optimizer.shards],
        "places": [[(slot.name, slot.start, slot.end) for slot in unit.slots] for unit in optimizer.units],
        "shard_bytes": optimizer.shard_bytes(),
        "memory": optimizer.memory(),
        "after backward": held,
    }


def read(module, optimizer) -> torch.Tensor:
    """Return a copy of all parameters, which stage 3 has to gather for that."""
    with optimizer.gathered():
        return gather_flat_params(module)


def whole(logs: list, part) -> torch.Tensor:
    """Put together what all ranks' shards hold; `part(log)` gives a tensor a unit. In the module's order, unpadded."""
    units, found = [torch.cat(each) for each in zip(*(part(log) for log in logs), strict=True)], {}
    for flat, places in zip(units, logs[0]["places"], strict=True):
        found |= {name: flat[start:end] for name, start, end in places}
    return torch.cat([found[name] for name, _ in MiniMLP().named_parameters()])


def run_zero(world_size: int, steps: int, backend: str = "gloo") -> dict:
    """Train on `world_size` ranks; return {rank: (its losses, final parameter norm, bytes of its optimizer state)}."""
    logs = run_ranks(train, world_size, steps, backend=backend)
    return {rank: (log["losses"], log["params"][-1].norm().item(), log["shard_bytes"]) for rank, log in enumerate(logs)}


class TorchAdam:
    """PyTorch's own Adam on one flat tensor (its functional form: the class would import torch._dynamo, 1.2 s)."""

    def __init__(self, param: torch.Tensor):
        self.param, self.count = param, torch.zeros(())
        self.moments = torch.zeros_like(param), torch.zeros_like(param)

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> torch.Tensor:
        """Update and return the parameters."""
        options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
        exp_avg, exp_avg_sq = self.moments
        adam([self.param], [grad], [exp_avg], [exp_avg_sq], [], [self.count], foreach=False, lr=LR, **options)
        return self.param


def mean_gradient(module, step: int, world_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of all ranks' gradients, computed here one after the other, and how far a sum may round.

    Two orders of a sum of N numbers differ by at most 2 (N-1) eps sum|g|; here it is divided by N.
    """
    grads = []
    for rank in range(world_size):
        module.zero_grad()
        mse(module, global_batch(step, ROWS * world_size, seed=seed), rank, world_size).backward()
        grads.append(gather_flat_grads(module).cpu())
    eps = torch.finfo(torch.float32).eps
    return sum(grads) / world_size, 2 * (world_size - 1) * eps * sum(g.abs() for g in grads) / world_size


def one_process(steps: int, world_size: int, seed: int, device: str) -> list[torch.Tensor]:
    """Train on the same global batches in one process with torch's Adam; return the parameters after each step."""
    module, params = MiniMLP(seed=seed).to(device), []
    optimizer = TorchAdam(gather_flat_params(module))
    for step in range(steps):
        module.zero_grad()
        mse(module, global_batch(step, ROWS * world_size, seed=seed), 0, 1).backward()  # the whole batch at once
        scatter_flat_to_params(module, optimizer.step(gather_flat_grads(module)))
        params.append(gather_flat_params(module).cpu())
    return params


def check_bits(claims: demo.Claims, logs: list) -> None:
    """All ranks hold the same parameters: compared as bits, not only as norms."""
    rows = [[rank, log["losses"][-1], log["params"][-1].double().norm().item()] for rank, log in enumerate(logs)]
    title = f"after {len(logs[0]['losses'])} steps on {len(logs)} ranks"
    demo.table(["rank", "last loss (its rows)", "parameter norm"], rows, title)
    equal = all(torch.equal(a, b) for log in logs for a, b in zip(log["params"], logs[0]["params"], strict=True))
    claims.check("after every step all ranks hold the same bits", equal)


def check_gradients(claims: demo.Claims, logs: list, seed: int, device: str) -> None:
    """The shards' gradients are the mean over ranks. Adam would hide a sum: it divides a common factor out."""
    module, within = MiniMLP(seed=seed).to(device), []
    for step in range(len(logs[0]["grads"])):
        scatter_flat_to_params(module, logs[0]["params"][step])
        mean, bound = mean_gradient(module, step, len(logs), seed)
        shards = whole(logs, lambda log, step=step: log["grads"][step])
        within.append(bool(((shards - mean).abs() <= bound).all()))
    claims.check("gradients are the mean over ranks, within 2(N-1) eps sum|g|/N", all(within))


def check_adam(claims: demo.Claims, logs: list, device: str) -> None:
    """Fed the ranks' own mean gradients, torch's Adam gives the same bits: sharding moves state, not arithmetic."""
    optimizer, equal = TorchAdam(logs[0]["params"][0].to(device)), True
    for step in range(len(logs[0]["grads"])):
        grad = whole(logs, lambda log, step=step: log["grads"][step]).to(device)
        equal &= torch.equal(optimizer.step(grad).cpu(), logs[0]["params"][step + 1])
    for name, theirs in zip(("exp_avg", "exp_avg_sq"), optimizer.moments, strict=True):
        ours = whole(logs, lambda log, name=name: [state[name] for state in log["state"]])
        equal &= torch.equal(ours, theirs.cpu())
    claims.check("sharded Adam = torch's Adam on the same gradients, bit for bit, moments too", equal)


def check_against_torch(claims: demo.Claims, logs: list, seed: int, device: str) -> None:
    """The trajectory is the one of torch.optim.Adam in a single process on the same global batches."""
    steps = len(logs[0]["losses"])
    reference = one_process(steps, len(logs), seed, device)
    worst = [(a - b).abs().max().item() for a, b in zip(reference, logs[0]["params"][1:], strict=True)]
    claims.check("parameters follow torch's Adam in one process", max(worst) < 2e-6, f"max |a-b| = {max(worst):.2g}")


def check_memory(claims: demo.Claims, logs: list, stage: int) -> None:
    """Bytes held after backward are the formulas', counted from live storages; after a step gradients are gone."""
    sizes = [places[-1][2] for places in logs[0]["places"]]
    expected = unit_bytes([(numel, 4) for numel in sizes], len(logs), stage)
    rows = [[what, logs[0]["after backward"][what][1], expected[what]] for what in expected]
    title = f"bytes on rank 0 after backward, {STAGES[stage]}; fp32 parameters are their own master"
    demo.table(["", "live storages", "formula"], rows, title)
    demo.say()
    exact = all(log["after backward"][what] == (size,) * 2 for log in logs for what, size in expected.items())
    claims.check("parameters, gradients and state are the formulas', logical and live, on every rank", exact)
    chunks = sum(shard_bounds(numel, len(logs), 0)[2] for numel in sizes)
    state = all(log["shard_bytes"] == 12 * chunks for log in logs)
    beside = all(log["memory"]["optimizer"][1] == 12 * chunks - 4 * chunks for log in logs)
    claims.check("optimizer state is 12 ceil(P/N) bytes a rank, 8 of them beside the parameters", state and beside)
    if stage > 1:
        freed = all(log["memory"]["gradients"][1] == 0 for log in logs)
        claims.check("gradients are freed, not zeroed: none has memory after a step", freed)


def check_cost(claims: demo.Claims, logs: list, stage: int) -> None:
    """Collectives and bytes sent are the formulas'. All of MiniMLP is in blocks: its root has no unit."""
    world_size, steps, calls, sent = len(logs), len(logs[0]["losses"]), logs[0]["calls"], logs[0]["bytes"]
    sizes = [places[-1][2] for places in logs[0]["places"]]
    gathers = 2 if stage == 3 else 1
    once = calls["reduce_scatter"] == steps * len(sizes) and calls["all_gather"] == gathers * steps * len(sizes)
    words = {
        1: "one reduce-scatter and one all-gather a step",
        2: "one reduce-scatter and one all-gather a unit and step",
        3: "one reduce-scatter and two all-gathers a block and step",
    }
    claims.check(words[stage], once, f"{steps} steps, {len(sizes)} unit{'s' * (len(sizes) > 1)}")
    padded = 4 * world_size * steps * sum(shard_bounds(numel, world_size, 0)[2] for numel in sizes)
    same = sent["reduce_scatter"] == padded and sent["all_gather"] == gathers * padded
    times = "" if gathers == 1 else ", gathered twice"
    detail = f"{sent['all_gather']:,} = {gathers * padded:,} in all"
    claims.check(f"each of 4P bytes, padded to N chunks{times}", same, detail)


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--steps", type=demo.positive, default=10, help="training steps (default: 10)")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=1, help="stage of ZeRO (default: 1)")
    parser.add_argument("--size", choices=["124M", "774M", "tiny"], help="with --bench: GPT-2 of this size, for GPUs")
    parser.add_argument("--batch", type=demo.positive, default=4, help="with --size: sequences a rank (default: 4)")
    parser.add_argument("--bucket-mb", type=demo.positive, default=100, help="with --size: MiB a unit (default: 100)")
    parser.add_argument("--stages", action="store_true", help="with --bench: stages 2 and 3 beside FSDP2")
    parser.add_argument("--memory", action="store_true", help="bytes of DDP and of stages 1 to 3, and their peaks")
    args = demo.parse(parser, lesson=78)
    if args.bench and args.memory:
        parser.error("--bench and --memory are programs of their own: one at a time")
    if (args.memory or (args.stages and not args.size)) and args.backend != "gloo":
        parser.error("--memory, and --stages without --size, run on CPU ranks: leave --backend nccl out")
    if args.memory:
        from memory_demo import report as program  # 78: predicted and measured

        mode, used = "--memory", "memory"
    elif args.bench and args.size:
        from zero_gpu_bench import bench as program  # 78: GPT-2 on GPUs, against torch's own

        mode, used = "--bench --size", "bench size batch bucket_mb stages"
    elif args.bench and args.stages:
        from zero_stages_bench import bench as program  # 78: 10M parameters, against FSDP2

        mode, used = "--bench --stages without --size", "bench stages"
    elif args.bench:
        from zero_bench import bench as program  # 78: 10M parameters, against torch's own

        mode, used = "--bench without --size", "bench"
    else:
        mode, program, used = "this lesson without --bench", tell, "steps stage seed"
    allow_only(parser, mode, f"world_size backend out {used}")
    return say_why(lambda: program(args))


def tell(args) -> int:
    """Tell the story, a claim after the other; return the exit code."""
    device = "cuda" if args.backend == "nccl" else "cpu"
    claims = demo.Claims()
    logs = run_ranks(train, args.world_size, args.steps, args.seed, args.stage, backend=args.backend)
    check_bits(claims, logs)
    check_gradients(claims, logs, args.seed, device)
    check_adam(claims, logs, device)
    check_against_torch(claims, logs, args.seed, device)
    check_memory(claims, logs, args.stage)
    check_cost(claims, logs, args.stage)
    demo.say()
    total = logs[0]["params"][0].numel()
    demo.say(f"model state of P = {total:,} parameters in fp32 on {args.world_size} ranks, masters apart")
    demo.say(memory_table(total, args.world_size, args.stage))
    return claims.verdict(f"{STAGES[args.stage]} on {args.world_size} ranks is Adam in one process")


if __name__ == "__main__":
    sys.exit(main())
