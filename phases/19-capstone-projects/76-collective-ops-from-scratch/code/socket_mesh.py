"""`SocketMesh`: a mesh over TCP or Unix sockets, one connection between any two ranks. TCP runs on every platform."""

import selectors
import socket
import weakref

from listeners import Listeners, close_all
from stream_mesh import StreamMesh

_BUFFER = 1 << 20  # bytes that a connection should hold; the system may allow less


class SocketMesh(StreamMesh):
    """A mesh over the connections that `Listeners` make. A peer whose process ends is noticed at once.

    The connections end with the mesh: a rank that throws it away may cut off what others still send to it.
    """

    def __init__(self, rank: int, world_size: int, listeners: Listeners, timeout: float = 60.0):
        if listeners.world_size != world_size:
            raise ValueError(f"the listeners are for {listeners.world_size} ranks, there are {world_size}")
        super().__init__(rank, world_size, timeout)
        self._sockets, self._selector = listeners.connect(rank, timeout), selectors.DefaultSelector()
        weakref.finalize(self, close_all, [*self._sockets.values(), self._selector])
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
        """Fill `memory` from the stream from `src` as far as bytes are there; return how many. Note its end."""
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
