"""Putting a loaded state into live objects: exact names, shapes and dtypes, all or nothing."""

from collections.abc import Callable, Iterator

import torch
from packed import place_of
from shardheader import Header
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
        _put_into(target, loaded, torch.Tensor.copy_)


class Destination:
    """Where the bytes of a shard go: into new tensors, or into those of a live state, without a copy in between.

    `flats` are contiguous 1-d CPU tensors, one a region of the file, in the file's order. `state()`, called when they
    have been read, returns the state. Raises CheckpointError, with nothing changed, unless `live` is like the saved
    state: the same names, shapes and dtypes, and no two tensors tied that were not tied when they were saved.
    """

    def __init__(self, header: Header, live=None):
        self.live, self.flats, self.copies = live, [], []
        if live is None:
            places = {o: torch.empty(numel, dtype=dtype) for o, (dtype, numel) in header.regions.items()}
            self.flats = list(places.values())
            self.loaded = header.state_in(places)
            return
        self.loaded = header.build([torch.empty(e.shape, dtype=e.dtype, device="meta") for e in header.entries])
        differences = list(_differences(live, self.loaded, ""))
        if differences:
            raise CheckpointError("; ".join(differences))
        users = self._users(header)
        for offset, (dtype, numel) in header.regions.items():
            direct = [t for t in users[offset] if t.is_cpu and t.is_contiguous() and not (t.is_conj() or t.is_neg())]
            flat = direct[0].view(-1) if direct else torch.empty(numel, dtype=dtype)
            self.flats.append(flat)
            self.copies += [(t, flat) for t in users[offset] if place_of(t) != place_of(flat)]

    def _users(self, header: Header) -> dict[int, list[torch.Tensor]]:
        """Return the live tensors that each region of the file belongs to."""
        tensors, region_of = dict(tensors_of(self.live)), {}
        users: dict[int, list[torch.Tensor]] = {offset: [] for offset in header.regions}
        for path, entry in header.paths().items():
            tensor = tensors[path].detach()
            if entry.numel:
                first, its_path = region_of.setdefault(place_of(tensor), (entry.offset, path))
                if first != entry.offset:
                    raise CheckpointError(f"{its_path} and {path} are one tensor here, two in the checkpoint")
                users[entry.offset].append(tensor)
        return users

    @torch.no_grad()
    def state(self):
        """Return the state, now that `flats` hold what was saved."""
        if self.live is None:
            return self.loaded
        for tensor, flat in self.copies:
            tensor.copy_(flat.view(tensor.shape))
        return _put_into(self.live, self.loaded, lambda tensor, _: tensor)


def tensors_of(state, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a state with its path, "optimizer/flat/master"."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict | list | tuple):
        for key, item in items(state).items():
            yield from tensors_of(item, f"{path}/{key}" if path else f"{key}")


def _differences(target, loaded, path: str) -> Iterator[str]:
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if (target.dtype, target.shape) != (loaded.dtype, loaded.shape):
            yield f"{path}: expected {target.dtype} {list(target.shape)}, found {loaded.dtype} {list(loaded.shape)}"
        elif any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)):
            yield f"{path}: cannot be filled: its elements share memory (see Tensor.expand)"
    elif (kind := container(target)) != container(loaded):
        yield f"{path or 'state'}: expected a {kind or 'single value'}, found a {container(loaded) or 'single value'}"
    elif kind:
        ours, theirs = items(target), items(loaded)
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            where = f"{path}/{key}" if path else f"{key}"
            if key not in theirs:
                yield f"missing key {where}"
            elif key not in ours:
                yield f"unexpected key {where}"
            else:
                yield from _differences(ours[key], theirs[key], where)


def _put_into(target, loaded, put: Callable):
    """Return what stands in the place of `target` afterwards: itself, if it can be filled (`put` fills a tensor)."""
    if isinstance(target, torch.Tensor):
        return put(target, loaded)
    if isinstance(target, tuple):
        return tuple(_put_into(ours, theirs, put) for ours, theirs in zip(target, loaded, strict=True))
    if not isinstance(target, dict | list):
        return loaded
    for key, item in items(loaded).items():
        target[key] = _put_into(target[key], item, put)
    return target


def container(value) -> str:
    """Return "dict", "list", "tuple" or "tensor"; "" for a single value."""
    names = {dict: "dict", list: "list", tuple: "tuple", torch.Tensor: "tensor"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "")


def items(value: dict | list | tuple) -> dict:
    """Return what is in a container, by key or index."""
    return value if isinstance(value, dict) else dict(enumerate(value))
