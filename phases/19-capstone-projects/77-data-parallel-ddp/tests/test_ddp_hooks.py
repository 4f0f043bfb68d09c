import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from comm import Work
from ddp import DistributedDataParallel
from ddp_cases import Branches, NotingComm, ThreeLayers, cause, data, grads, refusals, virtual
from finite import NonFiniteGradient, is_finite
from flat import gather_flat_grads, gather_flat_params
from hooks import average, bf16_bound, bf16_compress
from ranks import run_ranks
from torch import nn
from toy import sgd_step

TINY = 1e-9  # megabytes: every parameter a bucket of its own


def one_step(comm, options, samples=None, cap=25):
    """Be one rank: a step; return (the mean gradient, bytes of its all-reduces)."""
    module = ThreeLayers()
    ddp = DistributedDataParallel(module, cap, comm, weighted=samples is not None, **options)
    if samples:
        ddp.samples = samples[comm.rank]
    ddp(data(comm.rank)).square().mean().backward()
    return gather_flat_grads(module), comm.counters.bytes["all_reduce"]


def local_gradients(world_size):
    """Return every rank's own gradient, (N, P)."""
    found = []
    for rank in range(world_size):
        module = ThreeLayers()
        module(data(rank)).square().mean().backward()
        found.append(gather_flat_grads(module))
    return torch.stack(found)


class TestHooks(unittest.TestCase):
    def test_bf16_is_within_its_bound_and_has_half_the_bytes(self):
        for n in (1, 2, 3, 4, 8):
            for cap in (TINY, 25):
                plain = virtual(n, one_step, {}, None, cap)
                small = virtual(n, one_step, {"hook": bf16_compress}, None, cap)
                local = local_gradients(n)
                error = (small[0][0].double() - local.double().mean(0)).abs()
                self.assertTrue((error <= bf16_bound(local)).all())
                self.assertGreater(error.max().item(), 0)  # something was rounded
                self.assertGreater((error / bf16_bound(local)).max().item(), 0.1)  # and the bound is not idle
                for (grad, payload), (_, full) in zip(small, plain, strict=True):
                    self.assertTrue(torch.equal(grad, small[0][0]))
                    self.assertEqual(2 * payload, full)

    def test_every_rank_more_may_round_once_more(self):
        def rank(comm):  # each 256 is followed by ones, and 256 + 1 is 256 again
            memory = torch.ones(64).index_fill(0, torch.arange(comm.rank, 64, 8), 256.0)
            bf16_compress(comm, memory).wait()
            return memory

        local = torch.stack([torch.ones(64).index_fill(0, torch.arange(rank, 64, 8), 256.0) for rank in range(8)])
        for found in virtual(8, rank):
            error = (found.double() - local.double().mean(0)).abs()
            self.assertTrue((error <= bf16_bound(local)).all())
            self.assertTrue((error > bf16_bound(local[:1] * 0 + local.mean(0))).any())  # what one rank may round

    def test_launching_does_not_wait(self):
        def rank(comm, hook):
            events = []

            def late(memory, **options):
                def arrive():
                    events.append("wait")
                    NotingComm.all_reduce(comm, memory, "avg")

                events.append("launch")
                return Work("all_reduce", arrive)

            comm.all_reduce = late  # what it returns is there after `wait`, and not before
            comm.unchecked = lambda: comm
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, TINY, comm, hook=hook)
            ddp(data(comm.rank)).square().mean().backward()
            return events, gather_flat_grads(module)

        for hook in (average, bf16_compress):
            for events, found in virtual(2, rank, hook):
                self.assertEqual(events, ["launch"] * 6 + ["wait"] * 6)
                self.assertTrue(torch.equal(found, virtual(2, one_step, {"hook": hook}, None, TINY)[0][0]))

    def test_bf16_keeps_weights_exact(self):
        for n in (2, 3):
            weights = [301.0, 1.0, 0.0][:n]
            found = virtual(n, one_step, {"hook": bf16_compress}, weights)
            local, shares = local_gradients(n).double(), torch.tensor(weights).double()[:, None] / sum(weights)
            scaled = local * shares * n  # the mean of these is the weighted mean
            error = (found[0][0].double() - scaled.mean(0)).abs()
            self.assertTrue((error <= bf16_bound(scaled) * 1.001).all())

    def test_bf16_and_missing_gradients(self):
        def rank(comm):
            module = Branches()
            ddp = DistributedDataParallel(module, 25, comm, hook=bf16_compress)
            ddp(data(comm.rank), "a").backward()
            return grads(module)

        for found in virtual(3, rank):
            self.assertIsNone(found["b.weight"])
            self.assertIsNotNone(found["a.weight"])

    def test_a_hook_of_ones_own_replaces_the_all_reduce(self):
        def gather_then_add(comm, memory):
            everyone = memory.new_empty(comm.world_size * len(memory))
            comm.all_gather(everyone, memory)
            memory.copy_(everyone.view(comm.world_size, -1).mean(0))
            return comm.exchange([], [])  # work that is done

        def rank(comm):
            return *one_step(comm, {"hook": gather_then_add}), dict(comm.counters.calls)

        for (grad, payload, calls), (expected, _) in zip(virtual(2, rank), virtual(2, one_step, {}), strict=True):
            self.assertTrue(torch.equal(grad, expected))
            self.assertEqual(payload, 0)
            self.assertEqual(calls["all_gather"], 1)

    def test_the_default_is_the_average(self):
        for (a, _), (b, _) in zip(virtual(3, one_step, {}), virtual(3, one_step, {"hook": average}), strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_what_does_not_fit_is_refused_before_anything_changes(self):
        def half(comm):
            module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
            DistributedDataParallel(module, 25, comm, hook=bf16_compress)

        words = "hook hooks.bf16_compress takes torch.float32, but parameter 1.weight is torch.bfloat16"
        self.assertEqual(refusals(2, half), [words] * 2)
        messages = refusals(2, lambda comm: DistributedDataParallel(ThreeLayers(), 25, comm, hook="bf16"))
        self.assertEqual(messages, ["hook must be a function (comm, memory) -> Work, got 'bf16'"] * 2)

    def test_hooks_that_differ(self):
        def rank(comm):
            DistributedDataParallel(ThreeLayers(), 25, comm, hook=bf16_compress if comm.rank == 1 else average)

        messages = refusals(3, rank)
        self.assertEqual(messages, [messages[0]] * 3)
        self.assertIn('hook: rank 0, 2 has "hooks.average"; rank 1 has "hooks.bf16_compress"', messages[0])


def spoilt(comm, bad, check_finite=True, cap=TINY):
    """Be one rank; bad[rank] is a value that replaces an element of the second layer's gradient. Three steps."""
    module, seen = ThreeLayers(), []
    ddp = DistributedDataParallel(module, cap, comm, check_finite=check_finite)
    for step in range(3):
        if step == 1 and comm.rank in bad:
            spoil = module.layers[2].bias.register_hook(
                lambda grad: grad.index_fill(0, torch.tensor(2), bad[comm.rank])
            )
        before = gather_flat_params(module)
        try:
            ddp(data(comm.rank, step)).square().mean().backward()
        except NonFiniteGradient as error:
            seen.append([step, error.ranks, error.names, str(error)])
            module.zero_grad()  # so the step is skipped: sgd_step moves nothing that has no gradient
        if step == 1 and comm.rank in bad:
            spoil.remove()
        sgd_step(module, 0.1)
        if seen and seen[-1][0] == step:
            seen[-1].append(torch.equal(before, gather_flat_params(module)))
    return seen, gather_flat_params(module), comm.counters.control_calls


class TestFinite(unittest.TestCase):
    def test_all_ranks_raise_and_know_whose_it_was(self):
        nan, inf = float("nan"), float("inf")
        for cap in (TINY, 25):
            for bad, ranks in (({1: nan}, [1]), ({0: inf, 2: nan}, [0, 2]), ({0: inf, 1: -inf, 2: inf}, [0, 1, 2])):
                names = ["layers.2.bias"]
                text = f"the gradient of layers.2.bias is not finite on rank {', '.join(map(str, ranks))}"
                results = virtual(3, spoilt, bad, True, cap)
                for seen, params, control in results:
                    self.assertEqual(seen, [[1, ranks, names, text, True]])  # raised, and nothing moved
                    self.assertTrue(params.isfinite().all())
                    self.assertTrue(torch.equal(params, results[0][1]))
                    self.assertEqual(control, 2)  # no message beyond those of wrapping

    def test_without_the_option_nan_reaches_everybody(self):
        for seen, params, _ in virtual(2, spoilt, {1: float("nan")}, False):
            self.assertEqual(seen, [])
            self.assertTrue(params.isnan().any())

    def test_with_nothing_wrong_it_changes_nothing(self):
        for (a, one, _), (b, two, _) in zip(virtual(2, spoilt, {}), virtual(2, spoilt, {}, False), strict=True):
            self.assertEqual((a, b), ([], []))
            self.assertTrue(torch.equal(one, two))

    def test_each_element_counts_and_not_their_sum(self):
        nan, inf = float("nan"), float("inf")
        for finite in ([], [0.0], [3e38, 3e38], [-3e38, -3e38, 1.0]):  # some sums overflow
            self.assertTrue(is_finite(torch.tensor(finite)))
        for bad in ([nan], [inf], [-inf], [inf, -inf], [1.0, -inf, 2.0], [nan, inf]):
            self.assertFalse(is_finite(torch.tensor(bad)))

    def test_every_bad_bucket_and_its_rank_is_named(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, TINY, comm, check_finite=True)
            spoilt = {1: module.layers[0].weight, 2: module.layers[4].bias}.get(comm.rank)
            if spoilt is not None:
                spoilt.register_hook(lambda grad: grad * float("nan"))
            try:
                ddp(data(comm.rank)).square().mean().backward()
            except NonFiniteGradient as error:
                return error.ranks, sorted(error.names)

        self.assertEqual(virtual(3, rank), [([1, 2], ["layers.0.weight", "layers.4.bias"])] * 3)

    def test_buffers_are_rank_0s_though_a_gradient_was_not(self):
        def rank(comm):
            module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
            module[0].weight.register_hook(lambda grad: grad * (float("nan") if comm.rank == 1 else 1))
            ddp = DistributedDataParallel(module, 25, comm, check_finite=True)
            try:
                ddp(data(comm.rank)).square().sum().backward()
            except NonFiniteGradient:
                return module[1].running_mean

        found = virtual(2, rank)
        self.assertTrue(torch.equal(*found))
        self.assertTrue(found[0].any())

    def test_a_sum_that_overflows_is_nobodys(self):
        def rank(comm):
            module = nn.Linear(1, 1, bias=False)
            ddp = DistributedDataParallel(module, 25, comm, check_finite=True)
            try:
                ddp(torch.full((1, 1), 3e38)).sum().backward()
            except NonFiniteGradient as error:
                return str(error)

        text = "the mean gradient of weight is not finite, though every rank's own was: the sum overflowed"
        self.assertEqual(virtual(2, rank), [text] * 2)

    def test_many_names_are_shortened(self):
        error = NonFiniteGradient([3], list("abcde"))
        self.assertEqual(str(error), "the gradient of a, b, c and 2 more is not finite on rank 3")

    def test_ranks_must_agree_to_check(self):
        def rank(comm):
            DistributedDataParallel(ThreeLayers(), 25, comm, check_finite=comm.rank == 0)

        messages = refusals(2, rank)
        self.assertIn("check_finite: rank 0 has true; rank 1 has false", messages[0])
        self.assertEqual(messages[0], messages[1])

    def test_uncaught_it_ends_the_run_and_names_the_parameter(self):
        def rank(comm):
            ddp = DistributedDataParallel(ThreeLayers(), 25, comm, check_finite=True)
            ddp(data(comm.rank) * (float("nan") if comm.rank == 1 else 1)).square().mean().backward()

        _, error = cause(2, rank)
        self.assertIsInstance(error, NonFiniteGradient)
        self.assertEqual(error.ranks, [1])
        self.assertEqual(len(error.names), 6)


class TestOverGloo(unittest.TestCase):
    def test_the_same_between_processes(self):
        results = run_ranks(over_gloo, 3, timeout=60.0)
        local = local_gradients(3)
        for compressed, weighted, error in results:
            self.assertTrue(torch.equal(compressed, results[0][0]))
            self.assertTrue(((compressed.double() - local.double().mean(0)).abs() <= bf16_bound(local)).all())
            expected = (local.double() * torch.tensor([1.0, 300.0, 301.0]).double()[:, None]).sum(0) / 602
            torch.testing.assert_close(weighted.double(), expected, rtol=1e-5, atol=1e-8)
            self.assertEqual(error, ([1], "layers.2.bias"))


def over_gloo(rank, world_size):
    """Return (gradient sent as bf16, weighted gradient, who was not finite)."""
    from comm import TorchComm

    comm = TorchComm()
    compressed = one_step(comm, {"hook": bf16_compress}, None, 200 / 2**20)[0]
    weighted = one_step(comm, {}, [1, 300, 301], 200 / 2**20)[0]
    seen, *_ = spoilt(comm, {1: float("nan")})
    return compressed, weighted, (seen[0][1], seen[0][2][0])


if __name__ == "__main__":
    unittest.main()
