"""Lesson 78: Adam whose state is cut into N shards: the training of one process, in a fraction of its memory."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import torch
from comm import TorchComm  # 76: the interface to torch.distributed
from flat import (  # 77: flat buffers whose views are the parameters
    flat_param_numel,
    gather_flat_grads,
    gather_flat_params,
    scatter_flat_to_params,
)
from memory import memory_table, model_state_bytes, shard_bounds  # 78: what the formulas say
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


def train(rank: int, world_size: int, steps: int, seed: int = SEED) -> dict:
    """Be one rank: begin with a model of its own seed (the optimizer makes all equal), take `steps` steps."""
    comm = TorchComm()
    module = MiniMLP(seed=seed + rank).to(comm.device)
    optimizer = ZeroOptimizer(module, world_size, rank, LR, comm=comm, fused=False)  # on a GPU, too: bits are compared
    shard = optimizer.shards[0]
    log = {"losses": [], "grads": [], "params": [gather_flat_params(module)]}
    for step in range(steps):
        loss = mse(module, global_batch(step, ROWS * world_size, seed=seed), rank, world_size)
        loss.backward()
        optimizer.reduce_gradients()  # step() would do it: here, to look at the mean gradient first
        log["grads"].append(shard.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        log["losses"].append(loss.item())
        log["params"].append(gather_flat_params(module))
    return log | {
        "state": optimizer.state_dict()["state"]["unit0"],
        "shard_bytes": optimizer.shard_bytes(),
        "memory": optimizer.memory(),
        "calls": comm.counters.calls,
        "bytes": comm.counters.bytes,
    }


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
    module, total, within = MiniMLP(seed=seed).to(device), logs[0]["params"][0].numel(), []
    for step in range(len(logs[0]["grads"])):
        scatter_flat_to_params(module, logs[0]["params"][step])
        mean, bound = mean_gradient(module, step, len(logs), seed)
        shards = torch.cat([log["grads"][step] for log in logs])[:total]  # without the padding
        within.append(bool(((shards - mean).abs() <= bound).all()))
    claims.check("gradients are the mean over ranks, within 2(N-1) eps sum|g|/N", all(within))


def check_adam(claims: demo.Claims, logs: list, device: str) -> None:
    """Fed the ranks' own mean gradients, torch's Adam gives the same bits: sharding moves state, not arithmetic."""
    total = logs[0]["params"][0].numel()
    optimizer, equal = TorchAdam(logs[0]["params"][0].to(device)), True
    for step in range(len(logs[0]["grads"])):
        grad = torch.cat([log["grads"][step] for log in logs])[:total].to(device)
        equal &= torch.equal(optimizer.step(grad).cpu(), logs[0]["params"][step + 1])
    for name, whole in zip(("exp_avg", "exp_avg_sq"), optimizer.moments, strict=True):
        equal &= torch.equal(torch.cat([log["state"][name] for log in logs]), whole.cpu())
    claims.check("sharded Adam = torch's Adam on the same gradients, bit for bit, moments too", equal)


def check_against_torch(claims: demo.Claims, logs: list, seed: int, device: str) -> None:
    """The trajectory is the one of torch.optim.Adam in a single process on the same global batches."""
    steps = len(logs[0]["losses"])
    reference = one_process(steps, len(logs), seed, device)
    worst = [(a - b).abs().max().item() for a, b in zip(reference, logs[0]["params"][1:], strict=True)]
    claims.check("parameters follow torch's Adam in one process", max(worst) < 2e-6, f"max |a-b| = {max(worst):.2g}")


def check_cost(claims: demo.Claims, logs: list) -> None:
    """Bytes held and bytes sent are the formulas'."""
    world_size, steps, total = len(logs), len(logs[0]["losses"]), logs[0]["params"][0].numel()
    chunk = shard_bounds(total, world_size, 0)[2]
    state, held = (model_state_bytes(total, world_size, stage=1, master=m)["optimizer"] for m in (True, False))
    rows = [[rank, log["shard_bytes"], state, *log["memory"]["optimizer"], held] for rank, log in enumerate(logs)]
    columns = ["rank", "state", "12 ceil(P/N)", "beside the parameters", "live storages", "8 ceil(P/N)"]
    demo.table(columns, rows, "bytes of optimizer state; fp32 parameters are their own master")
    demo.say()
    exact = all(row[1] == row[2] and row[3] == row[4] == row[5] for row in rows)
    claims.check("optimizer state is 12 ceil(P/N) bytes a rank, 8 of them beside the parameters, live too", exact)
    calls, sent = logs[0]["calls"], logs[0]["bytes"]
    once = calls["reduce_scatter"] == calls["all_gather"] == steps
    padded = 4 * chunk * world_size * steps
    claims.check("one reduce-scatter and one all-gather a step", once, f"{steps} steps")
    same = sent["reduce_scatter"] == sent["all_gather"] == padded
    claims.check("each of 4P bytes, padded to N chunks", same, f"{sent['all_gather']:,} = {padded:,} in all")


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--steps", type=demo.positive, default=10, help="training steps (default: 10)")
    parser.add_argument("--size", choices=["124M", "774M", "tiny"], help="with --bench: GPT-2 of this size, for GPUs")
    parser.add_argument("--batch", type=demo.positive, default=4, help="with --size: sequences a rank (default: 4)")
    parser.add_argument("--bucket-mb", type=demo.positive, default=100, help="with --size: MiB a unit (default: 100)")
    parser.add_argument("--stages", action="store_true", help="with --bench: stages 2 and 3 beside FSDP2")
    parser.add_argument("--memory", action="store_true", help="bytes of DDP and of stages 1 to 3, and their peaks")
    args = demo.parse(parser, lesson=78)
    if args.memory:
        from memory_demo import report  # 78: predicted and measured

        return report(args)
    if args.bench and args.size:
        from zero_gpu_bench import bench  # 78: GPT-2 on GPUs, against torch's own

        return bench(args)
    if args.bench and args.stages:
        from zero_stages_bench import bench  # 78: 10M parameters, against FSDP2

        return bench(args)
    if args.bench:
        from zero_bench import bench  # 78: 10M parameters, against torch's own

        return bench(args)
    device = "cuda" if args.backend == "nccl" else "cpu"
    claims = demo.Claims()
    logs = run_ranks(train, args.world_size, args.steps, args.seed, backend=args.backend)
    check_bits(claims, logs)
    check_gradients(claims, logs, args.seed, device)
    check_adam(claims, logs, device)
    check_against_torch(claims, logs, args.seed, device)
    check_cost(claims, logs)
    demo.say()
    total = logs[0]["params"][0].numel()
    demo.say(f"model state of P = {total:,} parameters in fp32 on {args.world_size} ranks, masters apart")
    demo.say(memory_table(total, args.world_size))
    return claims.verdict(f"ZeRO-1 on {args.world_size} ranks is Adam in one process")


if __name__ == "__main__":
    sys.exit(main())
