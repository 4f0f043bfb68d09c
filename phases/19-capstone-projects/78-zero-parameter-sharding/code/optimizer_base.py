"""`OptimizerBase`: what schedulers and hooks expect of an optimizer, without importing torch._dynamo (1.2 s)."""

from collections import OrderedDict

import torch

KINDS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
hooked_step = torch.optim.Optimizer.profile_hook_step  # decorates a `step`: its hooks are called, a profiler sees it


class OptimizerBase(torch.optim.Optimizer):
    """An optimizer with fixed groups and without a state of its own. Its `register_*_hook` are torch's."""

    def __init__(self, defaults: dict, param_groups: list[dict]):
        self.defaults, self.state, self.param_groups = defaults, {}, param_groups
        for kind in KINDS:
            setattr(self, f"_optimizer_{kind}_hooks", OrderedDict())

    def add_param_group(self, param_group: dict) -> None:
        """Raise ValueError: the flat buffers are laid out once."""
        raise ValueError("parameter groups are given when the optimizer is built: ZeroOptimizer(..., groups=[...])")

    def __reduce_ex__(self, protocol):
        raise TypeError("a ZeroOptimizer cannot be copied or pickled: let every rank save its state_dict()")

    def call_hooks(self, kind: str, state: dict | None = None) -> dict | None:
        """Call the hooks of one of KINDS; return the state, or what a hook gives in its place."""
        for hook in getattr(self, f"_optimizer_{kind}_hooks").values():
            result = hook(self) if state is None else hook(self, state)
            state = state if result is None or state is None else result
        return state
