"""Reading what a run writes, without waiting for it and without keeping all of it."""

import contextlib
import os


class Capped:
    """Keeps the first and the last half of `limit` bytes; counts all of them."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        """Take in what came."""
        self.total += len(data)
        room = self.half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self.half :]

    def text(self) -> str:
        """What was kept; a line in the middle says how much was not."""
        dropped = self.total - len(self._head) - len(self._tail)
        middle = f"\n[... {dropped:,} bytes of output were dropped here ...]\n".encode() if dropped else b""
        return bytes(self._head + middle + self._tail).decode(errors="replace")


class Lines:
    """Collects whole lines up to `limit` bytes; `full` says that more came."""

    def __init__(self, limit: int) -> None:
        self.limit, self.full = limit, False
        self.lines: list[str] = []
        self._rest, self._size = b"", 0

    def add(self, data: bytes) -> list[str]:
        """Take in what came; return the lines that are complete now."""
        self._size += len(data)
        if self._size > self.limit:
            self.full = True
            return []
        *complete, self._rest = (self._rest + data).split(b"\n")
        new = [line.decode(errors="replace") for line in complete]
        self.lines += new
        return new


class Pipe:
    """A pipe whose reading end never waits. The writing end is to be inherited by a fork."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def read(self) -> bytes | None:
        """What is there: b"" at the end of the stream, None if nothing came yet."""
        try:
            return os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return None

    def close_writer(self) -> None:
        """In the process that reads: the end is seen only when nobody can write."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Both ends."""
        self.close_writer()
        with contextlib.suppress(OSError):
            os.close(self.reader)
