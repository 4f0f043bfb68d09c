"""Lesson 81: train a GPT on N ranks with what lessons 76 to 80 built; stop; go on as if nothing had happened."""

import argparse
import itertools
import math
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import e2e_options  # 81: what the command line says
import operate_demo  # 81: the run with nobody watching
import torch
import wire  # 76: tensors as bytes
from checkpoint import load_sharded  # 80: all shards of a checkpoint, verified
from corpus import make_corpus, synthetic  # 81: what the model reads
from earlier_run import check_metrics  # 81: that a file to be written to is one of metrics
from e2e_options import CHECKPOINT_STEP  # 81: the run is saved after this step
from endings import say_why  # 76: a line in the place of a traceback
from flat import flat_param_numel  # 77: number of parameters
from gpt import MiniGPT  # 81: the model
from manifest import CheckpointError  # 80: what a refused checkpoint raises
from memory import check_whole, model_state_bytes  # 78: what the formula says
from metrics import MetricsFile  # 81: a line a step, and no step twice
from ranks import run_ranks, under_torchrun  # 76: N processes and their results
from spike_guard import SpikeError  # 81: what a loss that is far too high raises
from train import Job, NonFiniteError, held_masters, train  # 81: the loop

__all__ = [
    "CHECKPOINT_STEP",
    "WORLD_SIZE",
    "MiniGPT",
    "flat_param_numel",
    "load_sharded",
    "make_corpus",
    "run_e2e",
    "verify_resume",
]

WORLD_SIZE = 4


def run_e2e(world_size: int, steps: int, workdir: Path | str | None = None) -> dict:
    """Train the default job and save at step CHECKPOINT_STEP; return {"results", "ckpt_dir", "workdir"}.

    `results[rank]` holds `losses` (the mean over ranks, a step), `norm` (of all parameters at the end), `shard_bytes`
    (optimizer state) and `master_at_ckpt` (its fp32 parameters when it was saved). The caller deletes `workdir`, a new
    temporary folder unless one is given (under torchrun, give one that all ranks share); a run that fails leaves no new
    folder behind. Raises ValueError if `steps` is no whole number or too few.
    """
    check_whole("steps", steps, least=CHECKPOINT_STEP)  # the checkpoint is part of the result
    folder = Path(workdir if workdir is not None else tempfile.mkdtemp(prefix="e2e-"))
    try:
        job = Job(synthetic(seed=7), steps=steps, exam_every=steps, save_at=(CHECKPOINT_STEP,), folder=folder)
        logs = run_ranks(train, world_size, job)
    except BaseException:
        if workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    results = {
        rank: {
            "losses": [row["loss"] for row in log["rows"]],
            "norm": log["parameter_norm"],
            "shard_bytes": log["shard_bytes"],
            "master_at_ckpt": log["masters"][CHECKPOINT_STEP],
        }
        for rank, log in enumerate(logs)
    }
    return {"results": results, "ckpt_dir": folder / f"step_{CHECKPOINT_STEP}", "workdir": folder}


def verify_resume(ckpt_dir: Path | str, expected_world_size: int, masters: dict | list) -> bool:
    """Say whether a checkpoint holds exactly these fp32 parameters: `masters[rank]`, compared bit for bit.

    Raises CheckpointError if the checkpoint cannot be loaded by so many ranks, ValueError, with their number, unless
    there is a tensor for each of them.
    """
    found = [masters[rank] for rank in sorted(masters)] if isinstance(masters, dict) else list(masters)
    if len(found) != expected_world_size or not all(isinstance(master, torch.Tensor) for master in found):
        kinds = [type(master).__name__ for master in found]
        raise ValueError(f"expected a tensor for each of {expected_world_size} ranks, got {kinds}")
    _, states = load_sharded(ckpt_dir, expected_world_size)
    return all(_bits(held_masters(state)) == _bits(master) for state, master in zip(states, found, strict=True))


def _bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, wire.tensor_to_bytes(tensor)


def show_steps(log: dict, job: Job) -> None:
    """Print the loss table: a row for each step after which held-out text was examined."""
    rows = [
        [row["step"], row["loss"], row["exam"], row["norm"], round(row["seconds"] * 1e3)]
        for row in log["rows"]
        if row["exam"] is not None
    ]
    demo.table(["step", "loss (all ranks)", "held-out loss", "gradient norm", "ms"], rows)
    demo.say(f"held-out loss before step {log['start'] + 1}: {log['initial_exam']:.4f}")
    demo.say(f"{job.corpus.yardstick_name}: {job.corpus.yardstick:.4f} (nats a token)")


def show_memory(logs: list[dict]) -> None:
    """Print bytes held by each rank, then the largest and the mean, then what the formula predicts."""
    formula = model_state_bytes(logs[0]["parameters"], len(logs), stage=1, master=False)
    rows = [[str(rank), *(log["memory"][kind][1] for kind in formula)] for rank, log in enumerate(logs)]
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    rows.append(["max", *map(max, columns)])
    rows.append(["mean", *(round(sum(column) / len(column)) for column in columns)])
    rows.append(["predicted", *formula.values()])
    demo.table(["rank", *formula], rows, "bytes held by live tensors; predicted: 4P, 4P, 8 ceil(P/N)")


def show_manifest(folder: Path, world_size: int) -> None:
    """Print what the checkpoint's manifest says of each shard."""
    manifest, _ = load_sharded(folder, world_size)
    rows = [[shard.rank, shard.path, shard.size, shard.sha256[:16] + "..."] for shard in manifest.shards]
    demo.table(["rank", "file", "bytes", "sha256"], rows, f"checkpoint of step {manifest.step}: {folder}")


def check_communication(claims: demo.Claims, logs: list[dict]) -> None:
    """What a step sends, predicted and counted."""
    steps, padded = len(logs[0]["rows"]), math.ceil(logs[0]["parameters"] / len(logs)) * len(logs)
    predicted = {
        "reduce_scatter": (1, 4 * padded),  # the gradients
        "all_reduce": (1, 4 * (1 + len(logs))),  # their squared norm, finite only if they are, and a checksum a rank
        "all_gather": (1, 4 * padded),  # the new parameters
    }
    counted = {op: (logs[0]["calls"][op] / steps, logs[0]["bytes"][op] / steps) for op in logs[0]["calls"]}
    rows = [[op, *map(int, each), *map(round, counted.get(op, (0, 0)))] for op, each in predicted.items()]
    columns = ["collective", "calls predicted", "bytes predicted", "calls", "bytes"]
    demo.table(columns, rows, "payload of a step, a rank")
    same = all(log["calls"] == logs[0]["calls"] and log["bytes"] == logs[0]["bytes"] for log in logs)
    claims.check("each rank's steps cost the predicted collectives and bytes", same and counted == predicted)


def check_loss(claims: demo.Claims, log: dict, job: Job, world_size: int, text: bool) -> None:
    """(a) The model learns. How much is promised of the default number of steps, and of 4 sequences a step, or more."""
    default = e2e_options.TEXT_STEPS if text else e2e_options.STEPS
    exams = [log["initial_exam"], *(row["exam"] for row in log["rows"] if row["exam"] is not None)]
    detail = f"{exams[0]:.3f} -> {exams[-1]:.3f} nats"
    if job.steps < default or job.rows_of(world_size) < Job.batch:
        demo.say(f"--    (a) is not checked, for it is promised of {default} steps of {Job.batch} sequences: {detail}")
        return
    if text:
        claim = f"(a) the held-out loss ends below the {job.corpus.yardstick_name}"
        holds = exams[-1] < job.corpus.yardstick
    elif log["start"] or job.steps > default:
        claim = "(a) the held-out loss ends 0.5 nats or more below that of guessing"
        holds = exams[-1] <= math.log(job.corpus.vocab) - 0.5
    else:
        claim = "(a) the held-out loss falls at every step, and by 0.5 nats or more"
        holds = all(after < before for before, after in itertools.pairwise(exams)) and exams[0] - exams[-1] >= 0.5
    claims.check(claim, holds, detail)


def check_ranks(claims: demo.Claims, logs: list[dict]) -> None:
    """(b) All ranks hold one model; (c) each holds its share of the optimizer state."""
    steps = zip(*([row["digest"] for row in log["rows"]] for log in logs), strict=True)
    one_model = all(len(set(step)) == 1 for step in steps)
    claims.check("(b) all ranks hold bit-identical parameters after every step", one_model)
    total, n = logs[0]["parameters"], len(logs)
    state, held = (model_state_bytes(total, n, stage=1, master=m)["optimizer"] for m in (True, False))
    claims.check(
        "(c) optimizer state is 12 ceil(P/N) bytes a rank, 8 of them beside the parameters",
        all((log["shard_bytes"], log["memory"]["optimizer"][1]) == (state, held) for log in logs),
        f"12 x ceil({total:,} / {n}) = {state:,}",
    )


def check_resume(claims: demo.Claims, logs: list[dict], job: Job, backend: str) -> None:
    """(d) New processes that load the checkpoint repeat the rest of the run."""
    saved = min(job.save_at)
    folder = job.folder / f"step_{saved}"
    held = verify_resume(folder, len(logs), [log["masters"][saved] for log in logs])
    claims.check("the checkpoint holds each rank's masters, bit for bit", held)
    again = run_ranks(train, len(logs), replace(job, resume=folder, save_at=()), backend=backend)
    same = all(
        [_outcome(row) for row in log["rows"][saved:]] == [_outcome(row) for row in new["rows"]]
        for log, new in zip(logs, again, strict=True)
    )
    who = "new objects in torchrun's processes" if under_torchrun() else "a new set of processes"
    how = "under deterministic algorithms, on GPUs like these" if backend == "nccl" else "on CPUs like this one"
    claim = f"(d) {who} resumes after step {saved}; steps {saved + 1}-{job.steps} are bit-identical"
    claims.check(claim, same, f"losses, gradient norms and parameters; {how}")


def check_other_ranks(claims: demo.Claims, world_size: int, job: Job, backend: str) -> None:
    """(e) Fewer ranks that load the checkpoint go on with the same run. (Without dropout: noise belongs to ranks.)"""
    saved = min(job.save_at)
    changes = {"resume": job.folder / f"step_{saved}", "save_at": (), "rows": job.rows_of(world_size)}
    few = replace(job, **changes, dropout=0.0, may_change=("dropout",), steps=saved + 3, exam_every=job.steps)
    others = sorted({max(1, world_size // 2), max(1, world_size - 1)} - {world_size})
    losses = [
        [row["loss"] for row in run_ranks(train, n, few, backend=backend)[0]["rows"]] for n in (world_size, *others)
    ]
    off = max(abs(loss - first) / first for first, *rest in zip(*losses, strict=True) for loss in rest)
    bound = 2 * few.rows * few.seq * torch.finfo(torch.float32).eps  # two orders of a sum over all tokens of a step
    claim = f"(e) saved by {world_size} ranks, continued by {' and by '.join(map(str, others))}: the same losses"
    claims.check(claim, off <= bound, f"relatively within 2 T eps = {bound:.1e}: {off:.1e}")


def _outcome(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "seconds"}


def write_metrics(path: Path, rows: list[dict], start: int) -> None:
    """Write a line a step; a run that was resumed after `start` steps goes on there in the file that it finds."""
    if not demo.is_main():
        return
    with MetricsFile(path, position=start) as file:
        for row in rows:
            file.write(row)


def demonstrate(args: argparse.Namespace) -> int:
    """Train, show what happened, check what is claimed; return the exit code."""
    job, metrics = e2e_options.make_job(args), args.out / "metrics.jsonl"
    if demo.is_main():
        check_metrics(metrics)  # before the work, not after it
    logs = run_ranks(train, args.world_size, job, backend=args.backend)
    claims = demo.Claims()
    show_steps(logs[0], job)
    show_memory(logs)
    show_manifest(job.folder / f"step_{min(job.save_at)}", args.world_size)
    check_communication(claims, logs)
    check_loss(claims, logs[0], job, args.world_size, bool(args.text))
    check_ranks(claims, logs)
    if not args.resume:
        check_resume(claims, logs, job, args.backend)
        if args.world_size > 1 and not under_torchrun():  # whose number of processes is what it is
            check_other_ranks(claims, args.world_size, job, args.backend)
        if all(holds for _, holds in claims.checked):
            demo.say("\nRESUME VERIFIED")
    write_metrics(metrics, logs[0]["rows"], logs[0]["start"])
    return claims.verdict(f"a GPT of {logs[0]['parameters']:,} parameters, trained on {args.world_size} ranks")


def main() -> int:
    """Do what the command line says; return the exit code."""
    args = e2e_options.parse_arguments(__doc__)
    return say_why(lambda: run(args), NonFiniteError, SpikeError, CheckpointError)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration, operated or not, or the benchmark, or the ladder; return the exit code."""
    if args.bench and args.size:
        from e2e_gpu_bench import bench as gpu_bench  # 81: GPT-2 on GPUs, beside torch's own

        return gpu_bench(args)
    if args.bench:
        from e2e_bench import bench  # 81: beside torch's own

        return bench(args)
    if args.ladder:
        import ladder  # 81: any combination of parallelism is the same run

        return ladder.main(["--quick"])
    if args.real:
        import real_work  # 81: ten million parameters, megabytes of text

        return real_work.demonstrate(args, real_work.make_job(args))
    return operate_demo.demonstrate(args, e2e_options.make_job(args)) if args.operate else demonstrate(args)


if __name__ == "__main__":
    sys.exit(main())
