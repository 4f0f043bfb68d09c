"""Flat memory that comes and goes while its views stay: a tensor's storage is emptied, and later filled again.

Autograd saves views of parameters in forward for use in backward. They must then see the parameters that were gathered
anew. So it is the storage under all views that is freed and allocated, and no tensor is replaced.
"""

import functools

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


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


def make_absent(param: nn.Parameter) -> None:
    """Let a parameter keep its shape without memory of its own: every element reads as NaN.

    So who reads a parameter out of turn gets NaN, and who writes to it an error from torch, since its elements are one;
    neither reads memory that is no longer his. Torch lets one write to a single element: `is_absent` notices.
    """
    nan = _nan(param.dtype, param.device)
    param.absent = nan.clone().view(param.shape) if param.numel() == 1 else nan.expand(param.shape)
    param.data, param.version_when_absent = param.absent, param._version


def is_absent(param: nn.Parameter) -> bool:
    """Return whether a parameter is as `make_absent` has left it: not there, nor replaced or written since."""
    absent = getattr(param, "absent", None)
    if absent is None or param.data_ptr() != absent.data_ptr():
        return False
    if param.numel() > 1:
        return True
    return param._version == param.version_when_absent and (param.is_cuda or bool(absent.isnan()))  # no wait on a GPU
