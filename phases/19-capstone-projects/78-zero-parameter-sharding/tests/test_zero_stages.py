import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from functools import partial
from unittest import mock

import routes
import torch
from arena import Arena, why_not
from comm import TorchComm
from groups import decay_groups
from memory import shard_bounds
from ranks import run_ranks
from shared_comm import SharedComm
from stage_cases import Tower, loss_of, mean_gradients, params_of, train
from torch import nn
from zero_cases import Flat, TorchAdam, copy_of, mean_and_bound, optimizer_for, put_gradients, refusals, same, virtual

STEPS, RANKS = 3, (1, 2, 3, 4, 8)
UNITS = (51, 56, 51, 50)  # elements of the last, middle and first block, and of the root: inlet, outlet, scale, bias
ROOT = {"scale", "inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias", "parts.0.first.bias"}


def equal(one: dict, two: dict) -> bool:
    """Compare {name: tensor} bit for bit."""
    return one.keys() == two.keys() and all(same([one[name]], [two[name]]) for name in one)


class TestTraining(unittest.TestCase):
    """Stages 2 and 3 of 1 to 8 virtual ranks, beside plain gradients, torch's Adam, and stage 1."""

    @classmethod
    def setUpClass(cls):
        cls.runs = {(n, stage): virtual(n, train, stage, STEPS) for n in RANKS for stage in (1, 2, 3)}

    def test_all_ranks_hold_the_same_bits(self):
        for case, logs in self.runs.items():
            for log in logs:
                with self.subTest(case=case):
                    self.assertTrue(all(map(equal, log["params"], logs[0]["params"])))
                    self.assertFalse(equal(log["params"][0], log["params"][1]))

    def test_shards_hold_the_mean_gradient(self):
        for case, logs in self.runs.items():
            for step in range(STEPS):
                means = mean_gradients(logs, step)
                self.assertEqual(set(means), set(logs[0]["own"][step]))
                for name, found in means.items():
                    mean, bound = mean_and_bound([log["own"][step][name].flatten() for log in logs])
                    with self.subTest(case=case, step=step, name=name):
                        self.assertTrue(((found.double() - mean).abs() <= bound).all())

    def test_the_update_is_torchs_adam_bit_for_bit(self):
        for case, logs in self.runs.items():
            for name in logs[0]["params"][0]:
                theirs = TorchAdam(logs[0]["params"][0][name].flatten())
                for step in range(STEPS):
                    expected = theirs.step(mean_gradients(logs, step)[name])
                    with self.subTest(case=case, step=step, name=name):
                        self.assertTrue(torch.equal(expected, logs[0]["params"][step + 1][name].flatten()))

    def test_stages_train_alike(self):
        """With one or two ranks the bits agree, as a sum of two has one order. Else Adam amplifies its rounding."""
        for n in RANKS:
            for stage in (2, 3):
                for step in range(STEPS + 1):
                    one, other = (self.runs[n, s][0]["params"][step] for s in (1, stage))
                    with self.subTest(n=n, stage=stage, step=step):
                        if n <= 2:
                            self.assertTrue(equal(one, other))
                        self.assertTrue(equal(self.runs[n, 2][0]["params"][step], self.runs[n, 3][0]["params"][step]))
                        for name in one:
                            self.assertLessEqual((one[name] - other[name]).abs().max().item(), 2e-5)

    def test_collectives_and_bytes_of_a_step(self):
        """A reduce-scatter a unit; stage 2 gathers each once, stage 3 a block's twice, the root's once."""
        for n in RANKS:
            padded = [4 * n * shard_bounds(numel, n, 0)[2] for numel in UNITS]
            blocks, root = sum(padded[:-1]), padded[-1]
            gathers = {2: (4, blocks + root), 3: (7, 2 * blocks + root)}
            for stage, (count, gathered) in gathers.items():
                calls = {"reduce_scatter": 4, "all_reduce": 1, "all_gather": count}
                sent = {"reduce_scatter": blocks + root, "all_reduce": 4 * (n + 1), "all_gather": gathered}
                for log in self.runs[n, stage]:
                    with self.subTest(n=n, stage=stage):
                        self.assertEqual(log["costs"], [(calls, sent, 0)] * STEPS)

    def test_memory_is_the_formulas(self):
        """After backward: each stage's share, logical and live alike. After the step gradients have no memory."""
        for n in RANKS:
            chunk = sum(shard_bounds(numel, n, 0)[2] for numel in UNITS)
            whole = n * chunk
            for stage, params in ((2, 4 * whole), (3, 4 * chunk)):
                held = {"parameters": (params,) * 2, "gradients": (4 * chunk,) * 2, "optimizer": (8 * chunk,) * 2}
                for log in self.runs[n, stage]:
                    with self.subTest(n=n, stage=stage):
                        self.assertEqual(log["held"], [held] * STEPS)
                        self.assertEqual(log["after"], [held | {"gradients": (4 * chunk, 0)}] * STEPS)

    def test_units_are_blocks_in_backwards_order_then_the_root_with_what_blocks_share(self):
        for stage in (2, 3):
            names = self.runs[1, stage][0]["names"]
            self.assertEqual([unit[-1][2] for unit in names], list(UNITS))
            for unit, part in zip(names, (2, 1, 0), strict=False):
                self.assertTrue(all(name.startswith(f"parts.{part}.") for name, _, _ in unit))
            self.assertEqual({name for name, _, _ in names[3]}, ROOT)


class TestFeatures(unittest.TestCase):
    """Each feature of stage 1 gives the same bits in stages 2 and 3, on two ranks."""

    def compare(self, **settings):
        """Return the logs of stages 1 to 3, whose parameters must be equal after every step."""
        runs = {stage: virtual(2, partial(train, stage=stage, steps=STEPS, **settings)) for stage in (1, 2, 3)}
        for stage, logs in runs.items():
            for log in logs:
                for step, params in enumerate(log["params"]):
                    with self.subTest(stage=stage, step=step):
                        self.assertTrue(equal(params, runs[1][0]["params"][step]))
        return runs

    def compare_with(self, worker, stages=(1, 2, 3), n=2):
        """Return what `worker(comm, stage)` returned, equal for all stages and ranks."""
        results = {stage: virtual(n, worker, stage) for stage in stages}
        for stage, ranks in results.items():
            for found in ranks:
                with self.subTest(stage=stage):
                    self.assertTrue(equal(found, results[stages[0]][0]))

    def test_groups(self):
        def worker(comm, stage):
            module = Tower()
            matrices, rest = decay_groups(module, 0.1)
            groups = [matrices | {"lr": 3e-2}, rest | {"betas": (0.7, 0.9), "eps": 1e-5}]
            optimizer = optimizer_for(module, comm, stage=stage, groups=groups)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.5**s])
            for step in range(STEPS):
                loss_of(module, step, comm.rank).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.assertEqual([g["lr"] for g in optimizer.param_groups], [3e-2 / 4, 1e-2 / 8])
            return params_of(module, optimizer)

        self.compare_with(worker)

    def test_clipping(self):
        """The norm is a sum over units in another order: it rounds otherwise, and scales by it."""
        for p in (1.0, 2.0, 3.0, float("inf")):
            runs = {stage: virtual(3, partial(train, stage=stage, steps=1, clip=p)) for stage in (1, 2, 3)}
            own = [log["own"][0] for log in runs[1]]
            mean = torch.cat([sum(each[name] for each in own).flatten() / 3 for name in own[0]])
            norm = torch.linalg.vector_norm(mean.double(), p).item()
            for stage, logs in runs.items():
                found = torch.cat(list(mean_gradients(logs, 0).values()))
                with self.subTest(p=p, stage=stage):
                    self.assertEqual(len({log["norms"][0] for log in logs}), 1)
                    self.assertAlmostEqual(logs[0]["norms"][0] / norm, 1, delta=1e-5)
                    self.assertAlmostEqual(torch.linalg.vector_norm(found.double(), p).item(), 1, delta=1e-5)
                    self.assertEqual(logs[0]["costs"][0][0]["all_reduce"], 1)  # of the norm: no flag is needed

    def test_accumulation_in_no_sync_travels_once(self):
        for stage, logs in self.compare(micro=3).items():
            calls = {"reduce_scatter": 1 if stage == 1 else 4, "all_reduce": 1, "all_gather": 1 if stage == 1 else 4}
            if stage == 3:
                calls["all_gather"] = 3 * 7  # parameters come for each microbatch
            self.assertEqual([cost[0] for cost in logs[0]["costs"]], [calls] * STEPS)

    def test_accumulation_without_no_sync_adds_means_to_the_shards(self):
        for stage in (2, 3):
            for n in (2, 3):
                logs = virtual(n, partial(train, stage=stage, steps=STEPS, micro=3, no_sync=False))
                for step in range(STEPS):
                    self.assertEqual(logs[0]["costs"][step][0]["reduce_scatter"], 3 * 4)
                    for name, found in mean_gradients(logs, step).items():
                        mean, bound = mean_and_bound([log["own"][step][name].flatten() for log in logs])
                        # `own` is a sum of three in fp32, and so is ours: three more roundings of what may cancel
                        slack = 4 * 3 * torch.finfo(torch.float32).eps * mean.abs().max()
                        self.assertTrue(((found.double() - mean).abs() <= 3 * bound + slack).all(), name)

    def test_frozen_parameters(self):
        def from_the_start(module, step):
            for parameter in (module.parts[1].first.weight, module.inlet.weight):
                parameter.requires_grad_(False)

        def a_whole_block(module, step):
            module.parts[1].requires_grad_(step == 0)

        def before_a_trained_one(module, step):
            module.parts[2].first.weight.requires_grad_(step != 1)

        def nearly_all(module, step):
            module.requires_grad_(step != 1)
            module.parts[0].gain.requires_grad_(True)

        for change in (a_whole_block, before_a_trained_one, nearly_all):
            with self.subTest(change.__name__):
                runs = self.compare(before=change)
                still, moved = runs[3][0]["params"][1], runs[3][0]["params"][2]
                name = "parts.1.second.weight" if change is a_whole_block else "parts.2.first.weight"
                self.assertTrue(torch.equal(still[name], moved[name]))
                self.assertFalse(torch.equal(still["parts.0.gain"], moved["parts.0.gain"]))

        def build(seed):
            module = Tower(seed)
            from_the_start(module, 0)
            return module

        runs = self.compare(build=build)
        self.assertNotIn("inlet.weight", [name for unit in runs[3][0]["names"] for name, _, _ in unit])

    def test_frozen_parameters_do_not_travel_as_gradients(self):
        def worker(comm, stage):
            module = Tower()
            optimizer_for(module, comm, stage=stage)
            module.parts[1].requires_grad_(False)
            before = comm.counters.bytes.copy(), comm.counters.calls.copy()
            loss_of(module, 0, comm.rank).backward()
            return dict(comm.counters.bytes - before[0]), dict(comm.counters.calls - before[1])

        live = 4 * (52 + 52 + 50)
        for sent, calls in virtual(2, worker, 2):
            self.assertEqual((sent, calls), ({"reduce_scatter": live}, {"reduce_scatter": 3}))
        for sent, calls in virtual(2, worker, 3):  # its parameters are needed in forward and in backward
            self.assertEqual(sent, {"reduce_scatter": live, "all_gather": 4 * (2 * (52 + 56 + 52) + 50)})
            self.assertEqual(calls, {"reduce_scatter": 3, "all_gather": 7})

    def test_gradients_that_only_some_ranks_have(self):
        """Rank 1's loss does without the last block and the inlet: its gradients there are zeros."""

        class Forked(Tower):
            def forward(self, x, short=False):
                x = self.inlet(x).detach() if short else self.inlet(x)
                for index, part in enumerate(self.parts):
                    new = part(x)
                    x = x + 0 * new.sum() + new.detach() if short and index == 2 else new
                return self.outlet(x) * self.scale

        def worker(comm, stage):
            module = Forked()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(STEPS):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                module(x, short=comm.rank == 1).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        self.compare_with(worker)

    def test_a_rank_whose_block_gets_no_gradient_at_all_keeps_the_order_of_collectives(self):
        """With three ranks the middle one has no gradient of half of each block: nobody waits, nothing is mixed up."""

        class Halved(Tower):
            def forward(self, x, half=False):
                x = self.inlet(x)
                for part in self.parts:
                    new = part(x)
                    x = x + part.first(x) * 0.5 if half else new
                return self.outlet(x) * self.scale

        def worker(comm, stage):
            module = Halved()
            optimizer = optimizer_for(module, comm, stage=stage, blocks=[module.parts[1]])
            for step in range(STEPS):
                with optimizer.gathered():  # `first` is used outside of its block's forward
                    module(torch.ones(2, 3) * (step + 1), half=comm.rank == 1).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        for stage in (2, 3):
            results = virtual(3, worker, stage)
            self.assertTrue(all(equal(found, results[0]) for found in results))

    def test_masters_of_bf16(self):
        def worker(comm, stage):
            module = Tower().bfloat16()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(STEPS):
                loss_of(module, step, comm.rank).backward()
                held = optimizer.memory()
                optimizer.step()
                optimizer.zero_grad()
            chunk = sum(shard_bounds(numel, 2, 0)[2] for numel in UNITS)
            if stage == 2:
                expected = {"parameters": 4 * chunk, "gradients": 2 * chunk, "optimizer": 12 * chunk}
            elif stage == 3:  # the master is all there is of them
                expected = {"parameters": 4 * chunk, "gradients": 2 * chunk, "optimizer": 8 * chunk}
            if stage > 1:
                self.assertEqual(held, {name: (size, size) for name, size in expected.items()})
            self.assertEqual({p.dtype for p in module.parameters()}, {torch.bfloat16})
            before = [shard.master.clone() for shard in optimizer.shards]
            self.assertFalse(all(torch.equal(m, m.bfloat16().float()) for m in before))
            with optimizer.gathered():
                pass
            optimizer.load_state_dict(copy_of(optimizer.state_dict()))
            self.assertTrue(same(before, [shard.master for shard in optimizer.shards]))
            kinds = {t.dtype for shard in optimizer.shards for t in shard.tensors().values()}
            self.assertEqual(kinds, {torch.float32})
            return params_of(module, optimizer)

        self.compare_with(worker)

    def test_fewer_elements_than_ranks(self):
        def worker(comm, stage):
            module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(STEPS):
                (module(torch.full((2, 1), 1.0 + step)) - 3).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.compare_with(worker, n=4)

    def test_a_module_without_blocks(self):
        def worker(comm, stage):
            module = Flat(torch.linspace(-1, 1, 7))
            module.forward = lambda x: module.vector * x
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(STEPS):
                module(step + 1.0 + comm.rank).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(module, optimizer)

        self.compare_with(worker)

    def test_gradients_that_were_put_there_by_hand(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for step in range(STEPS):
                put_gradients(module, comm.rank, step)
                optimizer.step()
            return params_of(module, optimizer)

        self.compare_with(worker)


class TestNotFinite(unittest.TestCase):
    def test_all_skip_and_the_rank_is_named(self):
        def worker(comm, stage, clip):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage, max_skipped=2)
            before = params_of(module, optimizer)
            loss = loss_of(module, 0, comm.rank)
            (loss * float("inf") if comm.rank == 1 else loss).backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            kept = equal(before, params_of(module, optimizer))
            loss_of(module, 1, comm.rank).backward()
            optimizer.step()
            moved = not equal(before, params_of(module, optimizer))
            return kept, moved, optimizer.skipped_steps, optimizer.steps, optimizer.last_skip

        said = "step 1: the gradient of rank 1 is not finite"
        for stage in (2, 3):
            for clip in (False, True):
                self.assertEqual(virtual(3, worker, stage, clip), [(True, True, 1, 1, said)] * 3)

    def test_an_overflow_in_the_first_of_two_backwards_is_named_too(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage)
            for part in range(2):
                loss = loss_of(module, part, comm.rank)
                (loss * float("nan") if (comm.rank, part) == (2, 0) else loss).backward()
            optimizer.step()
            return optimizer.last_skip

        for stage in (2, 3):
            self.assertEqual(virtual(3, worker, stage), ["step 1: the gradient of rank 2 is not finite"] * 3)

    def test_too_many_in_a_row_raise_and_leave_no_gradient_behind(self):
        def worker(comm, stage):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=stage, max_skipped=1)
            (loss_of(module, 0, comm.rank) * float("nan")).backward()
            with self.assertRaisesRegex(RuntimeError, "1 steps in a row were skipped"):
                optimizer.step()
            return optimizer.memory()["gradients"][1]

        for stage in (2, 3):
            self.assertEqual(virtual(2, worker, stage), [0, 0])


class TestState(unittest.TestCase):
    def test_between_stages_2_and_3_states_are_exchanged(self):
        """Their units are the same. Stage 1 cuts others: its states are refused, also by stage 1."""

        def worker(comm, one, two, dtype):
            module = Tower().to(dtype)
            optimizer = optimizer_for(module, comm, stage=one, weight_decay=0.1)
            for step in range(4):
                loss_of(module, step, comm.rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    saved = copy_of(optimizer.state_dict())
                    other = Tower(seed=9).to(dtype)
                    resumed = optimizer_for(other, comm, stage=two, lr=0.5)
                    resumed.load_state_dict(saved)
                elif step > 1:
                    loss_of(other, step, comm.rank).backward()
                    resumed.step()
                    resumed.zero_grad()
            return equal(params_of(module, optimizer), params_of(other, resumed))

        for dtype in (torch.float32, torch.bfloat16):
            for one, two in ((2, 2), (3, 3), (2, 3), (3, 2)):
                with self.subTest(one=one, two=two, dtype=dtype):
                    self.assertEqual(virtual(3, worker, one, two, dtype), [True] * 3)
        for one, two in ((1, 2), (1, 3), (3, 1)):
            for message in refusals(2, worker, one, two, torch.float32):
                self.assertIn("rank 0: layout must be", message)

    def test_a_state_replaces_parameters_that_a_forward_has_gathered(self):
        def worker(comm):
            module = Tower()
            optimizer = optimizer_for(module, comm, stage=3)
            loss_of(module, 0, comm.rank).backward()
            saved = copy_of(optimizer.state_dict())
            optimizer.step()
            optimizer.zero_grad()
            loss_of(module, 1, comm.rank)  # the root's parameters are there, as they are now
            optimizer.load_state_dict(saved)
            return loss_of(module, 0, comm.rank).item(), loss_of(Tower(), 0, comm.rank).item()

        for ours, plain in virtual(2, worker):
            self.assertEqual(ours, plain)


def over_processes(rank, world_size, arena):
    """Train stages 2 and 3 over gloo, over gloo with every unit a large one, and in shared memory."""
    gloo = TorchComm()
    runs = {}
    for stage in (2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            build = partial(cast_tower, dtype=dtype)
            key = stage, str(dtype)
            runs[("gloo", *key)] = train(gloo, stage, STEPS, build)
            with mock.patch.object(routes, "LARGE", 48):
                runs[("gloo, large", *key)] = train(gloo, stage, STEPS, build)
            if arena is not None:
                runs[("shared", *key)] = train(SharedComm(arena, gloo), stage, STEPS, build)
    return runs


def cast_tower(seed, dtype):
    return Tower(seed).to(dtype)


class TestOverProcesses(unittest.TestCase):
    """The transports: with two ranks, where a sum has one order, all give the same bits as virtual ranks."""

    @classmethod
    def setUpClass(cls):
        arena = None if why_not() else Arena(2, heap_bytes=1 << 16)
        cls.two = run_ranks(over_processes, 2, arena, timeout=120)
        cls.three = run_ranks(over_processes, 3, None, timeout=120)

    def test_two_ranks_have_the_bits_of_virtual_ones(self):
        for stage in (2, 3):
            for dtype in (torch.float32, torch.bfloat16):
                build = partial(cast_tower, dtype=dtype)
                expected = virtual(2, partial(train, stage=stage, steps=STEPS, build=build))[0]["params"]
                for rank, runs in enumerate(self.two):
                    for (how, *key), log in runs.items():
                        if key == [stage, str(dtype)]:
                            with self.subTest(how=how, stage=stage, dtype=dtype, rank=rank):
                                self.assertTrue(all(map(equal, log["params"], expected)))

    def test_three_ranks_have_the_mean_and_agree(self):
        for case in self.three[0]:
            logs = [runs[case] for runs in self.three]
            for step in range(STEPS):
                self.assertTrue(all(equal(log["params"][step + 1], logs[0]["params"][step + 1]) for log in logs))
                for name, found in mean_gradients(logs, step).items() if "float32" in case[2] else ():
                    mean, bound = mean_and_bound([log["own"][step][name].flatten() for log in logs])
                    with self.subTest(case=case, step=step, name=name):
                        self.assertTrue(((found.double() - mean).abs() <= bound).all())


if __name__ == "__main__":
    unittest.main()
