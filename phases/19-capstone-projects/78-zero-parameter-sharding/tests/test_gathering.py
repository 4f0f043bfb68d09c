import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import warnings
from functools import partial
from unittest import mock

import torch
from residency import Absence, is_absent
from stage_cases import STEP, Tower, batch, loss_of, params_of, same_as_stage_1, step_of, whole
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_cases import optimizer_for, virtual


class Telling(Tower):
    """Tells, as each block computes, which units have memory."""

    def tell(self, optimizer):
        self.seen = []
        for place, part in enumerate(self.parts):
            part.second.register_forward_hook(lambda *_, p=place: self.seen.append((f"F{p}", whole(optimizer))))
            part.second.register_full_backward_pre_hook(
                lambda *_, p=place: self.seen.append((f"B{p}", whole(optimizer)))
            )


class TestWhatIsThere(unittest.TestCase):
    def test_the_block_that_computes_the_next_one_and_the_root(self):
        """Units 0, 1, 2 are of parts 2, 1, 0; unit 3 is the root's."""

        def worker(comm):
            module = Telling()
            optimizer = optimizer_for(module, comm, stage=3)
            module.tell(optimizer)
            loss = loss_of(module, 0, comm.rank)
            between = whole(optimizer)
            loss.backward()
            return module.seen, between, whole(optimizer), all(map(is_absent, module.parameters()))

        forward = [("F0", [1, 2, 3]), ("F1", [0, 1, 3]), ("F2", [0, 3])]
        backward = [("B2", [0, 1, 3]), ("B1", [1, 2, 3]), ("B0", [2, 3])]
        self.assertEqual(virtual(2, worker), [(forward + backward, [3], [], True)] * 2)

    def test_outside_parameters_read_as_nan_and_cannot_be_written(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            shapes = [param.shape for param in Tower().parameters()]
            self.assertEqual([param.shape for param in module.parameters()], shapes)
            self.assertTrue(all(param.isnan().all() for param in module.parameters()))
            with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "single memory location"):
                module.inlet.weight.mul_(2.0)
            with self.assertRaises(RuntimeError):
                module.inlet.load_state_dict(Tower().inlet.state_dict())
            step_of(module, optimizer, comm)
            self.assertTrue(all(param.isnan().all() for param in module.parameters()))

        virtual(2, worker)

    def test_what_was_written_all_the_same_is_an_error_and_not_lost(self):
        """Torch lets one fill a tensor whose elements are one, and replace a parameter's data."""

        def fill(module):
            with torch.no_grad():
                module.scale.fill_(2.0)

        def zero(module):
            nn.init.zeros_(module.inlet.weight)

        def fill_data(module):
            module.scale.data.fill_(2.0)

        def replace(module):
            module.scale.data = torch.ones(())

        def convert(module):
            module.to(torch.float64)

        def worker(comm, write):
            module, other = Tower(), Tower()
            optimizer_for(module, comm, stage=3)
            optimizer_for(other, comm, stage=3)
            write(module)
            self.assertTrue(all(param.isnan().all() for param in other.parameters()))
            with self.assertRaisesRegex(ValueError, "was written while it was not gathered"):
                loss_of(module, 0, comm.rank)

        for write in (fill, zero, fill_data, replace, convert):
            with self.subTest(write.__name__):
                virtual(1, worker, write)

    def test_a_module_that_is_sharded_is_not_sharded_again(self):
        def worker(comm):
            module = Tower()
            optimizer_for(module, comm, stage=3)
            for stage in (1, 3):
                with self.assertRaisesRegex(ValueError, "is sharded by another optimizer, of stage 3"):
                    optimizer_for(module, comm, stage=stage)

        virtual(2, worker)


class TestGathered(unittest.TestCase):
    def test_weights_are_read_and_written(self):
        def worker(comm, stage, dtype):
            module = Tower().to(dtype)
            optimizer = optimizer_for(module, comm, stage=stage)
            step_of(module, optimizer, comm)
            with optimizer.gathered(), torch.no_grad():
                module.load_state_dict({name: value / 2 for name, value in module.state_dict().items()})
                module.scale.fill_(0.75)
                with optimizer.gathered():  # once more does no harm
                    module.parts[1].gain.mul_(2)
            step_of(module, optimizer, comm, 1)
            return params_of(module, optimizer)

        for dtype in (torch.float32, torch.bfloat16):
            same_as_stage_1(self, partial(worker, dtype=dtype))

    def test_masters_keep_their_bits_where_nothing_was_written(self):
        def worker(comm):
            module = Tower().bfloat16()
            optimizer = optimizer_for(module, comm, stage=3)
            step_of(module, optimizer, comm)
            before = [shard.master.clone() for shard in optimizer.shards]
            with optimizer.gathered(), torch.no_grad():
                module.parts[2].gain.fill_(0.25)
            kept = [a == b for a, b in zip(before, (s.master for s in optimizer.shards), strict=True)]
            return sum(int((~each).sum()) for each in kept)

        self.assertEqual(sum(virtual(3, worker)), 1)  # one element, on the rank that holds it

    def test_it_may_be_evaluated_and_trained_inside_but_not_stepped(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            with optimizer.gathered():
                before = comm.counters.calls["all_gather"]
                loss_of(module, 0, comm.rank).backward()
                with torch.no_grad():
                    loss_of(module, 0, comm.rank)
                self.assertEqual(comm.counters.calls["all_gather"], before)
                if stage == 3:
                    with self.assertRaisesRegex(RuntimeError, "cannot change inside gathered"):
                        optimizer.step()
                    with self.assertRaisesRegex(RuntimeError, "cannot change inside gathered"):
                        optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            self.assertEqual(optimizer.steps, 1)
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_a_parameter_that_was_replaced_inside_is_an_error(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            with self.assertRaisesRegex(ValueError, "inlet.bias was replaced inside gathered"):
                with optimizer.gathered():
                    module.inlet.bias.data = torch.zeros(5)

        virtual(1, worker)

    def test_between_forward_and_backward_it_costs_no_wrong_number(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(2):
                loss = loss_of(module, step, comm.rank)
                with optimizer.gathered():
                    pass
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)


class TestOtherForwards(unittest.TestCase):
    def test_without_gradients_blocks_come_once_and_nothing_stays(self):
        def worker(comm, mode):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            before = comm.counters.calls["all_gather"]
            with mode():
                found = module(batch(0, comm.rank))
            plain = Tower()(batch(0, comm.rank))
            counted = comm.counters.calls["all_gather"] - before
            return torch.equal(found, plain), counted, whole(optimizer), step_of(module, optimizer, comm)

        for mode in (torch.no_grad, torch.inference_mode):
            self.assertEqual(virtual(2, worker, mode), [(True, 4, [], STEP)] * 2)

    def test_an_evaluation_between_forward_and_backward(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(2):
                loss = loss_of(module, step, comm.rank)
                with torch.no_grad():
                    loss_of(module, step + 5, comm.rank)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_two_forwards_then_one_backward_or_two_in_any_order(self):
        def worker(comm, stage, order):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            losses = [loss_of(module, step, comm.rank) for step in range(2)]
            optimizer.zero_grad()  # as many loops do: between forward and backward
            for loss in [sum(losses)] if order == "sum" else [losses[i] for i in order]:
                loss.backward()
            optimizer.step()
            return params_of(module, optimizer)

        for order in ("sum", (0, 1), (1, 0)):
            with self.subTest(order=order):
                base = 1 if order == "sum" else 2  # where each backward's mean is added, as in stage 3
                same_as_stage_1(self, partial(worker, order=order), base)

    def test_a_forward_without_backward_is_forgotten(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            loss_of(module, 7, comm.rank)
            optimizer.step()  # zero gradients, and Adam stands still
            calls = [step_of(module, optimizer, comm, step) for step in range(2)]
            if stage == 3:
                self.assertEqual(calls, [STEP] * 2)
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_zero_grad_between_forward_and_backward_costs_nothing(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            before = comm.counters.calls.copy()
            loss = loss_of(module, 0, comm.rank)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return dict(comm.counters.calls - before)

        self.assertEqual(virtual(2, worker), [STEP] * 2)

    def test_backward_through_one_graph_twice(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            loss = loss_of(module, 0, comm.rank)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
            return params_of(module, optimizer)

        one, three = (virtual(2, worker, stage)[0] for stage in (1, 3))
        for name in one:  # the norm is summed in another order
            torch.testing.assert_close(three[name], one[name], rtol=0, atol=1e-6)

    def test_a_second_derivative_is_refused(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            with self.assertRaisesRegex(RuntimeError, "no create_graph=True"):
                loss_of(module, 0, comm.rank).backward(create_graph=True)
            optimizer.zero_grad()
            return [step_of(module, optimizer, comm) for _ in range(2)][1]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about create_graph
            self.assertEqual(virtual(2, worker), [STEP] * 2)

    def test_a_backward_that_fails_and_going_on(self):
        """In forward or in backward, on all ranks: the next step is as if nothing had been."""

        def worker(comm, stage, where):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)

            def fail(*_):
                raise RuntimeError("no luck")

            place = module.parts[1].second
            hook = {"forward": place.register_forward_hook, "backward": place.register_full_backward_hook}[where](fail)
            with self.assertRaisesRegex(RuntimeError, "no luck"):
                loss_of(module, 3, comm.rank).backward()
            hook.remove()
            optimizer.zero_grad()
            calls = [step_of(module, optimizer, comm, step) for step in range(2)]
            if stage == 3:
                self.assertEqual(calls[1], STEP)
                self.assertEqual(whole(optimizer), [])
            return params_of(module, optimizer)

        for where in ("forward", "backward"):
            with self.subTest(where):
                same_as_stage_1(self, partial(worker, where=where))


class Checkpointed(Tower):
    """Blocks are computed again in backward: each alone, two together, or the inside of each."""

    how = "each"

    def forward(self, x):
        x = self.inlet(x)
        first, *others = self.parts
        if self.how == "together":
            x = checkpoint(lambda x: others[0](first(x)), x, use_reentrant=False)
            x = others[1](x)
        elif self.how == "each":
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
        return self.outlet(x) * self.scale


class TestCheckpointing(unittest.TestCase):
    def test_it_changes_neither_numbers_nor_the_count_of_gathers(self):
        def worker(comm, stage, how):
            module = Checkpointed()
            module.how = how
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(3):
                calls = step_of(module, optimizer, comm, step)
            if stage == 3:
                self.assertEqual(calls, STEP)
            return params_of(module, optimizer)

        def plain(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                step_of(module, optimizer, comm, step)
            return params_of(module, optimizer)

        expected = virtual(2, plain)[0]
        for how in ("each", "together"):
            found = same_as_stage_1(self, partial(worker, how=how))
            self.assertTrue(all(torch.equal(found[name], expected[name]) for name in expected))

    def test_the_whole_model_is_computed_again(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(2):
                x = batch(step, comm.rank).requires_grad_()
                checkpoint(module, x, use_reentrant=False).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)


class Wild(Tower):
    """Blocks in another order than they are listed in, one of them twice; they return lists, dicts and tuples."""

    def __init__(self, seed=0):
        super().__init__(seed)
        for part, wrap in zip(self.parts, (lambda y: [y, None], lambda y: {"y": (y, 3)}, lambda y: y), strict=True):
            part.register_forward_hook(lambda _m, _i, y, wrap=wrap: wrap(y))

    def forward(self, x):
        x = self.inlet(x)
        x = self.parts[2](x)
        x = self.parts[0](x)[0]
        x = self.parts[2](x)
        x, three = self.parts[1](x)["y"]
        return self.outlet(x) * self.scale * (three / 3)


class TestOtherModels(unittest.TestCase):
    def test_blocks_in_any_order_twice_and_with_any_outputs(self):
        def worker(comm, stage):
            module = Wild()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(3):
                step_of(module, optimizer, comm, step)
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_outputs_that_are_changed_in_place_and_a_model_that_returns_a_dict(self):
        class Changing(Tower):
            def forward(self, x):
                x = self.inlet(x)
                for part in self.parts:
                    x = part(x)
                    x += 0.5
                    x *= 1.5
                return {"y": [torch.nn.functional.dropout(self.outlet(x), 0.5) * self.scale], "n": 3}

        def worker(comm, stage):
            module = Changing()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(3):
                torch.manual_seed(step)
                module(batch(step, comm.rank))["y"][0].square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_a_block_with_two_outputs(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

            def forward(self, x):
                return self.a(x), torch.tanh(self.b(x))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.parts = nn.ModuleList([nn.Linear(3, 5), Two(), Two()])

            def forward(self, x):
                x = self.parts[0](x)
                one, two = self.parts[1](x)
                three, four = self.parts[2](one * two)
                return three + four + two

        def worker(comm, stage):
            with torch.random.fork_rng(devices=[]):
                module = Model()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(3):
                calls = step_of(module, optimizer, comm, step)
            if stage == 3:
                self.assertEqual(calls, {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 1})
            return params_of(module, optimizer)

        same_as_stage_1(self, worker)

    def test_an_output_that_cannot_be_looked_into_is_refused(self):
        class Thing:
            pass

        def worker(comm):
            module = Tower()
            module.parts[0].register_forward_hook(lambda *_: Thing())
            optimizer_for(module, comm, stage=3)
            module.forward = lambda x: module.parts[0](module.inlet(x))
            with self.assertRaisesRegex(TypeError, "a block returned Thing: return tensors"):
                module(batch(0, comm.rank))
            with torch.no_grad():  # there is no backward to miss
                self.assertIsInstance(module(batch(0, comm.rank)), Thing)

        virtual(1, worker)

    def test_a_frozen_first_block_is_not_gathered_for_a_backward_it_does_not_have(self):
        def worker(comm):
            module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4))
            optimizer = optimizer_for(module, comm, stage=3)
            module[0].requires_grad_(False)
            return step_of(module, optimizer, comm)

        expected = {"all_gather": 5, "reduce_scatter": 2, "all_reduce": 1}
        self.assertEqual(virtual(2, worker), [expected] * 2)


@mock.patch.object(Absence, "by_version", True)
class TestAsOnAGpu(TestGathered, TestOtherForwards, TestCheckpointing):
    """There a write is noticed by torch's count of changes, which the optimizer raises, too."""

    def test_a_state_that_was_loaded_is_no_write(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            step_of(module, optimizer, comm)
            optimizer.load_state_dict(optimizer.state_dict())
            loss_of(module, 1, comm.rank).backward()

        virtual(2, worker)

    def test_a_write_after_a_step_is_noticed(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            step_of(module, optimizer, comm)
            nn.init.zeros_(module.inlet.weight)
            with self.assertRaisesRegex(ValueError, "inlet.weight was written while it was not gathered"):
                loss_of(module, 1, comm.rank)

        virtual(2, worker)


if __name__ == "__main__":
    unittest.main()
