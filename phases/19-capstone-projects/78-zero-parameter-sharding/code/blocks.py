"""Which parameters come and go together: one unit a block, and one for what belongs to no block, the root."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """A module whose parameters are gathered together; `units` are the numbers of its flat units, one a dtype."""

    module: nn.Module
    units: tuple[int, ...]


def default_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of every `nn.Sequential` or `nn.ModuleList` in a module that lies in no other such list."""
    found = []
    for child in module.children():
        is_list = isinstance(child, nn.Sequential | nn.ModuleList)
        found += child.children() if is_list else default_blocks(child)
    return list(module.children()) if isinstance(module, nn.Sequential | nn.ModuleList) else found


def plan_blocks(module: nn.Module, named: list, blocks: list[nn.Module] | None) -> tuple[list[list], list[Block]]:
    """Return (units as lists of (name, parameter), blocks in forward order; the root, if it has parameters, is last).

    `named` are the parameters that are trained. Units come in the order in which backward finishes them: the last
    block's first, the root's last. A parameter of two blocks (a tied one) belongs to the root. Raises ValueError for a
    block that is not inside the module, or inside another block.
    """
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
        for other in blocks[:index]:
            if block in set(other.modules()) or other in set(block.modules()):
                raise ValueError(f"blocks[{index}] and an earlier block are one inside the other")
