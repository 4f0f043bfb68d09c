"""The interpreter: one rank runs its program of the schedule over a `Comm`, with several microbatches in flight."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from comm import Comm, TorchComm, Work
from instructions import Compute, Exchange, Schedule, consumer, is_split
from mesh import must_agree
from recompute import random_state, replayed
from schedule_check import check_schedule
from split_backward import WeightsLater, add_weight_gradients
from tied import TiedWeight
from torch import nn
from wire import dtype_name


class _Resume(torch.autograd.Function):
    """A scalar whose backward pass hands `gradient` to y. (y.backward(gradient) does too, but first imports sympy.)"""

    @staticmethod
    def forward(ctx, y, gradient):
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None


class _Activation:
    """What a microbatch's backward pass needs of its forward pass through one stage."""

    def __init__(self, x: torch.Tensor):
        self.input, self.output = x, None
        self.later: list = []  # weight gradients, where backward is split
        self.random_state: list[torch.Tensor] = []  # before the forward pass, where that is computed again


class Pipeline:
    """One rank's part of a pipeline. `step` runs one batch: gradients accumulate in the parameters, losses come back.

    `stages`: this rank's stage; or, in a schedule with several a rank, the list of stages rank, rank + N, ...
    `shapes`: the input shape of every stage for one microbatch; `shapes[0]` is the microbatch's own.
    `dtype`: of what flies between stages. `loss_fn(output, target)`: the mean over one microbatch.
    `checkpoint`: keep only a stage's input, and compute its forward pass again in backward (recompute.py).
    `tied`: a weight of which several stages have a copy (tied.py).
    `on_gradients(stage)`: called when all gradients of a stage are there, while other stages may still be at work;
    returns a Work, for which `step` waits at its end, or None.

    Raises ValueError if the schedule is wrong, or on every rank if they disagree about it, the shapes or the dtype; in
    `step`, naming the computation, if a stage's output is not what was promised or has no graph to go back through.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        comm: Comm | None = None,
        *,
        checkpoint: bool = False,
        tied: TiedWeight | None = None,
        on_gradients: Callable[[int], Work | None] | None = None,
    ):
        comm = TorchComm() if comm is None else comm
        modules = [stages] if isinstance(stages, nn.Module) else list(stages)
        if not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError(f"a stage must be a module, got {[type(module).__name__ for module in modules]}")
        facts = check_schedule(schedule)
        self.num_stages, self.num_microbatches = facts.num_stages, facts.num_microbatches
        self.shapes, self.dtype, self.loss_fn = [tuple(shape) for shape in shapes], dtype, loss_fn
        self.stages = dict(zip(range(comm.rank, self.num_stages, comm.world_size), modules, strict=False))
        plan = {"schedule": _digest(schedule), "stages": len(modules), "dtype": dtype_name(dtype)}
        plan |= {"tied": tied is not None, "shapes": [list(shape) for shape in self.shapes]}
        must_agree(comm, "the pipeline", plan)
        self._check_plan(facts.num_ranks, comm.world_size, len(modules))
        self.comm, self.peak_live = comm.unchecked(), 0  # from here on, all ranks know what all others do
        self.last_rank = (self.num_stages - 1) % comm.world_size
        self.checkpoint, self.tied, self.on_gradients, self.stopwatch = checkpoint, tied, on_gradients, None
        tagged = comm.device.type == "cpu"  # NCCL has no tags: there messages must be posted as the schedule pairs them
        self.program = receive_early(schedule[comm.rank]) if tagged else schedule[comm.rank]
        self.split = is_split(schedule)
        self._run = {"F": self._forward, "B": self._backward, "W": self._weight}
        backwards = [i for i in self.program if isinstance(i, Compute) and i.kind == ("W" if self.split else "B")]
        self._ends = {work.stage: work for work in backwards}  # the last one of each stage

    def step(self, microbatches: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run forward and backward of one batch; return the M losses, (M,) in float64, on every rank.

        Gradients are those of the mean over all M microbatches. All ranks pass the same microbatches and targets: the
        first stage reads the ones, the last stage the others. Raises ValueError, on every rank and before anything is
        sent, unless there are M of both and the microbatches all have the agreed shape.
        """
        self._check_batch(microbatches, targets)
        self._microbatches, self._targets = microbatches, targets
        self._losses = torch.zeros(self.num_microbatches, dtype=torch.float64, device=self.comm.device)
        self._live: dict[tuple[int, int], _Activation] = {}  # (stage, microbatch) -> what its backward needs
        self._inbox: dict[Compute, tuple] = {}  # computation -> (tensor that feeds it, Work to wait for, or None)
        self._outbox: dict[Compute, torch.Tensor] = {}  # computation on another rank -> tensor that feeds it
        self._in_flight: deque = deque()  # sends whose memory is still being read
        self._synchronising: list[Work] = []
        if self.tied is not None:
            self.tied.begin()
        if self.stopwatch is not None:
            self.stopwatch.start()
        for instruction in self.program:
            if isinstance(instruction, Exchange):
                self._exchange(instruction)
            else:
                self._compute(instruction)
        self._finish_sends(0)
        for work in self._synchronising:
            work.wait()
        if self.tied is not None:
            self.tied.sum_gradients()
        self.comm.broadcast(self._losses, src=self.last_rank)
        return self._losses

    def _compute(self, work: Compute) -> None:
        incoming = self._take(work)
        begin = self.stopwatch.mark() if self.stopwatch is not None else None
        result = self._run[work.kind](work, incoming)
        if begin is not None:
            self.stopwatch.note(work, begin)
        if result is not None:
            self._give(work, result)
        if self.on_gradients is not None and work == self._ends[work.stage]:
            launched = self.on_gradients(work.stage)
            self._synchronising += [launched] if launched is not None else []

    def _forward(self, work: Compute, x: torch.Tensor) -> torch.Tensor | None:
        if work.stage > 0:
            x.requires_grad_()
        kept = self._live[work.stage, work.microbatch] = _Activation(x)
        self.peak_live = max(self.peak_live, len(self._live))
        if self.checkpoint:
            kept.random_state = random_state(self.comm.device)
            with torch.no_grad():
                y = self._run_stage(work, kept)
        else:
            y = kept.output = self._run_stage(work, kept)
        if work.stage < self.num_stages - 1:
            return y.detach()
        self._losses[work.microbatch] = y.detach()
        return None

    def _backward(self, work: Compute, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key = (work.stage, work.microbatch)
        kept = self._live[key] if self.split else self._live.pop(key)
        if self.checkpoint:
            with replayed(kept.random_state, self.comm.device):
                kept.output = self._run_stage(work, kept)
        x, y, kept.input, kept.output = kept.input, kept.output, None, None
        if gradient is None:
            y = y / self.num_microbatches  # the sum of the M gradients is then the gradient of the mean
        else:
            y = _Resume.apply(y, gradient)
        if y.requires_grad:  # not so in a first stage whose parameters are all frozen
            y.backward()
        elif any(p.requires_grad for p in self.stages[work.stage].parameters()):
            raise ValueError(f"{work} has no graph to go back through: is something detached, or under no_grad?")
        if work.stage == 0:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def _weight(self, work: Compute, _) -> None:
        add_weight_gradients(self._live.pop((work.stage, work.microbatch)).later)

    def _run_stage(self, work: Compute, kept: "_Activation") -> torch.Tensor:
        """Return the stage's output, or of the last stage the microbatch's loss."""
        last = work.stage == self.num_stages - 1
        with WeightsLater(kept.later) if self.split else nullcontext():
            y = self.stages[work.stage](kept.input)
            if last and isinstance(y, torch.Tensor):
                y = self.loss_fn(y, self._targets[work.microbatch])
        if not isinstance(y, torch.Tensor):
            raise ValueError(f"{work} made a {type(y).__name__}, where one tensor was expected")
        if last and y.numel() != 1:
            raise ValueError(f"{work} made losses {tuple(y.shape)}, where loss_fn must return the mean, one number")
        return y

    def _exchange(self, exchange: Exchange) -> None:
        buffers = [(m.feeds, self._buffer(m.feeds)) for m in exchange.recvs]
        sends = [(self._outbox.pop(m.feeds), m.peer, m.feeds.tag) for m in exchange.sends]
        recvs = [(b, m.peer, m.feeds.tag) for (_, b), m in zip(buffers, exchange.recvs, strict=True)]
        work = self.comm.exchange(sends, recvs)
        self._inbox |= {feeds: (buffer, work) for feeds, buffer in buffers}
        if sends:
            self._in_flight.append((work, sends))
            self._finish_sends(self.comm.world_size)

    def _finish_sends(self, allowed: int) -> None:
        """Wait until at most `allowed` exchanges are in flight, so that what was sent is not kept until the end."""
        while len(self._in_flight) > allowed:
            self._in_flight.popleft()[0].wait()

    def _take(self, work: Compute) -> torch.Tensor | None:
        if work.kind == "F" and work.stage == 0:
            return self._microbatches[work.microbatch]
        if work.kind == "W" or (work.kind == "B" and work.stage == self.num_stages - 1):
            return None
        tensor, arrival = self._inbox.pop(work)
        if arrival is not None:
            arrival.wait()
        return tensor

    def _give(self, work: Compute, tensor: torch.Tensor) -> None:
        feeds = consumer(work, self.num_stages)
        expected = self.shapes[max(work.stage, feeds.stage)]
        if (tuple(tensor.shape), tensor.dtype) != (expected, self.dtype):
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{work} made {got}; stage {feeds.stage} was promised {expected} {self.dtype}")
        if feeds.stage in self.stages:
            self._inbox[feeds] = (tensor, None)  # the next stage is on this rank, too
        else:
            self._outbox[feeds] = tensor

    def _buffer(self, feeds: Compute) -> torch.Tensor:
        shape = self.shapes[feeds.stage if feeds.kind == "F" else feeds.stage + 1]
        return torch.empty(shape, dtype=self.dtype, device=self.comm.device)

    def _check_plan(self, num_ranks: int, world_size: int, num_modules: int) -> None:
        if num_ranks != world_size:
            raise ValueError(f"the schedule is for {num_ranks} ranks, there are {world_size}")
        if num_modules * num_ranks != self.num_stages:
            raise ValueError(f"{num_modules} stages on each of {num_ranks} ranks, the schedule has {self.num_stages}")
        if len(self.shapes) != self.num_stages:
            raise ValueError(f"{self.num_stages} stages need as many input shapes, got {len(self.shapes)}")
        for stage, shape in enumerate(self.shapes):
            if not all(type(size) is int and size > 0 for size in shape):
                raise ValueError(f"the input shape of stage {stage} must be whole numbers of at least 1, got {shape}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"gradients need floating-point activations, got {dtype_name(self.dtype)}")

    def _check_batch(self, microbatches, targets) -> None:
        for what, items in (("microbatches", microbatches), ("targets", targets)):
            if len(items) != self.num_microbatches:
                raise ValueError(f"the schedule has {self.num_microbatches} microbatches, got {len(items)} {what}")
            for m, item in enumerate(items):
                if not isinstance(item, torch.Tensor):
                    raise ValueError(f"{what} must be tensors, number {m} is a {type(item).__name__}")
        for m, x in enumerate(microbatches):
            if tuple(x.shape) != self.shapes[0]:
                raise ValueError(f"microbatch {m} is {tuple(x.shape)}, agreed was {self.shapes[0]} for each")
        for m, target in enumerate(targets):
            if target.shape != targets[0].shape:
                raise ValueError(f"target {m} is {tuple(target.shape)}, target 0 {tuple(targets[0].shape)}")


def receive_early(program: list[Compute | Exchange], by: int = 2) -> list[Compute | Exchange]:
    """Post each receive alone and `by` exchanges earlier, so that messages arrive while this rank computes.

    Only for transports with tags. The price is memory for `by` more messages, whatever M is. Raises ValueError, with
    the value, unless `by` is a whole number of at least 0.
    """
    if isinstance(by, bool) or not isinstance(by, int) or by < 0:
        raise ValueError(f"by must be a whole number of at least 0, got {by!r}")
    recvs = [[Exchange(recvs=(m,)) for m in item.recvs] for item in program if isinstance(item, Exchange)]
    early = [receive for group in recvs[:by] for receive in group]
    later = iter(recvs[by:])
    for item in program:
        if isinstance(item, Compute):
            early.append(item)
        else:
            early += [Exchange(sends=item.sends)] if item.sends else []
            early += next(later, [])
    return early


def _digest(schedule) -> str:
    return hashlib.sha256(repr(sorted(schedule.items())).encode()).hexdigest()[:16]
