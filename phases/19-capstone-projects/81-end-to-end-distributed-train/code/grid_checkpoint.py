"""Checkpoints of a run over a grid: one for all ranks, however the model is cut.

A flat unit belongs to the ranks of one stage and one slice, (pp, tp), and is dealt to them along dp. In the checkpoint
it has their place in its name. Every rank's state lists all units of the grid; of those of other places it holds no
elements. So lesson 80 sees ranges that cover units, as ever, and can cut them anew for another dp.
"""

from pathlib import Path

import torch
from checkpoint import save_shard  # 80
from determinism import check_random_state, random_state, set_random_state
from memory import check_whole
from part import Part
from plan import DTYPES, parse_plan
from recipe import Reader
from resume import changes, check_counts, read_checkpoint, refuse_together

TENSORS = ("master", "exp_avg", "exp_avg_sq")


class GridCheckpoints:
    """Saves and restores a part of a plan. All ranks of the grid make one, and call its methods, together."""

    def __init__(self, part: Part, reader: Reader):
        self.part, self.reader, self.comm, place = part, reader, part.grid.world, part.grid.place
        own, units = (
            part.optimizer.state_dict()["state"],
            zip(part.optimizer.layout(), part.optimizer.units, strict=True),
        )
        self.own = {f"pp{place['pp']} tp{place['tp']} {unit['unit']}": unit for unit, _ in units}
        facts = {
            key: {
                "total": unit["total"],
                "dtype": str(own[unit["unit"]]["master"].dtype).removeprefix("torch."),
                "names": [slot.name for slot in flat.slots],
            }
            for (key, unit), flat in zip(self.own.items(), part.optimizer.units, strict=True)
        }
        self.units = {key: unit for of_rank in self.comm.agree(facts) for key, unit in of_rank.items()}  # of all places
        device = self.comm.device.type
        self.job = {"plan": str(part.plan), "recipe": part.recipe.facts(), "device": device}

    def save(self, folder: Path | str, position: int) -> None:
        """Save the state after `position` steps into a folder that all ranks see."""
        save_shard(self.state(position), folder, position, self.comm)

    def state(self, position: int) -> dict:
        """Return what this rank saves."""
        optimizer = self.part.optimizer.state_dict()
        states = {key: optimizer["state"][unit["unit"]] for key, unit in self.own.items()}
        for key, unit in self.units.items():
            states.setdefault(key, {name: torch.empty(0, dtype=DTYPES[unit["dtype"]]) for name in TENSORS})
        return {
            "job": self.job,
            "position": position,
            "data": self.reader.batches.position(position * self.part.recipe.rows),
            "random": random_state(self.comm.device) | {"own": self.part.own_noise.state},
            "names": {key: unit["names"] for key, unit in self.units.items()},
            "counts": {key: optimizer[key] for key in ("steps", "skipped_steps")},
            "units": {key: states[key] for key in self.units},
            "layout": self.layout(),
        }

    def layout(self) -> list[dict]:
        """Return which elements of which units this rank holds: of other places' none, at their end."""
        nothing = {
            key: {"start": unit["total"], "end": unit["total"], "total": unit["total"]}
            for key, unit in self.units.items()
        }
        return [{**nothing[key], **self.own.get(key, {}), "unit": f"units/{key}"} for key in self.units]

    def load(self, folder: Path | str) -> int:
        """Restore this rank's part; return the number of steps that were done.

        The plan may have another dp and other microbatches than the one that saved. Raises the same CheckpointError on
        every rank, with nothing changed, for any other plan, another recipe, or a damaged checkpoint.
        """
        saved = read_checkpoint(folder, self.comm, self._fault_of_owner, self.layout())
        refuse_together(folder, self.comm, lambda: self._fault_in(saved))
        optimizer = self.part.optimizer
        state = {unit["unit"]: saved["units"][key] for key, unit in self.own.items()}
        counts = {key: saved["counts"][key] for key in ("steps", "skipped_steps")}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state} | counts)
        optimizer.zero_grad()
        if len(saved["random"]) == self.comm.world_size:
            mine = saved["random"][self.comm.rank]
            set_random_state(mine)
            self.part.own_noise.state = mine["own"]
        else:  # noise belongs to ranks, and these are others
            self.part.seed_noise(saved["position"])
        return saved["position"]

    def _fault_of_owner(self, was: dict) -> str:
        if "plan" not in was and "corpus" in was:
            return "saved by a run without a plan: it goes on without one (main.py --resume)"
        before, now = parse_plan(was["plan"]), self.part.plan
        for name in ("pp", "tp", "zero", "dtype"):
            if getattr(before, name) != getattr(now, name):
                return f"saved under the plan {before}, cannot go on under {now}: only dp and m may differ"
        return changes(was["recipe"] | {"device": was["device"]}, self.job["recipe"] | {"device": self.job["device"]})

    def _fault_in(self, saved: dict) -> str | None:
        """Say why this part cannot go on from what was read; None if it can."""
        mine, steps = self.state(0), self.part.recipe.steps
        try:
            check_whole("position", saved["position"], least=1)
            if saved["position"] >= steps:
                return f"saved after {saved['position']} steps, and the run has only {steps}"
            if self.reader.batches.drawn_at(saved["data"]) != saved["position"] * self.part.recipe.rows:
                return f"saved after {saved['position']} steps, but {saved['data']['samples']} samples"
            wanted, found = [_kinds(each["units"]) for each in (mine, saved)]
            wanted["names"], found["names"] = mine["names"], saved["names"]
            if len(saved["random"]) == self.comm.world_size:
                check_random_state(saved["random"][self.comm.rank], mine["random"], self.comm.device)
            check_counts(saved["counts"], saved["position"])
            wrong = [
                f"{key}: expected {wanted[key]}, found {found.get(key)}"
                for key in wanted
                if found.get(key) != wanted[key]
            ]
            return "; ".join(wrong) or None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"not a checkpoint of a grid: {error!r}"


def _kinds(units: dict) -> dict:
    return {key: {name: (str(t.dtype), list(t.shape)) for name, t in own.items()} for key, own in units.items()}
