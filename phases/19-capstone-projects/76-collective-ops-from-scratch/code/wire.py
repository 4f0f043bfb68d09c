"""Tensors as bytes: the one encoding behind queue messages, results of ranks and checkpoint files.

A tensor sent through a `multiprocessing` queue shares a file descriptor that dies with its sender. Bytes do not.
"""

import importlib.machinery
import importlib.util
import io
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import FunctionType

import torch

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)  # as numbers, in headers


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`. Raises ValueError for anything that is not the name of a dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order; works for any stride, device and dtype (bfloat16 and bool too)."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a new CPU tensor that owns its memory. Raises ValueError if the sizes do not match."""
    numel = 1
    for size in shape:
        numel *= size
    if len(data) != numel * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not hold shape {tuple(shape)} of {dtype_name(dtype)}")
    if numel == 0:
        return torch.empty(shape, dtype=dtype)  # frombuffer refuses an empty buffer
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class _Pickler(ForkingPickler):
    """Plain pickle, but tensors go as their own bytes and functions of modules loaded by path are found again."""

    def reducer_override(self, obj):
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return tensor_from_bytes, (tensor_to_bytes(obj), obj.dtype, tuple(obj.shape))
        if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # by value, too: torch would have its memory shared
        if isinstance(obj, FunctionType | type) and _loaded_by_path(obj.__module__):
            return _find, (obj.__module__, sys.modules[obj.__module__].__file__, obj.__qualname__)
        return NotImplemented


def _loaded_by_path(module_name: str | None) -> bool:
    if module_name in (None, "__main__") or "." in module_name:
        return False
    has_file = getattr(sys.modules.get(module_name), "__file__", None) is not None
    return has_file and importlib.machinery.PathFinder.find_spec(module_name) is None


def _find(module_name: str, path: str, qualname: str):
    """Find a function or class again, also where its module was loaded from a file under a name of its own."""
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    found = sys.modules[module_name]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def dumps(obj) -> bytes:
    """Encode a value for a process of the same program. Tensors arrive detached and on the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def loads(data: bytes):
    """Decode what `dumps` of this same program wrote. Never give it a file from elsewhere: it is pickle."""
    return pickle.loads(data)
