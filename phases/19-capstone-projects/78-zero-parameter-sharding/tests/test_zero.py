import copy
import pickle
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from unittest import mock

import routes
import torch
from comm import TorchComm
from flat import gather_flat_grads, gather_flat_params
from groups import decay_groups
from memory import shard_bounds
from ranks import RankError, run_ranks
from toy import MiniMLP, global_batch, rank_slice
from torch import nn
from zero import ZeroOptimizer
from zero_cases import (
    LR,
    Flat,
    Odd,
    TorchAdam,
    known_gradient,
    mean_and_bound,
    optimizer_for,
    put_gradients,
    refusals,
    same,
    snapshot,
    virtual,
)

STEPS = 5
DECAY = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def train_odd(comm, settings):
    """Be one rank, from a seed of its own: returns what it had after each step and what it sent."""
    module = Odd(seed=comm.rank)
    optimizer = optimizer_for(module, comm, **settings)
    log = {"params": [gather_flat_params(module)], "own": [], "mean": [], "costs": []}
    for step in range(STEPS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        module(x).square().sum().backward()
        log["own"].append(gather_flat_grads(module))
        before = comm.counters.calls.copy(), comm.counters.bytes.copy(), comm.counters.control_calls
        optimizer.reduce_gradients()
        log["mean"].append(optimizer.shards[0].grad.clone())
        optimizer.step()
        calls, sent = comm.counters.calls - before[0], comm.counters.bytes - before[1]
        log["costs"].append((dict(calls), dict(sent), comm.counters.control_calls - before[2]))
        optimizer.zero_grad()
        log["params"].append(gather_flat_params(module))
    tied = module.left.weight is module.right.weight
    return log | {"tied": tied, "memory": optimizer.memory(), "shard_bytes": optimizer.shard_bytes()}


def mean_gradient(logs, step):
    """Put the shards of a step's mean gradient together, without their padding."""
    return torch.cat([log["mean"][step] for log in logs])[: logs[0]["params"][0].numel()]


class TestTraining(unittest.TestCase):
    """Every step of N = 1 to 8 virtual ranks, of a model whose 46 parameters most N do not divide."""

    @classmethod
    def setUpClass(cls):
        cls.settings = {"adam": {}, "adamw": DECAY}
        cls.runs = {
            (n, name): virtual(n, train_odd, settings) for n in range(1, 9) for name, settings in cls.settings.items()
        }

    def test_ranks_begin_as_rank_0_and_hold_the_same_bits_after_every_step(self):
        for case, logs in self.runs.items():
            with self.subTest(case=case):
                self.assertTrue(torch.equal(logs[0]["params"][0], gather_flat_params(Odd(seed=0))))
                self.assertTrue(all(same(log["params"], logs[0]["params"]) for log in logs))

    def test_the_gradient_is_the_mean_not_the_sum(self):
        for case, logs in self.runs.items():
            for step in range(STEPS):
                mean, bound = mean_and_bound([log["own"][step] for log in logs])
                with self.subTest(case=case, step=step):
                    self.assertTrue(((mean_gradient(logs, step).double() - mean).abs() <= bound).all())

    def test_adam_on_shards_is_torchs_on_the_whole_bit_for_bit(self):
        for (n, name), logs in self.runs.items():
            theirs = TorchAdam(logs[0]["params"][0], **self.settings[name])
            for step in range(STEPS):
                with self.subTest(n=n, name=name, step=step):
                    params = theirs.step(mean_gradient(logs, step))
                    self.assertTrue(torch.equal(params, logs[0]["params"][step + 1]))
                    self.assertFalse(torch.equal(params, logs[0]["params"][step]))

    def test_a_step_is_one_reduce_scatter_one_flag_and_one_all_gather(self):
        for (n, name), logs in self.runs.items():
            padded = 4 * n * shard_bounds(46, n, 0)[2]
            calls = {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
            sent = {"reduce_scatter": padded, "all_reduce": 4 * (n + 1), "all_gather": padded}
            with self.subTest(n=n, name=name):
                self.assertTrue(all(cost == (calls, sent, 0) for log in logs for cost in log["costs"]))

    def test_state_is_12_bytes_an_element_of_the_shard_and_nothing_is_held_twice(self):
        for (n, name), logs in self.runs.items():
            chunk = shard_bounds(46, n, 0)[2]
            held = {
                "parameters": (4 * n * chunk,) * 2,
                "gradients": (4 * n * chunk,) * 2,
                "optimizer": (8 * chunk,) * 2,  # fp32 parameters are their own master
            }
            with self.subTest(n=n, name=name):
                self.assertTrue(all(log["shard_bytes"] == 12 * chunk for log in logs))
                self.assertTrue(all(log["memory"] == held for log in logs))

    def test_tied_parameters_stay_tied_and_are_trained_once(self):
        self.assertTrue(all(log["tied"] for logs in self.runs.values() for log in logs))
        self.assertEqual(self.runs[1, "adam"][0]["params"][-1].numel(), 15 + 5 + 25 + 1)


def train_mlp(comm, steps):
    """Be one rank on its rows of a global batch; returns the parameters after each step."""
    module, params = MiniMLP(), []
    optimizer = optimizer_for(module, comm)
    for step in range(steps):
        x, y = (rank_slice(t, comm.rank, comm.world_size) for t in global_batch(step, 48))
        (nn.functional.mse_loss(module(x), y) * x.shape[0] * comm.world_size / 48).backward()  # N may not divide 48
        optimizer.step()
        optimizer.zero_grad()
        params.append(gather_flat_params(module))
    return params


class TestAgainstOneProcess(unittest.TestCase):
    def test_ten_steps_stay_within_2e_6_of_one_process_with_torchs_adam(self):
        module, reference = MiniMLP(), []
        optimizer = torch.optim.Adam(module.parameters(), LR)
        for step in range(10):
            x, y = global_batch(step, 48)
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
            reference.append(gather_flat_params(module))
        for n in (1, 2, 3, 4, 6, 8):
            for step, params in enumerate(virtual(n, train_mlp, 10)[0]):
                with self.subTest(n=n, step=step):
                    self.assertLessEqual((params - reference[step]).abs().max().item(), 2e-6)


def over_gloo(rank, world_size):
    """Train both settings over gloo, and see one rank's NaN stop all of them for a step."""
    comm = TorchComm()
    logs = {name: train_odd(comm, settings) for name, settings in (("adam", {}), ("adamw", DECAY))}
    module = Odd()
    optimizer = optimizer_for(module, comm)
    before = snapshot(module, optimizer)
    put_gradients(module, rank, 0)
    if rank == world_size - 1:
        module.scale.grad.fill_(float("nan"))
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return logs | {
        "skipped": (norm.isnan().item(), optimizer.skipped_steps, same(before, snapshot(module, optimizer))),
        "refused": wrong_world_size(rank, world_size, comm),
    }


def beside_ddp(rank, world_size):
    """Train `Odd`, tied and partly frozen, with torch's DDP and AdamW, and with ours, on the same rows."""
    runs = []
    for theirs in (True, False):
        module, params = Odd(seed=0), []
        module.first.weight.requires_grad_(False)
        groups = decay_groups(module, 0.1)
        if theirs:
            call = nn.parallel.DistributedDataParallel(module)
            optimizer = torch.optim.AdamW(groups, lr=LR)
        else:
            call, optimizer = module, optimizer_for(module, TorchComm(), groups=groups)
        for step in range(STEPS):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            params.append(gather_flat_params(module))
        runs.append(params)
    return runs


class TestBesideTorch(unittest.TestCase):
    def test_ddp_and_adamw_with_tied_and_frozen_parameters(self):
        for n in (2, 3):
            results = run_ranks(beside_ddp, n, timeout=60)
            for theirs, ours in results:
                self.assertTrue(same(ours, results[0][1]))
                gap = max((a - b).abs().max().item() for a, b in zip(theirs, ours, strict=True))
                self.assertLessEqual(gap, 2e-6)
                if n == 2:  # the sum of two has one order only
                    self.assertTrue(same(theirs, ours))
                self.assertFalse(torch.equal(ours[0], ours[1]))


def as_large(rank, world_size, size):
    """Train over gloo with units that count as large; then rank 1 has a NaN."""
    with mock.patch.object(routes, "LARGE", size):
        module, comm = Odd(), TorchComm()
        log = train_odd(comm, {})
        optimizer = optimizer_for(module, comm)
        optimizer.counter.restore(STEPS, 0)
        put_gradients(module, rank, 0)
        if rank == 1:
            module.scale.grad.fill_(float("nan"))
        optimizer.step()
        return log | {"skipped": optimizer.last_skip}


def wrong_world_size(rank, world_size, comm):
    """Return what a wrong world size is told."""
    try:
        ZeroOptimizer(Odd(), world_size + 1, rank, LR, comm=comm)
    except ValueError as error:
        return str(error)


class TestWhatTorchWouldRefuse(unittest.TestCase):
    def test_a_graph_from_before_a_step(self):
        def worker(comm, stage):
            module = Odd()
            optimizer = optimizer_for(module, comm, stage=stage)
            old = module(torch.ones(2, 3)).sum()
            module(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            try:
                old.backward()
            except RuntimeError as error:
                return str(error)

        for stage in (1, 2):
            for words in virtual(2, worker, stage):
                self.assertIn("modified by an inplace operation", words)

    def test_copies(self):
        def worker(comm):
            optimizer = optimizer_for(Odd(), comm)
            words = []
            for how in (copy.copy, copy.deepcopy, pickle.dumps):
                try:
                    how(optimizer)
                except TypeError as error:
                    words.append(str(error))
            return len(words), all("state_dict()" in each for each in words)

        self.assertEqual(virtual(1, worker), [(3, True)])


class TestOverGloo(unittest.TestCase):
    """The same over processes: 3 ranks, which do not divide 46 parameters."""

    @classmethod
    def setUpClass(cls):
        cls.logs = run_ranks(over_gloo, 3, timeout=60)

    def test_large_units_go_with_an_all_reduce_and_broadcasts(self):
        """46 elements are a large unit, if 48 bytes are: an all-reduce of gradients, one of the flag."""
        logs = run_ranks(as_large, 3, 48, timeout=60)
        theirs = TorchAdam(logs[0]["params"][0])
        for step in range(STEPS):
            mean, bound = mean_and_bound([log["own"][step] for log in logs])
            ours = mean_gradient(logs, step)
            self.assertTrue(((ours.double() - mean).abs() <= bound).all())
            self.assertTrue(torch.equal(theirs.step(ours), logs[0]["params"][step + 1]))
        for log in logs:
            self.assertTrue(same(log["params"], logs[0]["params"]))
            calls, sent = {"all_reduce": 2, "broadcast": 3}, {"all_reduce": 4 * 46 + 4 * 4, "broadcast": 4 * 46}
            self.assertEqual(log["costs"], [(calls, sent, 0)] * STEPS)
            self.assertEqual(log["skipped"], "step 6: the gradient of rank 1 is not finite")

    def test_bits_mean_adam_and_costs(self):
        for name, settings in (("adam", {}), ("adamw", DECAY)):
            logs = [log[name] for log in self.logs]
            theirs = TorchAdam(logs[0]["params"][0], **settings)
            for step in range(STEPS):
                mean, bound = mean_and_bound([log["own"][step] for log in logs])
                ours = mean_gradient(logs, step)
                self.assertTrue(((ours.double() - mean).abs() <= bound).all())
                self.assertTrue(torch.equal(theirs.step(ours), logs[0]["params"][step + 1]))
            self.assertTrue(all(same(log["params"], logs[0]["params"]) for log in logs))
            cost = {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
            self.assertTrue(all(calls == cost and not control for log in logs for calls, _, control in log["costs"]))
            self.assertTrue(all(log["memory"]["optimizer"] == (8 * 16, 8 * 16) for log in logs))

    def test_one_ranks_nan_stops_every_rank(self):
        self.assertEqual([log["skipped"] for log in self.logs], [(True, 1, True)] * 3)

    def test_a_wrong_world_size_is_refused(self):
        for rank, log in enumerate(self.logs):
            self.assertEqual(log["refused"], f"rank {rank} of 4 ranks, but in the group it is {rank} of 3")

    def test_a_rank_that_stays_away_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(leave_early, 2, timeout=60, collective_timeout=20)
        self.assertEqual(caught.exception.rank, 1)


def leave_early(rank, world_size):
    """Rank 1 fails between two steps."""
    module = Odd()
    optimizer = optimizer_for(module, TorchComm())
    put_gradients(module, rank, 0)
    optimizer.step()
    if rank == 1:
        raise RuntimeError("no more data")
    put_gradients(module, rank, 1)
    optimizer.step()


class Mixed(nn.Module):
    """Parameters of three dtypes: 7 of float32, 4 of bfloat16, 3 of float64."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(5.0))
        self.b = nn.Parameter(torch.arange(4.0).bfloat16())
        self.c = nn.Parameter(torch.arange(2.0))
        self.d = nn.Parameter(torch.arange(3.0).double())


def train_mixed(comm):
    module = Mixed()
    optimizer = optimizer_for(module, comm)
    before = comm.counters.calls.copy()
    put_gradients(module, comm.rank, 0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    calls = comm.counters.calls - before
    return [p.detach().clone() for p in module.parameters()], calls, optimizer.memory(), optimizer.shard_bytes()


class TestDtypes(unittest.TestCase):
    def test_a_unit_a_dtype_and_bytes_are_the_sum_over_units(self):
        for n in (1, 2, 3, 8):
            chunks = {size: shard_bounds(numel, n, 0)[2] for size, numel in ((4, 7), (2, 4), (8, 3))}
            stored = sum(size * n * chunk for size, chunk in chunks.items())
            state = 12 * chunks[4] + 12 * chunks[2] + 24 * chunks[8]  # float64 keeps its state in float64
            beside = state - 4 * chunks[4] - 8 * chunks[8]  # their parameters are their masters
            for params, calls, held, shard_bytes in virtual(n, train_mixed):
                with self.subTest(n=n):
                    self.assertEqual([p.dtype for p in params], [p.dtype for p in Mixed().parameters()])
                    self.assertEqual((calls["reduce_scatter"], calls["all_gather"]), (3, 3))
                    self.assertEqual(calls["all_reduce"], 1)  # the norm, however many units
                    self.assertEqual(held["parameters"], (stored, stored))
                    self.assertEqual(held["gradients"], (stored, stored))
                    self.assertEqual(held["optimizer"], (beside, beside))
                    self.assertEqual(shard_bytes, state)

    def test_every_dtype_is_trained_as_torch_trains_it(self):
        def worker(comm):
            module = Mixed()
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                put_gradients(module, 0, step)  # equal on both ranks, so that their mean is exact
                optimizer.step()
            return [param.detach().clone() for param in module.parameters()]

        results = virtual(2, worker)
        for index, param in enumerate(Mixed().parameters()):
            wide = torch.promote_types(param.dtype, torch.float32)
            theirs = TorchAdam(param.detach().to(wide))
            for step in range(3):
                grads = known_gradient(14, 0, step).split([5, 4, 2, 3])
                expected = theirs.step(grads[index].to(param.dtype).to(wide)).to(param.dtype)
            self.assertTrue(all(torch.equal(result[index], expected) for result in results), param.dtype)

    def test_float64_parameters_are_not_rounded_to_float32(self):
        values = torch.full((3,), 1 + 2**-40, dtype=torch.float64)

        def worker(comm):
            module = Flat(values)
            optimizer_for(module, comm, lr=0.0).step()
            return module.vector.detach().clone()

        self.assertTrue(all(torch.equal(result, values) for result in virtual(2, worker)))


class TestSmallModels(unittest.TestCase):
    def test_fewer_parameters_than_ranks(self):
        def worker(comm):
            module = Flat(torch.tensor([1.0, 2.0]))
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                put_gradients(module, comm.rank, step)
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            return module.vector.detach().clone(), optimizer.shard_bytes(), optimizer.layout()

        for n in (3, 5, 8):
            results = virtual(n, worker)
            self.assertTrue(same([r[0] for r in results], [results[0][0]] * n))
            self.assertTrue((results[0][0] != torch.tensor([1.0, 2.0])).all())
            self.assertEqual([r[1] for r in results], [12] * n)
            self.assertEqual([r[2][0]["end"] - r[2][0]["start"] for r in results], [1, 1] + [0] * (n - 2))

    def test_one_scalar_parameter(self):
        def worker(comm):
            module = Flat(torch.tensor(1.0))
            optimizer = optimizer_for(module, comm)
            module.vector.grad = torch.tensor(float(comm.rank + 1))
            optimizer.step()
            return module.vector.shape, module.vector.item()

        expected = TorchAdam(torch.ones(1)).step(torch.tensor([2.0])).item()
        self.assertEqual(virtual(3, worker), [((), expected)] * 3)

    def test_a_parameter_without_elements_is_left_alone(self):
        def worker(comm):
            module = nn.ParameterList([torch.empty(0), torch.ones(3), torch.empty(0, 2).bfloat16()])
            optimizer = optimizer_for(module, comm)
            module[1].grad = torch.ones(3)
            optimizer.clip_grad_norm_(1.0, float("inf"))
            optimizer.step()
            return len(optimizer.units), [tuple(p.shape) for p in module], bool((module[1] < 1).all())

        self.assertEqual(virtual(2, worker), [(1, [(0,), (3,), (0, 2)], True)] * 2)


class TestAccumulation(unittest.TestCase):
    def test_four_microbatches_communicate_once_and_sum(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            before = comm.counters.calls.copy()
            for micro in range(4):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * micro + comm.rank))
                (module(x).square().mean() / 4).backward()
            own = gather_flat_grads(module)
            during = comm.counters.calls - before
            optimizer.step()
            return own, optimizer.shards[0].grad.clone(), during, (comm.counters.calls - before)["reduce_scatter"]

        logs = virtual(3, worker)
        module = Odd()
        for rank, (own, _, during, reduced) in enumerate(logs):
            xs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * m + rank)) for m in range(4)]
            module.zero_grad()
            module(torch.cat(xs)).square().mean().backward()  # one batch of all rows
            torch.testing.assert_close(own, gather_flat_grads(module))
            self.assertEqual((during, reduced), ({}, 1))
        mean, bound = mean_and_bound([own for own, *_ in logs])
        ours = torch.cat([shard for _, shard, *_ in logs])[:46]
        self.assertTrue(((ours.double() - mean).abs() <= bound).all())


class TestGradientsOfTheUser(unittest.TestCase):
    """However gradients come and go between steps, a step uses the last ones, once."""

    def run_steps(self, forget):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + comm.rank))
                module(x).square().sum().backward()
                optimizer.step()
                forget(module, optimizer)
            return gather_flat_params(module)

        return virtual(2, worker)[0]

    def test_every_way_to_forget_gradients_trains_the_same(self):
        expected = self.run_steps(lambda module, optimizer: optimizer.zero_grad())

        def by_hand(module, optimizer):
            for param in module.parameters():
                param.grad = None

        ways = {
            "set_to_none=True": lambda module, optimizer: optimizer.zero_grad(set_to_none=True),
            "set_to_none=False": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
            "module.zero_grad": lambda module, optimizer: module.zero_grad(),
            "module.zero_grad(False)": lambda module, optimizer: module.zero_grad(set_to_none=False),
            "grad = None": by_hand,
            "not at all": lambda module, optimizer: None,  # a step uses its gradients up
        }
        for name, forget in ways.items():
            with self.subTest(name):
                self.assertTrue(torch.equal(self.run_steps(forget), expected))

    def test_zero_grad_attaches_zeroed_views_of_the_flat_buffer(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            put_gradients(module, comm.rank, 0)
            optimizer.zero_grad()
            storage = optimizer.units[0].grad.untyped_storage().data_ptr()
            grads = [param.grad for param in module.parameters()]
            return all(g.untyped_storage().data_ptr() == storage and not g.any() for g in grads)

        self.assertEqual(virtual(2, worker), [True, True])

    def test_backward_adds_into_the_flat_buffer_without_a_second_copy(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            module(torch.ones(2, 3)).sum().backward()
            logical, live = optimizer.memory()["gradients"]
            module.zero_grad()
            module(torch.ones(2, 3)).sum().backward()  # without views autograd makes tensors of its own
            return live == logical, optimizer.memory()["gradients"][1] > logical

        self.assertEqual(virtual(1, worker), [(True, True)])

    def test_a_missing_gradient_counts_as_zeros_not_as_the_last_ones(self):
        def worker(comm):
            module = nn.ParameterList([torch.ones(2), torch.ones(3)])
            optimizer = optimizer_for(module, comm)
            for step in range(2):
                module[0].grad = torch.full((2,), 1.0 + step)
                module[1].grad = torch.ones(3) if step == 0 and comm.rank == 0 else None
                optimizer.reduce_gradients()
                shard = optimizer.shards[0].grad.clone()
                optimizer.step()
            return shard

        self.assertEqual(torch.cat(virtual(2, worker))[:5].tolist(), [2.0, 2.0, 0.0, 0.0, 0.0])

    def test_a_gradient_that_comes_after_the_reduction_is_refused(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            put_gradients(module, comm.rank, 0)
            optimizer.clip_grad_norm_(1.0)
            module(torch.ones(2, 3)).sum().backward()
            with self.assertRaisesRegex(RuntimeError, r"\bscale\b"):
                optimizer.step()
            optimizer.zero_grad()  # starts anew
            put_gradients(module, comm.rank, 1)
            optimizer.step()
            return optimizer.steps

        self.assertEqual(virtual(2, worker), [1, 1])

    def test_step_without_backward_moves_on_momentum_alone(self):
        def worker(comm):
            module = Flat(torch.ones(5))
            optimizer, params = optimizer_for(module, comm), []
            put_gradients(module, 0, 0)
            for _ in range(3):
                optimizer.step()
                params.append(gather_flat_params(module))
            return params

        theirs, grads = TorchAdam(torch.ones(5)), [known_gradient(5, 0, 0), torch.zeros(5), torch.zeros(5)]
        expected = [theirs.step(grad) for grad in grads]
        self.assertTrue(all(same(params, expected) for params in virtual(3, worker)))

    def test_closure(self):
        def worker(comm):
            module = Flat(torch.ones(2))
            optimizer = optimizer_for(module, comm)

            def closure():
                optimizer.zero_grad()
                loss = module.vector.square().sum()
                loss.backward()
                return loss

            losses = [optimizer.step(closure).item() for _ in range(2)]
            return losses[0] == 2.0 and losses[1] < 2.0 and optimizer.step() is None

        self.assertEqual(virtual(2, worker), [True, True])

    def test_sparse_gradients_of_an_embedding(self):
        def worker(comm):
            module = nn.Embedding(4, 2, sparse=True)
            optimizer = optimizer_for(module, comm)
            for _ in range(2):  # with views, and, when the step has used those up, without
                module(torch.tensor([1, 1])).sum().backward()
                optimizer.reduce_gradients()
                shard = optimizer.shards[0].grad.clone()
                optimizer.step()
            return shard

        self.assertEqual(torch.cat(virtual(2, worker)).tolist(), [0, 0, 2, 2, 0, 0, 0, 0])


class TestFrozen(unittest.TestCase):
    def test_frozen_from_the_start_takes_no_part(self):
        def worker(comm):
            module = Odd(seed=comm.rank)
            module.first.requires_grad_(False)
            optimizer = optimizer_for(module, comm, weight_decay=0.1)
            before = module.first.weight.detach().clone()
            module(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            return optimizer.units[0].numel, before, module.first.weight.detach().clone()

        for numel, before, after in virtual(3, worker):
            self.assertEqual(numel, 26)
            self.assertTrue(torch.equal(before, Odd(seed=0).first.weight))  # it is made rank 0's like all others
            self.assertTrue(torch.equal(before, after))

    def test_unfreezing_what_was_frozen_from_the_start_is_refused(self):
        def worker(comm):
            module = Odd()
            module.first.requires_grad_(False)
            optimizer = optimizer_for(module, comm)
            module.first.requires_grad_(True)
            put_gradients(module, comm.rank, 0)
            optimizer.step()

        self.assertEqual(
            refusals(2, worker),
            ["first.weight was frozen, or not there, when the optimizer was built: build a new one to train it"] * 2,
        )

    def test_frozen_after_three_steps_it_neither_moves_nor_decays_and_can_be_unfrozen(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, weight_decay=0.1)

            def steps(start):
                for step in range(start, start + 3):
                    optimizer.zero_grad()
                    module(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).sum().backward()
                    optimizer.step()
                parts = [module.left.weight, module.first.weight, module.first.bias, module.scale]
                return [part.detach().clone() for part in parts]

            def state():
                return [t.clone() for shard in optimizer.shards for t in shard.tensors().values()]

            trained = steps(0)
            module.left.weight.requires_grad_(False)  # in the middle of the flat buffer
            held = state()
            frozen = steps(3)
            slot = next(slot for slot in optimizer.units[0].slots if slot.param is module.left.weight)
            shard = optimizer.shards[0]
            inside = slice(max(slot.start - shard.start, 0), max(slot.end - shard.start, 0))
            kept = all(torch.equal(a[inside], b[inside]) for a, b in zip(held, state(), strict=True))
            module.left.weight.requires_grad_(True)
            return trained, frozen, steps(6), kept

        for n in (1, 2, 3, 5):
            for trained, frozen, unfrozen, kept in virtual(n, worker):
                with self.subTest(n=n):
                    self.assertEqual(
                        [torch.equal(a, b) for a, b in zip(trained, frozen, strict=True)], [True] + [False] * 3
                    )
                    self.assertEqual([torch.equal(a, b) for a, b in zip(frozen, unfrozen, strict=True)], [False] * 4)
                    self.assertTrue(kept)  # its moments, too

    def test_the_ranges_of_a_shard_that_are_trained(self):
        def worker(comm):
            module = Odd()  # scale [0, 1), first.weight [1, 16), first.bias [16, 21), left.weight [21, 46)
            optimizer = optimizer_for(module, comm)
            shard = optimizer.shards[0]
            whole = shard.ranges
            module.first.bias.requires_grad_(False)
            optimizer.step()
            partly = shard.ranges
            module.requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
            return whole, partly, shard.ranges, {p.grad for p in module.parameters()}

        self.assertEqual(virtual(1, worker), [([(0, 46, 0)], [(0, 16, 0), (21, 46, 0)], [], {None})])
        expected = [
            ([(0, 12, 0)], [(0, 12, 0)]),
            ([(0, 12, 0)], [(0, 4, 0), (9, 12, 0)]),
            ([(0, 12, 0)], [(0, 12, 0)]),
            ([(0, 10, 0)], [(0, 10, 0)]),
        ]
        self.assertEqual([result[:2] for result in virtual(4, worker)], expected)  # 2 elements are padding

    def test_a_stale_gradient_of_a_frozen_parameter_is_harmless(self):
        def worker(comm):
            module = nn.ParameterList([torch.ones(2), torch.ones(2)])
            optimizer = optimizer_for(module, comm)
            module[0].requires_grad_(False)
            optimizer.zero_grad()
            module[1].grad = torch.ones(2)
            norm = optimizer.clip_grad_norm_(10.0).item()
            optimizer.step()
            return norm, module[0].tolist(), module[1][0].item() < 1

        self.assertEqual(virtual(2, worker), [(torch.tensor(2.0).sqrt().item(), [1.0, 1.0], True)] * 2)


class TestFrozenDoesNotTravel(unittest.TestCase):
    """`Odd`: scale [0, 1), first.weight [1, 16), first.bias [16, 21), left.weight [21, 46)."""

    def sent(self, n, freeze, steps=2):
        """Train with everything, freeze, train on; returns what a later step sends, of control messages too."""

        def worker(comm):
            module = Odd(seed=comm.rank)
            optimizer, params, costs = optimizer_for(module, comm, weight_decay=0.1), [], []
            for step in range(2 * steps):
                if step == steps:
                    freeze(module)
                before = comm.counters.calls.copy(), comm.counters.bytes.copy(), comm.counters.control_calls
                put_gradients(module, comm.rank, step)
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                calls, sent = comm.counters.calls - before[0], comm.counters.bytes - before[1]
                costs.append((dict(calls), dict(sent), comm.counters.control_calls - before[2]))
                params.append(gather_flat_params(module))
            return params, costs, optimizer.skipped_steps

        results = virtual(n, worker)
        for params, costs, skipped in results:
            self.assertTrue(same(params, results[0][0]))  # whatever travels, all ranks hold the same bits
            self.assertEqual((costs, skipped), (results[0][1], 0))
        return results[0][1], results[0][0]

    def test_bytes_are_those_of_what_is_trained(self):
        cases = {  # frozen: elements that travel, ranges of the unit
            "first.bias": (41, 2),
            "left.weight": (21, 1),
            "scale": (45, 1),
        }
        for n in (1, 2, 3, 8):
            for name, (live, ranges) in cases.items():
                costs, params = self.sent(n, lambda module, name=name: module.get_parameter(name).requires_grad_(False))
                with self.subTest(n=n, name=name):
                    whole, small = 4 * n * shard_bounds(46, n, 0)[2], 4 * (n + 1)
                    self.assertEqual(costs[1][1], {"reduce_scatter": whole, "all_reduce": small, "all_gather": whole})
                    self.assertEqual(costs[2][1], {"all_reduce": 4 * live + small, "broadcast": 4 * live})
                    self.assertEqual(costs[2][0]["all_reduce"], ranges + 1)
                    self.assertEqual([control for _, _, control in costs], [0, 0, 1, 0])  # agreed once, at the change
                    self.assertFalse(torch.equal(params[-1], params[-2]))

    def test_a_unit_that_is_frozen_as_a_whole_sends_nothing(self):
        costs, params = self.sent(3, lambda module: module.requires_grad_(False))
        self.assertEqual(costs[2][1], {"all_reduce": 4 * 4})
        self.assertTrue(torch.equal(params[-1], params[1]))

    def test_what_is_trained_gets_the_bits_that_it_gets_when_nothing_is_frozen(self):
        def worker(comm, freeze):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            for step in range(4):
                for param in module.parameters():
                    param.requires_grad_(True)
                put_gradients(module, comm.rank, step)
                module.left.weight.requires_grad_(not (freeze and step in (1, 2)))
                optimizer.step()
            slot = next(slot for slot in optimizer.units[0].slots if slot.param is module.left.weight)
            flat = optimizer.units[0].data
            return flat[: slot.start].clone(), flat[slot.start : 46].clone()

        for n in (1, 2):  # a reduce-scatter and an all-reduce of 3 ranks may add in another order
            for frozen, free in zip(virtual(n, worker, True), virtual(n, worker, False), strict=True):
                self.assertTrue(torch.equal(frozen[0], free[0]))
                self.assertFalse(torch.equal(frozen[1], free[1]))

    def test_ranks_that_freeze_different_ones_are_refused(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            before = snapshot(module, optimizer)
            (module.scale, module.first.bias)[comm.rank].requires_grad_(False)
            put_gradients(module, comm.rank, 0)
            try:
                optimizer.step()
            finally:
                self.assertTrue(same(before, snapshot(module, optimizer)))

        messages = refusals(2, worker)
        self.assertEqual(messages[0], messages[1])
        self.assertIn("ranks disagree on which parameters require a gradient: scale: rank 0 has false", messages[0])


class TestClipping(unittest.TestCase):
    def clipped(self, n, norm_type, max_norm, numel=37):
        def worker(comm):
            module = Flat(torch.zeros(numel))
            optimizer = optimizer_for(module, comm)
            put_gradients(module, comm.rank, 0)
            before = comm.counters.calls.copy()
            norm = optimizer.clip_grad_norm_(max_norm, norm_type)
            calls = comm.counters.calls - before
            shard = optimizer.shards[0].grad.clone()
            again = optimizer.clip_grad_norm_(max_norm, norm_type)
            return norm, shard, dict(calls), again, (comm.counters.calls - before)["reduce_scatter"]

        return virtual(n, worker)

    def test_equal_to_torchs_on_the_whole_gradient(self):
        for n in (1, 2, 3, 8):
            whole = torch.zeros(37)
            whole.grad = torch.stack([known_gradient(37, rank, 0) for rank in range(n)]).mean(0)
            mean = whole.grad.clone()
            for norm_type in (1, 2, 3, float("inf"), "inf"):
                for max_norm in (0.0, 0.3, 1e6):
                    whole.grad = mean.clone()
                    expected = torch.nn.utils.clip_grad_norm_([whole], max_norm, norm_type)
                    results = self.clipped(n, norm_type, max_norm)
                    with self.subTest(n=n, norm_type=norm_type, max_norm=max_norm):
                        for norm, *_ in results:
                            self.assertEqual((norm.shape, norm.dtype), ((), torch.float32))
                            self.assertTrue(torch.equal(norm, results[0][0]))
                        torch.testing.assert_close(results[0][0], expected, rtol=1e-6, atol=0)
                        ours = torch.cat([shard for _, shard, *_ in results])[:37]
                        torch.testing.assert_close(ours, whole.grad, rtol=2e-6, atol=1e-9)

    def test_costs_one_reduction_and_again_only_that(self):
        for norm, _, calls, again, reduced in self.clipped(3, 2, 0.3):
            self.assertEqual((calls, reduced), ({"reduce_scatter": 1, "all_reduce": 1}, 1))
            self.assertGreater(norm.item(), 0.3)
            self.assertAlmostEqual(again.item(), 0.3, places=5)  # the second time it is clipped already

    def test_padding_is_not_counted(self):
        for n in (2, 4, 8):  # 5 elements: up to 3 of padding
            for norm_type in (1, 2, 3, float("inf")):
                norm = self.clipped(n, norm_type, 1.0, numel=5)[0][0]
                mean = torch.stack([known_gradient(5, rank, 0) for rank in range(n)]).mean(0)
                torch.testing.assert_close(norm, torch.linalg.vector_norm(mean, norm_type))

    def test_the_step_uses_the_clipped_gradient(self):
        def worker(comm):
            module = Flat(torch.zeros(7))
            optimizer, params = optimizer_for(module, comm, eps=1.0), []  # so that the scale matters
            for step in range(3):
                put_gradients(module, 0, step)
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                params.append(gather_flat_params(module))
            return params

        theirs, expected = TorchAdam(torch.zeros(7), eps=1.0), []
        for step in range(3):
            whole = torch.zeros(7)
            whole.grad = known_gradient(7, 0, step)
            torch.nn.utils.clip_grad_norm_([whole], 0.5)
            expected.append(theirs.step(whole.grad))
        torch.testing.assert_close(virtual(2, worker)[0], expected, rtol=1e-5, atol=0)

    def test_a_gradient_of_zeros_stays_zero(self):
        def worker(comm):
            module = Flat(torch.ones(3))
            optimizer = optimizer_for(module, comm)
            return optimizer.clip_grad_norm_(1.0).item(), optimizer.shards[0].grad.tolist()

        self.assertEqual(virtual(3, worker), [(0.0, [0.0])] * 3)

    def test_bad_arguments(self):
        def worker(comm, *args):
            optimizer_for(Odd(), comm).clip_grad_norm_(*args)

        for args in ((-1.0,), (float("nan"),), (1.0, 0), (1.0, -2), (1.0, float("nan"))):
            self.assertTrue(all(refusals(2, worker, *args)), args)


class TestNotFinite(unittest.TestCase):
    def test_one_bad_value_on_one_rank_stops_all_for_one_step(self):
        def worker(comm, value, where, clip):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            for step in range(3):
                before = snapshot(module, optimizer)
                put_gradients(module, comm.rank, step)
                if step == 1 and comm.rank == 1:
                    module.first.weight.grad.view(-1)[0] = value
                    module.scale.grad.fill_(value if where == "both" else 1.0)
                if clip:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                unchanged = same(before, snapshot(module, optimizer))
                self.assertEqual(unchanged, step == 1)
            return optimizer.skipped_steps, optimizer.steps, gather_flat_params(module)

        for value in (float("nan"), float("inf"), -float("inf")):
            for where in ("first", "both"):
                for clip in (False, True):
                    results = virtual(3, worker, value, where, clip)
                    with self.subTest(value=value, where=where, clip=clip):
                        self.assertEqual([r[:2] for r in results], [(1, 2)] * 3)
                        self.assertTrue(same([r[2] for r in results], [results[0][2]] * 3))
                        self.assertTrue(results[0][2].isfinite().all())

    def test_a_clipped_nan_does_not_stay_in_the_padding(self):
        def worker(comm, forget):
            module = Flat(torch.ones(5))  # 8 with padding
            optimizer = optimizer_for(module, comm)
            for value in (float("nan"), 1.0, 2.0):
                module.vector.grad = torch.full((5,), value)
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                forget(module)
            return optimizer.skipped_steps, optimizer.steps

        for forget in (lambda module: None, lambda module: module.zero_grad()):
            self.assertEqual(virtual(4, worker, forget), [(1, 2)] * 4)

    def test_opposite_infinities_and_an_overflowing_sum(self):
        def worker(comm, values):
            module = Flat(torch.ones(2))
            optimizer = optimizer_for(module, comm)
            module.vector.grad = torch.tensor([0.0, values[comm.rank]])
            optimizer.step()
            return optimizer.skipped_steps, module.vector.tolist()

        for values in ((float("inf"), -float("inf")), (3e38, 3e38)):
            self.assertEqual(virtual(2, worker, values), [(1, [1.0, 1.0])] * 2)

    def test_large_finite_gradients_are_not_skipped(self):
        def worker(comm):
            module = Flat(torch.ones(200))
            optimizer = optimizer_for(module, comm)
            module.vector.grad = torch.full((200,), 1e37)  # their sum is not finite, they are
            optimizer.step()
            return optimizer.skipped_steps

        self.assertEqual(virtual(2, worker), [0, 0])


class Broken(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class TestRefusals(unittest.TestCase):
    def check(self, pattern, make, ranks=2, **settings):
        """Every rank must refuse, before a parameter has changed or has become a view."""

        def worker(comm):
            module = make(comm.rank)
            before = [(param.data_ptr(), param.detach().clone()) for param in module.parameters()]
            arguments = {"world_size": comm.world_size, "rank": comm.rank, "lr": LR, "comm": comm} | settings
            try:
                ZeroOptimizer(module, **arguments)
            except ValueError as error:
                after = [(param.data_ptr(), param.detach()) for param in module.parameters()]
                kept = all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))
                return str(error), kept, module.zero_grad()
            self.fail(f"{settings} was accepted")

        for message, kept, _ in virtual(ranks, worker):
            self.assertRegex(message, pattern)
            self.assertTrue(kept)

    def test_settings_out_of_range(self):
        nan, inf = float("nan"), float("inf")
        for name in ("lr", "eps", "weight_decay"):
            for value in (-1.0, nan, inf, None, "0.1", True, torch.tensor(0.1)):
                with self.subTest(name=name, value=value):
                    self.check(f"{name} must be a number of at least 0", Odd, **{name: value})
        for betas in ((0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, nan), 0.9, None, "ab", (True, 0.9), (0.9, 0.99, 0.999)):
            with self.subTest(betas=betas):
                self.check("betas must be two numbers", Odd, betas=betas)

    def test_world_size_and_rank_must_be_the_groups(self):
        for world_size in (1, 3, 0, -1):
            self.check(f"of {world_size} ranks, but in the group", Odd, world_size=world_size)
        for rank in (2, -1):
            self.check(f"rank {rank} of 2", Odd, rank=rank)

    def test_there_are_three_stages(self):
        for stage in (0, 4, "1", None, True):
            self.check("stage must be 1, 2 or 3", Odd, stage=stage)

    def test_nothing_to_train(self):
        self.check("no parameter that requires a gradient", lambda rank: nn.ReLU())
        self.check("no parameter that requires a gradient", lambda rank: Odd().requires_grad_(False))
        self.check("are empty", lambda rank: nn.ParameterList([torch.empty(0)]))

    def test_complex_parameters(self):
        self.check("parameter phase is torch.complex64", lambda rank: Broken())

    def test_ranks_that_differ(self):
        def frozen(rank):
            module = Odd(rank)
            module.first.requires_grad_(rank == 0)
            return module

        makes = {
            "ranks disagree on the model: 2.weight": lambda rank: nn.Sequential(
                *[nn.Linear(2, 2)] * 2, nn.Linear(2, 2 + rank)
            ),
            "ranks disagree on the model: vector": lambda rank: Flat(torch.ones(3 + rank)),
            "float32.*bfloat16": lambda rank: Flat(torch.ones(3, dtype=(torch.float32, torch.bfloat16)[rank])),
            "ranks disagree on the model: first.weight": frozen,
        }
        for pattern, make in makes.items():
            with self.subTest(pattern):
                self.check(pattern, make)

    def test_settings_that_differ_between_ranks(self):
        def worker(comm, name, values):
            optimizer_for(Odd(), comm, **{name: values[comm.rank]})

        for name, values in {"lr": (0.1, 0.2), "betas": ((0.9, 0.99), (0.9, 0.98)), "weight_decay": (0.0, 0.1)}.items():
            messages = refusals(2, worker, name, values)
            self.assertEqual(messages[0], messages[1])
            self.assertRegex(messages[0], f"ranks disagree on the optimizer: {name}")

    def test_a_module_that_leaves_the_flat_buffers(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            module.double()
            module(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()

        self.assertEqual(
            refusals(2, worker), ["scale has left the flat buffer: move and convert a module, then wrap it"] * 2
        )

    def test_a_group_added_later(self):
        def worker(comm):
            optimizer_for(Odd(), comm).add_param_group({"params": [nn.Parameter(torch.ones(1))]})

        self.assertTrue(all("when the optimizer is built" in message for message in refusals(2, worker)))


class TestSplitGroups(unittest.TestCase):
    def test_two_groups_train_two_models(self):
        def worker(comm):
            color = comm.rank % 2
            group = comm.split(color)
            module = Flat(torch.full((5,), float(comm.rank)))
            optimizer = optimizer_for(module, group)
            put_gradients(module, comm.rank, 0)
            optimizer.step()
            return module.vector.detach().clone()

        results = virtual(4, worker)
        for color in (0, 1):
            mean = (known_gradient(5, color, 0) + known_gradient(5, color + 2, 0)) / 2
            expected = TorchAdam(torch.full((5,), float(color))).step(mean)  # the values of the group's rank 0
            self.assertTrue(torch.equal(results[color], expected))
            self.assertTrue(torch.equal(results[color + 2], expected))


class TestOptimizerSurface(unittest.TestCase):
    def test_schedulers_drive_the_learning_rate(self):
        def worker(comm):
            module = Flat(torch.ones(5))
            optimizer = optimizer_for(module, comm)
            self.assertIsInstance(optimizer, torch.optim.Optimizer)
            rates, params = [], []
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
            for step in range(6):
                put_gradients(module, 0, step)
                optimizer.step()
                rates.append(optimizer.param_groups[0]["lr"])
                params.append(gather_flat_params(module))
                scheduler.step()
                if step == 2:
                    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
            return rates, params

        for rates, params in virtual(2, worker):
            for rate, factor in zip(rates, [0.25, 0.5, 0.75, 1.0, 0.75, 0.25], strict=True):
                self.assertAlmostEqual(rate, LR * factor)
            theirs = TorchAdam(torch.ones(5))
            for step, rate in enumerate(rates):
                theirs.options["lr"] = rate
                self.assertTrue(torch.equal(theirs.step(known_gradient(5, 0, step)), params[step]))

    def test_repr_and_groups_are_torchs(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, weight_decay=0.25)
            group = optimizer.param_groups[0]
            ids = [id(param) for param in group["params"]] == [id(param) for param in module.parameters()]
            return len(optimizer.param_groups), ids, group["weight_decay"], "weight_decay: 0.25" in repr(optimizer)

        self.assertEqual(virtual(1, worker), [(1, True, 0.25, True)])


if __name__ == "__main__":
    unittest.main()
