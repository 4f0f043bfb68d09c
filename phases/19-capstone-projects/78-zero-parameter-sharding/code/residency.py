"""Flat memory that comes and goes while its views stay: a tensor's storage is emptied, and later filled again.

Autograd saves views of parameters in forward for use in backward. They must then see the parameters that were gathered
anew. So it is the storage under all views that is freed and allocated, and no tensor is replaced.
"""

import torch
from torch import nn


def allocate(flat: torch.Tensor) -> None:
    """Give a flat tensor memory, if it has none. What is in it is undefined."""
    storage = flat.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(flat.numel() * flat.element_size())


def release(flat: torch.Tensor) -> None:
    """Free the memory of a flat tensor and of all its views."""
    flat.untyped_storage().resize_(0)


class Absence:
    """What stands for parameters of one dtype while they are not there: their shapes, and the memory of one NaN.

    So who reads a parameter out of turn gets NaN, and who writes to it mostly an error from torch, since its elements
    are one; neither touches memory that is no longer his. `fill_` and `zero_` raise nothing: `written` notices.
    """

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        self.nan = torch.full((), float("nan"), dtype=params[0].dtype, device=params[0].device)
        for param in params:
            param.absent = self.nan.expand(param.shape)
        self.note_versions()

    @property
    def by_version(self) -> bool:
        """Is a write noticed by torch's count of changes? To look at the NaN would be to wait for the GPU."""
        return self.nan.is_cuda

    def begin(self) -> None:
        """Let the parameters be absent."""
        for param in self.params:
            param.data = param.absent
        self.note_versions()

    def restore(self) -> None:
        """Let them be absent again, as if nothing had been written."""
        self.nan.fill_(float("nan"))
        self.begin()

    def note_versions(self) -> None:
        """Take all changes until now for known."""
        if self.by_version:
            self.versions = [param._version for param in self.params]

    def written(self) -> list[int]:
        """Return which parameters were replaced or written to since `begin`; all, if it cannot be told which."""
        if found := [i for i, param in enumerate(self.params) if not is_absent(param)]:
            return found
        if self.by_version:
            return [i for i, param in enumerate(self.params) if param._version != self.versions[i]]
        return [] if self.nan.isnan() else list(range(len(self.params)))


def is_absent(param: nn.Parameter) -> bool:
    """Return whether a parameter is not there now."""
    absent = getattr(param, "absent", None)
    return absent is not None and param.data_ptr() == absent.data_ptr()
