"""How many bytes of activations does a rank really hold, at most? Counted tensor by tensor while a pipeline runs."""

import weakref
from collections import Counter

import torch
from pipeline import Pipeline


class Meter:
    """Counts the bytes alive for backward: in its context, what autograd saves; and what is given to `hold`.

    Memory that several hold counts once; parameters do not count.
    """

    def __init__(self, parameters):
        self.alive = self.peak = 0
        self._holders, self._ignored = Counter(), {p.untyped_storage().data_ptr() for p in parameters}

    def hold(self, owner: object, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as long as `owner` lives."""
        if tensor.untyped_storage().data_ptr() not in self._ignored:
            key, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            self._holders[key] += 1
            self.alive += size * (self._holders[key] == 1)
            self.peak = max(self.peak, self.alive)
            weakref.finalize(owner, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        self.alive -= size * (self._holders[key] == 0)

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor)
        self.hold(saved, tensor)
        return saved

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._hooks.__enter__()

    def __exit__(self, *error):
        self._hooks.__exit__(*error)


class _Saved:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class MeteredPipeline(Pipeline):
    """A pipeline whose `meter` knows the peak of its activations, in bytes."""

    def step(self, microbatches, targets):
        """Run one step, with a meter of its own."""
        self.meter = Meter([p for stage in self.stages.values() for p in stage.parameters()])
        return super().step(microbatches, targets)

    def _forward(self, work, x):
        self.meter.hold(x, x)
        with self.meter:
            return super()._forward(work, x)

    def _backward(self, work, gradient):
        with self.meter:  # with checkpointing, a forward pass runs here
            return super()._backward(work, gradient)
