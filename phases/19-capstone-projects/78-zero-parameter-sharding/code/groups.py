"""Parameter groups: which settings belong to which parameters of a module."""

from torch import nn


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return the two usual groups: matrices, which decay, and all of fewer than 2 dimensions, which do not.

    Those are biases, the weights of norms, and scalars. Either group may be empty.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def split_groups(module: nn.Module, named: list, groups: list[dict] | None, defaults: dict) -> list[dict]:
    """Return one dict a group, {"params": [...], and every setting}; `named` are the parameters that are trained.

    `groups` is as for torch's optimizers, None for one group of all. There are as many groups as given, also where one
    is empty, and one more if some parameters are in none. A frozen parameter may be named; it is left out.

    Raises ValueError, with the index of the group, for one that is no dict with `params`; with the setting's name, too,
    for an unknown one; with the position in the group, too, for what is no parameter of the module or comes a second
    time, and then also with the index of the group it came in first.
    """
    trained, known = {param for _, param in named}, set(module.parameters())
    result, place = [], {}
    for index, group in enumerate([] if groups is None else groups):
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f"group {index} must be a dict with 'params', got {group!r:.200}")
        for setting in group.keys() - defaults.keys() - {"params"}:
            raise ValueError(f"group {index} has {setting!r}: expected params and {', '.join(defaults)}")
        given = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        for position, param in enumerate(given):
            if not isinstance(param, nn.Parameter) or param not in known:
                raise ValueError(f"group {index}: item {position} of its params is no parameter of the module")
            if param in place:
                raise ValueError(f"group {index}: item {position} of its params is in group {place[param]} already")
            place[param] = index
        mine = [param for param in given if param in trained]
        result.append({**defaults, **group, "params": mine})
    rest = [param for _, param in named if param not in place]
    if rest or not result:
        result.append({"params": rest, **defaults})
    for group in result:
        group["betas"] = tuple(group["betas"]) if isinstance(group["betas"], list) else group["betas"]
    return result


def group_facts(named: list, groups: list[dict]) -> list:
    """Return groups as plain facts, to be compared and saved: their settings, and names in place of parameters."""
    names = {param: name for name, param in named}
    return [{**group, "params": [names[param] for param in group["params"]]} for group in groups]
