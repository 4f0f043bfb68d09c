"""`Comm`: the one interface through which lessons 77-81 communicate.

`TorchComm` runs it on a `torch.distributed` group (gloo, NCCL), `MeshComm` (mesh_comm.py) on this lesson's own
collectives over any `Mesh`. Code written against `Comm` runs unchanged on GPUs, on CPU processes and in the virtual
cluster.
"""

import copy
import itertools
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import collectives
import flight
import plain
import torch
import torch.distributed as dist
import wire
from mesh import check_peer, check_whole, encode_facts, must_agree

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13; 2.11
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_AGREE_BYTES = 252  # facts that fit travel in one message; longer ones need a second
WIDER = {torch.bool: torch.int32, torch.int16: torch.int32}  # gloo adds bools as bytes, and int16 not at all


@dataclass
class CommCounters:
    """What was asked of a `Comm`: number of calls and payload bytes (the T of the formulas), by operation."""

    calls: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    control_calls: int = 0

    def count(self, operation: str, *tensors: torch.Tensor) -> None:
        """Record one call."""
        self.calls[operation] += 1
        self.bytes[operation] += sum(t.numel() * t.element_size() for t in tensors)


class Work:
    """Something launched. `wait()` returns when its results may be used; calling it again does nothing."""

    def __init__(self, name: str, wait=None, failures=nullcontext()):  # noqa: B008
        self._name, self._wait, self._failures = name, wait, failures

    def wait(self) -> None:
        """Block until done (on a GPU: make the current stream wait)."""
        if self._wait is not None:
            with flight.waiting(self._name), self._failures:
                self._wait()
            self._wait = None


class _Failures(list):
    """Errors of communication; a `with` block around one notes its error here."""

    def __enter__(self): ...

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError | OSError):
            self.append(error)


class Comm:
    """A group of ranks. All ranks of it make the same calls in the same order.

    Every call first lets the ranks compare operation, shape and dtype, and raises the same ValueError on all of them
    before anything is changed. Code that has agreed on its whole plan in advance uses `unchecked()` instead.
    """

    rank: int
    world_size: int
    device: torch.device

    def __init__(self):
        self.counters, self.checks = CommCounters(), True
        self._failures = _Failures()  # shared with `unchecked` copies

    def unchecked(self) -> "Comm":
        """Return this communicator without the comparison before each call; counters are shared."""
        other = copy.copy(self)
        other.checks = False
        return other

    def all_reduce(self, x: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Replace `x` by its sum (avg, max) over all ranks. avg needs floating-point elements."""
        self._check("all_reduce", x, x, op=op)
        return self._run("all_reduce", x, x, lambda: self._all_reduce(x, op), async_op, op=op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Fill `out` with chunk `rank` of the sum of `x` (N x out elements). `out` may be x's own slice."""
        self._check("reduce_scatter", x, out, shrinks=self.world_size, op=op)
        return self._run("reduce_scatter", x, x, lambda: self._reduce_scatter(out, x, op), async_op, op=op)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, async_op: bool = False) -> Work:
        """Fill `out` (N x x elements) with all ranks' `x`, in rank order. `x` may be out's own slice."""
        self._check("all_gather", x, out, grows=self.world_size)
        return self._run("all_gather", x, out, lambda: self._all_gather(out, x), async_op)

    def broadcast(self, x: torch.Tensor, src: int = 0, async_op: bool = False) -> Work:
        """Replace `x` by rank `src`'s (a rank of this group)."""
        self._check("broadcast", x, x, src=src)
        return self._run("broadcast", x, x, lambda: self._broadcast(x, src), async_op, src=src)

    def exchange(self, sends: list, recvs: list) -> Work:
        """Post sends and receives, lists of (tensor, peer, tag), together. Received tensors are filled after `wait()`.

        A received message must have its tensor's shape and dtype: else ValueError, where calls are checked (not on
        NCCL), and nothing is filled. gloo itself ends a process whose message is longer than its tensor. NCCL ignores
        tags: there the order of posting between two ranks is the tag.
        """
        for message in [*sends, *recvs]:
            if not isinstance(message, tuple | list) or len(message) != 3:
                raise ValueError(f"exchange needs messages (tensor, peer, tag), got {message!r:.200}")
            tensor, peer, tag = message
            self._check_tensor("exchange", tensor)
            check_peer(self.rank, peer, self.world_size, tag)
        for tensor, _, _ in recvs:
            self._check_writable("exchange", tensor)
        self.counters.count("exchange", *(tensor for tensor, _, _ in sends))
        with self._recorded("exchange"), self._failures:
            return Work("exchange", self._exchange(sends, recvs), self._failures)

    def agree(self, facts) -> list:
        """Return the facts (a small JSON value) of every rank, in rank order, on every rank. Also a barrier."""
        self.counters.control_calls += 1
        with self._recorded("agree"), self._failures:
            return self._agree(facts)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-d buffer on this group's device."""
        check_buffer(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def split(self, color: int, key: int = 0) -> "Comm":
        """Return the communicator of the ranks that gave the same color, ordered by (key, rank). All ranks call it."""
        raise NotImplementedError

    def _run(self, name, x, payload, launch, async_op, op=None, src=0) -> Work:
        """Compare with the other ranks, then launch: one recorded communication."""
        with self._recorded(name), self._failures:
            if self.checks:
                facts = {"operation": name, "shape": list(x.shape), "dtype": wire.dtype_name(x.dtype)}
                must_agree(self, "a collective", facts | {"reduction": op, "source": src})
            self.counters.count(name, payload)
            work = Work(name, launch(), self._failures)
            if not async_op:
                work.wait()
        return work

    def _recorded(self, name: str) -> flight.inside:
        """Record a communication; refuse it if an earlier one failed: who knows which messages are still on the way."""
        if self._failures:
            why = self._failures[0]
            raise ValueError(f"rank {self.rank}: this group cannot be used again after its failure: {why}") from why
        return flight.inside(name)

    def _check(self, name, x, out, grows=1, shrinks=1, op=collectives.MOVES, src=0) -> None:
        """Look for what is wrong with a call without any communication."""
        self._check_tensor(name, x, op, src)
        self._check_tensor(name, out)
        self._check_writable(name, out)
        if out.dtype != x.dtype:
            raise ValueError(f"{name}: input is {x.dtype}, output {out.dtype}")
        if x.numel() * grows != out.numel() * shrinks:
            raise ValueError(f"{name}: {self.world_size} ranks, {x.numel()} elements in, {out.numel()} out do not fit")

    def _check_tensor(self, name, tensor, op=collectives.MOVES, src=0) -> None:
        collectives.check_call(name, self.world_size, tensor, op, src, self.device)

    def _check_writable(self, name, tensor) -> None:
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name} cannot fill an expanded tensor: its elements share memory")


class TorchComm(Comm):
    """`Comm` over a `torch.distributed` process group; None means the default group."""

    def __init__(self, group=None):
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call this from a worker of run_ranks")
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._backends = dist.get_backend_config(group)
        cuda = "nccl" in self._backends
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._control_device = torch.device("cpu") if "gloo" in self._backends else self.device

    def _all_reduce(self, x, op):
        work = plain.flat(x).to(WIDER.get(x.dtype, x.dtype))
        handle = dist.all_reduce(plain.reals(work), group=self.group, async_op=True, **self._reduction(op))
        return self._finisher(handle, work, x, op)

    def _reduce_scatter(self, out, x, op):
        source = plain.flat(x).to(WIDER.get(x.dtype, x.dtype))
        work = plain.flat(out).to(source.dtype)
        options = {"group": self.group, "async_op": True, **self._reduction(op)}
        handle = _reduce_scatter_single(plain.reals(work), plain.reals(source), **options)
        return self._finisher(handle, work, out, op)

    def _all_gather(self, out, x):
        work = plain.flat(out)
        handle = _all_gather_single(plain.raw(work), plain.raw(plain.flat(x)), group=self.group, async_op=True)
        return self._finisher(handle, work, out)

    def _broadcast(self, x, src):
        work = plain.flat(x)
        handle = dist.broadcast(plain.raw(work), group_src=src, group=self.group, async_op=True)
        return self._finisher(handle, work, x)

    def _reduction(self, op):
        if op == "avg" and self.device.type == "cuda":
            return {"op": dist.ReduceOp.AVG}
        # On gloo the mean is a sum and a division: the same bits on every version of torch.
        return {"op": dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM}

    def _finisher(self, handle, work, result, op=None):
        def finish():
            handle.wait()
            if op == "avg" and self.device.type == "cpu":
                plain.divide(work, self.world_size)
            plain.fill(result, work)

        return finish

    def _exchange(self, sends, recvs):
        checked = self.checks and self.device.type == "cpu"
        filled = [plain.flat(tensor) for tensor, _, _ in recvs]
        incoming = [plain.raw(work) for work in filled]
        outgoing = [plain.raw(plain.flat(tensor)) for tensor, _, _ in sends]
        if checked:
            incoming = [torch.empty(plain.LABEL_BYTES + len(each), dtype=torch.uint8) for each in incoming]
            outgoing = [torch.cat((plain.label(t), each)) for (t, _, _), each in zip(sends, outgoing, strict=True)]
        posts = [(dist.irecv, x, None, self.group, tag, p) for x, (_, p, tag) in zip(incoming, recvs, strict=True)]
        posts += [(dist.isend, x, None, self.group, tag, p) for x, (_, p, tag) in zip(outgoing, sends, strict=True)]
        if self.device.type == "cpu":  # a batch would make the same calls, and take 20 us a message more
            handles = [post(*rest) for post, *rest in posts]
        else:
            handles = dist.batch_isend_irecv([dist.P2POp(*each) for each in posts]) if posts else []

        def finish():
            for handle in handles:
                handle.wait()
            for memory, (tensor, peer, tag) in zip(incoming, recvs, strict=True) if checked else ():
                if not torch.equal(memory[: plain.LABEL_BYTES], plain.label(tensor)):
                    got = bytes(memory[: plain.LABEL_BYTES].tolist()).decode(errors="replace").rstrip("\0")
                    raise ValueError(plain.unexpected(self.rank, tensor, peer, tag, got))
            for memory, work, (tensor, _, _) in zip(incoming, filled, recvs, strict=True):
                if checked:
                    plain.raw(work).copy_(memory[plain.LABEL_BYTES :])
                plain.fill(tensor, work)

        return finish

    def _agree(self, facts):
        data = encode_facts(facts)
        everyone = self._gather_bytes(len(data).to_bytes(4, "big") + data[:_AGREE_BYTES], 4 + _AGREE_BYTES)
        longest = max(int.from_bytes(item[:4], "big") for item in everyone)
        if longest > _AGREE_BYTES:
            everyone = self._gather_bytes(len(data).to_bytes(4, "big") + data, 4 + longest)
        return [json.loads(item[4 : 4 + int.from_bytes(item[:4], "big")]) for item in everyone]

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self._control_device)
        everyone = torch.empty(self.world_size * size, dtype=torch.uint8, device=self._control_device)
        _all_gather_single(everyone, mine, group=self.group)
        return [wire.tensor_to_bytes(item) for item in everyone.chunk(self.world_size)]

    def split(self, color: int, key: int = 0) -> "TorchComm":
        """Return the communicator of the ranks that gave the same color. All ranks call it.

        Raises ValueError unless color and key are whole numbers; on all ranks if keys would change the order of ranks:
        a torch.distributed group keeps it.
        """
        check_whole(color=color, key=key)
        everyone = self.agree([color, key])
        for (a, one), (b, two) in itertools.combinations(everyone, 2):
            if a == b and one > two:
                raise ValueError(f"keys must not change the order of ranks, got {[k for _, k in everyone]}")
        parent = self.group if self.group is not None else dist.group.WORLD
        timeout = parent._get_backend(self._control_device).options._timeout  # a new group's own default is 30 minutes
        # Of all ranks, each calls new_group for all parts. Of a sub-group, only a part's members: others may be busy.
        whole = self.world_size == dist.get_world_size()
        options = {"timeout": timeout, "backend": self._backends, "use_local_synchronization": not whole}
        members = {each: [r for r, (c, _) in enumerate(everyone) if c == each] for each, _ in everyone}
        ranks = {each: [dist.get_global_rank(parent, r) for r in part] for each, part in members.items()}
        groups = {each: dist.new_group(ranks[each], **options) for each in (sorted(ranks) if whole else [color])}
        return TorchComm(groups[color])


def check_buffer(numel: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless a buffer of `numel` elements of `dtype` can be made."""
    if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
        raise ValueError(f"numel must be a whole number of at least 0, got {numel!r}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
