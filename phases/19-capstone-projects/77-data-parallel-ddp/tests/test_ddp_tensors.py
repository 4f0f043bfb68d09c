import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import contextlib
import warnings

import torch
from ddp import DistributedDataParallel
from ddp_cases import Everything, ThreeLayers, backward, data, grads, virtual
from flat import gather_flat_grads, gather_flat_params
from torch import nn


def local_mean(build, world_size, step=0):
    """Return the flat mean gradient, computed in one process (two ranks: exact up to one rounding)."""
    flats = []
    for rank in range(world_size):
        module = build()
        backward(module, rank, step)
        flats.append(gather_flat_grads(module))
    return sum(flats) / world_size


def is_view(param, ddp):
    """Whether a gradient lies in a bucket's memory."""
    address = param.grad.data_ptr()
    memories = [bucket.memory for bucket in ddp.reducer.buckets]
    return any(m.data_ptr() <= address < m.data_ptr() + m.numel() * m.element_size() for m in memories)


class TestGradientsAsViews(unittest.TestCase):
    def both_steps(self, between):
        """Two steps on two ranks with `between(module, rank)` between them; return the ranks' last gradients."""

        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            backward(ddp, comm.rank, 0)
            views = all(is_view(param, ddp) for param in module.parameters())
            between(module, comm.rank)
            backward(ddp, comm.rank, 1)
            return gather_flat_grads(module), views and all(is_view(param, ddp) for param in module.parameters())

        (first, a), (second, b) = virtual(2, rank)
        self.assertTrue(a and b)
        self.assertTrue(torch.equal(first, second))
        return first

    def test_zero_grad_of_every_kind(self):
        def optimizer(set_to_none):
            return lambda module, _: torch.optim.SGD(module.parameters(), 0.1).zero_grad(set_to_none)

        ways = {
            "module, None": lambda module, _: module.zero_grad(),
            "module, zeros": lambda module, _: module.zero_grad(set_to_none=False),
            "torch.optim, None": optimizer(True),
            "torch.optim, zeros": optimizer(False),
            "by hand, None": lambda module, _: [setattr(param, "grad", None) for param in module.parameters()],
            "by hand, zeros": lambda module, _: [param.grad.zero_() for param in module.parameters()],
            "one rank each": lambda module, rank: module.zero_grad(set_to_none=rank == 0),
        }
        expected = local_mean(ThreeLayers, 2, step=1)
        for name, way in ways.items():
            with self.subTest(name):
                self.assertTrue(torch.equal(self.both_steps(way), expected))

    def test_a_gradient_that_a_user_replaced_counts(self):
        def replace(module, rank):
            for param in module.parameters():
                param.grad = torch.full_like(param, 10.0)

        torch.testing.assert_close(self.both_steps(replace), 10 + local_mean(ThreeLayers, 2, 1), rtol=1e-6, atol=0)

    def test_a_gradient_replaced_before_the_buckets_leave(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            loss = ddp(data(comm.rank)).square().mean()
            with ddp.no_sync():
                loss.backward()
            for param in module.parameters():
                param.grad = torch.full_like(param, comm.rank + 1.0)
            module.layers[0].bias.grad = None
            ddp.sync_grads()
            return gather_flat_grads(module)[:40], module.layers[0].bias.grad

        for flat, missing in virtual(2, rank):
            self.assertEqual(flat.tolist(), [1.5] * 40)
            self.assertIsNone(missing)  # on both ranks

    def test_clipping_and_an_optimizer_work_on_views(self):
        def rank(comm):
            module = ThreeLayers(seed=comm.rank + 1)
            ddp = DistributedDataParallel(module, 25, comm)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                optimizer.zero_grad()
                backward(ddp, comm.rank, step)
                norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
                optimizer.step()
            return gather_flat_params(module), norm.item(), torch.linalg.vector_norm(gather_flat_grads(module)).item()

        (first, norm, clipped), (second, *_) = virtual(2, rank)
        self.assertTrue(torch.equal(first, second))
        self.assertGreater(norm, 0.011)
        self.assertAlmostEqual(clipped, 0.01, places=6)

    def test_create_graph_leaves_the_buckets_without_a_graph(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of a reference cycle
                ddp(data(comm.rank)).square().mean().backward(create_graph=True)
            graph = any(bucket.memory.requires_grad for bucket in ddp.reducer.buckets)
            graph = graph or any(param.grad.requires_grad for param in module.parameters())
            return graph, gather_flat_grads(module)

        for graph, flat in virtual(2, rank):
            self.assertFalse(graph)
            self.assertTrue(torch.equal(flat, local_mean(ThreeLayers, 2)))

    def test_gradients_take_no_more_memory_than_flat_buckets(self):
        def rank(comm, accumulate):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 200 / 2**20, comm)
            with ddp.no_sync() if accumulate else contextlib.nullcontext():
                backward(ddp, comm.rank)
            storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in module.parameters()}
            return len(storages), sum(storage.nbytes() for storage in storages.values())

        for accumulate in (False, True):
            self.assertEqual(virtual(2, rank, accumulate), [(3, 4 * (123 + 6))] * 2)


class Kinds(nn.Module):
    """Parameters of two dtypes, in turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3, dtype=torch.bfloat16)
        self.third = nn.Linear(3, 2)

    def forward(self, x):
        return self.third(self.second(torch.tanh(self.first(x)).bfloat16()).float())


class TestKindsOfParameters(unittest.TestCase):
    def test_mixed_dtypes_have_buckets_of_their_own(self):
        def rank(comm):
            module = Kinds()
            ddp = DistributedDataParallel(module, 25, comm)
            comm.notes.clear()
            backward(ddp, comm.rank)
            plan = [(bucket.dtype, [slot.name for slot in bucket.slots]) for bucket in ddp.reducer.buckets]
            return grads(module), plan, comm.notes, comm.counters.bytes["all_reduce"]

        local = []
        for r in range(2):
            module = Kinds()
            backward(module, r)
            local.append(grads(module))
        for found, plan, notes, sent in virtual(2, rank):
            single = ["third.bias", "third.weight", "first.bias", "first.weight"]
            half = ["second.bias", "second.weight"]
            self.assertEqual(plan, [(torch.float32, single), (torch.bfloat16, half)])
            self.assertEqual(notes, [("all_reduce", 32 + 4), ("all_reduce", 15 + 2)])
            self.assertEqual(sent, 4 * 36 + 2 * 17)
            for name, grad in found.items():
                self.assertTrue(torch.equal(grad, (local[0][name] + local[1][name]) / 2), name)

    def test_scalars_and_empty_parameters(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))

            def forward(self, x):
                return x * self.scale + self.none.sum()

        def rank(comm):
            module = Odd()
            ddp = DistributedDataParallel(module, 25, comm)
            ddp(torch.tensor(comm.rank + 1.0)).backward()
            return module.scale.grad, module.none.grad

        for scale, none in virtual(3, rank):
            self.assertEqual((scale.shape, scale.item(), none.shape), ((), 2.0, (0, 3)))

    def test_only_an_empty_parameter(self):
        def rank(comm):
            module = nn.ParameterList([nn.Parameter(torch.zeros(0))])
            ddp = DistributedDataParallel(module, 25, comm)
            module[0].sum().backward()
            return ddp.reducer.buckets[0].numel, module[0].grad.shape

        self.assertEqual(virtual(2, rank), [(0, (0,))] * 2)

    def test_channels_last_and_strided_gradients(self):
        def build():
            torch.manual_seed(1)
            conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), conv, nn.Flatten(), Transposed())

        class Transposed(nn.Module):  # its weight's gradient arrives as a transposed, non-contiguous tensor
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 2))

            def forward(self, x):
                return x @ self.weight.t().contiguous().t()

        def images(rank):
            return data(rank, rows=3, dim=12)

        def rank(comm):
            module = build()
            self.assertEqual(module[1].weight.stride()[1], 1)
            ddp = DistributedDataParallel(module, 25, comm)
            for _ in range(2):  # the second adds to gradients that are views already
                ddp(images(comm.rank)).square().mean().backward()
            return gather_flat_grads(module), module[1].weight.grad.stride()

        expected = 0
        for r in range(2):
            module = build()
            module(images(r)).square().mean().backward()
            expected = expected + gather_flat_grads(module)
        for flat, stride in virtual(2, rank):
            torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-7)
            self.assertEqual(stride, (12, 1, 6, 3))

    def test_sparse_embedding(self):
        def rank(comm):
            module = nn.Embedding(5, 2, sparse=True)
            ddp = DistributedDataParallel(module, 25, comm)
            ddp(torch.tensor([comm.rank, 4])).sum().backward()
            return module.weight.grad

        for grad in virtual(2, rank):
            self.assertEqual(grad.tolist(), [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0], [1, 1]])

    def test_tied_once_and_frozen_never(self):
        def rank(comm):
            module = Everything(seed=comm.rank)
            ddp = DistributedDataParallel(module, 25, comm)
            backward(ddp, comm.rank)
            slots = [slot.name for bucket in ddp.reducer.buckets for slot in bucket.slots]
            tied = module.head.weight is module.embed.weight and module.head.weight.grad is module.embed.weight.grad
            return slots, tied, module.frozen.weight.grad, comm.counters.bytes["all_reduce"]

        for slots, tied, frozen, sent in virtual(2, rank):
            self.assertEqual(slots, ["head.bias", "middle.bias", "middle.weight", "embed.weight", "scale"])
            self.assertTrue(tied)
            self.assertIsNone(frozen)
            self.assertEqual(sent, 4 * (5 + 5 + 25 + 25 + 1 + 5))

    def test_frozen_after_wrapping(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            module.layers[2].requires_grad_(False)
            backward(ddp, comm.rank)
            return [param.grad is None for param in module.parameters()]

        self.assertEqual(virtual(2, rank), [[False, False, True, True, False, False]] * 2)


class TestBuffers(unittest.TestCase):
    @staticmethod
    def build(rank=0):
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def test_running_statistics_become_rank_0s_at_each_step(self):
        def rank(comm):
            module = self.build(comm.rank)
            ddp = DistributedDataParallel(module, 25, comm)
            seen = []
            for step in range(3):
                loss = ddp(data(comm.rank, step)).square().mean()
                before = module[1].running_mean.clone()
                loss.backward()
                seen.append((before, module[1].running_mean.clone(), module[1].running_var.clone()))
            module.eval()
            with torch.no_grad():
                out = ddp(data(7))
            return seen, module[1].num_batches_tracked, out, ddp.state_dict(), comm.notes

        results = virtual(3, rank)
        first = results[0]
        for seen, tracked, out, state, notes in results:
            for step in range(3):
                self.assertTrue(torch.equal(seen[step][1], first[0][step][0]))  # rank 0's own, which nothing changed
                self.assertTrue(torch.equal(seen[step][2], first[0][step][2]))
            self.assertEqual(tracked.item(), 3)
            self.assertTrue(torch.equal(out, first[2]))
            for name, tensor in state.items():
                self.assertTrue(torch.equal(tensor, first[3][name]), name)
            self.assertEqual(notes.count(("broadcast", 8)), 3)  # both statistics in one message
            self.assertEqual(notes.count(("broadcast", 1)), 3 + 1)  # the counter: another dtype; once when wrapping
        self.assertFalse(torch.equal(first[0][0][0], results[1][0][0][0]))  # they did differ before

    def test_no_message_without_buffers_and_none_under_no_sync(self):
        def rank(comm, build):
            ddp = DistributedDataParallel(build(), 25, comm)
            comm.notes.clear()
            with ddp.no_sync():
                backward(ddp, comm.rank)
            under, step = len(comm.notes), backward(ddp, comm.rank)
            return under, len(comm.notes), step.shape

        self.assertEqual(virtual(2, rank, ThreeLayers), [(0, 1, ())] * 2)
        self.assertEqual(virtual(2, rank, self.build), [(0, 1 + 2, ())] * 2)

    def test_two_forwards_before_their_backwards(self):
        def rank(comm):
            ddp = DistributedDataParallel(self.build(), 25, comm)
            losses = [ddp(data(comm.rank, step)).square().mean() for step in range(2)]
            for loss in losses:  # the first one's end changes buffers that the second one's graph holds
                loss.backward()
            return gather_flat_grads(ddp)

        first, second = virtual(2, rank)
        self.assertTrue(torch.equal(first, second))


class TestSurface(unittest.TestCase):
    """A wrapper is a module like any other."""

    def test_it_is_a_module(self):
        def rank(comm):
            module = Everything()
            module.double()  # before wrapping
            ddp = DistributedDataParallel(module, comm=comm)
            x = data(comm.rank).double()
            with self.subTest("call"):
                self.assertTrue(torch.equal(ddp(x), module(x)))
                self.assertTrue(torch.equal(ddp(x=x), module(x)))
            with self.subTest("parameters and state"):
                self.assertEqual(
                    [n for n, _ in ddp.named_parameters()], [f"module.{n}" for n, _ in module.named_parameters()]
                )
                self.assertEqual(list(ddp.state_dict()), [f"module.{n}" for n in module.state_dict()])
                self.assertIs(ddp.module, module)
            with self.subTest("train and eval"):
                self.assertFalse(ddp.eval().module.middle.training)
                self.assertTrue(ddp.train().module.middle.training)
            with self.subTest("zero_grad"):
                ddp(x).sum().backward()
                self.assertEqual(module.scale.grad.dtype, torch.float64)
                ddp.zero_grad()
                self.assertTrue(all(param.grad is None for param in module.parameters()))
            return True

        self.assertEqual(virtual(2, rank), [True, True])

    def test_loading_a_state_keeps_everything_attached(self):
        def rank(comm):
            module = ThreeLayers()
            ddp = DistributedDataParallel(module, 25, comm)
            ddp.load_state_dict({f"module.{k}": v for k, v in ThreeLayers(seed=9).state_dict().items()})
            backward(ddp, comm.rank)
            return gather_flat_params(module), gather_flat_grads(module)

        for params, flat in virtual(2, rank):
            self.assertTrue(torch.equal(params, gather_flat_params(ThreeLayers(seed=9))))
            self.assertTrue(torch.equal(flat, local_mean(lambda: ThreeLayers(seed=9), 2)))

    def test_a_subgroup_wraps_and_trains_for_itself(self):
        def rank(comm):  # rank 0 stays out; ranks 1 and 2 form a group in which rank 1 is number 0
            sub = comm.split(color=0 if comm.rank == 0 else 1)
            module = ThreeLayers(seed=comm.rank)
            if comm.rank > 0:
                backward(DistributedDataParallel(module, 25, sub), comm.rank)
            return gather_flat_params(module), gather_flat_grads(module)

        results = virtual(3, rank)
        expected = []
        for r in (1, 2):
            module = ThreeLayers(seed=1)
            backward(module, r)
            expected.append(gather_flat_grads(module))
        for params, flat in results[1:]:
            self.assertTrue(torch.equal(params, gather_flat_params(ThreeLayers(seed=1))))
            self.assertTrue(torch.equal(flat, (expected[0] + expected[1]) / 2))  # a zero gradient would be C06's fault
        self.assertTrue(torch.equal(results[0][0], gather_flat_params(ThreeLayers(seed=0))))


if __name__ == "__main__":
    unittest.main()
