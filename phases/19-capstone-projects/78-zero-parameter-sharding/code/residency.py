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


def make_absent(param: nn.Parameter) -> None:
    """Let a parameter keep its shape with the memory of one element, NaN.

    So who reads a parameter out of turn gets NaN, and who writes to it mostly an error from torch, since its elements
    are one; neither touches memory that is no longer his. `fill_` and `zero_` raise nothing: `is_absent` notices.
    """
    nan = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
    param.data = param.absent = nan.expand(param.shape)
    param.version_when_absent = param._version


def is_absent(param: nn.Parameter) -> bool:
    """Return whether a parameter is as `make_absent` has left it: not there, nor replaced or written since."""
    absent = getattr(param, "absent", None)
    if absent is None or param.data_ptr() != absent.data_ptr():
        return False
    if param.is_cuda:  # to look would be to wait
        return param._version == param.version_when_absent
    return bool(absent[(0,) * absent.dim()].isnan())
