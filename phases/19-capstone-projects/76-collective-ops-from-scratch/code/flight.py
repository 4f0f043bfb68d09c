"""Where is each rank? A few bytes a rank, written by the rank and readable by the launcher, also after a crash.

Each rank records "communication k, its name, still inside or left" in a slot of a memory-mapped file. When a run fails,
the launcher reads all slots: the rank that is dead, or behind, is the cause; ranks inside a collective are its victims.
"""

import mmap
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SLOT = struct.Struct("<I?59s")  # count, inside, name: 64 bytes a rank


@dataclass(frozen=True)
class Position:
    """The last communication a rank entered: its number `count` (0: none yet), its name, and whether it is inside."""

    count: int
    inside: bool
    name: str

    def __str__(self) -> str:
        if self.count == 0:
            return "before its first communication"
        return f"{'in' if self.inside else 'after'} communication {self.count} ({self.name})"


class _Recorder:
    """This process's slot. One a process is right: a process is one rank. Without a launcher it only counts."""

    def __init__(self):
        self.count, self.board, self.offset = 0, None, 0

    def write(self, count: int, inside: bool, name: str) -> None:
        if self.board is not None:
            _SLOT.pack_into(self.board, self.offset, count, inside, name.encode()[:59])


_recorder = _Recorder()


def create(path: Path, world_size: int) -> None:
    """Create the board, one empty slot a rank (launcher)."""
    path.write_bytes(bytes(_SLOT.size * world_size))


def attach(path: Path, rank: int) -> None:
    """Record into `rank`'s slot of the board from now on (rank)."""
    with open(path, "r+b") as file:
        _recorder.board = mmap.mmap(file.fileno(), 0)
    _recorder.offset, _recorder.count = rank * _SLOT.size, 0


def read(path: Path) -> list[Position]:
    """Read every rank's position (launcher)."""
    data = path.read_bytes()
    return [
        Position(count, inside, name.rstrip(b"\0").decode(errors="replace"))
        for count, inside, name in _SLOT.iter_unpack(data)
    ]


def enter(name: str) -> None:
    """Record that the next communication begins."""
    _recorder.count += 1
    _recorder.write(_recorder.count, True, name)


def leave(name: str) -> None:
    """Record that the latest communication is over, or launched and left to itself."""
    _recorder.write(_recorder.count, False, name)


@contextmanager
def inside(name: str):
    """Record one communication around a block. If the block raises, the record stays at "inside"."""
    enter(name)
    yield
    leave(name)


@contextmanager
def waiting(name: str):
    """Record that this rank waits for something it launched earlier; the count stays."""
    _recorder.write(_recorder.count, True, name)
    yield
    leave(name)
