"""`course memory`: what each stage needs on a rank, for a model of any size on any number of ranks."""

import argparse
import json
import sys

from memory import STAGES, unit_bytes

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a parameter
MODELS, RANKS = {"7B": 7 * 10**9, "70B": 70 * 10**9, "1T": 10**12}, (8, 16, 64, 256, 1024)
LETTERS = {"K": 3, "M": 6, "B": 9, "T": 12}
GB = 1e9


def count(text: str) -> int:
    """Parse a number of parameters: 7000000000, 7e9, 7B or 1.5T. Raises argparse's error unless it is whole, from 1."""
    digits, power = (text[:-1], LETTERS[text[-1].upper()]) if text[-1:].upper() in LETTERS else (text, 0)
    try:
        value = float(digits) * 10**power
        if value < 1 or value != round(value):
            raise ValueError
        return round(value)
    except (ValueError, OverflowError):
        expected = "a whole number of at least 1, as 7000000000, 7e9, 7B or 1.5T"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


def whole(text: str) -> int:
    """Parse a number of ranks. Raises argparse's error unless it is a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def stages(params: int, ranks: int, dtype: str) -> list[dict]:
    """Return for each stage its name and the bytes on a rank: of parameters, gradients, optimizer state, and all."""
    rows = []
    for stage, name in enumerate(STAGES):
        held = unit_bytes([(params, SIZES[dtype])], ranks, stage)
        rows.append({"stage": name, **held, "sum": sum(held.values())})
    return rows


def table(rows: list[list[str]]) -> str:
    """Return aligned text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print one model's stages, or without --params the usual models; return the exit code."""
    parser = argparse.ArgumentParser(prog="course memory", description=__doc__)
    parser.add_argument("--params", type=count, metavar="P", help="parameters: 7e9 or 7B (default: 7B, 70B and 1T)")
    parser.add_argument("--ranks", type=whole, metavar="N", help="number of ranks (default: 8 to 1,024)")
    parser.add_argument("--dtype", choices=sorted(SIZES), default="bf16", help="of the parameters (default: bf16)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    args = parser.parse_args(argv)
    models = MODELS if args.params is None else {f"{args.params:,}": args.params}
    cases = [(name, size, ranks) for name, size in models.items() for ranks in ([args.ranks] if args.ranks else RANKS)]
    found = [(name, size, ranks, stages(size, ranks, args.dtype)) for name, size, ranks in cases]
    if args.json:
        keys = ("params", "ranks", "dtype", "stages")
        print(json.dumps([dict(zip(keys, (size, n, args.dtype, rows), strict=True)) for _, size, n, rows in found]))
        return 0
    state = (
        "fp32 moments, and fp32 masters" if args.dtype != "fp32" else "fp32 moments; parameters are their own masters"
    )
    if len(found) == 1:
        name, _, ranks, rows = found[0]
        print(f"{name} parameters in {args.dtype} on {ranks:,} ranks, {state}: GB a rank, without activations")
        parts = ("parameters", "gradients", "optimizer", "sum")
        print(table([["", *parts], *([row["stage"], *(f"{row[part] / GB:,.2f}" for part in parts)] for row in rows)]))
    else:
        print(f"{args.dtype}, {state}: GB a rank, without activations")
        lines = [[name, f"{n:,}", *(f"{row['sum'] / GB:,.1f}" for row in rows)] for name, _, n, rows in found]
        print(table([["parameters", "ranks", *STAGES], *lines]))
    print("ZeRO-3 also has, whole, what is in no block, and the blocks that compute: two of them.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
