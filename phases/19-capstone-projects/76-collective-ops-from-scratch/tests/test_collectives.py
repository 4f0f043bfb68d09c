"""The four collectives in the virtual cluster: values and costs for N = 1-8, every dtype and shape, every mismatch."""

import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import wire
from collectives import PRIMITIVES, allgather, broadcast, reduce_scatter, ring_allreduce
from ranks import RankError
from virtual import VirtualCluster

SIZES = range(1, 9)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)


def values(rank: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    """Distinct for each rank and position, so that nothing can be mistaken for something else."""
    return (torch.arange(math.prod(shape)).reshape(shape) + 1000 * rank).to(dtype)


def run(world_size: int, collective, inputs: list, *args, seed=0, buffered=True, **options):
    """Call the collective on every virtual rank; return (results, counters of each rank)."""

    def work(mesh):
        return collective(mesh, inputs[mesh.rank], *args, **options), mesh.counters

    return zip(*VirtualCluster(world_size, seed, buffered).run(work), strict=True)


def bits(tensor: torch.Tensor):
    return tensor.dtype, tensor.shape, wire.tensor_to_bytes(tensor)


class Collective(unittest.TestCase):
    def assert_same(self, found: torch.Tensor, expected: torch.Tensor):
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape))
        self.assertTrue(torch.equal(found, expected), f"{found} is not {expected}")


class TestAllReduce(Collective):
    def test_value_bytes_and_rounds(self):
        for n in SIZES:
            for length in (0, 1, 3, 5, 8, 24, 840):
                with self.subTest(n=n, length=length):
                    inputs = [values(rank, length) for rank in range(n)]
                    results, counters = run(n, ring_allreduce, inputs)
                    for result in results:
                        self.assert_same(result, sum(inputs))
                    chunk = [length // n + (rank < length % n) for rank in range(n)]
                    for rank, count in enumerate(counters):
                        self.assertEqual(count.bytes_sent, 8 * (2 * length - chunk[rank] - chunk[rank - 1]) * (n > 1))
                        self.assertEqual((count.messages_sent, count.rounds), (2 * (n - 1), 2 * (n - 1)))
                        if length % n == 0:
                            self.assertEqual(count.bytes_sent, 2 * 8 * length * (n - 1) // n)

    def test_the_order_of_the_sum_is_the_rings(self):
        n = 4
        inputs = [torch.tensor([2.0**24, 1.0, -(2.0**24), 0.5]).roll(rank) for rank in range(n)]
        results, _ = run(n, ring_allreduce, inputs)
        for chunk in range(n):  # ((x[c-1] + x[c-2]) + ...) + x[c]
            total = inputs[chunk - 1][chunk]
            for back in range(2, n + 1):
                total = total + inputs[(chunk - back) % n][chunk]
            for result in results:
                self.assertEqual(result[chunk], total)

    def test_all_ranks_hold_the_same_bits(self):
        for n in SIZES:
            for dtype in FLOATS:
                generator = torch.Generator().manual_seed(n)
                inputs = [torch.randn(37, generator=generator).to(dtype) for _ in range(n)]
                results, _ = run(n, ring_allreduce, inputs)
                self.assertEqual(len({bits(result) for result in results}), 1)

    def test_mean_and_maximum(self):
        for n in SIZES:
            inputs = [values(rank * (-1) ** rank, 5) for rank in range(n)]
            for result in next(run(n, ring_allreduce, inputs, op="avg")):
                self.assert_same(result, sum(inputs) / n)
            for result in next(run(n, ring_allreduce, inputs, op="max")):
                self.assert_same(result, torch.stack(inputs).amax(0))

    def test_every_dtype(self):
        n = 3
        for dtype in FLOATS + INTEGERS + COMPLEX:
            inputs = [(torch.arange(7) % 4 + rank).to(dtype) for rank in range(n)]
            for result in next(run(n, ring_allreduce, inputs)):
                self.assert_same(result, sum(inputs))

    def test_bools_are_or_ed(self):
        inputs = [torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])]
        for result in next(run(2, ring_allreduce, inputs)):
            self.assert_same(result, torch.tensor([False, True, True, True]))
            self.assertEqual(wire.tensor_to_bytes(result), b"\0\1\1\1")

    def test_small_integers_wrap_as_torch_does(self):
        inputs = [torch.tensor([100], dtype=torch.int8)] * 3
        for result in next(run(3, ring_allreduce, inputs)):
            self.assert_same(result, torch.tensor([300 - 256], dtype=torch.int8))


class TestReduceScatter(Collective):
    def test_value_bytes_and_rounds(self):
        for n in SIZES:
            for shape in ((n,), (3 * n,), (2 * n, 5), (n, 0), (0,), (0, 4)):
                with self.subTest(n=n, shape=shape):
                    inputs = [values(rank, *shape) for rank in range(n)]
                    results, counters = run(n, reduce_scatter, inputs)
                    for rank, result in enumerate(results):
                        self.assert_same(result, sum(inputs).tensor_split(n)[rank])
                    for count in counters:
                        self.assertEqual(count.bytes_sent, 8 * math.prod(shape) * (n - 1) // n)
                        self.assertEqual(count.rounds, n - 1)

    def test_mean_and_maximum(self):
        for n in SIZES:
            inputs = [values(rank * (-1) ** rank, 2 * n) for rank in range(n)]
            for op, whole in (("avg", sum(inputs) / n), ("max", torch.stack(inputs).amax(0))):
                for rank, result in enumerate(next(run(n, reduce_scatter, inputs, op=op))):
                    self.assert_same(result, whole.tensor_split(n)[rank])

    def test_a_result_does_not_keep_the_whole_input_alive(self):
        for result in next(run(4, reduce_scatter, [values(rank, 400) for rank in range(4)])):
            self.assertEqual(result.untyped_storage().nbytes(), 800)

    def test_dimension_0_must_divide(self):
        for n, shape in ((3, (2, 6)), (3, (4, 3)), (2, ()), (2, (1, 2))):
            with self.assertRaisesRegex(RankError, f"into {n} equal chunks, which shape .* does not allow") as caught:
                run(n, reduce_scatter, [torch.ones(shape)] * n)
            self.assertIsInstance(caught.exception.__cause__, ValueError)
            self.assertIn(str(shape), str(caught.exception))


class TestAllGather(Collective):
    def test_value_bytes_and_rounds(self):
        for n in SIZES:
            for shape in ((), (1,), (4,), (2, 3), (0,), (3, 0)):
                with self.subTest(n=n, shape=shape):
                    inputs = [values(rank, *shape) for rank in range(n)]
                    results, counters = run(n, allgather, inputs)
                    for result in results:
                        self.assert_same(result, torch.cat(inputs) if shape else torch.stack(inputs))
                    for count in counters:
                        self.assertEqual(count.bytes_sent, 8 * math.prod(shape) * (n - 1))
                        self.assertEqual(count.rounds, n - 1)


class TestBroadcast(Collective):
    def test_value_bytes_and_rounds_from_every_source(self):
        for n in SIZES:
            for src in range(n):
                with self.subTest(n=n, src=src):
                    inputs = [values(rank, 6) for rank in range(n)]
                    results, counters = run(n, broadcast, inputs, src)
                    for result in results:
                        self.assert_same(result, inputs[src])
                    depth = (n - 1).bit_length()  # ceil(log2 n)
                    self.assertEqual(sum(count.bytes_sent for count in counters), 48 * (n - 1))
                    self.assertEqual(
                        [count.bytes_received for count in counters], [48 * (rank != src) for rank in range(n)]
                    )
                    self.assertEqual((counters[src].messages_sent, max(c.rounds for c in counters)), (depth, depth))


class TestAnyTensor(Collective):
    """What holds for all four: shapes, strides, dtypes, and an input that stays what it was."""

    def expected(self, name: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
        inputs = [x.detach().contiguous().resolve_conj() for x in inputs]
        if name == "broadcast":
            return inputs[0]
        if name == "allgather":
            return torch.cat(inputs) if inputs[0].dim() else torch.stack(inputs)
        total = sum(inputs[1:], inputs[0])
        return total if name == "allreduce" else total.tensor_split(len(inputs))[rank]

    def check(self, n: int, make):
        for name, collective in PRIMITIVES.items():
            with self.subTest(name=name, n=n):
                inputs = [make(rank) for rank in range(n)]
                if name == "reduce_scatter" and (inputs[0].dim() == 0 or inputs[0].shape[0] % n):
                    continue
                before = [wire.tensor_to_bytes(x) for x in inputs]
                results, _ = run(n, collective, inputs)
                for rank, result in enumerate(results):
                    self.assert_same(result, self.expected(name, inputs, rank))
                    self.assertTrue(result.is_contiguous() and not result.requires_grad and not result.is_conj())
                    self.assertNotEqual(result.data_ptr(), inputs[rank].data_ptr()) if result.numel() else None
                self.assertEqual([wire.tensor_to_bytes(x) for x in inputs], before)

    def test_shapes(self):
        for n in (1, 2, 3, 4):
            for shape in ((), (0,), (3, 0), (12,), (12, 5), (12, 1, 2)):
                self.check(n, lambda rank, shape=shape: values(rank, *shape))

    def test_strides(self):
        for n in (1, 2, 3, 4):
            self.check(n, lambda rank: values(rank, 12, 2)[:, 1])  # a column
            self.check(n, lambda rank: values(rank, 5, 12).t())
            self.check(n, lambda rank: values(rank, 24)[::2])
            self.check(n, lambda rank: values(rank, 1, 5).expand(12, 5))
            self.check(n, lambda rank: torch.complex(values(rank, 12), values(rank, 12)).conj())

    def test_dtypes(self):
        for dtype in FLOATS + INTEGERS + COMPLEX:
            self.check(3, lambda rank, dtype=dtype: (torch.arange(12) % 5 + rank).to(dtype))
        self.check(3, lambda rank: torch.arange(12) % 5 > rank)

    def test_a_leaf_that_needs_a_gradient(self):
        self.check(2, lambda rank: values(rank, 4).requires_grad_())
        self.check(2, lambda rank: torch.nn.Parameter(values(rank, 4)))

    def test_what_only_moves_may_be_of_any_dtype(self):
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn):
            inputs = [torch.tensor([1, 2, rank], dtype=torch.uint8).to(dtype) for rank in range(3)]
            for result in next(run(3, broadcast, inputs, 2)):
                self.assertEqual(bits(result), bits(inputs[2]))
            for result in next(run(3, allgather, inputs)):
                self.assertEqual(wire.tensor_to_bytes(result), b"".join(map(wire.tensor_to_bytes, inputs)))

    def test_nan_and_infinity_pass_through(self):
        inputs = [torch.tensor([math.nan, math.inf, 1.0]), torch.tensor([1.0, math.inf, -math.inf])]
        for result in next(run(2, ring_allreduce, inputs)):
            self.assertEqual(str(result.tolist()), "[nan, inf, -inf]")


class TestInterleavings(Collective):
    def test_any_order_of_the_ranks_gives_the_same_bits_and_costs(self):
        for name, collective in PRIMITIVES.items():
            generator = torch.Generator().manual_seed(5)
            inputs = [torch.randn(10, 3, generator=generator) for _ in range(5)]
            seen = set()
            for seed in range(20):
                results, counters = run(5, collective, inputs, seed=seed)
                seen.add((*map(bits, results), str(counters)))
            self.assertEqual(len(seen), 1, name)

    def test_none_relies_on_buffering(self):
        for n in SIZES:
            for name, collective in PRIMITIVES.items():
                with self.subTest(name=name, n=n):
                    inputs = [values(rank, n) for rank in range(n)]
                    results, _ = run(n, collective, inputs, buffered=False)
                    buffered, _ = run(n, collective, inputs)
                    self.assertEqual([*map(bits, results)], [*map(bits, buffered)])


def attempt(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "it went through"


class TestRefusals(Collective):
    """Each rank gets the same words, with the values, before any payload moves."""

    def refused(self, n: int, calls, *parts: str):
        """`calls(rank)` returns (collective, tensor, options)."""

        def work(mesh):
            collective, tensor, options = calls(mesh.rank)
            before = wire.tensor_to_bytes(tensor)
            words = attempt(lambda: collective(mesh, tensor, **options))
            return words, mesh.counters.bytes_sent, before == wire.tensor_to_bytes(tensor)

        outcomes = VirtualCluster(n).run(work)
        self.assertEqual(len(set(outcomes)), 1, outcomes)
        words, bytes_sent, unchanged = outcomes[0]
        self.assertEqual((bytes_sent, unchanged), (0, True))
        for part in ("a collective", *parts):
            self.assertIn(part, words)

    def test_shape(self):
        for collective in PRIMITIVES.values():
            self.refused(
                3,
                lambda rank, c=collective: (c, torch.ones(3 if rank < 2 else 6), {}),
                "shape: rank 0, 1 has [3]; rank 2 has [6]",
            )
        self.refused(2, lambda rank: (ring_allreduce, torch.ones(*((4,), (2, 2))[rank]), {}), "[4]", "[2, 2]")

    def test_dtype(self):
        for collective in PRIMITIVES.values():
            self.refused(
                3,
                lambda rank, c=collective: (c, torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32), {}),
                'dtype: rank 0, 2 has "float32"; rank 1 has "float64"',
            )

    def test_reduction(self):
        self.refused(
            2,
            lambda rank: (ring_allreduce, torch.ones(2), {"op": ("sum", "max")[rank]}),
            'reduction: rank 0 has "sum"; rank 1 has "max"',
        )

    def test_source(self):
        self.refused(
            3, lambda rank: (broadcast, torch.ones(2), {"src": rank}), "source: rank 0 has 0; rank 1 has 1; rank 2"
        )

    def test_different_collectives(self):
        names = [*PRIMITIVES]
        self.refused(
            4,
            lambda rank: (PRIMITIVES[names[rank]], torch.ones(4), {}),
            'rank 0 has "all_reduce"; rank 1 has "broadcast"; rank 2 has "all_gather"; rank 3 has "reduce_scatter"',
        )

    def test_the_mesh_works_on_after_a_refusal(self):
        def work(mesh):
            attempt(lambda: ring_allreduce(mesh, torch.ones(mesh.rank + 1)))
            return ring_allreduce(mesh, torch.ones(2)).tolist()

        self.assertEqual(VirtualCluster(3).run(work), [[3.0, 3.0]] * 3)

    def local(self, n: int, message: str, collective, tensor, **options):
        def work(mesh):
            return attempt(lambda: collective(mesh, tensor, **options)), mesh.counters.control_messages

        for words, messages in VirtualCluster(n).run(work):
            self.assertRegex(words, message)
            self.assertEqual(messages, 0)

    def test_local_faults_are_seen_without_any_message(self):
        for src in (-1, 3, 99, True, 1.0, "0", None):
            self.local(
                3, f"broadcast source must be a rank from 0 to 2, got {src!r}", broadcast, torch.ones(2), src=src
            )
        for collective in (ring_allreduce, reduce_scatter):
            self.local(2, "op must be one of sum, avg, max, got 'min'", collective, torch.ones(2), op="min")
            self.local(2, "avg needs floating-point elements, got int64", collective, torch.arange(2), op="avg")
            self.local(2, "max is not defined for elements of complex64", collective, torch.ones(2) * 1j, op="max")
            self.local(2, "sum is not defined for elements of uint16", collective, torch.ones(2).to(torch.uint16))
        for collective in PRIMITIVES.values():
            self.local(2, "needs a tensor, got list", collective, [1.0, 2.0])

    def test_the_comparison_can_be_left_out(self):
        for collective in PRIMITIVES.values():
            _, counters = run(3, collective, [torch.ones(3)] * 3, check=False)
            self.assertEqual([count.control_messages for count in counters], [0, 0, 0])
            _, counters = run(3, collective, [torch.ones(3)] * 3)
            self.assertEqual([count.control_messages for count in counters], [2, 2, 2])


if __name__ == "__main__":
    unittest.main()
