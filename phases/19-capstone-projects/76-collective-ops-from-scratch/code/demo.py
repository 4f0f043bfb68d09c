"""What every lesson's main.py shares: its flags, its tables, and a verdict that cannot say "verified" by itself."""

import argparse
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from ranks import under_torchrun


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that all lessons have; a lesson adds its own."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--world-size", type=positive, metavar="N", help="number of ranks (default: 4; with --bench 2)")
    p.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="gloo: CPU ranks; nccl: one GPU a rank")
    p.add_argument("--out", type=path, metavar="DIR", help="folder for plots, traces, JSONL (default: outputs/NN)")
    p.add_argument("--seed", type=seed, default=7, help="seed of models and data (default: 7)")
    p.add_argument("--bench", action="store_true", help="time our code side by side with PyTorch's own")
    return p


def positive(text: str) -> int:
    """Parse a whole number of at least 1 (a type for argparse)."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def path(text: str) -> Path:
    """Parse a path (a type for argparse). An empty text, as of a variable that is not set, is none."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def seed(text: str) -> int:
    """Parse a seed, a whole number from 0 to 2^31 - 1 (a type for argparse)."""
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {(1 << 31) - 1}, got {text!r}")
    return int(text)


def parse(p: argparse.ArgumentParser, lesson: int, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line and fill in defaults: `--out` (made by `out_dir` when first needed) and `--world-size`."""
    args = p.parse_args(argv)
    if args.world_size is None:
        args.world_size = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 2 if args.bench else 4
    args.out = args.out or Path("outputs") / str(lesson)
    return args


def out_dir(args: argparse.Namespace) -> Path:
    """Return the output folder, made if it is not there."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {args.out}: cannot be made: {error.strerror}") from None
    return args.out


def is_main() -> bool:
    """Say whether this process should print: rank 0 under torchrun, and always without it."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def say(text: str = "") -> None:
    """Print a line (on rank 0 only)."""
    if is_main():
        print(text, flush=True)


def head(card: str, torch_version: str) -> None:
    """Print what the record of a run on a GPU begins with."""
    say(f"# card: {card}")
    say(f"# torch: {torch_version}")
    say(f"# date: {datetime.now(timezone.utc):%Y-%m-%d}")
    say(f"# command: python code/main.py {shlex.join(sys.argv[1:])}")


def table(columns: list[str], rows: list, title: str = "") -> None:
    """Print rows as an aligned table: numbers to the right, text to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]

    def line(texts) -> str:
        pairs = zip(texts, widths, right, strict=True)
        return "  ".join(text.rjust(width) if r else text.ljust(width) for text, width, r in pairs).rstrip()

    say()
    if title:
        say(title)
    for text in (line(columns), line("-" * width for width in widths), *map(line, cells)):
        say(text)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Claims:
    """The claims of a demonstration. Each is checked once; the verdict is the conjunction of what was checked."""

    def __init__(self):
        self.checked: list[tuple[str, bool]] = []

    def check(self, claim: str, holds: bool, detail: str = "") -> bool:
        """Record a claim and print whether it holds."""
        if not self.checked:
            say()
        self.checked.append((claim, bool(holds)))
        say(f"{'ok  ' if holds else 'FAIL'}  {claim}" + (f": {detail}" if detail else ""))
        return bool(holds)

    def verdict(self, text: str) -> int:
        """Print the verdict and return the exit code: 0 only if something was checked and all of it held."""
        failed = [claim for claim, holds in self.checked if not holds]
        good = bool(self.checked) and not failed
        say()
        say(f"{text} -- {len(self.checked) - len(failed)} of {len(self.checked)} claims hold")
        if failed:
            print(f"failed: {'; '.join(failed)}", file=sys.stderr)
        return 0 if good else 1
