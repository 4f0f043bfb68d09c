"""Where is each rank? A few bytes a rank, written by the rank and readable by the launcher, also after a crash.

Each rank records "communication k, its name, still inside or left" in a slot of a memory-mapped file. When a run fails,
the launcher reads all slots: the rank that is dead, or behind, is the cause; ranks inside a collective are its victims.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_SLOT = struct.Struct("<I?59s")  # count, inside, name: 64 bytes a rank


class Position(NamedTuple):
    """The last communication a rank entered: its number `count` (0: none yet), its name, and whether it is inside."""

    count: int = 0
    inside: bool = False
    name: str = ""

    def __str__(self) -> str:
        if self.count == 0:
            return "before its first communication"
        return f"{'in' if self.inside else 'after'} communication {self.count} ({self.name})"


class _Recorder:
    """This process's slot. One a process is right: a process is one rank. Without a launcher it only remembers."""

    def __init__(self):
        self.position, self.depth, self.board, self.offset = Position(), 0, None, 0

    def write(self, count: int, inside: bool, name: str) -> None:
        self.position = Position(count, inside, name)
        if self.board is not None:
            _SLOT.pack_into(
                self.board, self.offset, count, inside, name.encode()
            )  # struct cuts a name that is too long


_recorder = _Recorder()


def create(path: Path, world_size: int) -> None:
    """Create the board, one empty slot a rank (launcher)."""
    path.write_bytes(bytes(_SLOT.size * world_size))


def attach(path: Path, rank: int) -> None:
    """Record into `rank`'s slot of the board from now on (rank)."""
    with open(path, "r+b") as file:
        _recorder.board = mmap.mmap(file.fileno(), 0)
    _recorder.offset, _recorder.position = rank * _SLOT.size, Position()


def read(path: Path) -> list[Position]:
    """Read every rank's position (launcher)."""
    return [
        Position(count, inside, name.rstrip(b"\0").decode(errors="replace"))
        for count, inside, name in _SLOT.iter_unpack(path.read_bytes())
    ]


def position() -> Position:
    """Return where this process is (rank)."""
    return _recorder.position


class inside:
    """Record one communication around a block; those it consists of are not recorded apart.

    If the block raises, the record stays at "inside". (A class: a generator would take three times as long.)
    """

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        self.outermost, self.count = _recorder.depth == 0, _recorder.position.count + 1
        if self.outermost:
            _recorder.write(self.count, True, self.name)
        _recorder.depth += 1

    def __exit__(self, kind, error, traceback):
        _recorder.depth -= 1
        if self.outermost and kind is None:
            _recorder.write(self.count, False, self.name)


class waiting:
    """Record that this rank waits for something it launched earlier; the count stays."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        self.before = _recorder.position
        _recorder.write(self.before.count, True, self.name)

    def __exit__(self, kind, error, traceback):
        if kind is None:
            _recorder.write(self.before.count, self.before.inside, self.name)
