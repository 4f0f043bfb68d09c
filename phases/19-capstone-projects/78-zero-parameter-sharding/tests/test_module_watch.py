import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from stage_cases import Tower, loss_of, params_of
from torch import nn
from torch.nn.utils import parametrize
from zero_cases import optimizer_for, refusals, same, virtual

MISSED = "was frozen, or not there, when the optimizer was built: build a new one to train it"


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice x, whatever its shape."""
        return 2 * x


def add(module):
    module.extra = nn.Parameter(torch.ones(3))


def add_deep(module):
    module.parts[1].deeper = nn.Sequential(nn.Identity(), nn.Linear(2, 2))


def replace(module):
    module.inlet.weight = nn.Parameter(module.inlet.weight.detach().clone())


def replace_layer(module):
    module.outlet = nn.Linear(5, 4)


def replace_and_tie(module):
    module.outlet.bias = nn.Parameter(torch.zeros(4))
    module.other = module.outlet.bias


CHANGES = {  # and the parameters that the optimizer does not know
    add: "extra",
    add_deep: "parts.1.deeper.1.weight",
    replace: "inlet.weight",
    replace_layer: "outlet.weight",
    replace_and_tie: "outlet.bias|other",
}


class TestParametersThatCameLater(unittest.TestCase):
    """They would keep their first values, or have gradients that nobody looks at, and no error would say so."""

    def test_the_next_step_names_them(self):
        def worker(comm, stage, change):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(2):
                if step == 1:
                    change(module)
                loss_of(module, step, comm.rank).backward()
                optimizer.step()
                optimizer.zero_grad()

        for stage in (1, 2, 3):
            for change, name in CHANGES.items():
                with self.subTest(stage=stage, name=name):
                    for message in refusals(2, worker, stage, change):
                        self.assertRegex(message, f"^({name}) {MISSED}$")

    def test_nothing_is_sent_or_changed(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm)
            before, calls = params_of(module, optimizer), comm.counters.calls.copy()
            loss_of(module, 0, comm.rank).backward()
            add(module)
            for function in (optimizer.step, optimizer.reduce_gradients, lambda: optimizer.clip_grad_norm_(1.0)):
                with self.assertRaisesRegex(ValueError, f"extra {MISSED}"):
                    function()
            del module.extra
            unchanged = same(list(before.values()), list(params_of(module, optimizer).values()))
            sent = comm.counters.calls - calls
            optimizer.step()
            return unchanged, not sent, optimizer.steps

        self.assertEqual(virtual(2, worker), [(True, True, 1)] * 2)

    def test_one_that_came_frozen_may_stay_so(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            module.later = nn.Linear(2, 2).requires_grad_(False)
            loss_of(module, 0, comm.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            module.later.bias.requires_grad_(True)
            loss_of(module, 1, comm.rank).backward()
            optimizer.step()

        for stage in (1, 2, 3):
            self.assertEqual(refusals(2, worker, stage), [f"later.bias {MISSED}"] * 2)

    def test_other_changes_are_nobodys_business(self):
        """Modules without parameters, empty parameters, buffers, a tie, a computed weight, a layer taken out."""

        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            module.parts.append(nn.Identity())
            module.empty = nn.Parameter(torch.empty(0))
            module.register_buffer("counts", torch.ones(3))
            module.again = module.outlet.weight
            parametrize.register_parametrization(module.inlet, "bias", Doubled())
            for step in range(3):
                if step == 2:
                    del module.parts[1]
                loss_of(module, step, comm.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer.steps

        for stage in (1, 2, 3):
            self.assertEqual(virtual(2, worker, stage), [3, 3])


if __name__ == "__main__":
    unittest.main()
