"""Strict JSON: what a file says is checked field by field, and every fault is one kind of error.

Python's own reader lets a key come twice, and Python's types are lenient: True == 1 == 1.0.
"""

import json
import sys
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or must not be loaded. Says which file and field, what was expected and found."""


@contextmanager
def about(place):
    """Make a CheckpointError begin with the file or folder that it is about."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error


def parse_json(text: str | bytes):
    """Parse JSON in which no key comes twice. Raises CheckpointError. NaN is left to the field's own check."""
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}") from None


def _no_key_twice(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointError(f"not valid JSON: a key appears twice in {show([key for key, _ in pairs])}")
    return found


def check_integer(name: str, value, least: int = 0) -> None:
    """Accept whole numbers of at least `least`; not 1.0, "1" or True."""
    if type(value) is not int or value < least:
        raise CheckpointError(f"{name}: expected a whole number of at least {least}, found {show(value)}")


def check_seconds(name: str, value) -> None:
    """Accept a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"{name}: expected a finite number of at least 0, found {show(value)}")


def check_keys(name: str, value, expected: list[str]) -> None:
    """Accept a JSON object with exactly these keys; name the missing and the unexpected ones."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected a JSON object, found {show(value)}")
    missing = [key for key in expected if key not in value]
    unexpected = [key for key in value if key not in expected]
    faults = [f"missing key {show(key)}" for key in missing] + [f"unexpected key {show(key)}" for key in unexpected]
    if faults:
        raise CheckpointError(f"{name}: {', '.join(faults)}")


def show(value) -> str:
    """Return `repr(value)`, shortened to fit a message."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return a text cut to fit a message."""
    return text if len(text) <= 60 else text[:57] + "..."
