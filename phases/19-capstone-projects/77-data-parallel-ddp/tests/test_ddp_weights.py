import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import notes
import torch
from ddp import DistributedDataParallel
from ddp_cases import EPS, Branches, Everything, ThreeLayers, cause, data, grads, refusals, virtual
from flat import gather_flat_grads, gather_flat_params, scatter_flat_to_params
from ranks import RankError, run_ranks
from torch import nn
from toy import sgd_step
from uneven import uneven

TINY = 1e-9  # megabytes: every parameter a bucket of its own


class Scale(nn.Module):
    """One parameter w, loss = mean(w x): its gradient is the mean of x."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x):
        return (self.w * x).mean()


def weighted_gradient(comm, batches, dtype=torch.float32, samples=None):
    """Be one rank: one step on its batch, weighted by its rows (or as `samples` says)."""
    module = Scale(dtype)
    ddp = DistributedDataParallel(module, 25, comm, weighted=True)
    x = torch.tensor(batches[comm.rank], dtype=dtype)
    ddp.samples = len(x) if samples is None else samples[comm.rank]
    ddp(x).backward()
    return module.w.grad, comm.counters.calls["all_reduce"]


class TestNotes(unittest.TestCase):
    def read_back(self, weights, dtype, rounded=None):
        """Write each rank's page, take the mean as a collective does, and read."""
        n = len(weights)
        like = torch.empty(0, dtype=dtype)
        total = sum(notes.page(weight, rank, n, like) for rank, weight in enumerate(weights))
        mean = total / n
        return notes.read(mean.to(rounded).to(dtype) if rounded else mean, n)

    def test_weights_come_back_exactly(self):
        values = [0.0, 1.0, 300.0, 301.0, 2.0**24 - 1, 0.1, 1e-45, 3e38, 1 / 3]
        for n in (1, 2, 3, 4, 5, 8, 9, 100):
            weights = [notes.check_weight((values * 12)[rank]) for rank in range(n)]
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                for rounded in (None, torch.bfloat16):
                    with self.subTest(n=n, dtype=dtype, rounded=rounded):
                        found, bad = self.read_back(weights, dtype, rounded)
                        self.assertEqual(found.tolist(), weights)
                        self.assertFalse(bad.any())

    def test_whose_gradients_are_not_finite(self):
        total = sum(notes.page(1.0, rank, 3, torch.empty(0)) for rank in range(3))
        total[notes.SIZE * 2 - 1] += 1
        self.assertEqual(notes.read(total / 3, 3)[1].tolist(), [False, True, False])

    def test_what_is_no_weight(self):
        for bad in (-1, -0.5, float("nan"), float("inf"), 1e39, 1e-60, True, "3", None, torch.tensor(3)):
            with self.assertRaisesRegex(ValueError, "samples must be"):
                notes.check_weight(bad)
        for good, found in ((3, 3.0), (0, 0.0), (-0.0, 0.0), (2.5, 2.5), (0.1, torch.tensor(0.1).item())):
            self.assertEqual(str(notes.check_weight(good)), str(found))


class TestWeightedMean(unittest.TestCase):
    def test_batches_of_two_and_one(self):
        for grad, calls in virtual(2, weighted_gradient, [[1.0, 2.0], [3.0]]):
            self.assertEqual((grad.item(), calls), (2.0, 1))  # the mean of means would be 2.25
        for grad, _ in virtual(2, weighted_gradient, [[1.0, 2.0], [3.0]], torch.float32, [1, 1]):
            self.assertEqual(grad.item(), 2.25)

    def test_only_the_ratio_counts(self):
        for samples in ([2, 1], [2e-30, 1e-30], [1, 0.5], [2e9, 1e9]):
            for grad, _ in virtual(2, weighted_gradient, [[1.0, 2.0], [3.0]], torch.float32, samples):
                self.assertAlmostEqual(grad.item(), 2.0, delta=4e-7)

    def test_many_samples_in_sixteen_bits(self):
        """A large weight and seven of 1, added one by one in bf16 or fp16, would be the large one again."""
        for dtype, most in ((torch.bfloat16, 512), (torch.float16, 4096)):
            weights, gradients = [most] + [1] * 7, [[1.0]] + [[0.0]] * 7  # so only the total can go wrong
            self.assertNotEqual(torch.tensor(most / (most + 7), dtype=dtype).item(), 1.0)
            for grad, _ in virtual(8, weighted_gradient, gradients, dtype, weights):
                self.assertEqual(grad.dtype, dtype)
                self.assertEqual(grad.item(), torch.tensor(most / (most + 7), dtype=dtype).item())

    def test_sixteen_bits_round_a_product_a_sum_and_two_quotients(self):
        for dtype in (torch.bfloat16, torch.float16):
            for weights in ([300, 301, 1], [257, 257, 257], [0, 999, 31]):
                gradients = [0.7, -1.3, 2.1]
                unit = torch.finfo(dtype).eps / 2
                held = [torch.tensor(g, dtype=dtype).item() for g in gradients]
                exact = sum(w * g for w, g in zip(weights, held, strict=True)) / sum(weights)
                magnitude = sum(abs(w * g) for w, g in zip(weights, held, strict=True)) / sum(weights)
                for grad, _ in virtual(3, weighted_gradient, [[g] for g in gradients], dtype, weights):
                    self.assertLessEqual(abs(grad.item() - exact), ((1 + unit) ** 5 - 1) * magnitude)

    def test_every_number_of_ranks_against_one_process(self):
        """Rank r has r + 1 rows; step by step, with tied, frozen and 0-dim parameters, in many buckets and in one."""

        def train(comm, cap):
            module, log = Everything(), []
            ddp = DistributedDataParallel(module, cap, comm, weighted=True)
            for step in range(3):
                x = data(comm.rank, step, rows=comm.rank + 1)
                ddp.samples = len(x)
                before = gather_flat_params(module)
                ddp(x).square().mean(dim=1).mean().backward()
                log.append((before, gather_flat_grads(module)))
                sgd_step(module, 0.1)
            return log

        for n in (1, 2, 3, 4, 8):
            for cap in (TINY, 25):
                logs = virtual(n, train, cap, seed=n)
                for step in range(3):
                    before, grad = logs[0][step]
                    self.assertTrue(all(torch.equal(log[step][1], grad) for log in logs))
                    exact, magnitude = 0, 0
                    for rank in range(n):
                        module = Everything()
                        scatter_flat_to_params(module, before)
                        module(data(rank, step, rows=rank + 1)).square().mean(dim=1).mean().backward()
                        share = (rank + 1) / (n * (n + 1) / 2)
                        exact = exact + share * gather_flat_grads(module).double()
                        magnitude = magnitude + share * gather_flat_grads(module).double().abs()
                    bound = (2 * (n - 1) + 3) * EPS * magnitude  # and: times a weight, two divisions, one more rounding
                    self.assertLessEqual(((grad.double() - exact).abs() - bound).max().item(), 0, (n, cap, step))

    def test_equal_weights_other_than_one_cost_only_rounding(self):
        def rank(comm, samples):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm, weighted=True)
            ddp.samples = samples
            ddp(data(comm.rank)).square().mean().backward()
            return gather_flat_grads(module)

        self.assertTrue(torch.equal(virtual(2, rank, 1)[0], virtual(2, rank, 4)[0]))  # 4 is a power of two: exact
        torch.testing.assert_close(virtual(3, rank, 1)[0], virtual(3, rank, 7)[0], rtol=1e-6, atol=1e-8)

    def test_weights_and_missing_gradients(self):
        def rank(comm):
            module = Branches()
            ddp = DistributedDataParallel(module, 25, comm, weighted=True)
            ddp.samples = 3 if comm.rank == 0 else 1
            ddp(data(comm.rank), "a" if comm.rank == 0 else "b").backward()
            return grads(module)

        first, second = virtual(2, rank)
        module = Branches()
        module(data(0), "a").backward()
        torch.testing.assert_close(first["a.weight"], module.a.weight.grad * 0.75, rtol=1e-6, atol=0)
        for name in first:
            self.assertTrue(torch.equal(first[name], second[name]))

    def test_no_weight_anywhere_is_no_gradient(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, TINY, comm, weighted=True)
            ddp.samples = 0
            ddp(data(comm.rank)).square().mean().backward()
            left = [p.grad for p in module.parameters()]
            ddp.samples = 1
            ddp(data(comm.rank)).square().mean().backward()
            return left, gather_flat_grads(module).isfinite().all().item()

        self.assertEqual(virtual(3, rank), [([None] * 6, True)] * 3)

    def test_a_weight_of_zero_drops_even_nan(self):
        for grad, _ in virtual(2, weighted_gradient, [[5.0], [float("nan")]], torch.float32, [4, 0]):
            self.assertEqual(grad.item(), 5.0)

    def test_another_weight_in_each_step(self):
        steps = [[3, 1], [1, 1], [1, 4], [0, 2], [1, 1]]  # also back to 1, and of one rank only

        def rank(comm):
            module, found = Scale(), []
            ddp = DistributedDataParallel(module, 25, comm, weighted=True)
            for weights in steps:
                module.zero_grad()
                ddp.samples = weights[comm.rank]
                ddp(torch.tensor([8.0 if comm.rank == 0 else -2.0])).backward()
                found.append(module.w.grad.item())
            return found

        expected = [(8.0 * a - 2.0 * b) / (a + b) for a, b in steps]
        for found in virtual(2, rank):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

    def test_as_a_gpu_divides(self):
        """A GPU is not waited for: it divides by a tensor. The same steps, on the CPU."""
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):

            def rank(comm, dtype=dtype):
                module = Scale(dtype)
                ddp = DistributedDataParallel(module, 25, comm, weighted=True)
                (only,) = ddp.reducer.buckets
                only.mean_weight = lambda: (only.work.wait(), only._mean_on_device())[1]
                ddp.samples = 512 if comm.rank == 0 else 1
                ddp(torch.ones(1, dtype=dtype) if comm.rank == 0 else torch.zeros(1, dtype=dtype)).backward()
                mean = module.w.grad.item()
                module.zero_grad()
                ddp.samples = 0
                ddp(torch.ones(1, dtype=dtype)).backward()
                return mean, module.w.grad, bool(only.grad.isfinite().all())

            for found in virtual(8, rank):
                self.assertEqual(found, (torch.tensor(512 / 519, dtype=dtype).item(), None, True))

    def test_only_a_weighted_wrapper_takes_weights(self):
        def rank(comm):
            ddp, words = DistributedDataParallel(Scale(), 25, comm), []
            for call in (lambda: setattr(ddp, "samples", 3), ddp.without_data):
                try:
                    call()
                except RuntimeError as error:
                    words.append(str(error))
            return ddp.samples, words

        words = "ranks of different weights need DistributedDataParallel(..., weighted=True)"
        self.assertEqual(virtual(2, rank), [(1.0, [words] * 2)] * 2)

    def test_all_ranks_are_weighted_or_none(self):
        messages = refusals(2, lambda comm: DistributedDataParallel(Scale(), 25, comm, weighted=comm.rank == 0))
        self.assertEqual(len(set(messages)), 1)
        self.assertIn("weighted: rank 0 has true; rank 1 has false", messages[0])

    def test_a_step_without_data_leaves_the_weight_as_it_was(self):
        def rank(comm):
            ddp = DistributedDataParallel(Scale(), 25, comm, weighted=True)
            ddp.samples = 5
            if comm.rank:
                ddp.without_data()
            else:
                ddp(torch.ones(1)).backward()
            return ddp.samples

        self.assertEqual(virtual(2, rank), [5.0, 5.0])

    def test_it_stays_until_set_again_and_bad_ones_are_refused(self):
        def rank(comm):
            ddp = DistributedDataParallel(Scale(), 25, comm, weighted=True)
            first = ddp.samples
            ddp.samples = 7
            ddp(torch.ones(1)).backward()
            return first, ddp.samples

        self.assertEqual(virtual(2, rank), [(1.0, 7.0)] * 2)

        def refused(comm):
            DistributedDataParallel(Scale(), 25, comm, weighted=True).samples = -3

        self.assertEqual(refusals(2, refused), ["samples must be a finite number of at least 0, got -3"] * 2)


def train_unevenly(comm, counts, rows):
    """Be one rank with counts[rank] batches of rows[rank] rows; return what it had and did at each step."""
    module, log = ThreeLayers(), []
    ddp = DistributedDataParallel(module, 25, comm, weighted=True)
    batches = [data(comm.rank, step, rows[comm.rank]) for step in range(counts[comm.rank])]
    control, calls = comm.counters.control_calls, comm.counters.calls["all_reduce"]
    for batch in uneven(batches, comm):
        if batch is None:
            ddp.without_data()
        else:
            ddp.samples = len(batch)
            ddp(batch).square().mean().backward()
        log.append(gather_flat_grads(module))
        sgd_step(module, 0.1)
    costs = comm.counters.control_calls - control, comm.counters.calls["all_reduce"] - calls
    return log, gather_flat_params(module), costs


class TestUneven(unittest.TestCase):
    def test_equals_the_plain_loop_over_the_same_global_batches(self):
        for counts, rows in (([3, 2], [2, 1]), ([1, 4, 0], [2, 3, 5]), ([2, 2, 2], [1, 2, 3]), ([3], [2])):
            n = len(counts)
            results = virtual(n, train_unevenly, counts, rows, seed=n)
            module = ThreeLayers()
            for step in range(max(counts)):
                whole = [data(rank, step, rows[rank]) for rank in range(n) if step < counts[rank]]
                module(torch.cat(whole)).square().mean().backward()
                for log, _, _ in results:
                    self.assertTrue(torch.equal(log[step], results[0][0][step]))
                torch.testing.assert_close(results[0][0][step], gather_flat_grads(module), rtol=2e-6, atol=1e-7)
                sgd_step(module, 0.1)
            for log, params, costs in results:
                self.assertEqual(len(log), max(counts))
                self.assertTrue(torch.equal(params, results[0][1]))
                self.assertEqual(costs, (max(counts) + 1, max(counts)))  # a question a step, and one for the end
            torch.testing.assert_close(results[0][1], gather_flat_params(module), rtol=2e-6, atol=1e-7)

    def test_nobody_has_a_batch(self):
        self.assertEqual([log for log, _, _ in virtual(2, train_unevenly, [0, 0], [1, 1])], [[], []])

    def test_it_asks_before_each_step_and_takes_any_iterable(self):
        def rank(comm):
            return list(uneven((i for i in range(comm.rank)), comm)), comm.counters.control_calls

        self.assertEqual(virtual(3, rank), [([None, None], 3), ([0, None], 3), ([0, 1], 3)])

    def test_a_batch_that_is_none_is_not_the_end(self):
        self.assertEqual(virtual(2, lambda comm: list(uneven([None] * comm.rank, comm))), [[None], [None]])

    def test_without_data_under_no_sync_does_nothing(self):
        def rank(comm):
            ddp = DistributedDataParallel(ThreeLayers(), 25, comm, weighted=True)
            with ddp.no_sync():
                ddp.without_data()
            ddp.sync_grads()
            return comm.counters.calls["all_reduce"], ddp.samples

        self.assertEqual(virtual(2, rank), [(0, 1.0)] * 2)

    def test_buffers_are_synchronised_with_those_without_data(self):
        def rank(comm):
            module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
            ddp = DistributedDataParallel(module, 25, comm, weighted=True)
            for batch in uneven([data(comm.rank)] * (2 - comm.rank), comm):
                ddp.without_data() if batch is None else ddp(batch).square().mean().backward()
            return module[1].running_mean.clone()

        first, second = virtual(2, rank)
        self.assertTrue(torch.equal(first, second))
        self.assertFalse(torch.equal(first, torch.zeros(4)))

    def test_a_data_loader_that_fails_names_its_rank(self):
        def rank(comm):
            def batches():
                yield data(comm.rank)
                if comm.rank == 1:
                    raise OSError("disk")
                yield data(comm.rank)

            ddp = DistributedDataParallel(ThreeLayers(), 25, comm, weighted=True)
            for batch in uneven(batches(), comm):
                ddp(batch).square().mean().backward()

        failed, error = cause(3, rank)
        self.assertEqual((failed, str(error)), (1, "disk"))

    def test_between_processes_too(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(fails_in_the_middle, 2, timeout=60.0)
        self.assertEqual(caught.exception.rank, 1)
        self.assertIn("OSError: disk", str(caught.exception))


def fails_in_the_middle(rank, world_size):
    """Rank 1's second batch cannot be read; rank 0 asks whether anyone has one left."""
    from comm import TorchComm

    def batches():
        for step in range(3):
            if (rank, step) == (1, 1):
                raise OSError("disk")
            yield data(rank, step)

    ddp = DistributedDataParallel(ThreeLayers(), weighted=True)
    for batch in uneven(batches(), TorchComm()):
        ddp(batch).square().mean().backward()


if __name__ == "__main__":
    unittest.main()
