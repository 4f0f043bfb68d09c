import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import copy
import functools
import gc

import torch
from ddp import DistributedDataParallel
from ddp_cases import (
    Fails,
    EPS,
    Branches,
    Everything,
    ThreeLayers,
    backward,
    cause,
    data,
    grads,
    mean_and_bound,
    refusals,
    virtual,
)
from flat import flat_param_numel, gather_flat_grads, gather_flat_params, scatter_flat_to_params
from torch import nn
from toy import sgd_step

TINY = 1e-9  # megabytes: every parameter a bucket of its own
STEPS, LR = 3, 0.1


def train(comm, build, cap, steps=STEPS):
    """Be one rank: returns what it had before each step, its mean gradients, and what it sent."""
    module = build(seed=comm.rank + 1)
    ddp = DistributedDataParallel(module, cap, comm)
    comm.notes.clear()
    log = {"params": [], "grads": [], "notes": comm.notes, "control": comm.counters.control_calls}
    for step in range(steps):
        log["params"].append(gather_flat_params(module))
        backward(ddp, comm.rank, step)
        log["grads"].append(grads(module))
        sgd_step(module, LR)
    log["params"].append(gather_flat_params(module))
    log["control"] = comm.counters.control_calls - log["control"]
    return log


def alone(build, params, step, world_size):
    """Return each rank's gradients as {name: gradient or None}, computed in one process from given parameters."""
    module, per_rank = build(), []
    for rank in range(world_size):
        scatter_flat_to_params(module, params)
        backward(module, rank, step)
        per_rank.append(grads(module))
        module.zero_grad()
    return per_rank


class TestEquivalence(unittest.TestCase):
    """Every step of N ranks against one process, with tied, frozen and 0-dim parameters, for N = 1 to 8."""

    @classmethod
    def setUpClass(cls):
        cls.runs = {
            (n, cap): virtual(n, train, build, cap, seed=n)
            for n in range(1, 9)
            for build, cap in ((Everything, TINY), (Everything, 25))
        }

    def test_gradients_within_the_derived_bound(self):
        for (n, cap), logs in self.runs.items():
            for step in range(STEPS):
                per_rank = alone(Everything, logs[0]["params"][step], step, n)
                for name, found in logs[0]["grads"][step].items():
                    with self.subTest(n=n, cap=cap, step=step, name=name):
                        if name.startswith("frozen"):
                            self.assertIsNone(found)
                            continue
                        mean, bound = mean_and_bound([each[name] for each in per_rank])
                        self.assertLessEqual(((found.double() - mean).abs() - bound).max().item(), 0)

    def test_sgd_within_the_derived_bound(self):
        trained = [name for name, p in Everything().named_parameters() if p.requires_grad]
        for (n, cap), logs in self.runs.items():
            for step in range(STEPS):
                before, after = Everything(), Everything()
                scatter_flat_to_params(before, logs[0]["params"][step])
                scatter_flat_to_params(after, logs[0]["params"][step + 1])
                before, after = dict(before.named_parameters()), dict(after.named_parameters())
                per_rank = alone(Everything, logs[0]["params"][step], step, n)
                for name in before:
                    with self.subTest(n=n, cap=cap, step=step, name=name):
                        if name not in trained:
                            self.assertTrue(torch.equal(before[name], after[name]))
                            continue
                        mean, bound = mean_and_bound([each[name] for each in per_rank])
                        exact = before[name].double() - LR * mean
                        bound = LR * bound + 2 * EPS * (before[name].double().abs() + LR * mean.abs())
                        self.assertLessEqual(((after[name].double() - exact).abs() - bound).max().item(), 0)

    def test_all_ranks_hold_the_same_bits_at_every_step(self):
        for key, logs in self.runs.items():
            for step in range(STEPS):
                for log in logs:
                    with self.subTest(key=key, step=step):
                        self.assertTrue(torch.equal(log["params"][step + 1], logs[0]["params"][step + 1]))
                        for name, found in log["grads"][step].items():
                            expected = logs[0]["grads"][step][name]
                            self.assertTrue(found is expected is None or torch.equal(found, expected))

    def test_training_begins_with_rank_0s_model_and_moves(self):
        for logs in self.runs.values():
            for log in logs:
                self.assertTrue(torch.equal(log["params"][0], gather_flat_params(Everything(seed=1))))
                self.assertFalse(torch.equal(log["params"][0], log["params"][1]))

    def test_sizes_of_buckets_do_not_matter_to_two_ranks(self):
        for small, large in zip(self.runs[2, TINY], self.runs[2, 25], strict=True):
            self.assertTrue(torch.equal(small["params"][-1], large["params"][-1]))  # a + b has one order only

    def test_order_of_threads_does_not_matter(self):
        expected = self.runs[3, TINY][0]["params"][-1]
        for seed in range(20, 25):
            for log in virtual(3, train, Everything, TINY, seed=seed):
                self.assertTrue(torch.equal(log["params"][-1], expected))


class TestCosts(unittest.TestCase):
    def test_one_all_reduce_a_bucket_and_step_and_nothing_else(self):
        sizes = [5, 5, 25, 25, 1]  # head.bias, middle.bias, middle.weight, the tied weight, scale; nothing frozen
        for log in virtual(3, train, Everything, TINY):
            self.assertEqual(log["notes"], [("all_reduce", size + 1) for size in sizes] * STEPS)
            self.assertEqual(log["control"], 0)

    def test_payload_is_the_gradient_a_flag_a_parameter_and_with_notes_nine_elements_a_rank_and_bucket(self):
        def bytes_of_a_step(comm, cap, **noted):
            ddp = DistributedDataParallel(ThreeLayers(), cap, comm, **noted)
            before = comm.counters.bytes["all_reduce"]
            backward(ddp, comm.rank)
            return comm.counters.bytes["all_reduce"] - before, comm.counters.calls["all_reduce"]

        for cap, calls in ((25, 1), (TINY, 6), (200 / 2**20, 3)):
            for notes, noted in ((0, {}), (9 * 2 * calls, {"weighted": True}), (9 * 2 * calls, {"check_finite": True})):
                for found in virtual(2, functools.partial(bytes_of_a_step, **noted), cap):
                    self.assertEqual(found, (4 * (flat_param_numel(ThreeLayers()) + 6 + notes), calls))

    def test_on_the_wire_it_is_the_rings_formula(self):
        def wire(comm):
            ddp = DistributedDataParallel(ThreeLayers(), 25, comm)
            before = comm.mesh.counters.bytes_sent
            backward(ddp, comm.rank)
            return comm.mesh.counters.bytes_sent - before

        numel = flat_param_numel(ThreeLayers()) + 6  # 129 = 3 * 43
        self.assertEqual(virtual(3, wire), [2 * 4 * numel * 2 // 3] * 3)

    def test_the_first_bucket_is_a_small_one(self):
        def plan(comm):
            module = nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(8)])  # 0.34 MiB each
            ddp = DistributedDataParallel(module, 1.5, comm)
            return [[slot.name for slot in bucket.slots] for bucket in ddp.reducer.buckets]

        expected = [
            ["7.weight", "6.weight"],
            ["5.weight", "4.weight", "3.weight", "2.weight"],
            ["1.weight", "0.weight"],
        ]
        self.assertEqual(virtual(2, plan), [expected] * 2)

    def test_caps_without_an_end(self):
        def plan(comm):
            return len(DistributedDataParallel(ThreeLayers(), float("inf"), comm).reducer.buckets)

        self.assertEqual(virtual(2, plan), [1, 1])


class TestOverlap(unittest.TestCase):
    def test_buckets_leave_in_order_while_backward_goes_on(self):
        def watch(comm):
            module = ThreeLayers()
            for name, param in module.named_parameters():
                param.register_post_accumulate_grad_hook(lambda _, name=name: comm.notes.append(name))
            ddp = DistributedDataParallel(module, TINY, comm)
            comm.notes.clear()
            backward(ddp, comm.rank)
            return comm.notes

        for notes in virtual(2, watch):
            launches = [note for note in notes if isinstance(note, tuple)]
            self.assertEqual([size for _, size in launches], [4, 19, 7, 49, 9, 41])  # distinct: order is visible
            gradients = [note for note in notes if isinstance(note, str)]
            self.assertEqual(len(gradients), 6)
            self.assertLess(notes.index(launches[0]), notes.index(gradients[-1]))
            self.assertEqual(notes.index(launches[0]), notes.index("layers.4.bias") + 1)  # at once
            self.assertEqual(notes[-1], launches[-1])

    def test_a_late_first_bucket_holds_the_others_back(self):
        class Backwards(nn.Module):  # registered in the order opposite to that of use
            def __init__(self):
                super().__init__()
                self.last, self.middle, self.first = nn.Linear(6, 3), nn.Linear(8, 6), nn.Linear(5, 8)

            def forward(self, x):
                return self.last(self.middle(self.first(x)))

        def watch(comm):
            ddp = DistributedDataParallel(Backwards(), TINY, comm)
            comm.notes.clear()
            backward(ddp, comm.rank)
            return comm.notes

        for notes in virtual(3, watch):
            self.assertEqual([size for _, size in notes], [9, 41, 7, 49, 4, 19])

    def test_ranks_that_finish_gradients_in_different_orders_launch_in_the_same(self):
        def watch(comm):
            module = Branches()
            ddp = DistributedDataParallel(module, TINY, comm)
            comm.notes.clear()
            ddp(data(comm.rank), "ab" if comm.rank else "ba").backward()
            return comm.notes, gather_flat_grads(module)

        results = virtual(3, watch)
        for notes, flat in results:
            self.assertEqual([size for _, size in notes], [3, 11, 3, 11])
            self.assertTrue(torch.equal(flat, results[0][1]))


class TestNoSync(unittest.TestCase):
    def run_micro(self, body, world_size=2):
        """Run `body(ddp, comm)` on ranks; return ([calls], [flat gradients])."""

        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            body(ddp, comm)
            return comm.counters.calls["all_reduce"], gather_flat_grads(module)

        results = virtual(world_size, rank)
        return [calls for calls, _ in results], [flat for _, flat in results]

    def test_four_microbatches_one_synchronisation_and_the_gradient_of_the_big_batch(self):
        def body(ddp, comm):
            for micro in range(3):
                with ddp.no_sync():
                    (ddp(data(comm.rank, micro)).square().mean() / 4).backward()
            (ddp(data(comm.rank, 3)).square().mean() / 4).backward()

        for world_size in (1, 2, 3):
            calls, flats = self.run_micro(body, world_size)
            self.assertEqual(calls, [1] * world_size)
            big, module = [data(rank, micro) for rank in range(world_size) for micro in range(4)], ThreeLayers()
            module(torch.cat(big)).square().mean().backward()
            for flat in flats:
                self.assertTrue(torch.equal(flat, flats[0]))
                torch.testing.assert_close(flat, gather_flat_grads(module), rtol=1e-5, atol=1e-7)

    def test_what_counts_is_where_backward_runs(self):
        def forward_outside(ddp, comm):
            loss = ddp(data(comm.rank)).square().mean()
            with ddp.no_sync():
                loss.backward()

        def forward_inside(ddp, comm):
            with ddp.no_sync():
                loss = ddp(data(comm.rank)).square().mean()
            loss.backward()

        self.assertEqual(self.run_micro(forward_outside)[0], [0, 0])
        self.assertEqual(self.run_micro(forward_inside)[0], [1, 1])

    def test_local_gradients_are_left_as_they_are(self):
        def body(ddp, comm):
            loss = ddp(data(comm.rank)).square().mean()
            with ddp.no_sync():
                loss.backward()
                ddp.sync_grads()  # does nothing here

        calls, flats = self.run_micro(body)
        self.assertEqual(calls, [0, 0])
        for rank, flat in enumerate(flats):
            module = ThreeLayers()
            backward(module, rank)
            self.assertTrue(torch.equal(flat, gather_flat_grads(module)))

    def test_nested_and_left_by_an_exception(self):
        def nested(ddp, comm):
            with ddp.no_sync():
                with ddp.no_sync():
                    backward(ddp, comm.rank)
                backward(ddp, comm.rank)  # still inside the outer one

        def interrupted(ddp, comm):
            try:
                with ddp.no_sync():
                    raise KeyError
            except KeyError:
                backward(ddp, comm.rank)

        self.assertEqual(self.run_micro(nested)[0], [0, 0])
        self.assertEqual(self.run_micro(interrupted)[0], [1, 1])

    def test_buckets_can_be_sent_after_backward(self):
        def body(ddp, comm):
            loss = ddp(data(comm.rank)).square().mean()
            with ddp.no_sync():
                loss.backward()
            ddp.sync_grads()
            ddp.sync_grads()

        calls, flats = self.run_micro(body)
        self.assertEqual(calls, [1, 1])
        self.assertTrue(torch.equal(*flats))
        self.assertTrue(torch.equal(flats[0], self.run_micro(lambda ddp, comm: backward(ddp, comm.rank))[1][0]))

    def test_synchronising_again_does_nothing(self):
        def body(ddp, comm):
            ddp.sync_grads()  # before anything
            backward(ddp, comm.rank)
            ddp.sync_grads()
            ddp.sync_grads()

        self.assertEqual(self.run_micro(body)[0], [1, 1])

    def test_a_forward_without_gradients_arms_nothing(self):
        def body(ddp, comm):
            with torch.no_grad():
                ddp(data(comm.rank))
            ddp.sync_grads()

        self.assertEqual(self.run_micro(body)[0], [0, 0])

    def test_a_forward_inside_no_sync_arms_nothing(self):
        def body(ddp, comm):
            with ddp.no_sync():
                ddp(data(comm.rank))
            ddp.sync_grads()

        self.assertEqual(self.run_micro(body)[0], [0, 0])

    def test_two_backwards_before_a_step_add_up(self):
        def body(ddp, comm):
            backward(ddp, comm.rank, step=0)
            backward(ddp, comm.rank, step=1)

        calls, flats = self.run_micro(body)
        self.assertEqual(calls, [2, 2])
        module = ThreeLayers()
        for rank in range(2):
            for step in range(2):
                backward(module, rank, step)
        self.assertTrue(torch.equal(*flats))
        torch.testing.assert_close(flats[0], gather_flat_grads(module) / 2, rtol=1e-6, atol=1e-8)

    def test_the_same_graph_twice(self):
        def body(ddp, comm):
            loss = ddp(data(comm.rank)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()

        calls, flats = self.run_micro(body)
        self.assertEqual(calls, [2, 2])
        once = self.run_micro(lambda ddp, comm: backward(ddp, comm.rank))[1][0]
        torch.testing.assert_close(flats[0], 2 * once, rtol=1e-6, atol=1e-8)


class TestMissingGradients(unittest.TestCase):
    def branch_grads(self, world_size, use, cap=25, steps=1):
        """Run `steps` steps where rank r uses the branches use(r, step); return what each rank has at the end."""

        def rank(comm):
            module = Branches()
            ddp = DistributedDataParallel(module, cap, comm)
            for step in range(steps):
                module.zero_grad()
                ddp(data(comm.rank), use(comm.rank, step)).backward()
            return grads(module), comm.counters.calls["all_reduce"]

        return virtual(world_size, rank)

    def test_a_branch_used_on_one_rank_only_counts_zeros_on_the_others(self):
        for cap, calls in ((25, 1), (TINY, 4)):
            for world_size in (2, 3):
                results = self.branch_grads(world_size, lambda rank, _: "a" if rank == 0 else "b", cap)
                module = Branches()
                module(data(0), "a").backward()
                local = grads(module)
                for found, count in results:
                    self.assertEqual(count, calls)
                    for name in ("a.weight", "a.bias"):
                        torch.testing.assert_close(found[name], local[name] / world_size, rtol=1e-6, atol=0)
                    for name, grad in results[0][0].items():
                        self.assertTrue(torch.equal(found[name], grad))  # replicas cannot drift apart

    def test_unused_everywhere_stays_none(self):
        for found, _ in self.branch_grads(3, lambda *_: "a"):
            self.assertIsNone(found["b.weight"])
            self.assertIsNone(found["b.bias"])
            self.assertIsNotNone(found["a.weight"])

    def test_what_was_used_before_does_not_come_back(self):
        """Stale values in the bucket and stale flags must not leak into a later step."""
        for found, _ in self.branch_grads(2, lambda rank, step: "ab" if step == 0 else "a", steps=2):
            self.assertIsNone(found["b.weight"])
        (one, _), (two, _) = self.branch_grads(2, lambda rank, step: "ab" if (rank, step) != (1, 1) else "a", steps=2)
        module = Branches()
        module(data(0), "b").backward()
        self.assertTrue(torch.equal(one["b.weight"], module.b.weight.grad / 2))
        self.assertTrue(torch.equal(two["b.weight"], one["b.weight"]))
        plan = {0: ("ab", "ab"), 1: ("a", "b"), 2: ("b", "b")}
        found = self.branch_grads(2, lambda rank, step: plan[step][rank], steps=3)
        self.assertIsNone(found[0][0]["a.bias"])
        self.assertTrue(torch.equal(found[0][0]["b.bias"], found[1][0]["b.bias"]))

    def test_momentum_does_not_move_what_no_rank_used(self):
        def rank(comm):
            module, momentum = Branches(), {}
            ddp = DistributedDataParallel(module, 25, comm)
            for use in ("ab", "a"):
                module.zero_grad()
                ddp(data(comm.rank), use).backward()
                before = module.b.weight.detach().clone()
                with torch.no_grad():
                    for name, param in module.named_parameters():
                        if param.grad is not None:
                            momentum[name] = 0.9 * momentum.get(name, 0) + param.grad
                            param.sub_(0.1 * momentum[name])
            return torch.equal(module.b.weight, before), momentum["b.weight"].abs().max().item() > 0

        self.assertEqual(virtual(2, rank), [(True, True)] * 2)

    def test_kept_gradients_of_an_unused_parameter_stay_the_mean(self):
        def rank(comm):  # no zero_grad between: b's mean is still there when only rank 0 uses b
            module = Branches()
            ddp = DistributedDataParallel(module, 25, comm)
            ddp(data(comm.rank), "b").backward()
            before = module.b.weight.grad.clone()
            ddp(data(comm.rank), "a" if comm.rank else "ab").backward()
            return before, module.b.weight.grad

        (before, first), (_, second) = virtual(2, rank)
        self.assertTrue(torch.equal(first, second))
        torch.testing.assert_close(first, 2 * before - self.local_b(1) / 2, rtol=1e-5, atol=1e-6)

    def local_b(self, rank):
        module = Branches()
        module(data(rank), "b").backward()
        return module.b.weight.grad

    def test_a_loss_that_does_not_touch_the_module(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            out, other = ddp(data(comm.rank)), torch.ones(1, requires_grad=True)
            (out if comm.rank == 0 else other).square().mean().backward()
            ddp.sync_grads()  # on rank 0 backward has done it
            return gather_flat_grads(module), comm.counters.calls["all_reduce"]

        module = ThreeLayers()
        backward(module, 0)
        for flat, calls in virtual(2, rank):
            self.assertEqual(calls, 1)
            self.assertTrue(torch.equal(flat, gather_flat_grads(module) / 2))


class TestLifetime(unittest.TestCase):
    def test_a_gradient_after_its_bucket_left_is_an_error(self):
        def rank(comm):
            module = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))

            class Again(
                torch.autograd.Function
            ):  # in the middle of backward, another one reaches a weight that is done
                @staticmethod
                def forward(ctx, x):
                    return x.clone()

                @staticmethod
                def backward(ctx, grad):
                    with torch.enable_grad():
                        module[1].weight.square().sum().backward()
                    return grad

            ddp = DistributedDataParallel(module, TINY, comm)
            module[1](Again.apply(module[0](data(comm.rank)))).sum().backward()
            del ddp

        _, error = cause(2, rank)
        self.assertIsInstance(error, RuntimeError)
        self.assertRegex(str(error), r"\b1\.weight\b")

    def test_a_backward_that_failed_makes_the_next_one_an_error(self):
        def rank(comm):
            module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
            ddp = DistributedDataParallel(module, 25, comm)
            try:
                module[1](Fails.apply(module[0](data(comm.rank)))).sum().backward()
            except MemoryError:
                module.zero_grad()
            backward(ddp, comm.rank)

        _, error = cause(2, rank)
        self.assertRegex(str(error), "an earlier backward ended with an error")

    def test_a_dropped_wrapper_stops_communicating(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            backward(ddp, comm.rank)
            del ddp
            gc.collect()
            module.zero_grad()
            backward(module, comm.rank)
            alone = gather_flat_grads(module)
            again = DistributedDataParallel(module, TINY, comm)
            module.zero_grad()
            backward(again, comm.rank)
            return alone, gather_flat_grads(module), comm.counters.calls["all_reduce"]

        results = virtual(2, rank)
        for r, (alone, mean, calls) in enumerate(results):
            module = ThreeLayers()
            backward(module, r)
            self.assertTrue(torch.equal(alone, gather_flat_grads(module)))
            self.assertTrue(torch.equal(mean, (results[0][0] + results[1][0]) / 2))
            self.assertEqual(calls, 1 + 6)

    def test_a_copy_of_the_module_is_on_its_own(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            backward(ddp, comm.rank)
            average = copy.deepcopy(module)  # as for a moving average of the weights
            average.zero_grad()
            if comm.rank == 0:
                backward(average, 0)  # would wait for ever if it communicated
            return comm.counters.calls["all_reduce"]

        self.assertEqual(virtual(2, rank), [1, 1])

    def test_activation_checkpointing(self):
        from torch.utils.checkpoint import checkpoint

        def rank(comm, reentrant):
            module = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 5))
            ddp = DistributedDataParallel(module, 25, comm)
            x = data(comm.rank).requires_grad_()
            out = module[1](checkpoint(module[0], x, use_reentrant=reentrant))
            out.square().mean().backward()
            del ddp
            return gather_flat_grads(module), comm.counters.calls["all_reduce"]

        torch.manual_seed(3)
        for reentrant in (False, True):
            first, second = virtual(2, rank, reentrant)
            self.assertEqual((first[1], second[1]), (1, 1))
            self.assertTrue(torch.equal(first[0], second[0]))

    def test_a_backward_inside_backward_synchronises_once_more_and_is_right(self):
        from torch.utils.checkpoint import checkpoint

        def rank(comm):
            ddp = DistributedDataParallel(ThreeLayers(), 25, comm)
            x = data(comm.rank).requires_grad_()
            for half in x[:1], x[1:]:  # all parameters are reached by inner backwards only, twice
                checkpoint(ddp, half, use_reentrant=True).square().mean().backward()
            return gather_flat_grads(ddp)

        results, expected = virtual(2, rank), 0
        for r in range(2):
            module = ThreeLayers()
            for half in data(r)[:1], data(r)[1:]:
                module(half).square().mean().backward()
            expected = expected + gather_flat_grads(module) / 2
        for flat in results:
            torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-7)


class TestRefusals(unittest.TestCase):
    def test_size_of_buckets(self):
        for cap in (0, -1, float("nan"), -0.0):
            messages = refusals(2, lambda comm, cap=cap: DistributedDataParallel(ThreeLayers(), cap, comm))
            self.assertEqual(messages, [f"bucket_cap_mb must be positive, got {cap!r}"] * 2)

    def test_sizes_of_buckets_that_differ(self):
        modules = [ThreeLayers(seed=rank) for rank in range(3)]
        before = [gather_flat_params(module) for module in modules]
        messages = refusals(3, lambda comm: DistributedDataParallel(modules[comm.rank], 25 + comm.rank // 2, comm))
        self.assertEqual(messages, [messages[0]] * 3)
        self.assertIn("bucket_cap_mb: rank 0, 1 has 25; rank 2 has 26", messages[0])
        for module, params in zip(modules, before, strict=True):  # nothing was broadcast
            self.assertTrue(torch.equal(gather_flat_params(module), params))

    def test_modules_that_cannot_be_trained(self):
        complex_one = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
        for module, words in ((nn.ReLU(), "ReLU has no parameter"), (complex_one, "0 is torch.complex64")):
            messages = refusals(2, lambda comm, module=module: DistributedDataParallel(module, 25, comm))
            self.assertEqual(messages, [messages[0]] * 2)
            self.assertIn(words, messages[0])

    def test_models_that_differ_and_nothing_is_changed(self):
        def rank(comm):
            module = ThreeLayers(seed=comm.rank)
            if comm.rank == 1:
                module.layers[2].requires_grad_(False)
            before = gather_flat_params(module)
            try:
                DistributedDataParallel(module, 25, comm)
            except ValueError as error:
                hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
                return str(error), torch.equal(gather_flat_params(module), before), any(hooks)

        results = virtual(3, rank)
        self.assertEqual(results, [results[0]] * 3)
        self.assertEqual(results[0][1:], (True, False))
        self.assertIn("ranks disagree on the model: layers.2.weight: rank 0, 2 has", results[0][0])

    def test_without_a_group(self):
        with self.assertRaisesRegex(RuntimeError, "no process group"):
            DistributedDataParallel(ThreeLayers())


if __name__ == "__main__":
    unittest.main()
