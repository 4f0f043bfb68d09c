"""What lesson 81's command line says, and the job that follows from it."""

import argparse

import demo  # 76
import operate_demo
from corpus import Batches, from_text, synthetic
from given_flags import allow_only  # 76
from job import Job
from ranks import under_torchrun  # 76

CHECKPOINT_STEP = 10
STEPS, TEXT_STEPS, REAL_STEPS = 20, 200, 300  # a text takes longer to learn than the synthetic language
EVERY, REAL_EVERY = 5, 100  # steps between two checkpoints of an operated run
PROGRAMS = {  # with jobs of their own: what chooses them, and all flags that they use
    "--bench --size": ("size", "bench size batch bucket_mb compile whole world_size backend"),
    "--bench": ("bench", "bench world_size backend"),
    "--ladder": ("ladder", "ladder"),
}


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = demo.parser(description)
    steps = f"optimizer steps (default: {STEPS}; of text {TEXT_STEPS}; with --real {REAL_STEPS})"
    parser.add_argument("--steps", type=demo.positive, help=steps)
    parser.add_argument("--rows", type=demo.positive, help="sequences a step over all ranks (default: 4 a rank)")
    parser.add_argument("--text", type=demo.path, metavar="FILE", help="train on the characters of a text file")
    parser.add_argument("--real", action="store_true", help="10M parameters, operated, on Python's own source")
    parser.add_argument("--resume", type=demo.path, metavar="DIR", help="go on from a checkpoint of the same job")
    parser.add_argument("--ladder", action="store_true", help="deal one run to ranks in twenty ways, and compare them")
    parser.add_argument("--inject-nan", type=demo.positive, metavar="STEP", help="drill: a NaN gradient on one rank")
    parser.add_argument("--size", choices=["124M", "774M", "tiny"], help="with --bench: GPT-2 of this size, for GPUs")
    parser.add_argument("--batch", type=demo.positive, default=16, help="with --size: sequences a rank (default: 16)")
    parser.add_argument("--bucket-mb", type=demo.positive, default=100, help="with --size: MiB a bucket (default: 100)")
    compiler = "with --size: torch.compile in all rows, by this backend (default: inductor)"
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compiler)
    whole = "with --compile: one more row, torch's DDP compiled as a whole"
    parser.add_argument("--whole", action="store_true", help=whole)
    operate_demo.add_flags(parser)
    args = demo.parse(parser, lesson=81)
    args.operate |= bool(args.inject) or args.real
    refuse_what_does_not_go_together(parser, args)
    args.steps = args.steps or (REAL_STEPS if args.real else TEXT_STEPS if args.text else STEPS)
    args.every = args.every or (REAL_EVERY if args.real else EVERY)
    args.minutes = args.minutes or operate_demo.MINUTES
    if not args.resume and args.steps <= CHECKPOINT_STEP:
        parser.error(f"--steps must be more than {CHECKPOINT_STEP}, the step of the checkpoint, got {args.steps}")
    if args.inject_nan and args.inject_nan > args.steps:
        parser.error(f"--inject-nan {args.inject_nan}: there are only {args.steps} steps")
    return args


def refuse_what_does_not_go_together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error of the parser rather than leave out a flag that was given."""
    auto = operate_demo.AUTO
    if args.operate:
        if args.resume not in (None, auto):
            parser.error(f"an operated run finds its checkpoints itself: --resume {auto}")
        if args.inject_nan:
            parser.error(f"the drill of an operated run is --inject nan@{args.inject_nan}")
        if args.bench or args.ladder:
            parser.error("--operate, --inject and --real are not for --bench or --ladder")
        if args.fresh and args.resume:
            parser.error(f"--resume {auto} goes on with an earlier run, --fresh deletes it")
    else:
        if args.fresh:
            parser.error("--fresh needs --operate")
        if args.resume == auto:
            parser.error(f"--resume {auto} needs --operate; the core run needs the folder of a checkpoint")
        if args.every or args.minutes:
            parser.error("--every and --minutes need --operate")
    if args.real and args.text:
        parser.error("--real has a text of its own")
    if (args.size and not args.bench) or (args.compile and not args.size) or (args.whole and not args.compile):
        parser.error("--size needs --bench, --compile needs --size, and --whole needs --compile")
    if args.ladder and args.bench:
        parser.error("--ladder and --bench are two commands")
    if args.ladder and under_torchrun():
        parser.error("--ladder starts its own ranks: run it without torchrun")
    if args.bench or args.ladder:
        what, used = next((what, used) for what, (flag, used) in PROGRAMS.items() if getattr(args, flag))
        allow_only(parser, f"{what}, which has jobs of its own", used)
    else:
        sized = ("size", "batch", "bucket_mb", "compile", "whole")
        allow_only(parser, "a run without --bench --size", " ".join(vars(args).keys() - set(sized)))


def make_job(args: argparse.Namespace) -> Job:
    """Return the job that the command line describes. Raises ValueError for a text that is none, or too many rows."""
    corpus = from_text(args.text, Job.seq) if args.text else synthetic(args.seed)
    half = CHECKPOINT_STEP if args.steps <= 2 * CHECKPOINT_STEP else args.steps // 2
    job = Job(
        corpus,
        steps=args.steps,
        rows=args.rows,
        seed=args.seed,
        exam_every=max(1, args.steps // STEPS),
        save_at=(args.steps,) if args.resume else (half, args.steps),
        folder=demo.out_dir(args) / "checkpoints",
        resume=args.resume,
        inject_nan=(args.inject_nan, args.world_size - 1) if args.inject_nan else None,
    )
    check_rows(job, args.world_size)
    return job


def check_rows(job: Job, world_size: int) -> None:
    """Raise ValueError, naming the flag, if the corpus has not as many sequences as a step is to have."""
    rows = job.rows_of(world_size)
    try:
        Batches(job.corpus.train, rows, job.seq, job.seed)
    except ValueError as error:
        raise ValueError(f"--rows {rows}{'' if job.rows else f' ({job.batch} a rank)'}: {error}") from None
