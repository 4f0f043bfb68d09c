"""DistributedDataParallel: every rank computes gradients on its own data, and all ranks step with the mean.

Gradients live in flat buckets, filled in the order in which backward finishes them. A hook on each parameter counts its
bucket down; a full bucket's all-reduce starts at once, while backward goes on with earlier layers.
"""

from contextlib import contextmanager

import torch
from comm import TorchComm
from flat import FlatUnit, broadcast_tensors, plan_units, sync_module, trainable_parameters
from torch import nn

FIRST_BUCKET_MB = 1  # a small first bucket starts communication early


class Bucket(FlatUnit):
    """A flat unit of gradients with one flag a parameter at its end, all reduced together.

    A flag is 1 where the rank has a gradient. After the mean it is 0 only if no rank has: so a rank that misses a
    gradient learns, without another message, whether to take the others' mean or to leave the parameter alone.
    """

    def __init__(self, named_params, comm):
        super().__init__(named_params, comm, extra=len(named_params))
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


class DistributedDataParallel(nn.Module):
    """Wrap a module so that after `backward()` each gradient is the mean over all ranks.

    A drop-in for torch's: wrap, call, `loss.backward()`, step with any optimizer. Parameters and buffers begin as rank
    0's, and buffers (BatchNorm's statistics) become rank 0's again at each synchronisation. A gradient that some ranks
    miss counts there as zeros; one that all ranks miss stays None. Only parameters that require a gradient when wrapped
    take part. Each bucket costs one all-reduce of its gradients plus one element a parameter.

    Raises ValueError on every rank, with nothing changed, if modules differ in names, shapes, dtypes or layout.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25, comm=None):
        super().__init__()
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        named = trainable_parameters(module)
        self.module = module
        comm = comm or TorchComm()
        sync_module(module, comm)
        self.comm = comm.unchecked()  # the plan is agreed: it follows from names, shapes and dtypes
        cap = int(bucket_cap_mb * 2**20)
        plan = plan_units(named, cap, min(cap, FIRST_BUCKET_MB * 2**20))
        self.buckets = [Bucket(unit, self.comm) for unit in plan]
        self._sync = True  # off inside no_sync()
        self._armed = False  # a forward or a gradient since the last synchronisation
        self._callback_queued = False
        self._launched = 0  # buckets launched in this backward
        for bucket in self.buckets:
            for index, slot in enumerate(bucket.slots):
                slot.param.register_post_accumulate_grad_hook(self._make_hook(bucket, index))

    def forward(self, *args, **kwargs):
        """Call the wrapped module."""
        self._armed |= self._sync and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Accumulate gradients on each rank without communication; the next backward outside reduces their sum.

        What counts is where `backward()` runs. (With torch's DDP it is where `forward` runs; wrap both, and the code
        works with either.)
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def sync_grads(self) -> None:
        """Wait until all gradients are the mean over ranks. `backward()` ends with this call; again it does nothing.

        Only a rank whose loss does not depend on the module at all must call it itself: no hook runs there.
        """
        if not self._sync or not self._armed:
            return
        self._launch_full(everything=True)
        for bucket in self.buckets:
            bucket.finish()
        self._launched, self._armed, self._callback_queued = 0, False, False
        buffers = list(self.module.buffers())
        if buffers:
            broadcast_tensors(self.comm, buffers)

    def _make_hook(self, bucket: Bucket, index: int):
        def hook(param: nn.Parameter) -> None:
            bucket.take_grad(index)
            if not self._sync:
                return
            if not self._callback_queued:
                self._armed = self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self.sync_grads)
            if bucket.work is not None:
                raise RuntimeError(
                    f"{bucket.slots[index].name} got a second gradient in one backward, after its bucket left"
                )
            bucket.pending -= 1
            self._launch_full()

        return hook

    def _launch_full(self, everything: bool = False) -> None:
        """Launch buckets strictly in order (all ranks must), as far as they are full; `everything`: also the others."""
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if bucket.pending > 0 and not everything:
                return
            bucket.launch(self.comm)
            self._launched += 1
