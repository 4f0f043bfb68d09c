import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from flat import gather_flat_params
from torch import nn
from zero_cases import (
    Flat,
    Odd,
    TorchAdam,
    copy_of,
    known_gradient,
    optimizer_for,
    put_gradients,
    refusals,
    same,
    snapshot,
    virtual,
)

BF16 = torch.bfloat16


def train(module, optimizer, steps):
    """Take the steps of these numbers; returns the parameters after each."""
    params = []
    for step in steps:
        put_gradients(module, optimizer.comm.rank, step)
        optimizer.step()
        params.append(gather_flat_params(module))
    return params


class TestMasters(unittest.TestCase):
    def test_small_steps_on_bf16_accumulate_in_the_master(self):
        """Near 1.0 bf16 steps by 1/128: a step of 1e-3 alone would be rounded away, ten are not."""

        def worker(comm):
            module = Flat(torch.ones(3, dtype=BF16))
            optimizer, seen = optimizer_for(module, comm, lr=1e-3), []
            for _ in range(10):
                module.vector.grad = torch.ones(3, dtype=BF16)
                optimizer.step()
                seen.append(module.vector[0].item())
            return seen, optimizer.shards[0].master.clone(), module.vector.dtype

        self.assertEqual(torch.ones(1, dtype=BF16).sub(1e-3).item(), 1.0)
        for seen, master, dtype in virtual(2, worker):
            self.assertEqual((dtype, master.dtype), (BF16, torch.float32))
            self.assertEqual(seen[0], 1.0)
            self.assertAlmostEqual(master[0].item(), 0.99, places=5)
            self.assertEqual(seen[-1], torch.tensor(0.99).to(BF16).item())

    def test_the_masters_are_torchs_adam_in_fp32(self):
        def worker(comm):
            module = Flat(torch.linspace(-1, 1, 11, dtype=BF16))
            optimizer = optimizer_for(module, comm)
            for step in range(4):
                put_gradients(module, 0, step)  # equal on all ranks, so that their mean is exact
                optimizer.step()
            return optimizer.shards[0].master.clone(), gather_flat_params(module)

        theirs = TorchAdam(torch.linspace(-1, 1, 11, dtype=BF16).float())
        for step in range(4):
            expected = theirs.step(known_gradient(11, 0, step).to(BF16).float())
        for n in (1, 2, 4):
            results = virtual(n, worker)
            self.assertTrue(torch.equal(torch.cat([master for master, _ in results])[:11], expected))
            self.assertTrue(all(torch.equal(params, expected.to(BF16)) for _, params in results))

    def test_fused_adam_trains_masters_as_the_plain_one_does(self):
        """One step from the same state, with bf16 gradients: ten roundings of a step, four of a parameter."""

        def worker(comm, fused):
            module = Flat(torch.linspace(-1, 1, 200, dtype=BF16))
            optimizer = optimizer_for(module, comm, weight_decay=0.1, fused=fused)
            put_gradients(module, 0, 0)
            optimizer.step()
            return optimizer.shards[0].master.clone(), gather_flat_params(module)

        eps = torch.finfo(torch.float32).eps
        for n in (1, 2, 3):
            plain, fused = virtual(n, worker, False), virtual(n, worker, True)
            self.assertTrue(all(torch.equal(params, fused[0][1]) for _, params in fused))
            one, other = (torch.cat([master for master, _ in ranks])[:200] for ranks in (plain, fused))
            self.assertTrue(((one - other).abs() <= 4 * eps * one.abs() + 16 * eps * 1e-2).all())
            self.assertTrue(torch.equal(fused[0][1], other.to(BF16)))

    def test_resuming_bf16_does_not_lose_the_masters_bits(self):
        """Whichever is loaded first: weights in bf16 must not overwrite masters that are the same, finer."""

        def worker(comm, order):
            def fresh():
                module = Flat(torch.ones(5, dtype=BF16))
                return module, optimizer_for(module, comm, lr=1e-3)

            module, optimizer = fresh()
            train(module, optimizer, range(5))
            saved = copy_of(optimizer.state_dict()), {k: v.clone() for k, v in module.state_dict().items()}
            train(module, optimizer, range(5, 10))
            again, resumed = fresh()
            for what in order:
                if what == "weights":
                    again.load_state_dict(saved[1])
                elif what == "state":
                    resumed.load_state_dict(saved[0])
            train(again, resumed, range(5, 10))
            return same(snapshot(module, optimizer), snapshot(again, resumed))

        for order in (("state",), ("weights", "state"), ("state", "weights"), ("weights", "state", "weights")):
            with self.subTest(order=order):
                self.assertEqual(virtual(2, worker, order), [True, True])

    def test_what_is_written_into_parameters_reaches_the_masters(self):
        def load(module):
            module.load_state_dict({"0.weight": torch.full((2, 3), 0.25), "0.bias": torch.full((2,), 0.25)})

        def load_a_part(module):
            module[0].load_state_dict({"weight": torch.full((2, 3), 0.25), "bias": torch.full((2,), 0.25)})

        def write(module):
            for param in module.parameters():
                nn.init.constant_(param, 0.25)

        def worker(comm, change, dtype):
            module = nn.Sequential(nn.Linear(3, 2)).to(dtype)
            optimizer = optimizer_for(module, comm, lr=0.0)
            train(module, optimizer, range(2))
            change(module)
            (params,) = train(module, optimizer, [2])  # no step may bring the old values back
            module.load_state_dict({name: value / 2 for name, value in module.state_dict().items()})
            return optimizer.state_dict()["state"]["unit0"]["master"].tolist(), params

        for change in (load, load_a_part, write):
            for dtype in (torch.float32, BF16):
                with self.subTest(change=change.__name__, dtype=dtype):
                    for masters, params in virtual(3, worker, change, dtype):
                        self.assertEqual(set(masters), {0.125})
                        self.assertEqual(params.tolist(), [0.25] * 8)

    def test_padding_stays_zero(self):
        def worker(comm):
            module = Flat(torch.ones(5))
            optimizer = optimizer_for(module, comm, weight_decay=0.1)
            train(module, optimizer, range(3))
            optimizer.load_state_dict(copy_of(optimizer.state_dict()))
            train(module, optimizer, range(3, 6))
            tensors = [optimizer.units[0].data[5:], optimizer.units[0].grad[5:]]
            beyond = max(0, 5 - optimizer.shards[0].start)
            tensors += [tensor[beyond:] for tensor in optimizer.shards[0].tensors().values()]
            return [bool(tensor.any()) for tensor in tensors]

        self.assertEqual(virtual(4, worker), [[False] * 5] * 4)


class TestRoundTrip(unittest.TestCase):
    def test_the_state_is_torchs_by_name(self):
        def worker(comm):
            module = Flat(torch.ones(7))
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                put_gradients(module, 0, step)
                optimizer.step()
            return copy_of(optimizer.state_dict())["state"]["unit0"]

        theirs = TorchAdam(torch.ones(7))
        for step in range(3):
            theirs.step(known_gradient(7, 0, step))
        states = virtual(2, worker)
        for name, expected in (
            ("master", theirs.param),
            ("exp_avg", theirs.exp_avg),
            ("exp_avg_sq", theirs.exp_avg_sq),
        ):
            self.assertTrue(torch.equal(torch.cat([state[name] for state in states]), expected), name)

    def test_a_restored_optimizer_continues_bit_for_bit(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, weight_decay=0.1)
            train(module, optimizer, range(3))
            saved, at_save = copy_of(optimizer.state_dict()), gather_flat_params(module)
            expected = train(module, optimizer, range(3, 6))
            other = Odd(seed=5)
            resumed = optimizer_for(other, comm, lr=0.5)  # another model, another rate: the state brings its own
            resumed.load_state_dict(saved)
            followed = torch.equal(gather_flat_params(other), at_save)
            resumed_params = train(other, resumed, range(3, 6))
            return followed, same(expected, resumed_params), same(snapshot(module, optimizer), snapshot(other, resumed))

        for n in (1, 2, 3, 8):
            self.assertEqual(virtual(n, worker), [(True, True, True)] * n)

    def test_every_part_but_the_tensors_is_json(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            train(module, optimizer, range(2))
            put_gradients(module, comm.rank, 2)
            module.scale.grad.fill_(float("inf"))
            optimizer.step()
            return copy_of(optimizer.state_dict())

        for rank, state in enumerate(virtual(3, worker)):
            start, end = 16 * rank, min(16 * rank + 16, 46)
            self.assertEqual(state["layout"], [{"unit": "unit0", "start": start, "end": end, "total": 46}])
            self.assertEqual(state["names"], [["scale", "first.weight", "first.bias", "left.weight"]])
            settings = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
            self.assertEqual(state["groups"], [settings | {"params": state["names"][0]}])
            self.assertEqual((state["steps"], state["skipped_steps"]), (2, 1))
            kinds = {name: (t.dtype, t.numel()) for name, t in state["state"]["unit0"].items()}
            held = (torch.float32, end - start)  # without padding
            self.assertEqual(kinds, {"master": held, "exp_avg": held, "exp_avg_sq": held})

    def test_moments_keep_their_dtype(self):
        def worker(comm):
            module = Flat(torch.ones(4, dtype=BF16))
            optimizer = optimizer_for(module, comm)
            train(module, optimizer, range(2))
            before = snapshot(module, optimizer)
            optimizer.load_state_dict(copy_of(optimizer.state_dict()))
            return same(before, snapshot(module, optimizer)), {t.dtype for t in optimizer.shards[0].tensors().values()}

        self.assertEqual(virtual(2, worker), [(True, {torch.float32})] * 2)

    def test_state_of_a_frozen_parameter_survives(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            train(module, optimizer, range(3))
            module.left.weight.requires_grad_(False)
            train(module, optimizer, range(3, 4))
            saved = copy_of(optimizer.state_dict())
            other = Odd(seed=3)
            resumed = optimizer_for(other, comm)
            resumed.load_state_dict(saved)
            frozen = torch.equal(other.left.weight, module.left.weight)
            module.left.weight.requires_grad_(True)
            return frozen, same(train(module, optimizer, range(4, 6)), train(other, resumed, range(4, 6)))

        self.assertEqual(virtual(3, worker), [(True, True)] * 3)

    def test_a_schedulers_own_entries_come_back(self):
        def worker(comm):
            module = Flat(torch.ones(3))
            optimizer = optimizer_for(module, comm)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for step in range(3):
                train(module, optimizer, [step])
                scheduler.step()
            saved = copy_of(optimizer.state_dict())
            resumed = optimizer_for(Flat(torch.ones(3)), comm)
            resumed.load_state_dict(saved)
            group = resumed.param_groups[0]
            again = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 1 / (1 + step), last_epoch=2)
            return group["lr"] == scheduler.get_last_lr()[0], again.get_last_lr()[0] == 1e-2 / 4, type(group["betas"])

        self.assertEqual(virtual(2, worker), [(True, True, tuple)] * 2)


class TestRefusedStates(unittest.TestCase):
    """A state that does not fit is refused by every rank, also if it is only one rank's, and nothing has changed."""

    def refuse(self, damage, ranks=2, only=None, build=Odd):
        def worker(comm):
            module = build()
            optimizer = optimizer_for(module, comm)
            train(module, optimizer, range(2))
            state = copy_of(optimizer.state_dict())
            train(module, optimizer, range(2, 3))
            before, group = snapshot(module, optimizer), dict(optimizer.param_groups[0])
            if only is None or comm.rank == only:
                state = damage(state) or state
            try:
                optimizer.load_state_dict(state)
            except ValueError as error:
                kept = same(before, snapshot(module, optimizer)) and group == optimizer.param_groups[0]
                return str(error), kept and optimizer.skipped_steps == 0
            self.fail("accepted")

        results = virtual(ranks, worker)
        self.assertEqual(len({message for message, _ in results}), 1, results)
        self.assertTrue(all(kept for _, kept in results))
        return results[0][0]

    def test_what_does_not_fit(self):
        def cast(state):
            state["state"]["unit0"]["exp_avg"] = state["state"]["unit0"]["exp_avg"].to(BF16)

        def cut(state):
            state["state"]["unit0"]["master"] = state["state"]["unit0"]["master"][:-1]

        def rename(state):
            state["names"][0][1] = "second.weight"

        def drop(state):
            del state["state"]["unit0"]["exp_avg_sq"]

        def shift(state):
            state["layout"][0]["start"] += 1

        damages = {
            "exp_avg.*torch.bfloat16": cast,
            r"'master': \('torch.float32', \(22,\)\)": cut,
            "the state has parameter second.weight where this model has first.weight": rename,
            "layout must be": shift,
            "KeyError: 'names'": lambda state: state.pop("names") and None,
            "KeyError: 'groups'": lambda state: state.pop("groups") and None,
            "groups must be of": lambda state: state["groups"][0]["params"].pop() and None,
            "state must be": lambda state: state["state"].clear(),
            "exp_avg_sq": drop,
            "AttributeError": lambda state: state["state"]["unit0"].update(master=[1.0]),
            "steps must be a whole number": lambda state: state.update(steps=-1),
            "skipped_steps must be a whole number": lambda state: state.update(skipped_steps=2.0),
            "lr must be a number": lambda state: state["groups"][0].update(lr=-1.0),
            "betas must be two numbers": lambda state: state["groups"][0].update(betas=None),
            "KeyError: 'eps'": lambda state: state["groups"][0].pop("eps") and None,
            "TypeError": lambda state: [state],
        }
        for pattern, damage in damages.items():
            for only in (None, 1):
                with self.subTest(pattern=pattern, only=only):
                    message = self.refuse(damage, only=only)
                    self.assertRegex(message, pattern)
                    self.assertEqual(message.startswith("rank 1: "), only == 1)

    def test_another_ranks_shard_and_another_world_size(self):
        def worker(comm, states):
            optimizer_for(Odd(), comm).load_state_dict(states[comm.rank])

        states = virtual(2, lambda comm: copy_of(optimizer_for(Odd(), comm).state_dict()))
        for message in refusals(2, worker, states[::-1]):
            self.assertIn("rank 0: layout must be", message)
        for message in refusals(3, worker, [*states, states[0]]):
            self.assertRegex(message, "rank 0: layout must be .*rank 1: layout must be .*rank 2: layout must be")

    def test_ranks_that_bring_different_counts_or_settings(self):
        for key, damage in {
            "steps": lambda state: state.update(steps=7),
            "groups": lambda state: state["groups"][0].update(lr=0.5),
        }.items():
            message = self.refuse(damage, only=1)
            self.assertRegex(message, f"ranks disagree on the optimizer's state: {key}: rank 0 has .*; rank 1 has")

    def test_a_model_of_the_same_size_with_other_parameters(self):
        def damage(state):
            return virtual(1, lambda comm: copy_of(optimizer_for(nn.Linear(3, 11, bias=True), comm).state_dict()))[0]

        self.assertRegex(
            self.refuse(damage, ranks=1, build=lambda: Flat(torch.ones(44))),
            "the state has parameter weight where this model has vector",
        )


if __name__ == "__main__":
    unittest.main()
