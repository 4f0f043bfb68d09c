"""Lesson 77: train one model on several ranks, and prove at each step that it is the same as on one."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import torch
from comm import MeshComm, TorchComm  # 76: the interface to torch.distributed, and to our own collectives
from ddp import DistributedDataParallel  # 77: buckets, hooks, one all-reduce a bucket
from ddp_bench import bench  # 77: against torch's own, for --bench
from flat import gather_flat_grads, gather_flat_params, scatter_flat_to_params, sync_module  # 77: flat buffers
from ranks import run_ranks  # 76: N processes and their results
from torch_mesh import TorchMesh  # 76: our collectives over a process group
from toy import SEED, MiniMLP, global_batch, rank_slice, sgd_step  # 77: the model and data of this demonstration

__all__ = ["SEED", "DistributedDataParallel", "MiniMLP", "reference_single_process", "run_ddp", "sync_module"]

ROWS, LR = 8, 0.1  # rows a rank and step; learning rate


def mse(module, batch, rank, world_size):
    """Return the loss on one rank's rows of a global batch."""
    x, y = (rank_slice(tensor, rank, world_size).to(next(module.parameters()).device) for tensor in batch)
    return torch.nn.functional.mse_loss(module(x), y)


def train(rank: int, world_size: int, steps: int, collectives: str = "torch", seed: int = SEED) -> dict:
    """Be one rank of a data-parallel run: begins with a model of its own seed, which wrapping replaces by rank 0's."""
    comm = TorchComm() if collectives == "torch" else MeshComm(TorchMesh())
    module = MiniMLP(seed=seed + rank).to(comm.device)
    ddp = DistributedDataParallel(module, comm=comm)
    log = {"losses": [], "grads": [], "params": [gather_flat_params(module)]}
    for step in range(steps):
        loss = mse(ddp, global_batch(step, ROWS * world_size, seed=seed), rank, world_size)
        loss.backward()  # ends with the mean of all ranks' gradients in .grad
        log["grads"].append(gather_flat_grads(module))
        sgd_step(module, LR)
        log["losses"].append(loss.item())
        log["params"].append(gather_flat_params(module))
    return log | {"calls": dict(comm.counters.calls), "bytes": dict(comm.counters.bytes), "buckets": len(ddp.buckets)}


def run_ddp(world_size: int, steps: int, backend: str = "gloo", collectives: str = "torch") -> dict:
    """Train on `world_size` ranks; return {rank: (its own loss at each step, the final parameter norm)}."""
    logs = run_ranks(train, world_size, steps, collectives, backend=backend)
    return {rank: (log["losses"], log["params"][-1].norm().item()) for rank, log in enumerate(logs)}


def slice_gradients(module, step: int, world_size: int, seed: int = SEED) -> tuple[list, list]:
    """Return (losses, flat gradients) of every rank's rows, computed one after the other in this process."""
    losses, grads = [], []
    for rank in range(world_size):
        loss = mse(module, global_batch(step, ROWS * world_size, seed=seed), rank, world_size)
        loss.backward()
        losses.append(loss.item())
        grads.append(gather_flat_grads(module).cpu())
        module.zero_grad()
    return losses, grads


def reference_single_process(world_size: int, steps: int) -> tuple[list, float]:
    """Train on the same global batches in one process; return (losses of rank 0's rows, final parameter norm)."""
    module, losses = MiniMLP(seed=SEED), []
    for step in range(steps):
        losses.append(mse(module, global_batch(step, ROWS * world_size), 0, world_size).item())
        mse(module, global_batch(step, ROWS * world_size), 0, 1).backward()  # the whole batch at once
        sgd_step(module, LR)
    return losses, gather_flat_params(module).norm().item()


def compare_with_one_process(claims: demo.Claims, logs: list, world_size: int, seed: int, device: str) -> None:
    """Each step from the run's own parameters: the mean gradient must lie within the bound of a sum of N numbers."""
    module, rows, worst, eps = MiniMLP(seed=seed).to(device), [], 0.0, torch.finfo(torch.float32).eps
    for step in range(len(logs[0]["grads"])):
        before, after, gradient = logs[0]["params"][step], logs[0]["params"][step + 1], logs[0]["grads"][step]
        scatter_flat_to_params(module, before)
        losses, grads = slice_gradients(module, step, world_size, seed)
        difference = (gradient - sum(grads) / world_size).abs()
        bound = 2 * (world_size - 1) * eps * sum(g.abs() for g in grads) / world_size
        worst = max(worst, (difference / bound.clamp_min(1e-30)).max().item())
        step_error = (after - (before - LR * gradient)).abs() / (before.abs() + LR * gradient.abs()).clamp_min(1e-30)
        stepped = step_error.max().item() <= 2 * eps  # the update rounds a product and a difference
        equal = all(torch.equal(log["params"][step + 1], after) for log in logs)
        same_loss = losses == [log["losses"][step] for log in logs]
        rows.append([step, losses[0], difference.max().item(), bound.max().item(), same_loss, equal and stepped])
    columns = ["step", "loss (rank 0)", "max |difference|", "largest bound", "losses equal", "ranks equal"]
    demo.table(columns, rows, f"{world_size} ranks against one process, step by step")
    claims.check("gradients equal one process's within 2(N-1) eps sum|g|", worst <= 1, f"{worst:.2f} of the bound used")
    claims.check("each rank's loss equals one process's on the same rows, bit for bit", all(row[4] for row in rows))
    claims.check("after every step all ranks hold the same bits, which are p - lr g", all(row[5] for row in rows))


def count_collectives(claims: demo.Claims, log: dict, steps: int) -> None:
    """One all-reduce a bucket and step; its bytes are the gradient and one flag a parameter."""
    numel, flags = log["params"][0].numel(), sum(1 for _ in MiniMLP().parameters())
    claims.check(
        "one all-reduce a bucket and step",
        log["calls"]["all_reduce"] == log["buckets"] * steps,
        f"{log['calls']['all_reduce']} calls = {log['buckets']} bucket(s) x {steps} steps",
    )
    predicted = 4 * (numel + flags) * steps
    counted = log["bytes"]["all_reduce"]
    claims.check("its payload is 4 (P + flags) bytes a step", counted == predicted, f"{counted:,} = {predicted:,}")


def accumulate(rank: int, world_size: int, seed: int) -> tuple[dict, torch.Tensor]:
    """Four microbatches, three of them under no_sync: returns (calls of collectives, the mean gradient)."""
    comm = TorchComm()
    module = MiniMLP(seed=seed).to(comm.device)
    ddp = DistributedDataParallel(module, comm=comm)
    for micro in range(4):
        loss = mse(ddp, global_batch(micro, ROWS * world_size, seed=seed), rank, world_size) / 4
        if micro < 3:
            with ddp.no_sync():
                loss.backward()
        else:
            loss.backward()
    return dict(comm.counters.calls), gather_flat_grads(module)


def check_accumulation(claims: demo.Claims, world_size: int, seed: int, backend: str) -> None:
    """Gradient accumulation over four microbatches communicates once, and is the gradient of their mean."""
    calls, grad = run_ranks(accumulate, world_size, seed, backend=backend)[0]
    module = MiniMLP(seed=seed)
    everything = [sum(slice_gradients(module, micro, world_size, seed)[1]) / (4 * world_size) for micro in range(4)]
    close = torch.allclose(grad, sum(everything), rtol=0, atol=1e-6)
    claims.check("4 microbatches, 3 under no_sync: one all-reduce, the same mean", calls["all_reduce"] == 1 and close)


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument("--steps", type=demo.positive, default=5)
    parser.add_argument("--collectives", choices=["torch", "ours"], default="torch", help="ours: lesson 76's functions")
    args = demo.parse(parser, lesson=77)
    if args.bench:
        return bench(args)
    claims = demo.Claims()
    options = (args.steps, args.collectives, args.seed)
    logs = run_ranks(train, args.world_size, *options, backend=args.backend)
    compare_with_one_process(claims, logs, args.world_size, args.seed, "cuda" if args.backend == "nccl" else "cpu")
    count_collectives(claims, logs[0], args.steps)
    check_accumulation(claims, args.world_size, args.seed, args.backend)
    return claims.verdict(f"DDP on {args.world_size} ranks is the same training as in one process")


if __name__ == "__main__":
    sys.exit(main())
