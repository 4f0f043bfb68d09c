"""Flat buffers whose views are the parameters and gradients of a module.

A collective wants one long tensor, a module has many small ones. So the memory is laid out flat and the module's
tensors are made views of it: nothing is copied after a collective, and an optimizer can treat a shard as one tensor.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import wire
from comm import TorchComm
from mesh import must_agree
from torch import nn


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer: elements `start` to `end`."""

    name: str
    param: nn.Parameter
    start: int
    end: int


class FlatUnit:
    """Parameters of one dtype, laid end to end in the order given; the unit of one collective.

    `grad` is the flat gradient, `data` (after `own_parameters`) the flat parameters. Both have `padded` elements:
    `numel` rounded up to a multiple of `multiple`, so that N ranks can have equal shards. The padding stays zero.
    `memory` is `grad` and `extra` elements more, which travel with it. It comes from `empty(numel, dtype)`, by default
    `comm.empty`.
    """

    def __init__(
        self, named_params: list[tuple[str, nn.Parameter]], comm, multiple: int = 1, extra: int = 0, empty=None
    ):
        self.slots, start = [], 0
        for name, param in named_params:
            self.slots.append(Slot(name, param, start, start + param.numel()))
            start += param.numel()
        self.numel, self.padded = start, -(-start // multiple) * multiple
        self.dtype = named_params[0][1].dtype
        self._empty = empty or comm.empty
        self.memory = self._empty(self.padded + extra, self.dtype).zero_()
        self.grad = self.memory[: self.padded]
        self.views = [self.grad[slot.start : slot.end].view(slot.param.shape) for slot in self.slots]
        self.data: torch.Tensor | None = None
        self.data_views: list[torch.Tensor] = []

    @torch.no_grad()
    def take_grads(self, indices: Iterable[int]) -> None:
        """Make the gradients of these parameters, which autograd or a user has set, the views of `grad`: one copy."""
        views, grads = [], []
        for index in indices:
            param, view = self.slots[index].param, self.views[index]
            if param.grad is not view:
                views.append(view)
                grads.append(param.grad.to_dense())  # an embedding's may be sparse
                param.grad = view
        if views:
            torch._foreach_copy_(views, grads)

    @torch.no_grad()
    def own_parameters(self, empty=None) -> None:
        """Move the parameters into one flat buffer: each `param.data` becomes a view of `data`, made as `memory` is."""
        self.data = (empty or self._empty)(self.padded, self.dtype).zero_()
        self.data_views = [self.data[slot.start : slot.end].view(slot.param.shape) for slot in self.slots]
        for slot, view in zip(self.slots, self.data_views, strict=True):
            view.copy_(slot.param)
            slot.param.data = view


def watch_gradients(units: list[FlatUnit], on_gradient) -> None:
    """Have the bound method `on_gradient(unit's number, slot's index)` called whenever a gradient is complete.

    The method is held weakly: a module, and its hooks, may outlive who listens.
    """
    listener = weakref.WeakMethod(on_gradient)

    def hook_for(number: int, index: int):
        def hook(param: nn.Parameter) -> None:
            if (call := listener()) is not None:
                call(number, index)

        hook.listener = listener
        return hook

    for number, unit in enumerate(units):
        for index, slot in enumerate(unit.slots):
            slot.param.register_post_accumulate_grad_hook(hook_for(number, index))


def watched(param: nn.Parameter) -> bool:
    """Say whether a living listener of `watch_gradients` has a hook on this parameter."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return any(hook.listener() is not None for hook in hooks if hasattr(hook, "listener"))


def trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of all that require a gradient, tied ones once.

    Raises ValueError if there are none, or if one is complex (a flat buffer would lose its imaginary part).
    """
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient: there is nothing to train"
        )
    for name, param in named:
        if param.is_complex():
            raise ValueError(f"parameter {name} is {param.dtype}: complex parameters are not supported")
    return named


def plan_units(named_params: list, cap_bytes: int, first_cap_bytes: int | None = None) -> list[list]:
    """Group parameters into units of at most `cap_bytes` (one larger parameter alone), one dtype a unit.

    Units come in the *reverse* of the module's order, which is roughly the order in which backward finishes gradients.
    The first may have a smaller cap, so that communication starts early.
    """
    units, open_units = [], {}
    for name, param in reversed(named_params):
        size = param.numel() * param.element_size()
        unit = open_units.get(param.dtype)
        cap = first_cap_bytes if unit is not None and unit is units[0] and first_cap_bytes else cap_bytes
        if unit is None or sum(p.numel() * p.element_size() for _, p in unit) + size > cap:
            unit = open_units[param.dtype] = []
            units.append(unit)
        unit.append((name, param))
    return units


def module_facts(module: nn.Module) -> dict:
    """Return what all ranks' modules must have in common: what each name stands for, and which name it follows."""
    facts, first_name, previous = {}, {}, None
    named = [("parameter", *item) for item in module.named_parameters(remove_duplicate=False)]
    named += [("buffer", *item) for item in module.named_buffers(remove_duplicate=False)]
    for kind, name, tensor in named:
        tied_to = first_name.setdefault(id(tensor), name)
        facts[name] = {
            "kind": kind,
            "after": previous,  # flat memory follows the order, which a comparison of dicts would ignore
            "shape": list(tensor.shape),
            "dtype": wire.dtype_name(tensor.dtype),
            "stride": list(tensor.stride()),
            "requires_grad": tensor.requires_grad,
            "tied_to": None if tied_to == name else tied_to,
        }
        previous = name
    return facts


@torch.no_grad()
def broadcast_tensors(comm, tensors: list[torch.Tensor], src: int = 0, cap_bytes: int = 25 << 20) -> None:
    """Replace each tensor by rank `src`'s, a few in one message, so that small ones do not pay a latency each."""
    for unit in plan_units([("", tensor) for tensor in tensors], cap_bytes):
        flat = torch.cat([tensor.reshape(-1) for _, tensor in unit])
        comm.broadcast(flat, src)
        for (_, tensor), values in zip(unit, flat.split([t.numel() for _, t in unit]), strict=True):
            tensor.data.copy_(values.view(tensor.shape))  # .data: a graph that holds a buffer need not know


def sync_module(module: nn.Module, comm=None, src: int = 0) -> None:
    """Make every rank's module equal to rank `src`'s: compare names, shapes, dtypes and layouts, then broadcast.

    Raises the same ValueError on every rank, with nothing changed, if the modules differ in anything but values, or
    `src` is no rank or not the same on all.
    """
    comm = comm or TorchComm()
    must_agree(comm, "the model", {"(source)": src} | module_facts(module))
    broadcast_tensors(comm.unchecked(), [*module.parameters(), *module.buffers()], src)


def flat_param_numel(module: nn.Module) -> int:
    """Return the number of elements of all parameters, tied ones once."""
    return sum(param.numel() for param in module.parameters())


def gather_flat_params(module: nn.Module) -> torch.Tensor:
    """Return a copy of all parameters as one tensor (P,), in the module's order. One dtype only."""
    return _cat([param.detach() for param in module.parameters()])


def gather_flat_grads(module: nn.Module) -> torch.Tensor:
    """Return a copy of all gradients as one tensor (P,); a missing gradient counts as zeros."""
    return _cat([torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])


@torch.no_grad()
def scatter_flat_to_params(module: nn.Module, flat: torch.Tensor) -> None:
    """Copy one tensor (P,) into the parameters, in the module's order. Raises ValueError if it has another length."""
    if flat.shape != (flat_param_numel(module),):
        raise ValueError(f"expected a tensor of shape ({flat_param_numel(module)},), got {tuple(flat.shape)}")
    start = 0
    for param in module.parameters():
        param.copy_(flat[start : start + param.numel()].view(param.shape))
        start += param.numel()


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        raise ValueError("the module has no parameters")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one flat tensor holds one dtype, got {sorted({str(tensor.dtype) for tensor in tensors})}")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
