"""`--real`: a GPT of 10M parameters reads Python's own source, operated; and what is claimed of its loss curve."""

import argparse
import hashlib
import statistics

import demo  # 76
import loss_curve
import operate_demo
import real_text
import torch
from checkpoint import load_sharded  # 80
from e2e_options import REAL_STEPS, check_rows
from job import Job
from metrics import read_metrics
from train import held_masters

MODEL = {"dim": 384, "heads": 6, "blocks": 6}
ROWS, SEQ, LR = 16, 128, 1e-3
LOOKS = 12  # at held-out text


def make_job(args: argparse.Namespace) -> Job:
    """Return the job: warm-up for a tenth of the steps, then half a cosine down to a tenth of the rate."""
    text = real_text.standard_library()
    demo.say(real_text.describe(text))
    job = Job(
        real_text.bytes_corpus(text),
        steps=args.steps,
        rows=args.rows or ROWS,
        seq=SEQ,
        model=MODEL,
        dropout=0.0,  # the run reads a part of the text once: there is nothing to overfit
        lr=LR,
        warmup=max(1, args.steps // 10),
        decay=args.steps,
        seed=args.seed,
        exam_every=max(1, args.steps // LOOKS),
    )
    check_rows(job, args.world_size)
    return job


def demonstrate(args: argparse.Namespace, job: Job) -> int:
    """Run the job under operations, show its loss curve, check what is claimed; return the exit code."""
    folder = demo.out_dir(args) / "real"
    job = operate_demo.for_operation(job, folder)
    operations = operate_demo.operations_of(args, folder, keep_last=2, exams=True)  # two, of 12 bytes a parameter
    logs = operate_demo.run(args, job, operations, folder)
    if logs[0]["start"] == job.steps:
        demo.say(f"the run had done its {job.steps} steps before: nothing is left to do")
        return 0
    if demo.is_main():
        report(read_metrics(operations.metrics), job, args)
    claims = demo.Claims()
    check_ranks(claims, logs)
    operate_demo.check_metrics(claims, logs[0], operations)
    if logs[0]["stopped"]:
        operate_demo.say_stopped(logs[0], job, "--real")
    else:
        check_losses(claims, logs[0], job)
        check_checkpoint(claims, logs[0], job, args.world_size)
    what = f"{logs[0]['position']} steps of a GPT of {parameters(job):,} parameters on {args.world_size} ranks"
    return claims.verdict(what)


def report(rows: list[dict], job: Job, args: argparse.Namespace) -> None:
    """Print and draw the loss curve of all steps so far, those before a resume included; print the speed."""
    loss_curve.table(rows, args.world_size)
    picture, title = args.out / "loss.png", f"a GPT of {parameters(job):,} parameters reads Python's source"
    if loss_curve.draw(rows, levels(job), picture, title):
        demo.say(f"\nloss curve: {picture}")
    median = statistics.median(row["tokens_per_second"] for row in rows)
    minutes = sum(row["seconds"] for row in rows) / 60
    read = len(rows) * job.rows * job.seq
    demo.say(f"{read:,} tokens read in {minutes:.1f} minutes of steps; median {median:,.0f} tokens/s over all ranks")


def levels(job: Job) -> dict[str, float]:
    """Return what losses are compared with: those of tables made of the held-out text itself."""
    return dict(zip(("unigram entropy", "bigram entropy"), real_text.entropies(job.corpus.held_out, 256), strict=True))


def parameters(job: Job) -> int:
    """Return the number of the model's parameters."""
    return sum(param.numel() for param in job.build().parameters())


def check_losses(claims: demo.Claims, log: dict, job: Job) -> None:
    """The model knows more than how often each byte comes, and which follows which, after the default steps of rows."""
    last = log["rows"][-1]["exam"]
    if job.steps < REAL_STEPS or job.rows < ROWS:
        promised = f"it is promised of {REAL_STEPS} steps of {ROWS} sequences"
        demo.say(f"--    the held-out loss beside the tables' is not checked, for {promised}: {last:.3f}")
        return
    for what, nats in levels(job).items():
        detail = f"{last:.3f} < {nats:.3f} nats a byte" if last < nats else f"{last:.3f}, {nats:.3f}"
        claims.check(f"the held-out loss ends below the {what} of the held-out text", last < nats, detail)


def check_ranks(claims: demo.Claims, logs: list[dict]) -> None:
    """All ranks have one model."""
    kept = ("step", "loss", "norm", "exam", "digest")
    done = [[[row.get(name) for name in kept] for row in log["rows"]] for log in logs]
    looks = sum("digest" in row for row in logs[0]["rows"])
    claim = "all ranks: the same losses and norms, and at each look the same parameters, bit for bit"
    claims.check(claim, all(each == done[0] for each in done), f"{looks} looks")


def check_checkpoint(claims: demo.Claims, log: dict, job: Job, world_size: int) -> None:
    """The last checkpoint has what the run ended with."""
    _, states = load_sharded(job.folder / f"step_{job.steps}", world_size)
    masters = torch.cat([held_masters(state) for state in states])
    found = hashlib.sha256(masters.view(torch.uint8).numpy()).hexdigest()[:16]
    claim = f"the checkpoint of step {job.steps} holds the parameters of the last look, bit for bit"
    claims.check(claim, found == log["rows"][-1]["digest"], f"{masters.numel():,} masters")
