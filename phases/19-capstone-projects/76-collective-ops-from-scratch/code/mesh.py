"""`Mesh`: N ranks that can send tensors to each other, and a transport that counts what that costs.

The collectives of this lesson need nothing but `send` and `recv`. The counters are the ground truth for every formula:
payload bytes, messages, and rounds.
"""

import copy
import json
import queue
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import wire

CONTROL = -1  # the tag of messages that carry facts, not payload


class MeshTimeout(TimeoutError):
    """A message did not come within the deadline: says who waited for whom."""


@dataclass
class Counters:
    """What one rank has sent and received. `rounds` is explained in `Mesh`."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    rounds: int = 0
    control_messages: int = 0
    control_bytes: int = 0


class Mesh:
    """Point-to-point messages between `world_size` ranks. A subclass moves them: `_post` and `_take`.

    `send` is buffered: it returns when the tensor may be reused. `recv` returns a new tensor with the sender's dtype
    and shape. Messages between two ranks with the same tag arrive in order.

    Rounds: in one round a rank can send one message and receive one (the alpha of the alpha-beta model). Each message
    carries the round it travels in: the first in which the sender's port is free *and* all that the sender has received
    so far has arrived. So `counters.rounds` is the longest chain of messages that had to wait for each other.
    """

    def __init__(self, rank: int, world_size: int, timeout: float = 60.0):
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.counters = Counters()
        self.broken: str | None = None
        self.members, self.context = list(range(world_size)), 0  # a sub-mesh has fewer members and its own context
        self._last_context = [0]  # shared by all sub-meshes of this rank
        self._known = self._out = self._in = (
            0  # rounds: of all received, of the last message sent, of the last received
        )

    def send(self, dst: int, tensor: torch.Tensor, tag: int = 0, lone: bool = True) -> None:
        """Send a tensor of any shape, stride and dtype to rank `dst`. Not `lone`: a receive is posted with it."""
        self._check_peer(dst, "send to")
        self._out = max(self._out, self._known) + 1
        self.counters.rounds = max(self.counters.rounds, self._out)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += tensor.numel() * tensor.element_size()
        self._post(self.members[dst], (self.context, tag), self._out, tensor.detach(), lone)

    def recv(self, src: int, tag: int = 0) -> torch.Tensor:
        """Return the next tensor from rank `src` with this tag. Raises MeshTimeout when none comes in time."""
        self._check_peer(src, "receive from")
        stamp, tensor = self._take(self.members[src], (self.context, tag))
        self._in = max(self._in + 1, stamp)
        self._known = max(self._known, self._in)
        self.counters.rounds = max(self.counters.rounds, self._in)
        self.counters.bytes_received += tensor.numel() * tensor.element_size()
        return tensor

    def agree(self, facts) -> list:
        """Return the facts (a small JSON value) of all ranks, in rank order. Counted as control, not as payload."""
        self._check_usable()
        data = json.dumps(facts).encode()
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [facts] * self.world_size
        for step in range(1, self.world_size):
            dst = self.members[(self.rank + step) % self.world_size]
            self._post(dst, (self.context, CONTROL), 0, message, lone=False)
            self.counters.control_messages += 1
            self.counters.control_bytes += len(data)
        for step in range(1, self.world_size):
            src = (self.rank - step) % self.world_size
            _, received = self._take(self.members[src], (self.context, CONTROL))
            everyone[src] = json.loads(wire.tensor_to_bytes(received))
        return everyone

    def split(self, color: int, key: int = 0) -> "Mesh":
        """Return the mesh of the ranks that gave the same color, ordered by (key, rank). All ranks call it."""
        everyone = self.agree([color, key, self._last_context[0]])
        chosen = sorted((k, r) for r, (c, k, _) in enumerate(everyone) if c == color)
        sub = copy.copy(self)  # the same wires and counters, other members; the context keeps messages apart
        self._last_context[0] = sub.context = 1 + max(last for _, _, last in everyone)
        sub.members = [self.members[r] for _, r in chosen]
        sub.rank, sub.world_size = sub.members.index(self.members[self.rank]), len(chosen)
        return sub

    def _post(self, dst: int, tag: tuple[int, int], stamp: int, tensor: torch.Tensor, lone: bool) -> None:
        """Move one message towards `dst` (a rank of the whole mesh). Must not keep a reference to `tensor`."""
        raise NotImplementedError

    def _take(self, src: int, tag: tuple[int, int]) -> tuple[int, torch.Tensor]:
        """Return (round stamp, tensor) of the next message from `src` with this (context, tag)."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self.broken:
            raise RuntimeError(f"rank {self.rank}: this mesh failed before and cannot be used again: {self.broken}")

    def _check_peer(self, peer: int, action: str) -> None:
        self._check_usable()
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.world_size:
            raise ValueError(f"rank {self.rank} cannot {action} rank {peer!r}: there are {self.world_size} ranks")
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot {action} itself")

    def _timed_out(self, src: int, tag: tuple[int, int]) -> MeshTimeout:
        me = self.members[self.rank]
        self.broken = f"rank {me} waited {self.timeout:g} s for a message from rank {src} (context, tag: {tag})"
        return MeshTimeout(self.broken)


class QueueMesh(Mesh):
    """A mesh over `multiprocessing` queues: one inbox a rank, made by the launcher with `inboxes(world_size)`."""

    def __init__(self, rank: int, world_size: int, boxes: list, timeout: float = 60.0):
        super().__init__(rank, world_size, timeout)
        self._boxes, self._stash = boxes, defaultdict(deque)

    @staticmethod
    def inboxes(world_size: int, start_method: str) -> list:
        """Create the queues, before the processes that will use them."""
        context = get_context(start_method)
        return [context.Queue() for _ in range(world_size)]

    def _post(self, dst, tag, stamp, tensor, lone):
        message = (wire.tensor_to_bytes(tensor), wire.dtype_name(tensor.dtype), tuple(tensor.shape))
        self._boxes[dst].put((self.members[self.rank], tag, stamp, message))

    def _take(self, src, tag):
        deadline = time.monotonic() + self.timeout
        while not self._stash[src, tag]:
            try:
                left = max(0.0, deadline - time.monotonic())
                sender, its_tag, stamp, message = self._boxes[self.members[self.rank]].get(timeout=left)
            except queue.Empty:
                raise self._timed_out(src, tag) from None
            self._stash[sender, its_tag].append((stamp, message))
        stamp, (data, dtype, shape) = self._stash[src, tag].popleft()
        return stamp, wire.tensor_from_bytes(data, wire.dtype_of(dtype), shape)


def must_agree(channel, what: str, facts: dict) -> None:
    """Raise the same ValueError on every rank unless all ranks brought the same facts. Call it before anything changes.

    `channel` is a Mesh or a Comm: anything with `agree`.
    """
    everyone = channel.agree(facts)
    if all(other == everyone[0] for other in everyone):
        return
    differences = []
    for key in dict.fromkeys(key for facts in everyone for key in facts):
        values = [json.dumps(facts.get(key)) for facts in everyone]
        if len(set(values)) > 1:
            groups = [(value, [str(r) for r, v in enumerate(values) if v == value]) for value in dict.fromkeys(values)]
            differences.append(f"{key}: " + "; ".join(f"rank {', '.join(who)} has {value}" for value, who in groups))
    raise ValueError(f"ranks disagree on {what}: " + " | ".join(differences))
