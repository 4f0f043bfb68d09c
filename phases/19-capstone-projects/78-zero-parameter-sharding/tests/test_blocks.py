import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from blocks import default_blocks, plan_blocks
from flat import trainable_parameters
from stage_cases import Tower, loss_of, params_of
from toy import MiniMLP
from torch import nn
from zero_cases import Flat, optimizer_for, refusals, virtual


def plan(module, blocks=None):
    """Return units as lists of names, and each block's module and units."""
    units, chain = plan_blocks(module, trainable_parameters(module), blocks)
    return [[name for name, _ in unit] for unit in units], [(block.module, block.units) for block in chain]


class TestDefaultBlocks(unittest.TestCase):
    def test_members_of_lists_outermost_first(self):
        tower, mlp = Tower(), MiniMLP()
        self.assertEqual(default_blocks(tower), list(tower.parts))
        self.assertEqual(default_blocks(mlp), list(mlp.layers))
        self.assertEqual(default_blocks(nn.Linear(2, 2)), [])
        inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        outer = nn.Sequential(inner, nn.Linear(2, 2))
        self.assertEqual(default_blocks(outer), [inner, outer[1]])  # not what is inside inner

    def test_lists_that_are_never_called_give_their_members(self):
        pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
        self.assertEqual(default_blocks(nn.Sequential(nn.Identity(), pairs))[1:], [m for pair in pairs for m in pair])
        holder = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(2))])])
        self.assertEqual(default_blocks(holder), [])

    def test_a_module_in_two_lists_is_there_once(self):
        module = nn.Module()
        shared = nn.Linear(2, 2)
        module.a, module.b = nn.ModuleList([shared]), nn.ModuleList([nn.ReLU(), shared])
        self.assertEqual(default_blocks(module), [shared, module.b[0]])


class TestPlan(unittest.TestCase):
    def test_units_in_backwards_order_blocks_in_forwards(self):
        module = MiniMLP()
        units, chain = plan(module)
        self.assertEqual(
            units, [["layers.2.weight", "layers.2.bias"], ["layers.0.weight", "layers.0.bias"]]
        )  # and none of the ReLU
        self.assertEqual(chain, [(module.layers[0], (1,)), (module.layers[2], (0,))])

    def test_what_two_blocks_share_is_the_roots(self):
        module = Tower()
        units, chain = plan(module)
        self.assertIn("parts.0.first.bias", units[-1])
        self.assertEqual(chain[-1], (module, (3,)))
        self.assertEqual(sum(len(unit) for unit in units), len(list(module.parameters())))

    def test_a_unit_for_each_dtype_of_a_block(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        units, chain = plan(module)
        self.assertEqual(units, [["1.weight"], ["1.bias"], ["0.weight", "0.bias"]])
        self.assertEqual(chain, [(module[0], (2,)), (module[1], (0, 1))])

    def test_frozen_parameters_are_in_no_unit(self):
        module = Tower()
        module.parts[1].requires_grad_(False)
        units, chain = plan(module)
        self.assertEqual(len(units), 3)
        self.assertEqual([block for block, _ in chain], [module.parts[0], module.parts[2], module])

    def test_given_blocks(self):
        module = Tower()
        units, chain = plan(module, [module.parts[1], module.inlet])
        self.assertEqual(units[0], ["inlet.weight", "inlet.bias"])
        self.assertEqual([block for block, _ in chain], [module.parts[1], module.inlet, module])
        self.assertEqual(len(plan(module, [])[0]), 1)  # all is the root's


class TestRefusals(unittest.TestCase):
    def test_blocks(self):
        cases = {
            "is no part of Tower": lambda m: [nn.Linear(2, 2)],
            r"blocks\[0\] is no part of Tower": lambda m: [m],
            r"blocks\[1\] is no part of Tower: 'parts.1'": lambda m: [m.inlet, "parts.1"],
            "are one inside the other": lambda m: [m.parts[0], m.parts[0].first],
            "earlier block are one": lambda m: [m.parts[0], m.parts[0]],
            r"blocks\[0\] is a ModuleList: it has no forward": lambda m: [m.parts],
            r"\b3\b": lambda m: 3,
            "'parts'": lambda m: "parts",
            r"\bPart\(": lambda m: m.parts[0],
        }
        for pattern, make in cases.items():
            module = Tower()
            with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
                plan(module, make(module))

    def test_options_of_other_stages_and_no_stage(self):
        def worker(comm, settings):
            module = Tower()
            before = [param.data_ptr() for param in module.parameters()]
            try:
                optimizer_for(module, comm, **settings)
            finally:
                self.assertEqual(before, [param.data_ptr() for param in module.parameters()])

        for settings, message in (
            ({"stage": 0}, "stage must be 1, 2 or 3, got 0"),
            ({"stage": 4}, "stage must be 1, 2 or 3, got 4"),
            ({"stage": True}, "stage must be 1, 2 or 3, got True"),
            ({"stage": "3"}, "stage must be 1, 2 or 3, got '3'"),
            ({"stage": 2, "bucket_cap_mb": 25}, "bucket_cap_mb is for stage 1"),
            ({"blocks": []}, "stage 1 has no blocks"),
        ):
            for found in refusals(2, worker, settings):
                self.assertIn(message, found)

    def test_ranks_that_differ(self):
        def worker(comm, what):
            module = Tower()
            settings = {"stage": 2 + (comm.rank if what == "stage" else 0)}
            if what == "units":
                settings["blocks"] = [module.parts[comm.rank]]
            optimizer_for(module, comm, **settings)

        for what in ("stage", "units"):
            messages = refusals(2, worker, what)
            self.assertEqual(messages[0], messages[1])
            self.assertIn(f"ranks disagree on the optimizer: {what}", messages[0])


class TestTrained(unittest.TestCase):
    def test_any_choice_of_blocks_trains_alike(self):
        def worker(comm, stage, choose):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage, blocks=choose(module))
            for step in range(3):
                loss_of(module, step, comm.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        expected = virtual(2, worker, 1, lambda m: None)[0]
        choices = {
            "none": lambda m: [],
            "one": lambda m: [m.parts[1]],
            "inside blocks": lambda m: [m.inlet, *(p.first for p in m.parts), m.outlet],
        }
        for stage in (2, 3):
            for name, choose in choices.items():
                for found in virtual(2, worker, stage, choose):
                    with self.subTest(stage=stage, name=name):
                        self.assertTrue(all(torch.equal(found[key], expected[key]) for key in expected))

    def test_empty_blocks_and_a_model_without_any(self):
        self.assertEqual(plan(Flat(torch.ones(3))), ([["vector"]], [(unittest.mock.ANY, (0,))]))


if __name__ == "__main__":
    unittest.main()
