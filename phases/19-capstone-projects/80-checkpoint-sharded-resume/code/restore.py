"""Putting a loaded state into live objects: exact names, shapes and dtypes, all or nothing."""

from collections.abc import Iterator

import torch
from strictjson import CheckpointError


def load_into(target, loaded) -> None:
    """Copy a loaded state into a live one of the same structure: tensors in place, other values replaced.

    `load_into(module.state_dict(), loaded["model"])` restores a module. Names, shapes and dtypes must be exactly the
    same. Everything is compared first: a CheckpointError lists every missing key, every unexpected key and every other
    difference, and then nothing has been changed.
    """
    differences = list(_differences(target, loaded, ""))
    if differences:
        raise CheckpointError("; ".join(differences))
    with torch.no_grad():
        _copy_into(target, loaded)


def _differences(target, loaded, path: str) -> Iterator[str]:
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if (target.dtype, target.shape) != (loaded.dtype, loaded.shape):
            yield f"{path}: expected {target.dtype} {list(target.shape)}, found {loaded.dtype} {list(loaded.shape)}"
    elif (kind := _container(target)) != _container(loaded):
        yield f"{path or 'state'}: expected a {kind or 'single value'}, found a {_container(loaded) or 'single value'}"
    elif kind:
        ours, theirs = _items(target), _items(loaded)
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            where = f"{path}/{key}" if path else f"{key}"
            if key not in theirs:
                yield f"missing key {where}"
            elif key not in ours:
                yield f"unexpected key {where}"
            else:
                yield from _differences(ours[key], theirs[key], where)


def _copy_into(target, loaded):
    """Return what stands in the place of `target` afterwards: itself, if it can be filled."""
    if isinstance(target, torch.Tensor):
        return target.copy_(loaded)
    if isinstance(target, tuple):
        return tuple(_copy_into(ours, theirs) for ours, theirs in zip(target, loaded, strict=True))
    if not isinstance(target, dict | list):
        return loaded
    for key, item in _items(loaded).items():
        target[key] = _copy_into(target[key], item)
    return target


def _container(value) -> str:
    names = {dict: "dict", list: "list", tuple: "tuple", torch.Tensor: "tensor"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "")


def _items(value: dict | list | tuple) -> dict:
    return value if isinstance(value, dict) else dict(enumerate(value))
