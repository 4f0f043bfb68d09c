"""What a JSON object must look like: which keys, what each holds. A fault is (place, message), place as in jsonpos."""

import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

Place = tuple[str | int, ...]
Faults = list[tuple[Place, str]]


class Rule(NamedTuple):
    """What a key holds: in words, and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """An int or a finite float. True and NaN are no numbers here."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_integer(value: Any) -> bool:
    """An int. True is none, nor is 1.0."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """An integer that is not negative."""
    return is_integer(value) and value >= 0


def moment(text: str) -> datetime:
    """A date and time with its offset from UTC, in ISO 8601; ValueError for anything else."""
    found = datetime.fromisoformat(re.sub("Z$", "+00:00", text))  # Python 3.10 knows no Z
    if found.tzinfo is None:
        raise ValueError(f"{text!r} does not say its offset from UTC")
    return found


def is_moment(value: Any) -> bool:
    """A text that `moment` reads."""
    try:
        return isinstance(value, str) and moment(value) is not None
    except ValueError:
        return False


TEXT = Rule("a text", lambda value: isinstance(value, str))
FILLED = Rule("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
NUMBER = Rule("a finite number", is_number)
COUNT = Rule("an integer that is not negative", is_count)
MOMENT = Rule("a date and time with its offset from UTC, as 2027-01-02T03:04:05+00:00", is_moment)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
LIST = Rule("a list", lambda value: isinstance(value, list))
TEXTS = Rule("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))


def one_of(*words: str) -> Rule:
    """Exactly one of these texts."""
    return Rule(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def object_faults(value: Any, rules: Mapping[str, Rule], required: tuple[str, ...], place: Place = ()) -> Faults:
    """Unknown keys, missing keys, and values against their rules."""
    if not isinstance(value, dict):
        return [(place, f"an object is expected, not {type(value).__name__}")]
    faults: Faults = []
    for key, item in value.items():
        if key not in rules:
            faults.append(((*place, str(key)), f"unknown key {key!r}; known are {', '.join(rules)}"))
        elif not rules[key].holds(item):
            faults.append(((*place, key), f"{key} is {shown(item)}; {rules[key].expected} is expected"))
    return faults + [(place, f"the key {key!r} is missing") for key in required if key not in value]


def list_faults(value: Any, rules: Mapping[str, Rule], required: tuple[str, ...], place: Place) -> Faults:
    """The same for each object of a list; what is no list is the caller's fault to report."""
    items = value if isinstance(value, list) else []
    return [
        fault for index, item in enumerate(items) for fault in object_faults(item, rules, required, (*place, index))
    ]


def shown(value: Any, limit: int = 60) -> str:
    """A value as a message shows it: cut off where it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def path_of(place: Place) -> str:
    """A place as text: `$.tests[2].score`."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def raise_faults(what: str, faults: Faults) -> None:
    """ValueError with every fault, one a line; nothing if there is none."""
    if faults:
        raise ValueError(f"no valid {what}:\n" + "\n".join(f"{path_of(place)}: {message}" for place, message in faults))
