"""Flags that were given: one that would do nothing is refused, so that nobody takes a run for another one."""

import argparse


def given(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> list[str]:
    """Return the names of the flags on the command line, in the parser's order, with the default value or not."""
    names = vars(parser.parse_args([]))
    found = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names))))  # None in the place of defaults
    return [name for name, value in found.items() if value is not None]


def allow_only(parser: argparse.ArgumentParser, mode: str, used: str, argv: list[str] | None = None) -> None:
    """End with an error of the parser if the command line has a flag that is not in `used`, names with spaces between.

    `mode` says in the message what it is that does not use the flag.
    """
    flags = [f"--{name.replace('_', '-')}" for name in given(parser, argv) if name not in used.split()]
    if flags:
        parser.error(f"{', '.join(flags)}: not used by {mode}")
