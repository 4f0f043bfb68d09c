"""`SocketMesh`: a mesh over TCP or Unix sockets, one connection between any two ranks. TCP runs on every platform."""

import secrets
import selectors
import socket
import sys
import time
import weakref

from mesh import MeshTimeout
from ranks import check_seconds, check_world_size
from stream_mesh import LONGEST, StreamMesh

FAMILIES = ("tcp", "unix") if sys.platform == "linux" else ("tcp",)
_BUFFER = 1 << 20  # bytes that a connection should hold; the system may allow less


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
        weakref.finalize(self, _close, self._sockets)
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
        seconds; ValueError for a bad timeout, and for a second call.
        """
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
            _close(connections.values())
            raise
        finally:
            _close(self._sockets)  # this process's copies: a dead rank's must not seem to be alive
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
            _close([*said, selector])


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


def _close(things) -> None:
    for each in things:
        each.close()


class SocketMesh(StreamMesh):
    """A mesh over the connections that `Listeners` make. A peer whose process ends is noticed at once."""

    def __init__(self, rank: int, world_size: int, listeners: Listeners, timeout: float = 60.0):
        if listeners.world_size != world_size:
            raise ValueError(f"the listeners are for {listeners.world_size} ranks, there are {world_size}")
        super().__init__(rank, world_size, timeout)
        self._sockets, self._selector = listeners.connect(rank, timeout), selectors.DefaultSelector()
        weakref.finalize(self, _close, [*self._sockets.values(), self._selector])
        for peer, connection in self._sockets.items():
            connection.setblocking(False)
            if listeners.family == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go at once
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _push(self, dst, data):
        return self._move(dst, self._sockets[dst].send, data) or 0

    def _pull(self, src, memory):
        """Fill `memory` from the stream from `src` as far as bytes are there; return how many. Note the stream's end."""
        count = self._move(src, self._sockets[src].recv_into, memory)
        if count == 0:  # nothing, though it need not wait: there will never be more
            self._end(src, "its connection has ended")
        return count or 0

    def _move(self, peer, call, memory) -> int | None:
        """Let `call` move bytes out of or into `memory`; return how many, None if it would have to wait or fails."""
        try:
            return call(memory)
        except BlockingIOError:
            return None
        except OSError as error:
            self._end(peer, f"its connection has ended: {error.strerror}")
            return None

    def _end(self, peer, why) -> None:
        if peer not in self._gone:
            self._gone[peer] = why
            self._selector.unregister(self._sockets[peer])
            self._sockets[peer].close()

    def _ready(self, seconds, dst):
        """Return the ranks whose bytes can be pulled; wait for some, or for room in the stream to `dst`, if given."""
        if dst is not None:
            self._selector.modify(self._sockets[dst], selectors.EVENT_READ | selectors.EVENT_WRITE, dst)
        events = self._selector.select(seconds)
        if dst is not None:
            self._selector.modify(self._sockets[dst], selectors.EVENT_READ, dst)
        return [key.data for key, event in events if event & selectors.EVENT_READ]
