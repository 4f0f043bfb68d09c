"""DistributedDataParallel: every rank computes gradients on its own data, and all ranks step with the mean.

Gradients live in flat buckets, filled in the order in which backward finishes them. A hook on each parameter counts its
bucket down; a full bucket's all-reduce starts at once, while backward goes on with earlier layers.
"""

from contextlib import contextmanager

import finite
import notes
import torch
from bucket import Bucket
from comm import TorchComm
from flat import broadcast_tensors, plan_units, sync_module, trainable_parameters, watch_gradients, watched
from hooks import average, check_hook, hook_name
from mesh import must_agree
from torch import nn

FIRST_BUCKET_MB = 1  # a small first bucket starts communication early


class Reducer:
    """Decides when buckets leave: counts gradients down as backward finishes them, launches, and waits at its end."""

    def __init__(self, module: nn.Module, plan: list, comm, hook=average, weighted=False, check_finite=False):
        self.module, self.comm, self.weighted, self.check_finite = module, comm, weighted, check_finite
        self.buckets = [Bucket(unit, comm, hook, weighted, check_finite) for unit in plan]
        self.weight = 1.0  # of this rank's gradients in the mean
        self.enabled = True  # off inside no_sync()
        self.armed = False  # there was a forward or a gradient since the last synchronisation
        self.in_backward = False
        self._launched = 0  # buckets, in this backward
        self._has_buffers = any(True for _ in module.buffers())
        watch_gradients(self.buckets, self._on_gradient)

    def _on_gradient(self, number: int, index: int) -> None:
        """A gradient is complete: count its bucket down, and launch what is full."""
        bucket = self.buckets[number]
        if not self.enabled:
            bucket.take_grads([index])  # the next backward adds to it there
            self.armed = True  # sync_grads() has something to send
            return
        if not self.in_backward:
            self.armed = self.in_backward = True
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
            bucket.launch(self.weight)
            self._launched += 1

    def synchronise(self) -> None:
        """Launch what has not left, wait for everything, then make the buffers rank 0's."""
        if not self.enabled or not self.armed:
            return
        self._launch_full(everything=True)
        divisor = self.buckets[0].mean_weight()  # the same in all
        for bucket in self.buckets:
            bucket.finish(divisor)
        self.armed, self.in_backward, self._launched = False, False, 0
        if self._has_buffers:
            broadcast_tensors(self.comm, list(self.module.buffers()))
        if self.check_finite:
            finite.check_buckets(self.buckets)


class DistributedDataParallel(nn.Module):
    """Wrap a module so that after `backward()` each gradient is the mean over all ranks.

    A drop-in for torch's: wrap, call, `loss.backward()`, step with any optimizer. Parameters and buffers begin as rank
    0's, and buffers (BatchNorm's statistics) become rank 0's again at each synchronisation. A gradient that some ranks
    miss counts there as zeros; one that all ranks miss stays None. Only parameters that require a gradient when wrapped
    take part. Each bucket costs one all-reduce of its gradients and one element a parameter.

    `weighted`: set `samples` to how many rows this rank's gradient is the mean of, and the mean is over all rows.
    `hook`: see hooks.py. `check_finite`: `backward()` raises NonFiniteGradient on every rank if the mean gradient is
    not finite; catch it, zero the gradients, and the step is skipped everywhere. With either, each bucket has nine
    elements a rank more.

    Raises ValueError on every rank, with nothing changed, if a setting differs, or the modules do in names, their
    order, shapes, dtypes, layout, ties or which parameters are frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        comm=None,
        *,
        weighted: bool = False,
        hook=average,
        check_finite: bool = False,
    ):
        super().__init__()
        comm, named, fault = comm or TorchComm(), [], None
        try:
            if not bucket_cap_mb > 0:
                raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
            named = trainable_parameters(module)
            check_hook(hook, named)
            for name, param in named:
                if watched(param):
                    raise ValueError(f"parameter {name} belongs to another wrapper, which is alive: delete that first")
        except ValueError as error:
            fault = str(error)
        settings = {"fault": fault, "bucket_cap_mb": bucket_cap_mb, "hook": hook_name(hook)}
        settings |= {"weighted": bool(weighted), "check_finite": bool(check_finite)}
        must_agree(comm, "the settings of DistributedDataParallel", settings)
        if fault:
            raise ValueError(fault)
        sync_module(module, comm)
        cap = bucket_cap_mb * 2**20
        plan = plan_units(named, cap, min(cap, FIRST_BUCKET_MB * 2**20))
        self.module = module
        agreed = comm.unchecked()
        self.reducer = Reducer(module, plan, agreed, hook, weighted, check_finite)

    def forward(self, *args, **kwargs):
        """Call the wrapped module."""
        if self.reducer.in_backward and torch._C._current_graph_task_id() == -1:
            raise RuntimeError("an earlier backward ended with an error: this wrapper cannot go on")
        self.reducer.armed |= self.reducer.enabled and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @property
    def samples(self) -> float:
        """This rank's weight in the mean. Set it before `backward()`; it stays. Only the ratio between ranks counts.

        Setting it raises RuntimeError without `weighted`: the others would not learn of it.
        """
        return self.reducer.weight

    @samples.setter
    def samples(self, number: float) -> None:
        number = notes.check_weight(number)
        self._check_weighted()
        self.reducer.weight = number

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

    def without_data(self) -> None:
        """Synchronise as a rank that has no rows in this step: weight 0. In place of forward and backward.

        Raises RuntimeError without `weighted`.
        """
        self._check_weighted()
        before, self.reducer.weight = self.reducer.weight, 0.0
        self.reducer.armed = self.reducer.enabled
        try:
            self.reducer.synchronise()
        finally:
            self.reducer.weight = before

    def _check_weighted(self) -> None:
        if not self.reducer.weighted:
            raise RuntimeError("ranks of different weights need DistributedDataParallel(..., weighted=True)")
