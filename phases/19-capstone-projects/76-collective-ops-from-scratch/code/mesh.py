"""`Mesh`: N ranks that can send tensors to each other, and a transport that counts what that costs.

The collectives of this lesson need nothing but `send` and `recv`. The counters are the ground truth for every formula:
payload bytes, messages, and rounds.
"""

import copy
import json
import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch
import wire
from ranks import check_seconds, check_world_size

CONTROL = -1  # the tag of messages that carry facts, not payload
MAX_TAG = (1 << 31) - 1  # torch.distributed takes no larger one


class MeshTimeout(TimeoutError):
    """A message did not come within the deadline: says who waited for whom (`waited_for`)."""

    def __init__(self, message: str, waited_for: int):
        super().__init__(message)
        self.waited_for = waited_for


@dataclass
class Counters:
    """What one rank has sent and received. `rounds` is explained in `Mesh`; `bytes_to` has each link's bytes apart."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    rounds: int = 0
    control_messages: int = 0
    control_bytes: int = 0
    bytes_to: Counter = field(default_factory=Counter)  # rank of the whole mesh -> payload bytes sent to it


@dataclass
class _Port:
    """One rank's end of the wires. A mesh shares it with the meshes split from it."""

    sent: int = 0  # the round of the last message sent,
    received: int = 0  # of the last one received,
    known: int = 0  # and the latest round of all that were received
    contexts: int = 0  # how many sub-meshes there are
    broken: Exception | None = None  # why this port cannot be used any more


class Mesh:
    """Point-to-point messages between `world_size` ranks. A subclass moves them: `_post` and `_take`.

    `send` is buffered: it returns when the tensor may be reused. `recv` returns a new tensor with the sender's dtype
    and shape. Messages between two ranks with the same tag arrive in order.

    Rounds: in one round a rank can send one message and receive one (the alpha of the alpha-beta model). Each message
    carries the round it travels in: the first in which the sender's port is free *and* all that the sender has received
    so far has arrived. So `counters.rounds` is the longest chain of messages that had to wait for each other.
    """

    device = torch.device("cpu")  # where its tensors live
    most_dimensions = 64  # of a message: torch itself allows no more

    def __init__(self, rank: int, world_size: int, timeout: float = 60.0):
        check_world_size(world_size)
        check_rank("rank", rank, world_size)
        check_seconds("timeout", timeout)
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.members, self.context = list(range(world_size)), 0  # a sub-mesh has fewer members and its own context
        self.counters, self._port = Counters(), _Port()
        self.observer: Callable | None = None  # called as observer(round, src, dst, tensor) for each message sent

    def send(self, dst: int, tensor: torch.Tensor, tag: int = 0, lone: bool = True) -> None:
        """Send a tensor of any shape, stride and dtype to rank `dst`. Not `lone`: a receive is posted with it.

        Raises ValueError, with both numbers, for a tensor of more than `most_dimensions` dimensions.
        """
        self._check_usable()
        check_peer(self.rank, dst, self.world_size, tag)
        check_tensor("send", tensor, self.device)
        if tensor.dim() > self.most_dimensions:
            raise ValueError(f"a message may have {self.most_dimensions} dimensions, this tensor has {tensor.dim()}")
        port = self._port
        port.sent = max(port.sent, port.known) + 1
        self.counters.rounds = max(self.counters.rounds, port.sent)
        self.counters.messages_sent += 1
        size = tensor.numel() * tensor.element_size()
        self.counters.bytes_sent += size
        self.counters.bytes_to[self.members[dst]] += size
        if self.observer is not None:
            self.observer(port.sent, self.members[self.rank], self.members[dst], tensor)
        self._post(self.members[dst], (self.context, tag), port.sent, tensor.detach(), lone)

    def recv(self, src: int, tag: int = 0) -> torch.Tensor:
        """Return the next tensor from rank `src` with this tag. Raises MeshTimeout when none comes in time."""
        self._check_usable()
        check_peer(self.rank, src, self.world_size, tag)
        stamp, tensor = self._take(self.members[src], (self.context, tag))
        port = self._port
        port.received = max(port.received + 1, stamp)
        port.known = max(port.known, port.received)
        self.counters.rounds = max(self.counters.rounds, port.received)
        self.counters.bytes_received += tensor.numel() * tensor.element_size()
        return tensor

    def sendrecv(self, dst: int, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        """Send to `dst` and receive from `src` at once: on no transport does the one wait for the other."""
        self.send(dst, tensor, tag, lone=False)
        return self.recv(src, tag)

    def agree(self, facts) -> list:
        """Return the facts (a small JSON value) of all ranks, in rank order. Counted as control, not as payload."""
        self._check_usable()
        data = encode_facts(facts)
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [json.loads(data)] * self.world_size  # what the others see: a tuple arrives as a list
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
        """Return the mesh of the ranks that gave the same color, ordered by (key, rank). All ranks call it.

        Raises ValueError unless color and key are whole numbers.
        """
        check_whole(color=color, key=key)
        everyone = self.agree([color, key, self._port.contexts])
        chosen = sorted((its_key, rank) for rank, (its_color, its_key, _) in enumerate(everyone) if its_color == color)
        sub = copy.copy(self)  # the same port and counters, other members; the context keeps messages apart
        self._port.contexts = sub.context = 1 + max(contexts for _, _, contexts in everyone)
        sub.members = [self.members[rank] for _, rank in chosen]
        sub.rank, sub.world_size = sub.members.index(self.members[self.rank]), len(chosen)
        return sub

    def _post(self, dst: int, tag: tuple[int, int], stamp: int, tensor: torch.Tensor, lone: bool) -> None:
        """Move one message towards `dst` (a rank of the whole mesh). Must not keep a reference to `tensor`."""
        raise NotImplementedError

    def _take(self, src: int, tag: tuple[int, int]) -> tuple[int, torch.Tensor]:
        """Return (round stamp, tensor) of the next message from `src` with this (context, tag)."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self._port.broken:
            why = self._port.broken  # as the cause, too: so that the launcher sees a victim
            me = self.members[self.rank]
            raise ValueError(f"rank {me}: this mesh cannot be used again after its failure: {why}") from why

    def _lost(self, peer: int, tag: tuple[int, int], why: str, sending: bool = False) -> MeshTimeout:
        """Mark the mesh as broken and return the error to raise."""
        what = "facts" if tag[1] == CONTROL else f"a message (tag {tag[1]})"
        wait = f"rank {peer} to take {what}" if sending else f"{what} from rank {peer}"
        self._port.broken = MeshTimeout(f"rank {self.members[self.rank]} waited for {wait}: {why}", peer)
        return self._port.broken


class QueueMesh(Mesh):
    """A mesh over `multiprocessing` queues: one inbox a rank, made by the launcher with `inboxes(world_size)`."""

    def __init__(self, rank: int, world_size: int, boxes: list, timeout: float = 60.0):
        super().__init__(rank, world_size, timeout)
        if len(boxes) != world_size:
            raise ValueError(f"{world_size} ranks need as many inboxes, got {len(boxes)}")
        self._boxes, self._stash = boxes, defaultdict(deque)

    @staticmethod
    def inboxes(world_size: int, start_method: str) -> list:
        """Create the queues, before the processes that will use them."""
        check_world_size(world_size)
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
                raise self._lost(src, tag, f"none came in {self.timeout:g} s") from None
            self._stash[sender, its_tag].append((stamp, message))
        stamp, (data, dtype, shape) = self._stash[src, tag].popleft()
        return stamp, wire.tensor_from_bytes(data, wire.dtype_of(dtype), shape)


def check_rank(what: str, rank: int, world_size: int) -> None:
    """Raise ValueError unless `rank` is one of `world_size` ranks."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"{what} must be a rank from 0 to {world_size - 1}, got {rank!r}")


def check_peer(rank: int, peer: int, world_size: int, tag: int) -> None:
    """Raise ValueError unless `rank` can exchange messages with `peer` under this tag."""
    check_rank("peer", peer, world_size)
    if peer == rank:
        raise ValueError(f"rank {rank} cannot exchange messages with itself")
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= MAX_TAG:
        raise ValueError(f"a tag is a whole number from 0 to {MAX_TAG}, got {tag!r}")


def check_whole(**values: int) -> None:
    """Raise ValueError unless all are whole numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_tensor(what: str, tensor: torch.Tensor, device: torch.device | None = None) -> None:
    """Raise ValueError unless `tensor` is one whose elements lie in memory, on a device of this type if it is given."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} needs a tensor, got {type(tensor).__name__}")
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
    if kind is not torch.strided:
        raise ValueError(f"{what} needs a dense tensor, got one that is {str(kind).removeprefix('torch.')}")
    if device is not None and tensor.device.type != device.type:
        raise ValueError(f"{what}: tensor on {tensor.device}, but this group works on {device}")
    if tensor.is_meta:
        raise ValueError(f"{what}: a tensor on meta has no elements to move")


def encode_facts(facts) -> bytes:
    """Return a JSON value as bytes. Raises ValueError for anything else."""
    try:
        return json.dumps(facts).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts must be a JSON value, got {facts!r:.200}: {error}") from error


def must_agree(channel, what: str, facts: dict) -> None:
    """Raise the same ValueError on every rank unless all ranks brought the same facts. Call it before anything changes.

    Of `what` = "a plan" it says `ranks disagree on a plan: size: rank 0, 2 has 4; rank 1 has 8`: each fact that differs
    and its values as JSON text (`nothing` where a rank lacks it), the first rank's first; facts are joined by ` | `.
    Facts that are no dictionary count as one called `facts`. `channel` is a Mesh or a Comm: anything with `agree`.
    """
    everyone = [each if isinstance(each, dict) else {"facts": each} for each in channel.agree(facts)]
    if all(each == everyone[0] for each in everyone):
        return
    differences = []
    for key in dict.fromkeys(key for each in everyone for key in each):
        values = [json.dumps(each[key]) if key in each else "nothing" for each in everyone]  # as text: NaN equals NaN
        groups = [(value, [str(r) for r, v in enumerate(values) if v == value]) for value in dict.fromkeys(values)]
        if len(groups) > 1:
            differences.append(f"{key}: " + "; ".join(f"rank {', '.join(who)} has {value}" for value, who in groups))
    if differences:
        raise ValueError(f"ranks disagree on {what}: " + " | ".join(differences))
