"""Which parameters come and go together: one unit a block, and one for what belongs to no block, the root."""

from dataclasses import dataclass

from residency import is_absent
from torch import nn


@dataclass(frozen=True)
class Block:
    """A module whose parameters are gathered together; `units` are the numbers of its flat units, one a dtype."""

    module: nn.Module
    units: tuple[int, ...]


def check_stage(stage: int, bucket_cap_mb: float | None, blocks: list | None, module: nn.Module) -> None:
    """Raise ValueError for a stage that there is not, an option of another stage, or a module that is sharded now."""
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}")
    if stage > 1 and bucket_cap_mb is not None:
        raise ValueError(f"stage {stage} has a unit for each of its blocks: bucket_cap_mb is for stage 1")
    if stage == 1 and blocks is not None:
        raise ValueError("stage 1 has no blocks: give bucket_cap_mb, or stage=2 or 3")
    for name, param in module.named_parameters():
        if is_absent(param):
            raise ValueError(f"{name} is not there: the module is sharded by another optimizer, of stage 3")


def default_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of every `nn.Sequential` or `nn.ModuleList` in a module that lies in no other block.

    A member that is itself a list of modules and is never called gives its members in its place.
    """
    found, is_list = [], isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        found += [child] if is_list and _is_called(child) else default_blocks(child)
    return list(dict.fromkeys(found))


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def plan_blocks(module: nn.Module, named: list, blocks: list[nn.Module] | None) -> tuple[list[list], list[Block]]:
    """Return (units as lists of (name, parameter), blocks in forward order; the root, if it has parameters, is last).

    `named` are the parameters that are trained. Units come in the order in which backward finishes them: the last
    block's first, the root's last. A parameter of two blocks (a tied one) belongs to the root. Raises ValueError for a
    block that is not inside the module, is never called, or lies inside another block, and, with the beginning of its
    repr, for `blocks` that are no list, tuple or ModuleList.
    """
    if not isinstance(blocks, list | tuple | nn.ModuleList | type(None)):
        raise ValueError(f"blocks must be a list of modules, got {blocks!r:.100}")
    blocks = default_blocks(module) if blocks is None else list(blocks)
    _check_blocks(module, blocks)
    owners: dict = {}
    for block in blocks:
        for param in set(block.parameters()):
            owners.setdefault(param, []).append(block)
    home = {param: owners[param][0] if len(owners.get(param, ())) == 1 else module for _, param in named}
    units, plan = [], []
    for block in [*reversed(blocks), module]:
        members: dict = {}
        for name, param in named:
            if home[param] is block:
                members.setdefault(param.dtype, []).append((name, param))
        if members:
            plan.append(Block(block, tuple(range(len(units), len(units) + len(members)))))
            units += members.values()
    root = [each for each in plan if each.module is module]
    return units, [each for each in reversed(plan) if each.module is not module] + root


def _check_blocks(module: nn.Module, blocks: list) -> None:
    inside = set(module.modules())
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module) or block not in inside or block is module:
            raise ValueError(f"blocks[{index}] is no part of {type(module).__name__}: {block!r:.100}")
        if not _is_called(block):
            raise ValueError(f"blocks[{index}] is a {type(block).__name__}: it has no forward before which to gather")
        for other in blocks[:index]:
            if block in set(other.modules()) or other in set(block.modules()):
                raise ValueError(f"blocks[{index}] and an earlier block are one inside the other")
