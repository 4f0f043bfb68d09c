"""`Listeners`: how ranks find each other and get one connection a pair. Anyone may call; only ranks are let in."""

import secrets
import selectors
import socket
import sys
import time
import weakref
from contextlib import suppress

from mesh import MeshTimeout, check_rank
from ranks import check_seconds, check_world_size
from stream_mesh import LONGEST

FAMILIES = ("tcp", "unix") if sys.platform == "linux" else ("tcp",)


class Listeners:
    """One listening socket a rank, made by the launcher and given to all ranks: no address has to be waited for.

    The system chooses the addresses: "tcp" ports of this machine's loopback, "unix" abstract names, which are no files
    and so leave none (Linux only). Others on this machine can call them, too: so a caller begins with a secret that
    only these ranks were given. Raises ValueError for a bad world_size or family.
    """

    def __init__(self, world_size: int, family: str = "tcp"):
        check_world_size(world_size)
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
        self.world_size, self.family, self.secret = world_size, family, secrets.token_bytes(16)
        self._sockets: list[socket.socket] = []
        weakref.finalize(self, close_all, self._sockets)
        for _ in range(world_size):
            self._sockets.append(self._socket())
            self._sockets[-1].bind(("127.0.0.1", 0) if family == "tcp" else "")
            self._sockets[-1].listen(2 * world_size)

    def _socket(self) -> socket.socket:
        return socket.socket(socket.AF_INET if self.family == "tcp" else socket.AF_UNIX)

    def _hello(self, rank: int) -> bytes:
        return self.secret + rank.to_bytes(4, "little")

    def connect(self, rank: int, timeout: float) -> dict[int, socket.socket]:
        """Return this rank's connections, one to each other rank: it calls the lower ones and hears the higher ones.

        To be called once in each rank. Raises MeshTimeout, naming a rank, if not all have come within `timeout`
        seconds; ValueError for a bad rank or timeout, and for a second call.
        """
        check_rank("rank", rank, self.world_size)
        check_seconds("timeout", timeout)
        if self._sockets[rank].fileno() < 0:
            raise ValueError(f"rank {rank} has connected through these listeners before")
        deadline, connections = time.monotonic() + timeout, {}
        try:
            for peer in range(rank):
                connections[peer] = self._socket()
                self._call(connections[peer], rank, peer, deadline)
            self._hear(connections, rank, deadline, timeout)
        except BaseException:
            close_all(connections.values())
            raise
        finally:
            close_all(self._sockets)  # this process's copies: a dead rank's must not seem to be alive
        return connections

    def _call(self, connection: socket.socket, rank: int, peer: int, deadline: float) -> None:
        try:
            connection.settimeout(_left(deadline))
            connection.connect(self._sockets[peer].getsockname())  # that rank need not have come yet
            connection.sendall(self._hello(rank))
        except OSError as error:
            raise MeshTimeout(f"rank {rank} could not connect to rank {peer}: {error}", peer) from error

    def _hear(self, connections: dict[int, socket.socket], rank: int, deadline: float, timeout: float) -> None:
        """Add the connections of the ranks above. All callers are heard at once: a silent one holds nobody up."""
        expected = {self._hello(peer): peer for peer in range(rank + 1, self.world_size)}
        listener, said = self._sockets[rank], {}  # caller -> what it has said so far
        listener.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        try:
            while expected:
                events = selector.select(_left(deadline))
                if not events and time.monotonic() >= deadline:
                    peer = min(expected.values())
                    words = f"rank {rank} waited for rank {peer} to connect: it did not in {timeout:g} s"
                    raise MeshTimeout(words, peer)
                for caller in [key.fileobj for key, _ in events]:
                    if caller is listener:
                        with suppress(BlockingIOError, ConnectionError):  # who called has hung up
                            caller, _ = listener.accept()
                            caller.setblocking(False)
                            said[caller] = bytearray()
                            selector.register(caller, selectors.EVENT_READ)
                    elif _finished(caller, said[caller], len(self._hello(rank))):
                        selector.unregister(caller)
                        hello = bytes(said.pop(caller))
                        if hello in expected and _read(caller, 1, socket.MSG_PEEK) != b"":  # not one of an earlier run
                            connections[expected.pop(hello)] = caller
                        else:
                            caller.close()
        finally:
            close_all([*said, selector])


def _left(deadline: float) -> float:
    return min(max(1e-3, deadline - time.monotonic()), LONGEST)


def _finished(caller: socket.socket, said: bytearray, size: int) -> bool:
    """Take in what has come, up to `size` bytes; say whether no more is to be heard."""
    more = _read(caller, size - len(said))
    said += more or b""
    return more == b"" or len(said) == size


def _read(connection: socket.socket, *size_and_flags: int) -> bytes | None:
    """Return the bytes that are there; None if there are none yet, b"" if the connection has ended."""
    try:
        return connection.recv(*size_and_flags)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def close_all(things) -> None:
    """Close sockets and selectors; those that are closed stay so."""
    for each in things:
        each.close()
