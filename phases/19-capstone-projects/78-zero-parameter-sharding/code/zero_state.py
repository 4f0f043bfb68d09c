"""Saving and restoring a `ZeroOptimizer`: each rank its own shard, checked on all ranks before anything changes."""

from itertools import chain, zip_longest

import torch
from adam import AdamSettings
from groups import group_facts
from memory import check_whole
from mesh import must_agree


def layout(optimizer) -> list[dict]:
    """Return which elements [start, end) of each flat unit this rank's state holds; padding is left out."""
    result = []
    for index, shard in enumerate(optimizer.shards):
        total = shard.unit.numel
        start, end = min(shard.start, total), min(shard.end, total)
        result.append({"unit": f"unit{index}", "start": start, "end": end, "total": total})
    return result


@torch.no_grad()
def collect(optimizer) -> dict:
    """Return what `ZeroOptimizer.state_dict` does."""
    state = {}
    for shard, place in zip(optimizer.shards, layout(optimizer), strict=True):
        shard.refresh_master()
        held = place["end"] - place["start"]
        state[place["unit"]] = {name: tensor[:held] for name, tensor in shard.tensors().items()}
    named = [(slot.name, slot.param) for unit in optimizer.units for slot in unit.slots]
    return {
        "state": state,
        "layout": layout(optimizer),
        "names": [[slot.name for slot in unit.slots] for unit in optimizer.units],
        "groups": group_facts(named, optimizer.param_groups),
        "steps": optimizer.steps,
        "skipped_steps": optimizer.skipped_steps,
    }


@torch.no_grad()
def restore(optimizer, saved: dict) -> None:
    """Do what `ZeroOptimizer.load_state_dict` says, except for the parameters of other ranks' shards."""
    mine = collect(optimizer)
    faults = optimizer.comm.agree(_fault_in(saved, mine))
    if any(faults):
        raise ValueError("; ".join(f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault))
    common = {key: saved[key] for key in ("groups", "steps", "skipped_steps")}
    must_agree(optimizer.comm, "the optimizer's state", common)
    for unit, tensors in mine["state"].items():
        for name, tensor in tensors.items():
            tensor.copy_(saved["state"][unit][name])
    optimizer.counter.restore(common["steps"], common["skipped_steps"])
    for group, found in zip(optimizer.param_groups, common["groups"], strict=True):
        settings = {key: value for key, value in found.items() if key != "params"}
        group.update(settings, betas=tuple(settings["betas"]))
    for shard in optimizer.shards:
        shard.params.copy_(shard.master)


def _fault_in(saved: dict, mine: dict) -> str | None:
    """Say what about a saved state does not fit this rank's own; None if all of it does."""
    try:
        if saved["layout"] != mine["layout"]:
            return f"layout must be {mine['layout']}, got {saved['layout']}"
        for name, found in zip_longest(chain(*mine["names"]), chain(*saved["names"])):
            if name != found:
                return f"the state has parameter {found} where this model has {name}"
        if _kinds(saved["state"]) != _kinds(mine["state"]):
            return f"state must be {_kinds(mine['state'])}, got {_kinds(saved['state'])}"
        for key in ("steps", "skipped_steps"):
            check_whole(key, saved[key], least=0)
        members, found = ([group["params"] for group in each["groups"]] for each in (mine, saved))
        if members != found:
            return f"groups must be of {members}, got {found}"
        for group in saved["groups"]:
            AdamSettings.of(group)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _kinds(state: dict) -> dict:
    return {unit: {name: (str(t.dtype), tuple(t.shape)) for name, t in named.items()} for unit, named in state.items()}
