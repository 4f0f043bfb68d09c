"""The comparison with gloo: it cannot be fooled, refuses bad input before any process starts, and all cases match."""

import math
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import verify
import wire
from collectives import PRIMITIVES
from verify import Case, compare, gloo_reference, run_mesh, verify_against_gloo, verify_cases

F32 = torch.float32
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def cases(world_size: int, sources) -> list[Case]:
    """Every collective with every dtype and shape that it takes; distinct values for each rank and position."""
    made = []
    for op in PRIMITIVES:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(3)
            pages = [(torch.randn(2 * world_size, 3, generator=generator) * 50).to(dtype) for _ in range(world_size)]
            made += [Case(op, pages, src) for src in (sources if op == "broadcast" else (0,))]
            made.append(Case(op, [page[:, 1] for page in pages], world_size - 1))  # a column
        made += [Case(op, [torch.ones(shape)] * world_size) for shape in ((0,), (0, 3), (world_size, 0))]
        if op != "reduce_scatter":
            made.append(Case(op, [torch.tensor(rank + 0.5) for rank in range(world_size)]))
            made.append(Case(op, [torch.arange(7.0) / (rank + 3) for rank in range(world_size)]))
    return made


class TestAgainstGloo(unittest.TestCase):
    def test_every_collective_dtype_and_shape(self):
        for n in (1, 2, 3, 4):
            all_cases = cases(n, range(n))
            for case, verdict in zip(all_cases, verify_cases(n, all_cases), strict=True):
                x = case.tensors[0]
                with self.subTest(n=n, op=case.op, dtype=x.dtype, shape=tuple(x.shape), src=case.src):
                    self.assertTrue(verdict.match, verdict)
                    if n <= 2 or not (x.is_floating_point() or x.is_complex()):
                        self.assertEqual(verdict.max_abs_diff, 0.0)  # bit for bit
                    size = x.numel() * x.element_size()
                    formula = {"allreduce": 2 * size, "allgather": n * size}.get(case.op, size) * (n - 1)
                    self.assertEqual(verdict.total_bytes, formula)

    def test_single_calls(self):
        inputs = [torch.arange(4.0) + 10 * rank for rank in range(3)]
        results, total_bytes = run_mesh("allreduce", 3, inputs)
        self.assertEqual([result.tolist() for result in results], [[30.0, 33.0, 36.0, 39.0]] * 3)
        self.assertEqual(total_bytes, 2 * 16 * 2)
        self.assertEqual([r.tolist() for r in gloo_reference("broadcast", 3, inputs, src=2)], [[20.0, 21, 22, 23]] * 3)
        self.assertEqual(verify_against_gloo("broadcast", 3, inputs, 1), (True, 0.0))

    def test_the_reference_is_right_where_gloo_itself_is_not(self):
        columns = [(torch.arange(8.0).view(4, 2) + 10 * rank)[:, 1] for rank in range(2)]
        self.assertEqual(gloo_reference("broadcast", 2, columns)[1].tolist(), [1.0, 3.0, 5.0, 7.0])
        short = [torch.tensor([30000, 1], dtype=torch.int16)] * 2
        self.assertEqual(gloo_reference("allreduce", 2, short)[0].tolist(), [60000 - 65536, 2])
        truths = [torch.tensor([True, True, False])] * 2
        self.assertEqual(wire.tensor_to_bytes(gloo_reference("allreduce", 2, truths)[0]), b"\1\1\0")


class TestCompare(unittest.TestCase):
    """Five ways in which a public lesson's comparison was fooled, and some more."""

    def one(self, a, b, op="allreduce", inputs=None):
        """Two ranks with the same results a (ours) and b (gloo's)."""
        return compare(op, inputs or [a / 2, a / 2], [a, a], [b, b])

    def test_nan_is_not_0(self):
        nan, zero = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])
        self.assertEqual(self.one(nan, zero), (False, math.inf))
        self.assertEqual(self.one(zero, nan), (False, math.inf))
        self.assertEqual(self.one(nan, nan.clone()), (True, 0.0))

    def test_a_shape_of_1_is_not_a_shape_of_4(self):
        self.assertEqual(self.one(torch.ones(1), torch.ones(4)), (False, math.inf))
        self.assertEqual(self.one(torch.ones(4), torch.ones(2, 2)), (False, math.inf))
        self.assertEqual(self.one(torch.ones(0), torch.ones(3, 0)), (False, math.inf))

    def test_one_result_is_not_two(self):
        x = torch.ones(2)
        for ours, theirs in (([x], [x, x]), ([x, x], [x]), ([x], [x]), ([], [])):
            self.assertEqual(compare("allreduce", [x, x], ours, theirs), (False, math.inf))

    def test_int64_is_not_float32(self):
        self.assertEqual(self.one(torch.ones(2, dtype=torch.int64), torch.ones(2)), (False, math.inf))

    def test_a_millionth_is_not_two_millionths(self):
        match, gap = self.one(torch.tensor([1e-6]), torch.tensor([2e-6]))
        self.assertFalse(match)
        self.assertAlmostEqual(gap, 1e-6, places=12)

    def test_the_bound_is_the_derived_one(self):
        eps = torch.finfo(F32).eps
        inputs = [torch.tensor([1.0]), torch.tensor([-1.0]), torch.tensor([2.0])]  # sum |x| = 4, N = 3: 16 eps
        sums = [torch.tensor([2.0])] * 3
        for gap, match in ((16 * eps, True), (18 * eps, False)):
            theirs = [torch.tensor([2.0]), torch.tensor([2.0 + gap]), torch.tensor([2.0])]  # on one rank only
            self.assertEqual(compare("allreduce", inputs, sums, theirs), (match, gap))

    def test_the_bound_of_reduce_scatter_is_that_of_the_ranks_own_chunk(self):
        inputs = [torch.tensor([1.0, 1e6])] * 2
        ours = [torch.tensor([2.0]), torch.tensor([2e6])]
        self.assertTrue(compare("reduce_scatter", inputs, ours, [ours[0], torch.tensor([2e6 + 0.25])])[0])
        self.assertFalse(compare("reduce_scatter", inputs, ours, [torch.tensor([2.0001]), ours[1]])[0])

    def test_with_one_rank_nothing_is_rounded(self):
        x = torch.tensor([1.0])
        self.assertFalse(compare("allreduce", [x], [x], [x + torch.finfo(F32).eps])[0])

    def test_an_infinite_bound_allows_nothing(self):
        inputs = [torch.tensor([math.inf]), torch.tensor([1.0])]
        for wrong in (5.0, -math.inf, math.nan):
            self.assertEqual(
                self.one(torch.tensor([math.inf]), torch.tensor([wrong]), inputs=inputs), (False, math.inf)
            )
        self.assertEqual(self.one(inputs[0], inputs[0].clone(), inputs=inputs), (True, 0.0))

    def test_what_only_moves_is_compared_bit_for_bit(self):
        for op in ("broadcast", "allgather"):
            self.assertFalse(self.one(torch.tensor([1.0]), torch.tensor([1.0 + torch.finfo(F32).eps]), op)[0])
            self.assertEqual(self.one(torch.tensor([0.0]), torch.tensor([-0.0]), op), (False, 0.0))

    def test_integers_and_bools_are_exact_also_where_floats_are_not(self):
        big = torch.tensor([2**60])
        self.assertEqual(compare("allreduce", [big, big], [big, big], [big + 1, big]), (False, 1.0))
        true, false = torch.tensor([True]), torch.tensor([False])
        self.assertEqual(compare("allreduce", [true, true], [true, true], [true, false]), (False, 1.0))
        self.assertEqual(compare("allreduce", [true, true], [true, true], [true, true]), (True, 0.0))

    def test_complex(self):
        x = torch.tensor([3 + 4j])
        self.assertTrue(self.one(x, x * (1 + torch.finfo(F32).eps))[0])
        self.assertEqual(self.one(x, x + 5)[1], 5.0)
        self.assertEqual(self.one(x, torch.tensor([complex(math.nan, 0)])), (False, math.inf))

    def test_cancellation_does_not_make_the_bound_meaningless(self):
        inputs = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([0.1])]
        found = [torch.tensor([0.1])] * 3
        self.assertTrue(
            compare("allreduce", inputs, found, [torch.tensor([0.0])] * 3)[0]
        )  # another order loses the 0.1


class TestArguments(unittest.TestCase):
    def refused(self, message, *args, **options):
        for function in (run_mesh, gloo_reference, verify_against_gloo):
            with mock.patch.object(verify, "run_ranks", side_effect=AssertionError("processes were started")):
                with self.assertRaisesRegex(ValueError, message):
                    function(*args, **options)

    def test_refused_before_any_process_starts(self):
        x = torch.ones(6)
        for op in ("all_reduce", "gather", "", None, 3, ["allreduce"]):
            self.refused("op must be one of allreduce, broadcast, allgather, reduce_scatter, got ", op, 2, [x, x])
        for world_size in (0, -2, True, "2", 2.0, None):
            self.refused("world_size must be a whole number of at least 1, got ", "allreduce", world_size, [])
        self.refused("a list of 3 tensors is needed, one a rank, got 2", "allreduce", 3, [x, x])
        self.refused("a list of 3 tensors is needed, one a rank, got 4", "allreduce", 3, [x] * 4)
        self.refused("a list of 3 tensors is needed, one a rank, got Tensor", "allreduce", 3, torch.ones(3, 2))
        self.refused("allreduce needs a tensor, got list", "allreduce", 2, [x, [1.0]])
        self.refused(r"float32 \(6,\), float64 \(6,\)", "allreduce", 2, [x, x.double()])
        self.refused(r"float32 \(6,\), float32 \(2, 3\)", "broadcast", 2, [x, x.view(2, 3)])
        for src in (-1, 2, 99, True, "0", None):
            self.refused(f"source must be a rank from 0 to 1, got {src!r}", "broadcast", 2, [x, x], src=src)
        for shape in ((2, 6), (4, 3), ()):
            self.refused("into 3 equal chunks, which shape", "reduce_scatter", 3, [torch.ones(shape)] * 3)
        self.refused("sum is not defined for elements of uint16", "allreduce", 2, [x.to(torch.uint16)] * 2)


if __name__ == "__main__":
    unittest.main()
