import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import json

import torch
from flat import gather_flat_params
from groups import decay_groups
from torch import nn
from zero_cases import Flat, Odd, copy_of, optimizer_for, put_gradients, refusals, same, snapshot, virtual


def normed():
    """A Linear and a LayerNorm, each a (5, 3) or (5,) tensor: 15 + 5 + 5 + 5 elements."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))


def two_rates(module):
    """Weights and the rest at rates, betas, eps and decays of their own."""
    matrices, rest = decay_groups(module, 0.1)
    return [matrices | {"lr": 3e-2}, rest | {"betas": (0.7, 0.9), "eps": 1e-5}]


class TestGroupsAreTorchs(unittest.TestCase):
    """torch.optim.AdamW with the same groups and gradients gives the same bits, for every N."""

    def test_each_element_has_its_groups_settings(self):
        def worker(comm, build):
            module = build()
            optimizer, params = optimizer_for(module, comm, groups=two_rates(module)), []
            for step in range(4):
                put_gradients(module, 0, step)
                for param in module.parameters():
                    param.grad *= comm.world_size if comm.rank == 0 else 0  # so that the mean of 2, 4, 8 is exact
                optimizer.step()
                params.append(gather_flat_params(module))
            return params

        for build in (normed, Odd):
            module, expected = build(), []
            theirs = torch.optim.AdamW(two_rates(module), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
            for step in range(4):
                put_gradients(module, 0, step)
                theirs.step()
                expected.append(gather_flat_params(module))
            for n in (1, 2, 4, 8):
                with self.subTest(build=build.__name__, n=n):
                    self.assertTrue(all(same(params, expected) for params in virtual(n, worker, build)))

    def test_only_matrices_decay_when_gradients_are_zero(self):
        def worker(comm):
            module = normed()
            optimizer = optimizer_for(module, comm, lr=0.5, groups=decay_groups(module, 0.1))
            optimizer.step()
            return [param.detach().clone() for param in module.parameters()]

        weight, bias, scale, shift = normed().parameters()
        for n in (1, 2, 3, 8):
            for found in virtual(n, worker):
                self.assertTrue(same(found, [weight.detach() * (1 - 0.5 * 0.1), bias, scale, shift]))

    def test_ranges_of_a_shard_follow_the_groups(self):
        def worker(comm):
            module = normed()
            optimizer = optimizer_for(module, comm, groups=decay_groups(module, 0.1))
            whole = optimizer.shards[0].ranges
            module[1].weight.requires_grad_(False)
            optimizer.step()
            return whole, optimizer.shards[0].ranges

        self.assertEqual(virtual(1, worker), [([(0, 15, 0), (15, 30, 1)], [(0, 15, 0), (15, 20, 1), (25, 30, 1)])])
        self.assertEqual(
            [whole for whole, _ in virtual(3, worker)], [[(0, 10, 0)], [(0, 5, 0), (5, 10, 1)], [(0, 10, 1)]]
        )


class TestSchedules(unittest.TestCase):
    def test_torchs_schedulers_drive_each_group(self):
        schedulers = torch.optim.lr_scheduler

        def make(name, optimizer):
            if name == "lambdas":
                return schedulers.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5**step])
            if name == "cosine":
                return schedulers.CosineAnnealingLR(optimizer, T_max=5)
            warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
            return schedulers.SequentialLR(optimizer, [warmup, schedulers.ExponentialLR(optimizer, 0.5)], [2])

        def train(module, optimizer, name):
            scheduler, log = make(name, optimizer), []
            for step in range(5):
                put_gradients(module, 0, step)
                optimizer.step()
                scheduler.step()
                log.append(([group["lr"] for group in optimizer.param_groups], gather_flat_params(module)))
            return log

        def worker(comm, name):
            module = normed()
            return train(module, optimizer_for(module, comm, groups=two_rates(module)), name)

        for name in ("lambdas", "cosine", "sequence"):
            module = normed()
            theirs = torch.optim.AdamW(two_rates(module), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
            expected = train(module, theirs, name)
            for log in virtual(2, worker, name):
                with self.subTest(name):
                    self.assertEqual([rates for rates, _ in log], [rates for rates, _ in expected])
                    self.assertTrue(same([params for _, params in log], [params for _, params in expected]))

    def test_an_empty_group_stays_and_has_its_rate(self):
        def worker(comm):
            module = Flat(torch.ones(4))  # nothing of two dimensions
            optimizer = optimizer_for(module, comm, groups=decay_groups(module, 0.1))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 2.0, lambda step: 3.0])
            put_gradients(module, 0, 0)
            optimizer.step()
            scheduler.step()
            state = copy_of(optimizer.state_dict())
            optimizer.load_state_dict(state)
            return [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups], len(
                state["groups"]
            )

        self.assertEqual(virtual(3, worker), [([(0, 2e-2, 0.1), (1, 3e-2, 0.0)], 2)] * 3)

    def test_a_rate_that_a_schedule_made_bad_is_refused(self):
        def worker(comm):
            optimizer = optimizer_for(Odd(), comm)
            optimizer.param_groups[0]["lr"] = float("nan")
            optimizer.step()

        self.assertEqual(refusals(2, worker), ["lr must be a number of at least 0, got nan"] * 2)


class TestGiven(unittest.TestCase):
    def test_what_is_in_no_group_is_the_last_one(self):
        def worker(comm):
            module = Odd()
            groups = [{"params": module.scale, "lr": 0.5}, {"params": iter([module.first.bias])}]
            groups = optimizer_for(module, comm, weight_decay=0.25, groups=groups).param_groups
            rest = [
                param is other
                for param, other in zip(groups[2]["params"], (module.first.weight, module.left.weight), strict=True)
            ]
            return [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups], rest

        expected = [(1, 0.5, 0.25), (1, 1e-2, 0.25), (2, 1e-2, 0.25)]
        self.assertEqual(virtual(2, worker), [(expected, [True, True])] * 2)

    def test_frozen_parameters_may_be_named(self):
        def worker(comm):
            module = Odd()
            module.first.requires_grad_(False)
            optimizer = optimizer_for(module, comm, groups=[{"params": list(module.parameters())}])
            return [len(group["params"]) for group in optimizer.param_groups]

        self.assertEqual(virtual(2, worker), [[2], [2]])

    def test_refused(self):
        def worker(comm, make):
            module = Odd()
            before = [param.data_ptr() for param in module.parameters()]
            try:
                optimizer_for(module, comm, groups=make(module))
            finally:
                self.assertEqual(before, [param.data_ptr() for param in module.parameters()])

        for expected, make in (  # which group, which item of it, and the group in which it was before
            (r"(?=.*\b1\b.*\b1\b)(?=.*\b0\b)", lambda m: [{"params": [m.scale]}, {"params": [m.first.bias, m.scale]}]),
            (r"(?=.*\b0\b.*\b0\b)(?=.*\b1\b)", lambda m: [{"params": [m.scale, m.scale]}]),
            (r"\b0\b.*\b0\b", lambda m: [{"params": [nn.Parameter(torch.ones(()))]}]),
            (r"\b0\b.*\b0\b", lambda m: [{"params": ["scale"]}]),
            (r"\b0\b", lambda m: [[m.scale]]),
            (r"(?=.*\b0\b)(?=.*\bdecay\b)", lambda m: [{"params": [m.scale], "decay": 0.1}]),
            ("lr must be a number of at least 0, got -1", lambda m: [{"params": [m.scale], "lr": -1}]),
            ("betas must be two numbers", lambda m: [{"params": [], "betas": 0.9}]),
        ):
            for message in refusals(2, worker, make):
                self.assertRegex(message or "accepted", expected)

    def test_ranks_that_differ(self):
        def worker(comm, what):
            module = Odd()
            settings = {"lr": 0.5 if what == "lr" and comm.rank else 0.1}
            params = [module.scale, *([module.first.bias] if what == "members" and comm.rank else [])]
            optimizer_for(module, comm, groups=[{"params": params, **settings}])

        for what in ("lr", "members"):
            messages = refusals(2, worker, what)
            self.assertEqual(messages[0], messages[1])
            self.assertIn("ranks disagree on the optimizer: groups", messages[0])


class TestStateOfGroups(unittest.TestCase):
    def test_it_comes_back_and_another_grouping_is_refused(self):
        def worker(comm):
            module = normed()
            optimizer = optimizer_for(module, comm, groups=two_rates(module))
            put_gradients(module, comm.rank, 0)
            optimizer.step()
            optimizer.param_groups[1]["lr"] = 0.25
            saved = copy_of(optimizer.state_dict())
            other = normed()
            resumed = optimizer_for(other, comm, groups=decay_groups(other, 0.7))
            resumed.load_state_dict(saved)
            for each, its in ((module, optimizer), (other, resumed)):
                put_gradients(each, comm.rank, 1)
                its.step()
            settings = [{k: v for k, v in g.items() if k != "params"} for g in resumed.param_groups]
            again = same(snapshot(module, optimizer), snapshot(other, resumed))
            third = normed()
            with self.assertRaisesRegex(ValueError, "rank 0: groups must be of .*rank 1: groups must be of"):
                optimizer_for(third, comm).load_state_dict(saved)
            return again, settings, json.loads(json.dumps(saved["groups"])) == saved["groups"]

        expected = [
            {"lr": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
            {"lr": 0.25, "betas": (0.7, 0.9), "eps": 1e-5, "weight_decay": 0.0},
        ]
        self.assertEqual(virtual(2, worker), [(True, expected, True)] * 2)


if __name__ == "__main__":
    unittest.main()
