"""`SocketMesh`: a mesh over TCP or Unix sockets, one connection between any two ranks. It runs on every platform."""

import os
import secrets
import selectors
import shutil
import socket
import tempfile
import time
import weakref
from pathlib import Path

from mesh import MeshTimeout, check_rank
from ranks import check_world_size
from stream_mesh import StreamMesh

FAMILIES = ("tcp", "unix") if hasattr(socket, "AF_UNIX") else ("tcp",)
_BUFFER = 1 << 20  # bytes that a connection should hold; the system may allow less


class Listeners:
    """One listening socket a rank, made by the launcher and given to all ranks: no address has to be waited for.

    "tcp" binds ports that the system chooses, on this machine's loopback; "unix" files in a folder of its own, which
    goes with this object. Who connects must know a secret that only these ranks were given. Raises ValueError for a bad
    world_size or family.
    """

    def __init__(self, world_size: int, family: str = "tcp"):
        check_world_size(world_size)
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
        self.world_size, self.family, self.secret = world_size, family, secrets.token_bytes(16)
        addresses = [("127.0.0.1", 0)] * world_size
        if family == "unix":
            folder = Path(tempfile.mkdtemp(prefix="ranks-"))
            weakref.finalize(self, _remove, folder, os.getpid())
            addresses = [str(folder / str(rank)) for rank in range(world_size)]
        self._sockets = []
        for address in addresses:
            listener = socket.socket(self._family())
            listener.bind(address)
            listener.listen(world_size)
            self._sockets.append(listener)

    def _family(self) -> int:
        return socket.AF_INET if self.family == "tcp" else socket.AF_UNIX

    def connect(self, rank: int, timeout: float) -> dict[int, socket.socket]:
        """Return this rank's connections, one to each other rank: it calls the lower ones and hears the higher ones.

        To be called once in each rank. Raises MeshTimeout, naming a rank, if not all have called within `timeout`.
        """
        if self._sockets[rank].fileno() < 0:
            raise ValueError(f"rank {rank} has connected through these listeners before")
        deadline, connections = time.monotonic() + timeout, {}
        for peer in range(rank):
            connection = socket.socket(self._family())
            connection.connect(self._sockets[peer].getsockname())  # that rank need not have come yet
            connection.sendall(self.secret + rank.to_bytes(4, "little"))
            connections[peer] = connection
        while missing := [peer for peer in range(rank + 1, self.world_size) if peer not in connections]:
            try:
                self._sockets[rank].settimeout(max(1e-3, deadline - time.monotonic()))
                connection, _ = self._sockets[rank].accept()
                hello = _receive(connection, len(self.secret) + 4, deadline)
            except TimeoutError:
                words = f"rank {rank} waited for rank {missing[0]} to connect: it did not in {timeout:g} s"
                raise MeshTimeout(words, missing[0]) from None
            peer = int.from_bytes(hello[len(self.secret) :], "little")
            if secrets.compare_digest(hello[: len(self.secret)], self.secret) and peer in missing:
                connections[peer] = connection
            else:
                connection.close()  # a stranger
        for listener in self._sockets:  # this process's copies: a dead rank's must not seem to be alive
            listener.close()
        return connections


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return the next `size` bytes; fewer if the connection ends."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (more := connection.recv(size - len(data))):
            break
        data += more
    return data


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a rank that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


class SocketMesh(StreamMesh):
    """A mesh over the connections that `Listeners` make. A peer whose process ends is noticed at once."""

    def __init__(self, rank: int, world_size: int, listeners: Listeners, timeout: float = 60.0):
        if listeners.world_size != world_size:
            raise ValueError(f"the listeners are for {listeners.world_size} ranks, there are {world_size}")
        check_rank("rank", rank, world_size)
        super().__init__(rank, world_size, timeout)
        self._sockets = listeners.connect(rank, timeout)
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._sockets.items():
            connection.setblocking(False)
            if listeners.family == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go at once
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _push(self, dst, data):
        return self._move(dst, self._sockets[dst].send, data)

    def _pull(self, src, memory):
        count = self._move(src, self._sockets[src].recv_into, memory)
        if count == 0 and src not in self._gone:
            self._end(src, "its connection has ended")
        return count

    def _move(self, peer, call, memory) -> int:
        try:
            return call(memory)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._end(peer, f"its connection has ended: {error.strerror}")
            return 0

    def _end(self, peer, why) -> None:
        if peer not in self._gone:
            self._gone[peer] = why
            self._selector.unregister(self._sockets[peer])

    def _ready(self, seconds, dst):
        if dst is not None:
            self._selector.modify(self._sockets[dst], selectors.EVENT_READ | selectors.EVENT_WRITE, dst)
        events = self._selector.select(seconds)
        if dst is not None:
            self._selector.modify(self._sockets[dst], selectors.EVENT_READ, dst)
        return [key.data for key, event in events if event & selectors.EVENT_READ]
