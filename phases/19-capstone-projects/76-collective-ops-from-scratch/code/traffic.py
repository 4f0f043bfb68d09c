"""Traffic as data: a JSON line for each message, and what the lines add up to.

{"round": 1, "src": 0, "dst": 3, "bytes": 256, "collective": "all_reduce"}
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import flight
import torch


@dataclass(frozen=True)
class Message:
    """The round it travels in (from 1), two ranks, payload bytes, and what it is part of: "" for a lone message."""

    round: int
    src: int
    dst: int
    bytes: int
    collective: str

    def __post_init__(self):
        for key, least in (("round", 1), ("src", 0), ("dst", 0), ("bytes", 0)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise ValueError(f"{key}: expected a whole number of at least {least}, found {value!r:.60}")
        if self.src == self.dst or type(self.collective) is not str:
            raise ValueError("expected two different ranks, and a text as the collective")


class Recorder:
    """Writes a line for each message of a mesh: `mesh.observer = Recorder(path)`. An older file is replaced.

    Processes need a file each. Virtual ranks take turns and can share one; but they share their process's record of
    what it does, too, so name the collective for them: `mesh.observer = partial(recorder, collective="broadcast")`.
    """

    def __init__(self, path: Path):
        self.path = path
        path.write_bytes(b"")

    def __call__(self, round: int, src: int, dst: int, tensor: torch.Tensor, collective: str | None = None) -> None:
        """Write one line. The file is opened for it, so it is complete, however the rank ends."""
        if collective is None:
            collective = flight.position().name if flight.position().inside else ""
        message = Message(round, src, dst, tensor.numel() * tensor.element_size(), collective)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(message)) + "\n")


def read_traffic(paths: Iterable[Path]) -> list[Message]:
    """Read recorded files. Raises ValueError for a line that is not exactly one message.

    It names the file and the number of the line, and repeats what the error behind it says.
    """
    messages = []
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                messages.append(Message(**json.loads(line, object_pairs_hook=_exactly_the_keys)))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: expected a message, found {line[:80]!r}: {error}") from None
    return messages


def _exactly_the_keys(pairs: list[tuple]) -> dict:
    if sorted(key for key, _ in pairs) != sorted(Message.__dataclass_fields__):
        raise ValueError(f"expected an object with {', '.join(Message.__dataclass_fields__)}, each once")
    return dict(pairs)


def totals(messages: Iterable[Message]) -> tuple[Counter, Counter, int]:
    """Return bytes sent by each rank, bytes on each link (src, dst), and the round in which the last one arrives."""
    sent, links, arrived = Counter(), Counter(), Counter()
    for message in sorted(messages, key=lambda each: each.round):
        sent[message.src] += message.bytes
        links[message.src, message.dst] += message.bytes
        arrived[message.dst] = max(arrived[message.dst] + 1, message.round)  # one a round
    return sent, links, max(arrived.values(), default=0)
