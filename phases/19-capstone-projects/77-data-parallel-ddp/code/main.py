"""Lesson 77: train one model on several ranks, and prove at each step that it is the same as on one."""

import sys
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import torch
from comm import TorchComm  # 76: the interface to torch.distributed, and to our own collectives
from mesh_comm import MeshComm  # 76: the same over a mesh
from endings import say_why  # 76: a line in the place of a traceback
from given_flags import allow_only  # 76: a flag that would do nothing is refused
from ddp import DistributedDataParallel  # 77: buckets, hooks, one all-reduce a bucket
from ddp_bench import bench  # 77: against torch's own, for --bench
from ddp_deeper import deeper  # 77: uneven data, bf16, NaN, experiments, for --deeper
from flat import (  # 77: flat buffers, and the comparison of models
    flat_param_numel,
    gather_flat_grads,
    gather_flat_params,
    scatter_flat_to_params,
    sync_module,
)
from ranks import run_ranks  # 76: N processes and their results
from timeline import trace  # 77: four ways to the same mean, as a picture, for --trace
from torch_mesh import TorchMesh  # 76: our collectives over a process group
from toy import SEED, MiniMLP, global_batch, rank_slice, sgd_step  # 77: the model and data of this demonstration

__all__ = ["SEED", "DistributedDataParallel", "MiniMLP", "reference_single_process", "run_ddp", "sync_module"]

ROWS, LR = 8, 0.1  # rows a rank and step; learning rate
BUCKET_CAP_MB = 0.001  # so small that the toy has two buckets


def mse(module, batch, rank, world_size):
    """Return the loss on one rank's rows of a global batch."""
    x, y = (rank_slice(tensor, rank, world_size).to(next(module.parameters()).device) for tensor in batch)
    return torch.nn.functional.mse_loss(module(x), y)


def train(rank: int, world_size: int, steps: int, collectives: str = "torch", seed: int = SEED) -> dict:
    """Be one rank of a data-parallel run: begins with a model of its own seed, which wrapping replaces by rank 0's."""
    comm = TorchComm() if collectives == "torch" else MeshComm(TorchMesh())
    module = MiniMLP(seed=seed + rank).to(comm.device)
    ddp = DistributedDataParallel(module, BUCKET_CAP_MB, comm)
    log = {"losses": [], "grads": [], "params": [gather_flat_params(module)]}
    for step in range(steps):
        loss = mse(ddp, global_batch(step, ROWS * world_size, seed=seed), rank, world_size)
        loss.backward()  # ends with the mean of all ranks' gradients in .grad
        log["grads"].append(gather_flat_grads(module))
        sgd_step(module, LR)
        log["losses"].append(loss.item())
        log["params"].append(gather_flat_params(module))
    buckets = [len(bucket.memory) for bucket in ddp.reducer.buckets]
    return log | {"calls": dict(comm.counters.calls), "bytes": dict(comm.counters.bytes), "buckets": buckets}


def run_ddp(world_size: int, steps: int, backend: str = "gloo", collectives: str = "torch") -> dict:
    """Train on `world_size` ranks; return {rank: (its own loss at each step, the final parameter norm)}."""
    logs = run_ranks(train, world_size, steps, collectives, backend=backend)
    return {rank: (log["losses"], log["params"][-1].norm().item()) for rank, log in enumerate(logs)}


def reference_single_process(world_size: int, steps: int, seed: int = SEED) -> tuple[list, float]:
    """Train on the same global batches in one process; return (losses of rank 0's rows, final parameter norm)."""
    module, losses = MiniMLP(seed=seed), []
    for step in range(steps):
        batch = global_batch(step, ROWS * world_size, seed=seed)
        losses.append(mse(module, batch, 0, world_size).item())
        mse(module, batch, 0, 1).backward()  # the whole batch at once
        sgd_step(module, LR)
    return losses, gather_flat_params(module).norm().item()


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


def compare_with_one_process(claims: demo.Claims, logs: list, world_size: int, seed: int, device: str) -> None:
    """Each step from the run's own parameters: the mean gradient must lie within the bound of a sum of N numbers."""
    module, rows, worst, eps = MiniMLP(seed=seed).to(device), [], 0.0, torch.finfo(torch.float32).eps
    wrapped = all(torch.equal(log["params"][0], gather_flat_params(module).cpu()) for log in logs)
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
    claims.check("wrapping gave every rank rank 0's parameters, bit for bit", wrapped)
    claims.check("gradients equal one process's within 2(N-1) eps sum|g|", worst <= 1, f"{worst:.2f} of the bound used")
    claims.check("each rank's loss equals one process's on the same rows, bit for bit", all(row[4] for row in rows))
    claims.check("after every step all ranks hold the same bits, which are p - lr g", all(row[5] for row in rows))


def compare_with_whole_batch(claims: demo.Claims, logs: list, world_size: int, seed: int) -> None:
    """The run's end against one process that takes each global batch at once: sums are grouped otherwise, so nearly."""
    losses, norm = reference_single_process(world_size, len(logs[0]["losses"]), seed)
    far = max(abs(a - b) / abs(b) for a, b in zip(logs[0]["losses"], losses, strict=True))
    far = max(far, abs(logs[0]["params"][-1].norm().item() - norm) / norm)
    claims.check("one process with the whole batch: same losses and norm to 1e-5", far <= 1e-5, f"{far:.1e} at most")


def count_collectives(claims: demo.Claims, log: dict, steps: int) -> None:
    """One all-reduce a bucket and step; its bytes are the gradient and a flag a parameter."""
    calls, buckets = log["calls"]["all_reduce"], len(log["buckets"])
    detail = f"{calls} calls = {buckets} buckets x {steps} steps"
    claims.check("one all-reduce a bucket and step", calls == buckets * steps, detail)
    numel, flags = flat_param_numel(MiniMLP()), sum(1 for _ in MiniMLP().parameters())
    counted, predicted = log["bytes"]["all_reduce"], 4 * (numel + flags) * steps
    claims.check("their payload is 4 (P + K) bytes a step", counted == predicted, f"{counted:,} = {predicted:,}")


class WatchedComm(TorchComm):
    """Writes down when an all-reduce is launched."""

    def all_reduce(self, x, op="sum", async_op=False):
        """Launch it, and say so."""
        self.events.append(f"all-reduce of {x.numel()} elements launched")
        return super().all_reduce(x, op, async_op)


def watch(rank: int, world_size: int, seed: int) -> list[str]:
    """Return what happened on this rank in one backward, in order."""
    comm, module = WatchedComm(), MiniMLP(seed=seed)
    comm.events = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: comm.events.append(f"gradient of {name}"))
    ddp = DistributedDataParallel(module.to(comm.device), BUCKET_CAP_MB, comm)
    mse(ddp, global_batch(0, ROWS * world_size, seed=seed), rank, world_size).backward()
    return comm.events


def check_overlap(claims: demo.Claims, world_size: int, seed: int, backend: str) -> None:
    """The first bucket is under way while backward still computes gradients."""
    events = run_ranks(watch, world_size, seed, backend=backend)[0]
    demo.table(["", "one backward on rank 0"], [[number, event] for number, event in enumerate(events, 1)])
    demo.say()
    launches = [number for number, event in enumerate(events) if "launched" in event]
    last_gradient = max(number for number, event in enumerate(events) if "gradient" in event)
    early = [number for number in launches if number < last_gradient]
    claims.check("the first all-reduce leaves before the last gradient is there", len(early) == len(launches) - 1)


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
    parser.add_argument("--steps", type=demo.positive, default=5, help="training steps (default: 5)")
    parser.add_argument("--collectives", choices=["torch", "ours"], default="torch", help="ours: lesson 76's functions")
    parser.add_argument("--trace", action="store_true", help="four ways to the same mean: counted, and as a picture")
    parser.add_argument("--deeper", action="store_true", help="uneven data, bf16 on the wire, NaN, and experiments")
    parser.add_argument("--size", choices=["124M", "774M", "tiny"], help="with --bench: GPT-2 of this size, for GPUs")
    parser.add_argument("--batch", type=demo.positive, default=4, help="with --size: sequences a rank (default: 4)")
    parser.add_argument("--bucket-mb", type=demo.positive, default=100, help="with --size: MiB a bucket (default: 100)")
    args = demo.parse(parser, lesson=77)
    if args.bench + args.trace + args.deeper > 1:
        parser.error("--bench, --trace and --deeper are programs of their own: one at a time")
    if args.size and not args.bench:
        parser.error("--size goes with --bench")
    if (args.trace or args.deeper) and args.backend != "gloo":
        parser.error("--trace and --deeper run on CPU ranks: leave --backend nccl out")
    if args.bench and args.size:
        from ddp_gpu_bench import bench as gpu_bench  # 77: GPT-2 on GPUs, against torch's own

        mode, program, used = "--bench --size", gpu_bench, "bench size batch bucket_mb"
    elif args.bench:
        mode, program, used = "--bench without --size", bench, "bench"
    elif args.trace or args.deeper:
        mode, program, used = ("--trace", trace, "trace") if args.trace else ("--deeper", deeper, "deeper")
    else:
        mode, program, used = "this lesson without --bench", tell, "steps collectives seed"
    allow_only(parser, mode, f"world_size backend out {used}")
    return say_why(lambda: program(args))


def tell(args) -> int:
    """Tell the story, a claim after the other; return the exit code."""
    claims = demo.Claims()
    device = "cuda" if (args.backend, args.collectives) == ("nccl", "torch") else "cpu"  # ours work on CPU tensors
    logs = run_ranks(train, args.world_size, args.steps, args.collectives, args.seed, backend=args.backend)
    compare_with_one_process(claims, logs, args.world_size, args.seed, device)
    compare_with_whole_batch(claims, logs, args.world_size, args.seed)
    count_collectives(claims, logs[0], args.steps)
    check_overlap(claims, args.world_size, args.seed, args.backend)
    check_accumulation(claims, args.world_size, args.seed, args.backend)
    return claims.verdict(f"DDP on {args.world_size} ranks is the same training as in one process")


if __name__ == "__main__":
    sys.exit(main())
