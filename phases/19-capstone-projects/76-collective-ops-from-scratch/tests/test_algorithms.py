"""Halving, two levels, pipelined broadcast, all-to-all, barrier: N = 1-16, all kinds of tensors, and all mismatches."""

import math
import sys
import unittest
from functools import partial
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import wire
from alltoall import alltoall
from barrier import barrier
from halving import halving_allreduce
from hierarchical import hierarchical_allreduce, nodes_of, owner
from pipelined import pipelined_broadcast
from ranks import RankError
from verify import compare
from virtual import DeadlockError, VirtualCluster

RANKS = range(1, 17)
SOME_RANKS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
LENGTHS = (0, 5, 37)
SEEDS = 10


def values(rank: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    """Distinct for each rank and position."""
    return (torch.arange(math.prod(shape)).reshape(shape) + 1000 * rank).to(dtype)


def run(collective, inputs: list, *args, seed=0, buffered=True, **options) -> list:
    """Return each virtual rank's result; make sure that its input is what it was. Ranks do not compare their calls."""

    def work(mesh):
        before = wire.tensor_to_bytes(inputs[mesh.rank])
        result = collective(mesh, inputs[mesh.rank], *args, check=False, **options)
        assert wire.tensor_to_bytes(inputs[mesh.rank]) == before, f"rank {mesh.rank}: the input has changed"
        return result

    return VirtualCluster(len(inputs), seed, buffered).run(work)


def nodes_to_try(n: int) -> list[int]:
    """Return sizes of nodes that divide N, and that leave a smaller last node."""
    return sorted({min(2, n), (n + 1) // 2} | ({1, n} if n < 6 else set()))


def halvings(n: int) -> dict:
    """Return name -> all-reduce of (mesh, tensor, op) for N ranks."""
    return {"halving": halving_allreduce}


def two_levels(n: int) -> dict:
    """Return the same, for each size of a node."""
    return {f"nodes of {s}": partial(hierarchical_allreduce, node_size=s) for s in nodes_to_try(n)}


def all_reduces(n: int) -> dict:
    """Return all of them."""
    return halvings(n) | two_levels(n)


class Algorithms(unittest.TestCase):
    def assert_same(self, found: torch.Tensor, expected: torch.Tensor):
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape))
        self.assertEqual(wire.tensor_to_bytes(found), wire.tensor_to_bytes(expected), f"{found} is not {expected}")

    def assert_refused(self, words: str, n: int, call, control: int | None = 0):
        """`call(mesh)` raises one ValueError on every rank, before any payload (and `control` messages a rank)."""

        def work(mesh):
            try:
                call(mesh)
            except ValueError as error:
                return str(error), mesh.counters.messages_sent, mesh.counters.control_messages
            return "it went through", mesh.counters.messages_sent, mesh.counters.control_messages

        found = VirtualCluster(n).run(work)
        self.assertEqual(len(set(found)), 1, found)
        self.assertIn(words, found[0][0])
        self.assertEqual(found[0][1:], (0, control))


class Numbers:
    """What every all-reduce must do, whatever the number of ranks.

    The classes below say which: `all_reduces(n)` returns name -> function; `ranks` and `some_ranks` say for how many.
    """

    ranks, some_ranks = RANKS, SOME_RANKS

    def test_sums_for_every_length(self):
        for n in self.ranks:
            for length in LENGTHS:
                inputs = [values(rank, length) for rank in range(n)]
                for name, all_reduce in self.all_reduces(n).items():
                    with self.subTest(name=name, n=n, length=length):
                        for result in run(all_reduce, inputs):
                            self.assert_same(result, sum(inputs))

    def test_rounding_stays_within_the_bound_and_is_the_same_on_every_rank(self):
        for n in self.some_ranks:
            for dtype in (torch.float32, torch.bfloat16, torch.complex64):
                generator = torch.Generator().manual_seed(n)
                inputs = [torch.randn(29, generator=generator).to(dtype) for _ in range(n)]
                exact = sum(x.to(torch.complex128 if dtype.is_complex else torch.float64) for x in inputs).to(dtype)
                for name, all_reduce in self.all_reduces(n).items():
                    with self.subTest(name=name, n=n, dtype=dtype):
                        results = run(all_reduce, inputs)
                        self.assertTrue(compare("allreduce", inputs, results, [exact] * n)[0])
                        self.assertEqual(len({wire.tensor_to_bytes(result) for result in results}), 1)

    def test_mean_and_maximum(self):
        for n in self.some_ranks:
            inputs = [values(rank * (-1) ** rank, 11) for rank in range(n)]
            for name, all_reduce in self.all_reduces(n).items():
                with self.subTest(name=name, n=n):
                    for result in run(all_reduce, inputs, op="avg"):
                        self.assert_same(result, sum(inputs) / n)
                    for result in run(all_reduce, inputs, op="max"):
                        self.assert_same(result, torch.stack(inputs).amax(0))


class AllReduces(Numbers):
    """And whatever the tensor."""

    def test_every_dtype(self):
        for n in (2, 3, 5):
            for dtype in FLOATS + INTEGERS + COMPLEX:
                inputs = [(torch.arange(7) % 4 + rank).to(dtype) for rank in range(n)]
                for all_reduce in self.all_reduces(n).values():
                    for result in run(all_reduce, inputs):
                        self.assert_same(result, sum(inputs[1:], inputs[0]))
            bools = [torch.arange(9) % 5 > 3 + rank % 2 for rank in range(n)]
            for all_reduce in self.all_reduces(n).values():
                for result in run(all_reduce, bools):
                    self.assert_same(result, torch.stack(bools).any(0))

    def test_shapes_and_strides(self):
        for n in (1, 3, 4):
            for make in (
                lambda rank: torch.tensor(float(rank)),
                lambda rank: values(rank, 3, 0),
                lambda rank: values(rank, 3, 2, 2),
                lambda rank: values(rank, 12, 2)[:, 1],
                lambda rank: values(rank, 5, 3).t(),
                lambda rank: values(rank, 1, 5).expand(4, 5),
                lambda rank: torch.complex(values(rank, 7), values(rank, 7)).conj(),
                lambda rank: values(rank, 4).requires_grad_(),
            ):
                inputs = [make(rank) for rank in range(n)]
                plain = [x.detach().resolve_conj().contiguous() for x in inputs]
                expected = sum(plain[1:], plain[0])
                for all_reduce in self.all_reduces(n).values():
                    for rank, result in enumerate(run(all_reduce, inputs)):
                        self.assert_same(result, expected)
                        self.assertTrue(result.is_contiguous() and not result.requires_grad)
                        if result.numel():
                            self.assertNotEqual(result.data_ptr(), inputs[rank].data_ptr())

    def test_nan_and_infinity_pass_through(self):
        inputs = [torch.tensor([1.0, math.inf, 2.0, 3.0])] * 4 + [torch.tensor([math.nan, math.inf, -math.inf, 1.0])]
        for all_reduce in self.all_reduces(5).values():
            for result in run(all_reduce, inputs):
                self.assertEqual(str(result.tolist()), "[nan, inf, -inf, 13.0]")


class TestHalving(AllReduces, Algorithms):
    all_reduces = staticmethod(halvings)


class TestTwoLevels(AllReduces, Algorithms):
    ranks = some_ranks = (1, 2, 3, 4, 5, 6, 8, 11)  # one node and many, full ones and a smaller last one
    all_reduces = staticmethod(two_levels)


class TestTwoLevelsOfMoreRanks(Numbers, Algorithms):
    ranks, some_ranks = sorted({*RANKS} - {*TestTwoLevels.ranks}), (16,)
    all_reduces = staticmethod(two_levels)


class TestPipelinedBroadcast(Algorithms):
    def test_there_are_no_more_pieces_than_elements(self):
        def work(mesh):
            return pipelined_broadcast(mesh, torch.arange(6.0) + 10 * mesh.rank, 0, chunks=10**9), mesh.counters.rounds

        for result, rounds in VirtualCluster(3).run(work):
            self.assertEqual(result.tolist(), list(range(6)))
            self.assertLessEqual(rounds, 6 + 3 - 2)

    def test_from_every_source_in_any_number_of_chunks(self):
        for n in RANKS:
            inputs = [values(rank, 7) for rank in range(n)]
            for src in {0, n // 2, n - 1}:
                for chunks in (1, 3, 10):
                    with self.subTest(n=n, src=src, chunks=chunks):
                        for result in run(pipelined_broadcast, inputs, src, chunks):
                            self.assert_same(result, inputs[src])

    def test_any_kind_of_tensor(self):
        makers = [lambda rank, d=d: values(rank % 2, 11).to(d) for d in FLOATS + INTEGERS + COMPLEX]
        makers += [
            lambda rank: values(rank, 11) > 1003,
            lambda rank: (torch.arange(5, dtype=torch.uint8) + rank).to(torch.float8_e4m3fn),
            lambda rank: torch.tensor(rank),
            lambda rank: values(rank, 2, 0),
            lambda rank: values(rank, 6, 2)[:, 1],
            lambda rank: torch.complex(values(rank, 7), values(rank, 7)).conj(),
            lambda rank: torch.nn.Parameter(values(rank, 7)),
        ]
        for make in makers:
            inputs = [make(rank) for rank in range(3)]
            for result in run(pipelined_broadcast, inputs, 1, chunks=4):
                self.assert_same(result, inputs[1].detach().resolve_conj().contiguous())
                self.assertFalse(result.requires_grad)


class TestAllToAll(Algorithms):
    def expected(self, inputs: list, rank: int) -> torch.Tensor:
        n = len(inputs)
        return torch.cat([x.detach().resolve_conj().contiguous().tensor_split(n)[rank] for x in inputs])

    def test_every_number_of_ranks(self):
        for n in RANKS:
            for shape in ((n,), (2 * n, 3), (n, 0), (0,)):
                with self.subTest(n=n, shape=shape):
                    inputs = [values(rank, *shape) for rank in range(n)]
                    for rank, result in enumerate(run(alltoall, inputs)):
                        self.assert_same(result, self.expected(inputs, rank))

    def test_twice_is_once_there_and_back(self):
        inputs = [values(rank, 15) for rank in range(5)]
        for rank, result in enumerate(run(lambda mesh, x, check: alltoall(mesh, alltoall(mesh, x)), inputs)):
            self.assert_same(result, inputs[rank])

    def test_any_kind_of_tensor(self):
        makers = [lambda rank, d=d: values(rank % 2, 12).to(d) for d in FLOATS + INTEGERS + COMPLEX]
        makers += [
            lambda rank: values(rank, 12) > 1003,
            lambda rank: values(rank, 12, 2)[:, 1],
            lambda rank: values(rank, 5, 6).t(),
            lambda rank: torch.complex(values(rank, 6), values(rank, 6)).conj(),
            lambda rank: values(rank, 6).requires_grad_(),
        ]
        for make in makers:
            inputs = [make(rank) for rank in range(3)]
            for rank, result in enumerate(run(alltoall, inputs)):
                self.assert_same(result, self.expected(inputs, rank))
                self.assertTrue(result.is_contiguous() and not result.requires_grad)


class TestBarrier(Algorithms):
    def left_too_early(self, wait, n: int, seed: int) -> bool:
        """Say whether any rank left one of two barriers before all ranks had come to it."""
        come, early = [0] * n, []

        def work(mesh):
            for turn in (1, 2):
                come[mesh.rank] = turn
                wait(mesh)
                early.append(min(come) < turn)

        VirtualCluster(n, seed, buffered=bool(seed % 2)).run(work)
        return any(early)

    def test_nobody_leaves_before_everybody_has_come(self):
        for n in range(2, 17, 2):
            for seed in range(SEEDS):
                self.assertFalse(self.left_too_early(barrier, n, seed), f"N={n}, seed {seed}")

    def can_leave_alone(self, wait, n: int, early: int) -> bool:
        """Say whether rank `early` can leave the barrier although rank 0 comes to it only after that."""

        def work(mesh):
            if mesh.rank == 0:
                mesh.recv(early, tag=1)
            wait(mesh)
            if mesh.rank == early:
                mesh.send(0, torch.empty(0), tag=1)

        try:
            VirtualCluster(n).run(work)
        except DeadlockError:
            return False
        return True

    def test_nobody_leaves_if_one_never_comes(self):
        for n in RANKS:
            self.assertFalse(any(self.can_leave_alone(barrier, n, early) for early in range(1, n)), f"N={n}")

    def test_a_barrier_of_one_round_less_is_found_out(self):
        def one_round_less(mesh):
            barrier(LastRoundLeftOut(mesh))

        for n in range(2, 17):
            self.assertTrue(any(self.can_leave_alone(one_round_less, n, early) for early in range(1, n)), f"N={n}")


class LastRoundLeftOut:
    """A mesh that goes through all rounds of a barrier but the last."""

    def __init__(self, mesh):
        self._mesh, self._left = mesh, math.ceil(math.log2(mesh.world_size)) - 1

    def __getattr__(self, name):
        return getattr(self._mesh, name)

    def sendrecv(self, dst, tensor, src, tag=0):
        self._left -= 1
        return self._mesh.sendrecv(dst, tensor, src, tag) if self._left >= 0 else tensor


class TestInterleavings(Algorithms):
    def others(self, n: int) -> dict:
        calls = {"alltoall": alltoall, "pipelined": lambda mesh, x: pipelined_broadcast(mesh, x, n - 1, 3)}
        return calls | two_levels(n)

    @staticmethod
    def counted(call, inputs: list, mesh):
        return call(mesh, inputs[mesh.rank]), mesh.counters

    def assert_same_in_any_order(self, calls):
        """`calls(n)` returns name -> call(mesh, tensor): the same bits and costs, buffered or not."""
        for n in (2, 3, 5, 8, 11):
            generator = torch.Generator().manual_seed(5)
            inputs = [torch.randn(n, 3, generator=generator) for _ in range(n)]
            for name, call in calls(n).items():
                seen = set()
                for seed in range(6):
                    cluster = VirtualCluster(n, seed, buffered=bool(seed % 2))
                    pairs = cluster.run(partial(self.counted, call, inputs))
                    seen.add((*(wire.tensor_to_bytes(result) for result, _ in pairs), str([c for _, c in pairs])))
                self.assertEqual(len(seen), 1, f"{name}, N={n}")

    def test_halving(self):
        self.assert_same_in_any_order(halvings)

    def test_the_others(self):
        self.assert_same_in_any_order(self.others)


class TestNodes(Algorithms):
    def test_ranks_of_a_node_are_neighbours(self):
        self.assertEqual(nodes_of(5, 2), [[0, 1], [2, 3], [4]])
        self.assertEqual(nodes_of(3, 3), [[0, 1, 2]])

    def test_every_slice_has_an_owner_and_the_slices_of_an_owner_are_neighbours(self):
        for node_size in range(1, 17):
            for members in range(1, node_size + 1):
                owners = [owner(index, node_size, members) for index in range(node_size)]
                self.assertEqual(owners, sorted(owners))
                self.assertEqual(set(owners), set(range(members)))


class TestRefusals(Algorithms):
    def test_bad_node_sizes_are_seen_without_any_message(self):
        for node_size in (0, -1, 4, True, 1.0, "2", None):
            self.assert_refused(
                f"node_size must be a whole number from 1 to 3, the ranks, got {node_size!r}",
                3,
                lambda mesh, s=node_size: hierarchical_allreduce(mesh, torch.ones(2), s),
            )

    def test_bad_chunks_and_sources_are_too(self):
        for chunks in (0, -1, True, 1.0, "2", None):
            self.assert_refused(
                f"chunks must be a whole number of at least 1, got {chunks!r}",
                3,
                lambda mesh, c=chunks: pipelined_broadcast(mesh, torch.ones(2), chunks=c),
            )
        for src in (-1, 3, True, 1.0, "0", None):
            self.assert_refused(
                f"pipelined_broadcast source must be a rank from 0 to 2, got {src!r}",
                3,
                lambda mesh, s=src: pipelined_broadcast(mesh, torch.ones(2), s),
            )
        for shape in ((), (2,), (4, 3)):
            self.assert_refused(
                f"alltoall cuts dimension 0 into 3 equal chunks, which shape {shape} does not allow",
                3,
                lambda mesh, s=shape: alltoall(mesh, torch.ones(s)),
            )

    def test_bad_operations_and_tensors_are_too(self):
        for all_reduce in all_reduces(3).values():
            for words, tensor, op in (
                ("op must be one of sum, avg, max, got 'min'", torch.ones(2), "min"),
                ("avg needs floating-point elements, got int64", torch.arange(2), "avg"),
                ("max is not defined for elements of complex64", torch.ones(2) * 1j, "max"),
                ("needs a tensor, got list", [1.0], "sum"),
            ):
                self.assert_refused(words, 3, lambda mesh, f=all_reduce, t=tensor, o=op: f(mesh, t, op=o))
        for collective in (pipelined_broadcast, alltoall):
            self.assert_refused("needs a tensor, got list", 3, lambda mesh, f=collective: f(mesh, [1.0]))

    def test_ranks_that_disagree_are_refused(self):
        for words, call in (
            ("node_size: rank 0, 1 has 1; rank 2 has 2", lambda m, x: hierarchical_allreduce(m, x, 1 + m.rank // 2)),
            ("chunks: rank 0 has 1; rank 1 has 2; rank 2 has 3", lambda m, x: pipelined_broadcast(m, x, 0, m.rank + 1)),
            ("source: rank 0 has 0; rank 1 has 1; rank 2 has 2", lambda m, x: pipelined_broadcast(m, x, m.rank)),
            (
                'reduction: rank 0 has "sum"; rank 1, 2',
                lambda m, x: halving_allreduce(m, x, "max" if m.rank else "sum"),
            ),
            (
                'operation: rank 0 has "halving_all_reduce"; rank 1, 2 has "all_to_all"',
                lambda m, x: (alltoall if m.rank else halving_allreduce)(m, x),
            ),
        ):
            self.assert_refused(words, 3, lambda mesh, call=call: call(mesh, torch.ones(3)), control=2)

    def test_ranks_with_different_tensors_are_refused(self):
        for collective in (*all_reduces(3).values(), pipelined_broadcast, alltoall):
            self.assert_refused(
                "shape: rank 0, 1 has [3]; rank 2 has [6]",
                3,
                lambda mesh, f=collective: f(mesh, torch.ones(6 if mesh.rank == 2 else 3)),
                control=2,
            )
            self.assert_refused(
                'dtype: rank 0, 2 has "float32"; rank 1 has "float64"',
                3,
                lambda mesh, f=collective: f(mesh, torch.ones(3, dtype=torch.float64 if mesh.rank == 1 else None)),
                control=2,
            )

    def test_the_comparison_can_be_left_out(self):
        for collective in (*all_reduces(3).values(), pipelined_broadcast, alltoall):
            for check, messages in ((True, 2), (False, 0)):
                counters = VirtualCluster(3).run(
                    lambda mesh, f=collective, c=check: (f(mesh, torch.ones(3), check=c), mesh.counters)[1]
                )
                self.assertEqual([count.control_messages for count in counters], [messages] * 3)

    def test_a_rank_that_raises_is_named(self):
        with self.assertRaisesRegex(RankError, "rank 0 raised ValueError: node_size"):
            VirtualCluster(1).run(lambda mesh: hierarchical_allreduce(mesh, torch.ones(1), 2))


if __name__ == "__main__":
    unittest.main()
