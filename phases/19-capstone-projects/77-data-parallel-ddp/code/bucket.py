"""`Bucket`: the gradients of some parameters as one flat tensor, with what ranks must tell each other about them."""

import finite
import notes
import torch
from flat import FlatUnit
from hooks import average
from torch import nn


class Bucket(FlatUnit):
    """A flat unit of gradients with one flag a parameter at its end, reduced together.

    A flag is 1 where the rank has a gradient. After the mean it is 0 only if no rank has: so a rank that misses a
    gradient learns, without another message, whether to take the others' mean or to leave the parameter alone. With
    `weighted` or `check_finite` every rank's notes (notes.py) follow: its weight, and whether its gradients are finite.
    """

    def __init__(
        self,
        named_params: list[tuple[str, nn.Parameter]],
        comm,
        hook=average,
        weighted: bool = False,
        check_finite: bool = False,
    ):
        noted = notes.SIZE * comm.world_size if weighted or check_finite else 0
        super().__init__(named_params, comm, extra=len(named_params) + noted)
        self.comm, self.hook, self.weighted, self.check_finite = comm, hook, weighted, check_finite
        for index, slot in enumerate(self.slots):
            like = torch.empty_like(slot.param, device="meta")  # a gradient has its parameter's layout (channels_last)
            self.views[index] = self.grad[slot.start :].as_strided(like.shape, like.stride())
        self.tail = self.memory[self.padded :]
        self.flags, self.notes = self.tail.tensor_split([len(self.slots)])
        self.weight, self.page = 1.0, self._page(1.0)
        self.start_backward()

    def start_backward(self) -> None:
        """Expect every parameter's gradient."""
        self.pending, self.work, self.missing = len(self.slots), None, []

    def launch(self, weight: float = 1.0) -> None:
        """Start this bucket's all-reduce. What has no gradient, or no weight, goes as zeros, flagged."""
        present = [index for index, slot in enumerate(self.slots) if weight != 0 and slot.param.grad is not None]
        self.missing = sorted({*range(len(self.slots))} - {*present})
        self.take_grads(present)
        for index in self.missing:
            self.views[index].zero_()
        if weight not in (0, 1):
            self.grad.mul_(weight)
        self._write_tail(weight)
        self.work = self.hook(self.comm, self.memory)

    def finish(self, divisor: torch.Tensor | float | None) -> None:
        """Wait; divide by `mean_weight`; then take the mean for parameters that only other ranks have used."""
        self.work.wait()
        if divisor is not None:
            self.grad.div_(divisor)
        for index in self.missing:
            self.slots[index].param.grad = self.views[index] if self.flags[index] > 0 else None
        self.start_backward()

    def mean_weight(self) -> torch.Tensor | float | None:
        """Wait; return what turns a mean of weight x gradient into the weighted mean: the mean weight, unless it is 0.

        None if nothing is to be divided. A GPU, rather than be waited for, answers with a tensor (1,).
        """
        if not self.weighted:
            return None
        self.work.wait()
        if self.grad.device.type != "cpu":
            return self._mean_on_device()
        mean = self._mean_of_notes().item()
        return None if mean in (0, 1) else mean

    def _mean_on_device(self) -> torch.Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        mean = self._mean_of_notes().to(wide).view(1)  # a 0-dim one would be rounded to the gradients' dtype
        return torch.where(mean == 0, 1, mean)

    def _mean_of_notes(self) -> torch.Tensor:
        return notes.read(self.notes, self.comm.world_size)[0].mean()

    def _page(self, weight: float) -> torch.Tensor:
        """Return this rank's flags, then notes if there are any, where no gradient is missing."""
        flags = torch.ones_like(self.flags)
        if not self.notes.numel():
            return flags
        return torch.cat([flags, notes.page(weight, self.comm.rank, self.comm.world_size, self.notes)])

    def _write_tail(self, weight: float) -> None:
        if weight != self.weight:
            self.weight, self.page = weight, self._page(weight)
        self.tail.copy_(self.page)
        for index in self.missing:
            self.flags[index] = 0
        if self.check_finite:
            self.notes[(self.comm.rank + 1) * notes.SIZE - 1] = ~finite.is_finite(self.grad)

    def nonfinite_ranks(self) -> list[int]:
        """Return whose gradients in this bucket were not finite before the mean. Only with `check_finite`."""
        return notes.read(self.notes, self.comm.world_size)[1].nonzero().view(-1).tolist()
