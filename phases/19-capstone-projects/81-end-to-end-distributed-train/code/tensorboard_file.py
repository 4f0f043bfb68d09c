"""TensorBoard's event files, written without TensorBoard: records with checksums, and four protocol buffer messages.

record:   length (8 bytes), its checksum (4), the event, its checksum (4); numbers begin with the lowest byte
Event:    1 wall time (double)   2 step   3 version (text)   5 Summary   7 SessionLog
Summary:  1 Value, repeated                  Value:  1 tag (text)   2 the number (float)
SessionLog:  1 status (1: a session starts here, and what was logged of this step or a later one no longer counts)
"""

import itertools
import os
import socket
import struct
import time
from pathlib import Path

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types: how a field's value is written
_files = itertools.count()


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_CRC32C = _table()  # of each byte


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes. Not zlib's CRC-32, which has another polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """Return a checksum as records hold it: rotated and moved, so that a record of records has no odd checksum."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """Return one record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def event(wall_time: float, step: int = 0, scalars: dict[str, float] | None = None) -> bytes:
    """Return an Event with a number for each tag."""
    values = b"".join(
        field(1, BYTES, field(1, BYTES, tag.encode()) + field(2, FLOAT, _single(value)))
        for tag, value in (scalars or {}).items()
    )
    return _stamp(wall_time, step) + (field(5, BYTES, values) if scalars else b"")


def field(number: int, wire_type: int, value) -> bytes:
    """Return one field of a message: its number and wire type, then the value (bytes: their length first)."""
    key = varint(number << 3 | wire_type)
    if wire_type == VARINT:
        return key + varint(value)
    if wire_type == BYTES:
        return key + varint(len(value)) + value
    return key + struct.pack("<d" if wire_type == DOUBLE else "<f", value)


def varint(value: int) -> bytes:
    """Return a whole number of at least 0 in groups of 7 bits, lowest first; the top bit says that another follows."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _stamp(wall_time: float, step: int) -> bytes:
    return field(1, DOUBLE, wall_time) + field(2, VARINT, step)


def _single(value: float) -> float:
    """Return a number that fits into 4 bytes; one that is too large becomes infinite."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


class EventFile:
    """A new event file in `folder`, which TensorBoard reads together with the others there.

    What they hold of steps after `position` no longer counts: these steps come again.
    """

    def __init__(self, folder: Path | str, position: int, clock=time.time):
        self.clock = clock
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(clock()):010}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self.path = Path(folder) / name  # TensorBoard reads files by name: the time comes first
        self._file = open(self.path, "xb")
        self._write(field(1, DOUBLE, clock()) + field(3, BYTES, b"brain.Event:2"))
        self.rewind(position)

    def rewind(self, position: int) -> None:
        """Say that what was logged of steps after `position` no longer counts."""
        self._write(_stamp(self.clock(), position + 1) + field(7, BYTES, field(1, VARINT, 1)))

    def write(self, row: dict) -> None:
        """Log each number of a row under its name; row["step"] is the step."""
        scalars = {name: float(value) for name, value in row.items() if type(value) in (int, float) and name != "step"}
        self._write(event(self.clock(), row["step"], scalars))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        self._file.write(record(data))
        self._file.flush()
