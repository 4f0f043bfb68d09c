import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from ddp_cases import Everything, ThreeLayers, cause, refusals, virtual
from flat import (
    FlatUnit,
    broadcast_tensors,
    flat_param_numel,
    gather_flat_grads,
    gather_flat_params,
    module_facts,
    plan_units,
    scatter_flat_to_params,
    sync_module,
    trainable_parameters,
)
from toy import MiniMLP, global_batch, rank_slice, sgd_step
from torch import nn


class Here:
    """A group of one that only hands out memory."""

    def empty(self, numel, dtype):
        return torch.full((numel,), 7, dtype=dtype)


def sized(*numels, dtype=torch.float32):
    return [(f"p{i}", nn.Parameter(torch.zeros(numel, dtype=dtype))) for i, numel in enumerate(numels)]


def names(plan):
    return [[name for name, _ in unit] for unit in plan]


class TestPlanUnits(unittest.TestCase):
    def test_reverse_order_and_cap(self):
        self.assertEqual(names(plan_units(sized(4, 3, 2, 1), cap_bytes=20)), [["p3", "p2"], ["p1"], ["p0"]])

    def test_a_unit_may_be_exactly_full(self):
        self.assertEqual(names(plan_units(sized(4, 1, 2, 3), cap_bytes=24)), [["p3", "p2", "p1"], ["p0"]])

    def test_first_cap_counts_for_the_first_unit_alone(self):
        plan = plan_units(sized(1, 1, 1, 1, 1), cap_bytes=12, first_cap_bytes=4)
        self.assertEqual(names(plan), [["p4"], ["p3", "p2", "p1"], ["p0"]])

    def test_an_oversized_parameter_stands_alone(self):
        self.assertEqual(names(plan_units(sized(1, 100, 1), cap_bytes=40)), [["p2"], ["p1"], ["p0"]])
        self.assertEqual(names(plan_units(sized(1, 100), cap_bytes=40, first_cap_bytes=8)), [["p1"], ["p0"]])

    def test_a_cap_below_every_parameter_gives_each_its_own_unit(self):
        self.assertEqual(names(plan_units(sized(1, 2, 3), cap_bytes=0.001)), [["p2"], ["p1"], ["p0"]])

    def test_one_unit_without_a_cap(self):
        self.assertEqual(names(plan_units(sized(1, 2, 3), cap_bytes=float("inf"))), [["p2", "p1", "p0"]])

    def test_dtypes_apart_and_sizes_in_bytes(self):
        half = sized(2, 2, dtype=torch.bfloat16)
        single = sized(1, 2)
        mixed = [("h0", half[0][1]), ("s0", single[0][1]), ("h1", half[1][1]), ("s1", single[1][1])]
        self.assertEqual(names(plan_units(mixed, cap_bytes=8)), [["s1"], ["h1", "h0"], ["s0"]])

    def test_the_plan_holds_every_parameter_once(self):
        named = sized(*range(1, 40))
        for cap in (1, 40, 400, 4000):
            flat = [item for unit in plan_units(named, cap, cap // 2) for item in unit]
            self.assertEqual([name for name, _ in flat], [name for name, _ in reversed(named)])

    def test_nothing_to_plan(self):
        self.assertEqual(plan_units([], cap_bytes=1), [])


class TestFlatUnit(unittest.TestCase):
    def setUp(self):
        self.named = [
            ("matrix", nn.Parameter(torch.arange(6.0).view(2, 3))),
            ("scalar", nn.Parameter(torch.tensor(10.0))),
            ("empty", nn.Parameter(torch.zeros(0))),
            ("vector", nn.Parameter(torch.arange(20.0, 24.0))),
        ]

    def test_layout_and_padding(self):
        unit = FlatUnit(self.named, Here(), multiple=8, extra=3)
        self.assertEqual([(s.name, s.start, s.end) for s in unit.slots][:2], [("matrix", 0, 6), ("scalar", 6, 7)])
        self.assertEqual([(s.start, s.end) for s in unit.slots][2:], [(7, 7), (7, 11)])
        self.assertEqual((unit.numel, unit.padded, len(unit.grad), len(unit.memory)), (11, 16, 16, 19))
        self.assertTrue(torch.equal(unit.memory, torch.zeros(19)))  # whatever `empty` brought is gone
        self.assertEqual([tuple(view.shape) for view in unit.views], [(2, 3), (), (0,), (4,)])

    def test_gradients_become_views_and_keep_their_values(self):
        unit = FlatUnit(self.named, Here())
        for index, (_, param) in enumerate(self.named):
            param.grad = torch.full_like(param, index + 1.0)
            unit.take_grads([index])
            self.assertIs(param.grad, unit.views[index])
        self.assertEqual(unit.grad.tolist(), [1.0] * 6 + [2.0] + [4.0] * 4)
        unit.grad.mul_(2)  # what a collective does to the flat memory, the parameters see
        self.assertEqual(self.named[0][1].grad.tolist(), [[2.0] * 3] * 2)

    def test_taking_a_view_again_copies_nothing(self):
        unit = FlatUnit(self.named, Here())
        self.named[0][1].grad = torch.ones(2, 3)
        unit.take_grads([0])
        version = unit.grad._version
        unit.take_grads([0])
        self.assertEqual(unit.grad._version, version)

    def test_strided_sparse_and_graph_carrying_gradients(self):
        weight = nn.Parameter(torch.zeros(2, 3))
        unit = FlatUnit([("weight", weight)], Here())
        weight.grad = torch.arange(6.0).view(3, 2).t()
        unit.take_grads([0])
        self.assertEqual(unit.grad.tolist(), [0, 2, 4, 1, 3, 5])
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [5.0, 6.0, 7.0], (2, 3))
        unit.take_grads([0])
        self.assertEqual(unit.grad.tolist(), [0, 0, 5, 13, 0, 0])
        weight.grad = torch.ones(2, 3, requires_grad=True) * 3
        unit.take_grads([0])
        self.assertEqual(unit.grad.tolist(), [3] * 6)
        self.assertFalse(unit.grad.requires_grad)

    def test_own_parameters(self):
        before = [param.detach().clone() for _, param in self.named]
        unit = FlatUnit(self.named, Here(), multiple=4)
        unit.own_parameters()
        for (_, param), value in zip(self.named, before, strict=True):
            self.assertTrue(torch.equal(param, value))
        self.assertEqual(unit.data.tolist(), [0, 1, 2, 3, 4, 5, 10, 20, 21, 22, 23, 0])
        unit.data[6] = -1.0
        self.assertEqual(self.named[1][1].item(), -1.0)
        self.assertEqual(len({param.untyped_storage().data_ptr() for _, param in self.named}), 1)


class TestTrainable(unittest.TestCase):
    def test_tied_once_frozen_never(self):
        found = [name for name, _ in trainable_parameters(Everything())]
        self.assertEqual(found, ["scale", "embed.weight", "middle.weight", "middle.bias", "head.bias"])

    def test_nothing_to_train(self):
        for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            with self.assertRaisesRegex(ValueError, f"{type(module).__name__} has no parameter that requires"):
                trainable_parameters(module)

    def test_complex_is_refused_by_name(self):
        module = nn.Linear(2, 2)
        module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with self.assertRaisesRegex(ValueError, "phase is torch.complex64"):
            trainable_parameters(module)


class TestModuleFacts(unittest.TestCase):
    def test_equal_models_of_other_values_have_equal_facts(self):
        self.assertEqual(module_facts(Everything(1)), module_facts(Everything(2)))

    def test_facts(self):
        module = nn.BatchNorm1d(4)
        facts = module_facts(module)
        self.assertEqual(list(facts), ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"])
        expected = {"kind": "buffer", "after": "running_var", "shape": [], "dtype": "int64", "stride": []}
        self.assertEqual(facts["num_batches_tracked"], expected | {"requires_grad": False, "tied_to": None})
        self.assertEqual(module_facts(Everything())["head.weight"]["tied_to"], "embed.weight")


def kinds_of_buffers():
    module = nn.Module()
    for name, values in {
        "of_float": torch.arange(3.0),
        "of_int": torch.tensor(5),
        "of_bool": torch.tensor([True, False]),
        "of_half": torch.ones(2, dtype=torch.bfloat16),
        "of_complex": torch.tensor([1 + 2j]),
        "of_nothing": torch.zeros(0, 3),
        "of_strided": torch.arange(6.0).view(2, 3).t(),
    }.items():
        module.register_buffer(name, values, persistent=name != "of_half")
    return module


class TestSyncModule(unittest.TestCase):
    def test_all_become_the_source(self):
        for world_size in (1, 2, 3, 5):
            for src in range(world_size):

                def sync(comm, src=src):
                    module = MiniMLP(seed=comm.rank)
                    sync_module(module, comm, src)
                    counters = comm.counters
                    return gather_flat_params(module), counters.calls, counters.bytes, counters.control_calls

                for params, calls, sizes, control in virtual(world_size, sync):
                    self.assertTrue(torch.equal(params, gather_flat_params(MiniMLP(seed=src))))
                    self.assertEqual((calls, sizes), ({"broadcast": 1}, {"broadcast": 676 * 4}))
                    self.assertEqual(control, 1)  # one comparison, of everything

    def test_buffers_of_every_kind(self):
        def sync(comm):
            module = kinds_of_buffers()
            if comm.rank != 1:
                for buffer in module.buffers():
                    buffer.copy_(~buffer) if buffer.dtype == torch.bool else buffer.add_(comm.rank + 10)
            sync_module(module, comm, src=1)
            return dict(module.named_buffers())

        for buffers in virtual(3, sync):
            for name, expected in kinds_of_buffers().named_buffers():
                self.assertTrue(torch.equal(buffers[name], expected), name)
                self.assertEqual(buffers[name].stride(), expected.stride())

    def test_ties_survive_and_are_sent_once(self):
        def sync(comm):
            module = Everything(seed=comm.rank)
            sync_module(module, comm)
            return module.head.weight is module.embed.weight, dict(comm.counters.bytes), gather_flat_params(module)

        numel = flat_param_numel(Everything())
        self.assertEqual(numel, 1 + 25 + 30 + 30 + 5)
        for tied, sizes, params in virtual(2, sync):
            self.assertTrue(tied)
            self.assertEqual(sizes, {"broadcast": 4 * numel})
            self.assertTrue(torch.equal(params, gather_flat_params(Everything(seed=0))))

    def test_a_graph_that_holds_a_buffer_survives(self):
        def sync(comm):
            module = nn.BatchNorm1d(2)
            loss = module(torch.arange(6.0).view(3, 2) + comm.rank).square().sum()
            sync_module(module, comm)
            loss.backward()  # an in-place change that autograd saw would raise here
            return module.running_mean

        first, second = virtual(2, sync)
        self.assertTrue(torch.equal(first, second))

    def test_source_out_of_range_or_not_agreed(self):
        for src in (-1, 2, 1.0, True, None):
            messages = refusals(2, lambda comm, src=src: sync_module(MiniMLP(), comm, src))
            self.assertEqual(len(set(messages)), 1)
            self.assertIn(f"must be a rank from 0 to 1, got {src!r}", messages[0])
        messages = refusals(2, lambda comm: sync_module(MiniMLP(), comm, src=comm.rank))
        self.assertEqual(len(set(messages)), 1)
        self.assertIn("(source): rank 0 has 0; rank 1 has 1", messages[0])

    def test_source_is_a_rank_of_the_subgroup(self):
        def sync(comm):  # ranks 0, 2 and ranks 1, 3
            module = MiniMLP(seed=comm.rank)
            sub = comm.split(color=comm.rank % 2)
            sync_module(module, sub, src=1)
            return gather_flat_params(module)

        for rank, params in enumerate(virtual(4, sync)):
            self.assertTrue(torch.equal(params, gather_flat_params(MiniMLP(seed=rank % 2 + 2))))

    def test_many_small_tensors_travel_in_few_messages(self):
        def send(comm):
            tensors = [torch.full((10,), float(10 * comm.rank + i)) for i in range(20)]
            broadcast_tensors(comm, tensors, src=1, cap_bytes=200)
            return [tensor[9].item() for tensor in tensors], dict(comm.counters.calls)

        for values, calls in virtual(2, send):
            self.assertEqual(values, [10.0 + i for i in range(20)])
            self.assertEqual(calls, {"broadcast": 4})


class TestGatherScatter(unittest.TestCase):
    def test_round_trip(self):
        module, other = Everything(1), Everything(2)
        flat = gather_flat_params(module)
        self.assertEqual(flat.shape, (flat_param_numel(module),))
        scatter_flat_to_params(other, flat)
        self.assertTrue(torch.equal(gather_flat_params(other), flat))
        flat.zero_()  # a copy
        self.assertTrue(module.scale.item() == other.scale.item() == 1.5)
        self.assertIs(other.head.weight, other.embed.weight)

    def test_wrong_lengths(self):
        module = ThreeLayers()
        for shape in ((flat_param_numel(module) - 1,), (flat_param_numel(module) + 1,), (1, flat_param_numel(module))):
            with self.assertRaisesRegex(ValueError, r"expected a tensor of shape \(123,\), got"):
                scatter_flat_to_params(module, torch.zeros(shape))

    def test_missing_gradients_count_as_zeros(self):
        module = nn.Linear(2, 1)
        module.weight.grad = torch.tensor([[3.0, 4.0]])
        self.assertEqual(gather_flat_grads(module).tolist(), [3, 4, 0])

    def test_one_dtype_and_not_nothing(self):
        mixed = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).bfloat16())
        for gather in (gather_flat_params, gather_flat_grads):
            with self.assertRaisesRegex(ValueError, "bfloat16.*float32"):
                gather(mixed)
            with self.assertRaisesRegex(ValueError, "no parameters"):
                gather(nn.ReLU())
        self.assertEqual(flat_param_numel(nn.ReLU()), 0)


class TestToy(unittest.TestCase):
    def test_the_batch_is_a_function_of_seed_and_step(self):
        x, y = global_batch(3, 8)
        again, _ = global_batch(3, 8)
        self.assertTrue(torch.equal(x, again))
        self.assertFalse(torch.equal(x, global_batch(4, 8)[0]))
        self.assertFalse(torch.equal(x, global_batch(3, 8, seed=8)[0]))
        self.assertEqual((tuple(x.shape), tuple(y.shape)), ((8, 16), (8, 4)))
        self.assertTrue(torch.equal(torch.cat([rank_slice(x, rank, 4) for rank in range(4)]), x))

    def test_the_model_is_a_function_of_its_seed_and_leaves_the_random_state(self):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        self.assertTrue(torch.equal(gather_flat_params(MiniMLP()), gather_flat_params(MiniMLP())))
        self.assertFalse(torch.equal(gather_flat_params(MiniMLP()), gather_flat_params(MiniMLP(seed=8))))
        self.assertTrue(torch.equal(torch.get_rng_state(), state))

    def test_sgd_moves_only_what_has_a_gradient(self):
        module = nn.Linear(2, 1)
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        module.weight.grad = torch.tensor([[1.0, 2.0]])
        sgd_step(module, lr=0.5)
        self.assertEqual((module.weight.tolist(), module.bias.tolist()), ([[0.5, 0.0]], [1.0]))
        self.assertIsNone(module.weight.grad)


class TestModelsThatDiffer(unittest.TestCase):
    """Each way in which ranks' models can differ: the same error on every rank, which names it; nothing changed."""

    def differ(self, build, *words):
        def sync(comm):
            module = build(comm.rank)
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.fill_(comm.rank + 1)
            try:
                sync_module(module, comm)
            except ValueError as error:
                same = all(bool((t == comm.rank + 1).all()) for t in (*module.parameters(), *module.buffers()))
                return str(error), same, dict(comm.counters.calls)
            return "no error", False, {}

        results = virtual(3, sync)
        self.assertEqual(len({message for message, _, _ in results}), 1)
        self.assertEqual([(same, calls) for _, same, calls in results], [(True, {})] * 3)
        self.assertIn("ranks disagree on the model", results[0][0])
        for word in words:
            self.assertIn(word, results[0][0])

    def test_name(self):
        def build(rank):
            module = nn.Module()
            module.add_module("odd" if rank == 1 else "even", nn.Linear(2, 2))
            return module

        self.differ(build, 'even.weight: rank 0, 2 has {"kind": "parameter"', "odd.bias")

    def test_number(self):
        self.differ(lambda rank: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank // 2)]), "1.weight", "rank 2")

    def test_shape(self):
        self.differ(lambda rank: nn.Linear(6, 1) if rank else nn.Linear(3, 2), "weight", '"shape": [2, 3]', "[1, 6]")

    def test_dtype(self):
        self.differ(lambda rank: nn.Linear(2, 2, dtype=torch.float64 if rank == 2 else None), '"dtype": "float64"')

    def test_layout(self):
        def build(rank):
            module = nn.Conv2d(2, 3, 2)
            return module.to(memory_format=torch.channels_last) if rank else module

        self.differ(build, "weight", '"stride": [8, 4, 2, 1]', '"stride": [8, 1, 4, 2]')

    def test_tie(self):
        def build(rank):
            module = Everything()
            if rank == 2:
                module.head.weight = nn.Parameter(module.head.weight.detach().clone())
            return module

        self.differ(build, "head.weight", '"tied_to": "embed.weight"', '"tied_to": null')

    def test_frozen(self):
        self.differ(lambda rank: nn.Linear(2, 2).requires_grad_(rank != 1), '"requires_grad": false')

    def test_buffer(self):
        self.differ(
            lambda rank: nn.BatchNorm1d(2, track_running_stats=rank != 0), "running_mean", "num_batches_tracked"
        )

    def test_order_of_the_same_names(self):
        def build(rank):
            module = nn.Module()
            for name in "ab" if rank else "ba":
                module.register_parameter(name, nn.Parameter(torch.zeros(2)))
            return module

        self.differ(build, '"after": "a"', '"after": "b"')

    def test_buffer_or_parameter(self):
        def build(rank):
            module, values = nn.Module(), torch.zeros(2)
            module.register_parameter("x", nn.Parameter(values, False)) if rank else module.register_buffer("x", values)
            return module

        self.differ(build, '"kind": "parameter"', '"kind": "buffer"')

    def test_a_local_fault_ends_the_run_with_its_rank(self):
        def scatter(comm):
            scatter_flat_to_params(MiniMLP(), torch.zeros(676 if comm.rank != 1 else 7))
            comm.agree(None)

        rank, error = cause(3, scatter)
        self.assertEqual((rank, type(error)), (1, ValueError))


if __name__ == "__main__":
    unittest.main()
