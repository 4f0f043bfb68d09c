"""A state taken apart: a JSON header, and the regions of memory that follow it in the shard file.

Nothing is copied here unless a tensor is strided or lives on a GPU. Whoever wants a copy of everything (an asynchronous
save) says so with `keep`.
"""

import json
import math
from collections.abc import Callable, Iterator

import torch
import wire
from layout import check_layout
from strictjson import CheckpointError, show

MAGIC = b"SHARD-80"
BLOCK = 1 << 20  # bytes written, hashed, read at a time: they stay in a core's cache
ALIGN = 64  # the first tensor begins at a multiple of so many bytes: see mapped.py
RESERVED = TENSOR, TUPLE, FLOAT = "__tensor__", "__tuple__", "__float__"  # what JSON lacks: {"__float__": "nan"}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, not a copy."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # view(-1) keeps any stride of a single element
    return memoryview(flat.view(torch.uint8).numpy())


def blocks_of(region: memoryview) -> Iterator[memoryview]:
    """Yield a region in pieces of at most 1 MB."""
    for start in range(0, len(region), BLOCK):
        yield region[start : start + BLOCK]


def place_of(tensor: torch.Tensor) -> tuple:
    """Return what two tensors have in common if they are the same elements in memory: tied. Their shapes may differ."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.numel(), tensor.is_conj(), tensor.is_neg())
    return place if tensor.is_contiguous() else (*place, tensor.shape, tensor.stride())


def in_place(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order: its own memory where that is possible."""
    return bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())


class PackedState:
    """One rank's state taken apart into a header and the regions of memory that follow it in the file.

    A state is made of dicts with string keys, lists, tuples, strings, ints, floats (exact; also NaN and infinities),
    bools, None and tensors. Raises CheckpointError, naming the key, for anything else. A view stores its own elements,
    not its storage; tensors that are the same elements in memory (tied) are stored once. `keep(tensor)` returns the
    bytes of a region; it is called once a region.
    """

    def __init__(
        self,
        state: dict | list,
        rank: int,
        world_size: int,
        step: int,
        keep: Callable[[torch.Tensor], memoryview] = in_place,
    ):
        if not isinstance(state, dict | list):
            raise CheckpointError(f"state: expected a dict or a list, found a {type(state).__name__}")
        self.table, self.regions, self._end, self._keep = [], [], 0, keep  # _end: bytes in `regions`
        self._offsets, self._indices, self._numels = {}, {}, {}  # of a place in memory, of a tensor, of a key
        try:
            apart = self._take_apart(state, "")
        except RecursionError:
            raise CheckpointError("state: nested too deeply, or it contains itself") from None
        facts = {"rank": rank, "world_size": world_size, "step": step, "state": apart}
        header = json.dumps({**facts, "tensors": self.table}, allow_nan=False).encode()
        header += b" " * (-(len(MAGIC) + 8 + len(header)) % ALIGN)  # JSON may end in spaces
        self.header = MAGIC + len(header).to_bytes(8, "little") + header
        self.size = len(self.header) + self._end
        self.layout = state.get("layout", []) if isinstance(state, dict) else []
        self._check_layout()

    def blocks(self) -> Iterator[memoryview]:
        """Yield the file's contents in pieces of at most 1 MB, without copying."""
        for region in (memoryview(self.header), *self.regions):
            yield from blocks_of(region)

    def _take_apart(self, value, path: str):
        if isinstance(value, torch.Tensor):
            return {TENSOR: self._add(value, path)}
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str or key in RESERVED:
                    raise CheckpointError(f"{path or 'state'}: expected keys that are plain strings, found {show(key)}")
            return {key: self._take_apart(item, f"{path}/{key}" if path else key) for key, item in value.items()}
        if type(value) in (list, tuple):
            items = [self._take_apart(item, f"{path}/{i}" if path else str(i)) for i, item in enumerate(value)]
            return items if type(value) is list else {TUPLE: items}
        if type(value) is float and not math.isfinite(value):
            return {FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(f"{path}: cannot save a {kind}: only tensors, dicts, lists, tuples and JSON's values")

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        """Return the index of the tensor's entry in the table; add the entry, and its bytes, if they are new."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_meta or tensor.is_quantized:
            kind = f"{type(tensor).__name__} of {tensor.layout} and {tensor.dtype} on {tensor.device}"
            raise CheckpointError(f"{path}: cannot save a {kind}: only plain dense tensors")
        if path in self._numels:
            raise CheckpointError(f"{path}: two tensors of the state have this path")
        tensor = tensor.detach()
        self._numels[path] = tensor.numel()
        place = place_of(tensor) if tensor.numel() else (path,)  # all empty tensors lie at address 0: not tied
        if place not in self._offsets:
            region = self._keep(tensor)
            self._offsets[place] = self._end
            self._end += len(region)
            self.regions.append(region)
        if (place, tensor.shape) not in self._indices:
            self._indices[place, tensor.shape] = len(self.table)
            entry = {"dtype": wire.dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            self.table.append({**entry, "offset": self._offsets[place], "numel": tensor.numel()})
        return self._indices[place, tensor.shape]

    def _check_layout(self) -> None:
        check_layout(self.layout)
        for item in self.layout:
            unit, length = item["unit"], item["end"] - item["start"]
            numels = {path: n for path, n in self._numels.items() if path == unit or path.startswith(unit + "/")}
            if not numels:
                raise CheckpointError(f"layout: the state has no tensor at or below {unit!r}")
            for path, numel in numels.items():
                if numel != length:
                    raise CheckpointError(f"layout: {unit!r} is a range of {length} elements, but {path} has {numel}")
