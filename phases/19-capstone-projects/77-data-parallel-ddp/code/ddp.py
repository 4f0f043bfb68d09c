"""DistributedDataParallel: every rank computes gradients on its own data, and all ranks step with the mean.

Gradients live in flat buckets, filled in the order in which backward finishes them. A hook on each parameter counts its
bucket down; a full bucket's all-reduce starts at once, while backward goes on with earlier layers.
"""

import weakref
from contextlib import contextmanager

import torch
from comm import TorchComm
from flat import FlatUnit, broadcast_tensors, plan_units, sync_module, trainable_parameters
from mesh import must_agree
from torch import nn

FIRST_BUCKET_MB = 1  # a small first bucket starts communication early


class Bucket(FlatUnit):
    """A flat unit of gradients with one flag a parameter at its end, all reduced together.

    A flag is 1 where the rank has a gradient. After the mean it is 0 only if no rank has: so a rank that misses a
    gradient learns, without another message, whether to take the others' mean or to leave the parameter alone.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], comm):
        super().__init__(named_params, comm, extra=len(named_params))
        for index, slot in enumerate(self.slots):
            like = torch.empty_like(slot.param, device="meta")  # a gradient has its parameter's layout (channels_last)
            self.views[index] = self.grad[slot.start :].as_strided(like.shape, like.stride())
        self.flags = self.memory[self.padded :]
        self.start_backward()

    def start_backward(self) -> None:
        """Expect every parameter's gradient."""
        self.pending, self.work, self.missing = len(self.slots), None, []

    def launch(self, comm) -> None:
        """Start this bucket's all-reduce. What has no gradient on this rank goes as zeros, flagged."""
        self.flags.fill_(1)
        for index, slot in enumerate(self.slots):
            if slot.param.grad is None:
                self.missing.append(index)
                self.views[index].zero_()
                self.flags[index] = 0
            else:
                self.take_grad(index)
        self.work = comm.all_reduce(self.memory, op="avg", async_op=True)

    def finish(self) -> None:
        """Wait; then take the mean for parameters that only other ranks have used."""
        self.work.wait()
        for index in self.missing:
            if self.flags[index] > 0:
                self.slots[index].param.grad = self.views[index]
        self.start_backward()


class Reducer:
    """Decides when buckets leave: counts gradients down as backward finishes them, launches, and waits at its end."""

    def __init__(self, module: nn.Module, plan: list[list[tuple[str, nn.Parameter]]], comm):
        self.module, self.comm = module, comm
        self.buckets = [Bucket(unit, comm) for unit in plan]
        self.enabled = True  # off inside no_sync()
        self.armed = False  # there was a forward or a gradient since the last synchronisation
        self._in_backward = False
        self._launched = 0  # buckets, in this backward
        self._has_buffers = any(True for _ in module.buffers())
        for bucket in self.buckets:
            for index, slot in enumerate(bucket.slots):
                slot.param.register_post_accumulate_grad_hook(self._make_hook(bucket, index))

    def _make_hook(self, bucket: Bucket, index: int):
        on_gradient = weakref.WeakMethod(self._on_gradient)  # the module, and its hooks, may outlive the wrapper

        def hook(param: nn.Parameter) -> None:
            call = on_gradient()
            if call is not None:
                call(bucket, index)

        return hook

    def _on_gradient(self, bucket: Bucket, index: int) -> None:
        """A gradient is complete: put it into its bucket, and launch what is full."""
        bucket.take_grad(index)
        if not self.enabled:
            return
        if not self._in_backward:
            self.armed = self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.synchronise)  # runs when backward ends
        if bucket.work is not None:
            raise RuntimeError(
                f"{bucket.slots[index].name} got a gradient after its bucket had left: a second one in this backward, "
                "or an earlier backward ended with an error"
            )
        bucket.pending -= 1
        self._launch_full()

    def _launch_full(self, everything: bool = False) -> None:
        """Launch buckets strictly in order (all ranks must), as far as they are full; `everything`: also the others."""
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if bucket.pending > 0 and not everything:
                return
            bucket.launch(self.comm)
            self._launched += 1

    def synchronise(self) -> None:
        """Launch what has not left, wait for everything, then make the buffers rank 0's."""
        if not self.enabled or not self.armed:
            return
        self._launch_full(everything=True)
        for bucket in self.buckets:
            bucket.finish()
        self.armed, self._in_backward, self._launched = False, False, 0
        if self._has_buffers:
            broadcast_tensors(self.comm, list(self.module.buffers()))


class DistributedDataParallel(nn.Module):
    """Wrap a module so that after `backward()` each gradient is the mean over all ranks.

    A drop-in for torch's: wrap, call, `loss.backward()`, step with any optimizer. Parameters and buffers begin as rank
    0's, and buffers (BatchNorm's statistics) become rank 0's again at each synchronisation. A gradient that some ranks
    miss counts there as zeros; one that all ranks miss stays None. Only parameters that require a gradient when wrapped
    take part. Each bucket costs one all-reduce of its gradients plus one element a parameter.

    Raises ValueError on every rank, with nothing changed, if `bucket_cap_mb` differs, or the modules do in names, their
    order, shapes, dtypes, layout, ties or which parameters are frozen.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25, comm=None):
        super().__init__()
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        named = trainable_parameters(module)
        comm = comm or TorchComm()
        must_agree(comm, "the size of buckets", {"bucket_cap_mb": bucket_cap_mb})
        sync_module(module, comm)
        cap = bucket_cap_mb * 2**20
        plan = plan_units(named, cap, min(cap, FIRST_BUCKET_MB * 2**20))
        self.module = module
        self.reducer = Reducer(module, plan, comm.unchecked())  # unchecked: the plan follows from what was agreed

    def forward(self, *args, **kwargs):
        """Call the wrapped module."""
        self.reducer.armed |= self.reducer.enabled and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Accumulate gradients on each rank without communication; the next backward outside reduces their sum.

        What counts is where `backward()` runs. (With torch's DDP it is where `forward` runs; wrap both, and the code
        works with either.)
        """
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    def sync_grads(self) -> None:
        """Wait until all gradients are the mean over ranks. `backward()` ends with this call; again it does nothing.

        Only a rank whose loss does not depend on the module at all must call it itself, after `forward`: no hook runs
        there.
        """
        self.reducer.synchronise()
