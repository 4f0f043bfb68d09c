"""Lesson 81: train a GPT on N ranks with what lessons 76 to 80 built; stop; go on as if nothing had happened."""

import itertools
import math
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo  # 76: flags, tables, verdict
import torch
from checkpoint import load_sharded  # 80: all shards of a checkpoint, verified
from corpus import from_text, make_corpus, synthetic  # 81: what the model reads
from flat import flat_param_numel  # 77: number of parameters
from gpt import MiniGPT  # 81: the model
from manifest import CheckpointError  # 80: what a refused checkpoint raises
from memory import model_state_bytes  # 78: what the formula says
from ranks import RankError, run_ranks, under_torchrun  # 76: N processes and their results
from train import Job, train  # 81: the loop

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

CHECKPOINT_STEP = 10
WORLD_SIZE = 4


def run_e2e(world_size: int, steps: int, workdir=None) -> dict:
    """Train the default job and save at step CHECKPOINT_STEP; return {"results", "ckpt_dir", "workdir"}.

    `results[rank]` holds `losses` (the mean over ranks, a step), `norm` (of all parameters at the end), `shard_bytes`
    (optimizer state) and `master_at_ckpt` (its fp32 parameters when it was saved). The caller deletes `workdir`, a new
    temporary folder unless one is given; a run that fails leaves none behind. Raises ValueError if `steps` is too few.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < CHECKPOINT_STEP:
        raise ValueError(
            f"the checkpoint is saved after step {CHECKPOINT_STEP}: steps must be at least that, got {steps!r}"
        )
    folder = Path(workdir) if workdir is not None else Path(tempfile.mkdtemp(prefix="e2e-"))
    try:
        job = Job(synthetic(seed=7), steps=steps, save_at=(CHECKPOINT_STEP,), folder=folder)
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
            "master_at_ckpt": log["masters"][CHECKPOINT_STEP][0],
        }
        for rank, log in enumerate(logs)
    }
    return {"results": results, "ckpt_dir": folder / f"step_{CHECKPOINT_STEP}", "workdir": folder}


def verify_resume(ckpt_dir, expected_world_size: int, masters) -> bool:
    """Say whether a checkpoint holds exactly these masters: `masters[rank]`, a tensor a rank, compared bit for bit.

    Raises CheckpointError if the checkpoint cannot be loaded, ValueError if a master is missing.
    """
    masters = [masters[rank] for rank in sorted(masters)] if isinstance(masters, dict) else list(masters)
    if len(masters) != expected_world_size or not all(isinstance(master, torch.Tensor) for master in masters):
        raise ValueError(f"expected a tensor for each of {expected_world_size} ranks, got {len(masters)} masters")
    _, states = load_sharded(ckpt_dir, expected_world_size)
    saved = [state["optimizer"]["state"]["unit0"]["master"] for state in states]
    return all(torch.equal(a, master[: len(a)]) for a, master in zip(saved, masters, strict=True))


def show_steps(log: dict, job: Job) -> None:
    """Print the loss table: a row for each step at which held-out text was examined."""
    rows = [
        [row["step"] + 1, row["loss"], row["exam"], row["norm"], round(row["seconds"] * 1e3, 1)]
        for row in log["rows"]
        if row["exam"] is not None
    ]
    demo.table(["step", "loss (all ranks)", "held-out loss", "gradient norm", "ms"], rows)
    demo.say(f"held-out loss before the first of these steps {log['initial_exam']:.4f}")
    demo.say(f"{job.corpus.yardstick_name} {job.corpus.yardstick:.4f} (nats a token)")


def show_memory(logs: list) -> None:
    """Print bytes held by each rank, then the largest and the mean."""
    kinds = ["parameters", "gradients", "optimizer"]
    rows = [[str(rank), *(log["memory"][kind][1] for kind in kinds)] for rank, log in enumerate(logs)]
    columns = list(zip(*(row[1:] for row in rows), strict=True))
    rows.append(["max", *map(max, columns)])
    rows.append(["mean", *(round(sum(column) / len(column)) for column in columns)])
    demo.table(["rank", *kinds], rows, "bytes held by live tensors")


def show_manifest(folder: Path, world_size: int) -> None:
    """Print what the checkpoint's manifest says of each shard."""
    manifest, _ = load_sharded(folder, world_size)
    rows = [[shard.rank, shard.path, shard.size, shard.sha256[:16] + "..."] for shard in manifest.shards]
    demo.table(["rank", "file", "bytes", "sha256"], rows, f"checkpoint of step {manifest.step}: {folder}")


def check_loss(claims: demo.Claims, log: dict, job: Job, text: bool) -> None:
    """(a) The model learns."""
    exams = [log["initial_exam"], *(row["exam"] for row in log["rows"] if row["exam"] is not None)]
    if text:
        goal, name = job.corpus.yardstick, job.corpus.yardstick_name
        claims.check(f"(a) the held-out loss is below the {name}", exams[-1] < goal, f"{exams[-1]:.3f} < {goal:.3f}")
    elif log["start"] or job.exam_every > 1:
        goal = math.log(job.corpus.vocab) - 0.5
        claims.check(
            "(a) the held-out loss is 0.5 nats below guessing", exams[-1] < goal, f"{exams[-1]:.3f} < {goal:.3f}"
        )
    else:
        falls = all(after < before for before, after in itertools.pairwise(exams)) and exams[0] - exams[-1] >= 0.5
        detail = f"{exams[0]:.3f} -> {exams[-1]:.3f} nats"
        claims.check("(a) the held-out loss falls at every step, by 0.5 nats or more in all", falls, detail)


def check_ranks(claims: demo.Claims, logs: list) -> None:
    """(b) All ranks hold one model; (c) each holds its share of the optimizer state."""
    steps = zip(*([row["digest"] for row in log["rows"]] for log in logs), strict=True)
    claims.check(
        "(b) all ranks hold bit-identical parameters after every step", all(len(set(step)) == 1 for step in steps)
    )
    expected = model_state_bytes(logs[0]["parameters"], len(logs), stage=1)["optimizer"]
    claims.check(
        "(c) optimizer bytes a rank are 12 ceil(P/N)",
        all(log["shard_bytes"] == log["memory"]["optimizer"][1] == expected for log in logs),
        f"12 x ceil({logs[0]['parameters']:,} / {len(logs)}) = {expected:,}",
    )


def check_resume(claims: demo.Claims, logs: list, job: Job, backend: str) -> None:
    """(d) New processes that load the checkpoint repeat the rest of the run."""
    saved = min(job.save_at)
    folder = job.folder / f"step_{saved}"
    masters = [log["masters"][saved][0] for log in logs]
    claims.check("the checkpoint holds each rank's masters, bit for bit", verify_resume(folder, len(logs), masters))
    again = run_ranks(train, len(logs), replace(job, resume=folder, save_at=()), backend=backend)
    same = all(
        [_bits(row) for row in log["rows"] if row["step"] >= saved] == [_bits(row) for row in new["rows"]]
        for log, new in zip(logs, again, strict=True)
    )
    who = "new objects in torchrun's processes" if under_torchrun() else "a new set of processes"
    how = "deterministic algorithms on the GPU" if backend == "nccl" else "gloo"
    claim = f"(d) {who} resumes after step {saved}; steps {saved + 1}-{job.steps} are bit-identical"
    claims.check(claim, same, f"losses, gradient norms and parameters; {how}")


def _bits(row: dict) -> tuple:
    return row["step"], row["loss"], row["norm"], row["exam"], row["digest"]


def make_job(args) -> Job:
    """Return the job that the command line describes."""
    corpus = from_text(args.text, seq=16) if args.text else synthetic(args.seed)
    half = CHECKPOINT_STEP if args.steps <= 2 * CHECKPOINT_STEP else args.steps // 2
    inject = (args.inject_nan, args.world_size - 1) if args.inject_nan is not None else None
    return Job(
        corpus,
        steps=args.steps,
        seed=args.seed,
        exam_every=max(1, args.steps // 20),
        save_at=(args.steps,) if args.resume else (half, args.steps),
        folder=demo.out_dir(args) / "checkpoints",
        resume=args.resume,
        inject_nan=inject,
    )


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = demo.parser(__doc__)
    parser.add_argument(
        "--steps", type=demo.positive, default=2 * CHECKPOINT_STEP, help="optimizer steps (default: 20)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on the characters of a text file")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint of the same job")
    parser.add_argument("--inject-nan", type=int, metavar="STEP", help="drill: a NaN gradient on the last rank")
    args = demo.parse(parser, lesson=81)
    if args.bench:
        from e2e_bench import bench  # 81: against torch's own

        return bench(args)
    if not args.resume and args.steps <= CHECKPOINT_STEP:
        parser.error(f"--steps must be more than {CHECKPOINT_STEP}, the step of the checkpoint, got {args.steps}")
    try:
        job = make_job(args)
        logs = run_ranks(train, args.world_size, job, backend=args.backend)
    except (ValueError, CheckpointError, RankError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    claims = demo.Claims()
    show_steps(logs[0], job)
    show_memory(logs)
    show_manifest(job.folder / f"step_{min(job.save_at)}", args.world_size)
    check_loss(claims, logs[0], job, bool(args.text))
    check_ranks(claims, logs)
    if not args.resume:
        check_resume(claims, logs, job, args.backend)
        if all(holds for _, holds in claims.checked):
            demo.say("\nRESUME VERIFIED")
    return claims.verdict(f"a GPT of {logs[0]['parameters']:,} parameters, trained on {args.world_size} ranks")


if __name__ == "__main__":
    sys.exit(main())
