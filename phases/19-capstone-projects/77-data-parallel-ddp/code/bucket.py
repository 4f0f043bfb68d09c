"""`Bucket`: the gradients of some parameters as one flat tensor, with what ranks must tell each other about them."""

import finite
import notes
import torch
from flat import FlatUnit
from hooks import average
from torch import nn


class Bucket(FlatUnit):
    """A flat unit of gradients with one flag a parameter at its end, and every rank's notes, all reduced together.

    A flag is 1 where the rank has a gradient. After the mean it is 0 only if no rank has: so a rank that misses a
    gradient learns, without another message, whether to take the others' mean or to leave the parameter alone. The
    notes (notes.py) tell each rank's weight.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], comm, hook=average, check_finite: bool = False):
        super().__init__(named_params, comm, extra=len(named_params) + notes.SIZE * comm.world_size)
        self.comm, self.hook, self.check_finite = comm, hook, check_finite
        for index, slot in enumerate(self.slots):
            like = torch.empty_like(slot.param, device="meta")  # a gradient has its parameter's layout (channels_last)
            self.views[index] = self.grad[slot.start :].as_strided(like.shape, like.stride())
        self.flags, self.notes = self.memory[self.padded :].tensor_split([len(self.slots)])
        self.weight, self.page = 1.0, self._page(1.0)
        self.ordinary = sum(notes.page(1.0, r, comm.world_size, self.notes) for r in range(comm.world_size))
        self.ordinary /= comm.world_size  # the notes' mean if every rank has weight 1
        self.start_backward()

    def start_backward(self) -> None:
        """Expect every parameter's gradient."""
        self.pending, self.work, self.missing = len(self.slots), None, []

    def launch(self, weight: float = 1.0) -> None:
        """Start this bucket's all-reduce. What has no gradient, or no weight, goes as zeros, flagged."""
        self.flags.fill_(1)
        for index, slot in enumerate(self.slots):
            if slot.param.grad is None or weight == 0:
                self.missing.append(index)
                self.views[index].zero_()
                self.flags[index] = 0
            else:
                self.take_grad(index)
        if weight not in (0, 1):
            self.grad.mul_(weight)
        self._write_notes(weight)
        self.work = self.hook(self.comm, self.memory)

    def finish(self) -> None:
        """Wait; divide by the mean weight; then take the mean for parameters that only other ranks have used."""
        self.work.wait()
        self._divide()
        for index in self.missing:
            self.slots[index].param.grad = self.views[index] if self.flags[index] > 0 else None
        self.start_backward()

    def _page(self, weight: float) -> torch.Tensor:
        return notes.page(weight, self.comm.rank, self.comm.world_size, self.notes)

    def _write_notes(self, weight: float) -> None:
        if weight != self.weight:
            self.weight, self.page = weight, self._page(weight)
        self.notes.copy_(self.page)
        if self.check_finite:
            self.notes[(self.comm.rank + 1) * notes.SIZE - 1] = ~finite.is_finite(self.grad)

    def _divide(self) -> None:
        """Turn the mean of weight x gradient into the weighted mean. A GPU divides by 1 rather than be waited for."""
        if self.grad.device.type == "cpu":
            if not torch.equal(self.notes, self.ordinary) and (mean := self._mean_weight().item()) not in (0, 1):
                self.grad.div_(mean)
        else:
            self.grad.div_(self._divisor())

    def _divisor(self) -> torch.Tensor:
        """Return the mean weight, 1 if that is 0, as a tensor (1,) of float32 or more: 0-dim, it would be rounded."""
        mean = self._mean_weight().to(torch.promote_types(self.dtype, torch.float32)).view(1)
        return torch.where(mean == 0, 1, mean)

    def _mean_weight(self) -> torch.Tensor:
        return notes.read(self.notes, self.comm.world_size)[0].mean()

    def nonfinite_ranks(self) -> list[int]:
        """Return whose gradients in this bucket were not finite before the mean. Only with `check_finite`."""
        return notes.read(self.notes, self.comm.world_size)[1].nonzero().view(-1).tolist()
