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


def absent(param: nn.Parameter) -> torch.Tensor:
    """Return what stands for a parameter that is not there: its shape, without memory of its own; every element NaN.

    So who reads a parameter out of turn gets NaN, and who writes to it an error from torch; neither reads memory that
    is no longer his.
    """
    return _nan(param.dtype, param.device).expand(param.shape)


def is_absent(param: nn.Parameter) -> bool:
    """Return whether a parameter is represented by `absent`."""
    return param.data_ptr() == _nan(param.dtype, param.device).data_ptr()
