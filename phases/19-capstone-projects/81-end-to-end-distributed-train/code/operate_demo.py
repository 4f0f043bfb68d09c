"""`--operate` and `--inject`: the demonstration's run again, with nobody watching; and what is claimed of it."""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path

import demo  # 76
from earlier_run import CHECKPOINTS, METRICS, TENSORBOARD, make_room
from inject import parse_drill
from job import Job
from metrics import read_metrics
from operate import Operations, check, operate
from ranks import check_launch, run_ranks  # 76
from train import train

MINUTES = 10.0  # between two checkpoints, at most
STOP_WITHIN = 60.0  # seconds for a step and a checkpoint, when asked to stop
AUTO = Path("auto")  # --resume auto: from the newest checkpoint, if there is one


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what is said of an operated run on the command line."""
    parser.add_argument("--operate", action="store_true", help="save itself, go back after a fault, stop when asked")
    parser.add_argument(
        "--every", type=demo.positive, metavar="K", help="so operated: a checkpoint every K steps (5; --real: 100)"
    )
    parser.add_argument("--minutes", type=_minutes, metavar="T", help="and when the last is T minutes old (10)")
    parser.add_argument("--fresh", action="store_true", help="and first delete what an earlier one has left")
    parser.add_argument(
        "--inject",
        type=_drill,
        action="append",
        default=[],
        metavar="DRILL",
        help="so operated, a fault: spike@12, nan@12, kill@12:1, sigterm@12",
    )


def _drill(text: str):
    try:
        return parse_drill(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text!r}")
    return minutes


def demonstrate(args: argparse.Namespace, job: Job) -> int:
    """Run the job under operations, show what happened, check what is claimed; return the exit code."""
    folder = demo.out_dir(args) / "operated"
    job, operations = for_operation(job, folder), operations_of(args, folder, digests=True)
    logs = run(args, job, operations, folder)
    show(logs[0], job)
    if logs[0]["start"] == job.steps:
        demo.say(f"the run had done its {job.steps} steps before: nothing is left to do")
        return 0
    claims = demo.Claims()
    check_ranks(claims, logs)
    check_rollbacks(claims, logs)
    check_metrics(claims, logs[0], operations)
    if logs[0]["stopped"]:
        say_stopped(logs[0], job, "--operate")
    else:
        check_same_run(claims, logs, job, args, read_metrics(operations.metrics))
    return claims.verdict(f"a run of {logs[0]['position']} steps on {args.world_size} ranks, operated")


def for_operation(job: Job, folder: Path) -> Job:
    """Return the job as operations want it: they say when to save and resume; the checkpoints are in `folder`."""
    return replace(job, save_at=(), resume=None, folder=folder / CHECKPOINTS)


def operations_of(args: argparse.Namespace, folder: Path, **more) -> Operations:
    """Return the operations that the command line describes, with `more` settings; what they write is in `folder`."""
    return Operations(
        checkpoint_every_steps=args.every,
        checkpoint_every_minutes=args.minutes,
        resume=goes_on(args),
        metrics=folder / METRICS,
        tensorboard=folder / TENSORBOARD,
        progress=True,
        inject=tuple(args.inject),
        **more,
    )


def goes_on(args: argparse.Namespace) -> bool:
    """Say whether to go on from the newest checkpoint: when told to, or when torchrun has started the run again."""
    return args.resume is not None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def run(args: argparse.Namespace, job: Job, operations: Operations, folder: Path) -> list[dict]:
    """Run the job on its ranks; return their logs. What can be refused is refused before anything is deleted."""
    check(job, operations, args.world_size)
    check_launch(operate, args.world_size, args.backend, stop_within=STOP_WITHIN)
    if demo.is_main() and make_room(folder, goes_on(args), args.fresh):
        demo.say(f"the earlier run in {folder} was deleted")
    return run_ranks(operate, args.world_size, job, operations, backend=args.backend, stop_within=STOP_WITHIN)


def say_stopped(log: dict, job: Job, flags: str) -> None:
    """Tell that a run ended early because it was asked to."""
    saved = job.folder / f"step_{log['position']}"
    demo.say(f"asked to stop: saved after step {log['position']}, in {saved}; {flags} --resume {AUTO} goes on")


def show(log: dict, job: Job) -> None:
    """Print some twenty steps, and what went wrong."""
    names = ["step", "loss", "norm", "learning_rate", "tokens_per_second", "bytes"]
    chosen = [row for row in log["rows"] if row["step"] % max(1, job.steps // 20) == 0]
    heads = ["tokens/s" if name == "tokens_per_second" else name for name in names]
    demo.table(heads, [[round(row[name]) if "second" in name else row[name] for name in names] for row in chosen])
    if log["rollbacks"]:
        rows = [[each["step"], each["position"], each["why"]] for each in log["rollbacks"]]
        demo.table(["at step", "back to", "why"], rows)


def check_ranks(claims: demo.Claims, logs: list[dict]) -> None:
    """All ranks have done the same."""
    same = all(_done(log) == _done(logs[0]) for log in logs)
    claims.check("all ranks took, gave up and saved the same steps, with the same parameters after each", same)


def check_rollbacks(claims: demo.Claims, logs: list[dict]) -> None:
    """After a rollback everything is as it was."""
    for log in logs[:1]:
        at = {log["start"]: log["digest"]} | {row["step"]: row["digest"] for row in log["rows"]}
        for each in log["rollbacks"]:
            claim = f"step {each['step']}: after the rollback the parameters are those of step {each['position']}"
            claims.check(claim, each["digest"] == at[each["position"]], each["digest"])


def check_metrics(claims: demo.Claims, log: dict, operations: Operations) -> None:
    """The file has each step once (it is rank 0's)."""
    if demo.is_main():
        steps, taken = ([row["step"] for row in rows] for rows in (read_metrics(operations.metrics), log["rows"]))
        holds = steps == sorted(set(steps)) and [step for step in steps if step > log["start"]] == taken
        claims.check("metrics.jsonl has a line for each step, and none twice", holds, f"{len(steps)} lines")


def check_same_run(claims: demo.Claims, logs: list[dict], job: Job, args: argparse.Namespace, rows: list[dict]) -> None:
    """What happened left no trace: the run is the one to which nothing happens. `rows`: its metrics, from step 1 on."""
    if len(rows) < job.steps:
        demo.say("steps were left out, so this is another run than one without faults")
        return
    if any(row.get("ranks") != args.world_size for row in rows):
        demo.say("another number of ranks took some of the steps: their sums and noise are not those of one run")
        return
    whole = run_ranks(train, args.world_size, replace(job, folder=None), backend=args.backend)
    names = ("step", "loss", "norm", "digest")
    ours, theirs = ([[row[name] for name in names] for row in log["rows"]] for log in (logs[0], whole[0]))
    claim = "losses, gradient norms and parameters are those of an uninterrupted run, bit for bit"
    claims.check(claim, ours == theirs[logs[0]["start"] :], f"steps {logs[0]['start'] + 1}-{job.steps}")


def _done(log: dict) -> list:
    return [log["stopped"], log["rollbacks"], [[row["step"], row["loss"], row["digest"]] for row in log["rows"]]]
