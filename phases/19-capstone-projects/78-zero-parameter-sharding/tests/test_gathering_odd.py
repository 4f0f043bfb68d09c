import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from functools import partial
from unittest import mock

import torch
from residency import Absence
from stage_cases import STEP, Part, Tower, loss_of, params_of, same_as_stage_1, step_of, whole
from torch import nn
from zero_cases import optimizer_for, virtual


class Skipping(Tower):
    """Layer drop: some blocks return their input as it came, or one of two tensors so."""

    skipped = (1,)

    def __init__(self):
        super().__init__(depth=4)
        for place, part in enumerate(self.parts):
            part.register_forward_hook(lambda _, given, out, place=place: given[0] if place in self.skipped else out)


class Carrying(nn.Module):
    """A block that changes one of its two inputs and hands the other one on."""

    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple:
        """(batch, 5) twice -> the same twice."""
        return self.part(x) + kept, kept


class Highway(Tower):
    """What the inlet says goes along all blocks."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Carrying() for _ in range(3))

    def forward(self, x):
        x = kept = self.inlet(x)
        for part in self.parts:
            x, kept = part(x, kept)
        return self.outlet(x * kept) * self.scale


class TestHandedOn(unittest.TestCase):
    def train(self, make, stage, comm):
        module = make()
        optimizer = optimizer_for(module, comm, stage=stage)
        for step in range(2):
            step_of(module, optimizer, comm, step)
        return params_of(module, optimizer)

    def test_a_block_that_is_skipped_does_not_come_between(self):
        for skipped in ((0,), (1,), (3,), (1, 2), (0, 1, 3)):
            with self.subTest(skipped=skipped), mock.patch.object(Skipping, "skipped", skipped):
                same_as_stage_1(self, lambda comm, stage: self.train(Skipping, stage, comm))

    def test_a_tensor_that_goes_along_all_blocks(self):
        same_as_stage_1(self, lambda comm, stage: self.train(Highway, stage, comm))


class TestWritten(unittest.TestCase):
    """A parameter is written while it is not there: an error, once; training goes on as if it had not been."""

    def worker(self, comm, stage, when):
        module = Tower()
        optimizer = optimizer_for(module, comm, stage=stage)
        loss_of(module, 0, comm.rank).backward()
        if stage == 3 and when == "before step":
            nn.init.zeros_(module.inlet.weight)
            self.fails(optimizer.step, module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if stage == 3 and when == "before forward":
            nn.init.zeros_(module.parts[1].gain)
            self.fails(lambda: loss_of(module, 1, comm.rank), module, optimizer)
        elif stage == 3 and when == "before load":
            nn.init.zeros_(module.inlet.weight)
            optimizer.load_state_dict(optimizer.state_dict())
        self.assertTrue(stage < 3 or all(param.isnan().all() for param in module.parameters()))
        step_of(module, optimizer, comm, 1)
        return params_of(module, optimizer)

    def fails(self, call, module, optimizer):
        with self.assertRaisesRegex(ValueError, "was written while it was not gathered"):
            call()
        self.assertEqual(whole(optimizer), [])

    def test_on_a_cpu_by_the_value_and_on_a_gpu_by_torchs_count(self):
        for by_version in (False, True):
            for when in ("before step", "before forward", "before load"):
                with (
                    self.subTest(when=when, by_version=by_version),
                    mock.patch.object(Absence, "by_version", by_version),
                ):
                    same_as_stage_1(self, partial(self.worker, when=when))


class TestInTheMidst(unittest.TestCase):
    def test_gathered_in_forward_or_backward_is_refused(self):
        def worker(comm, place):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)

            def enter(*_):
                with optimizer.gathered():
                    pass

            inside = module.parts[1].second
            hook = {"forward": inside.register_forward_hook, "backward": inside.register_full_backward_hook}[place](
                enter
            )
            with self.assertRaisesRegex(RuntimeError, "in the midst of forward or backward"):
                loss_of(module, 0, comm.rank).backward()
            hook.remove()
            with optimizer.gathered():  # a forward or backward that has failed is over
                self.assertFalse(any(param.isnan().any() for param in module.parameters()))
            optimizer.zero_grad()
            return step_of(module, optimizer, comm)

        for place in ("forward", "backward"):
            with self.subTest(place):
                self.assertEqual(virtual(2, worker, place), [STEP] * 2)

    def test_a_forward_that_fails_leaves_nothing(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            module.parts[2].register_forward_pre_hook(lambda *_: 1 / 0)
            self.assertRaises(ZeroDivisionError, loss_of, module, 0, comm.rank)
            return whole(optimizer)

        self.assertEqual(virtual(2, worker), [[], []])

    def test_loading_after_a_backward_that_failed(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage, **({"overlap": True} if stage == 1 else {}))
            state = optimizer.state_dict()
            hook = module.parts[0].second.register_full_backward_hook(lambda *_: 1 / 0)
            self.assertRaises(ZeroDivisionError, loss_of(module, 3, comm.rank).backward)
            hook.remove()
            optimizer.load_state_dict(state)
            step_of(module, optimizer, comm)
            return params_of(module, optimizer)

        for base in (1, 2):
            same_as_stage_1(self, worker, base)

    def test_a_block_that_is_frozen_between_forward_and_backward(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            loss = loss_of(module, 0, comm.rank)
            module.parts[1].requires_grad_(False)
            loss.backward()
            optimizer.step()
            return params_of(module, optimizer)

        before = {name: param.clone() for name, param in Tower().named_parameters()}
        for base in (1, 2):
            found = same_as_stage_1(self, worker, base)
            for name, param in before.items():
                self.assertEqual(torch.equal(found[name], param), name.startswith("parts.1."), name)


if __name__ == "__main__":
    unittest.main()
