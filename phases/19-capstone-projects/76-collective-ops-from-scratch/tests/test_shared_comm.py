import itertools
import multiprocessing
import sys
import unittest
import unittest.mock
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from arena import ALIGNMENT, Arena, why_not
from comm import TorchComm
from ranks import RankError, run_ranks
from shared_comm import SharedComm, gloo_chunks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
SIZES = (0, 1, 3, 7, 1000, 3001)  # with windows of 4096 bytes: less than one, one and many segments


def values(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Distinct values for each rank and position."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    x = torch.randn(numel, generator=generator, dtype=torch.float64) * 100
    return (x > 0) if dtype == torch.bool else x.to(dtype)


def operations(dtype: torch.dtype) -> list[str]:
    """Those that have a meaning for it."""
    average, largest = dtype.is_floating_point or dtype.is_complex, not dtype.is_complex
    return ["sum", *["max"] * largest, *["avg"] * average]


class Differences(list):
    """What differs in any bit, for one rank."""

    def compare(self, what: str, theirs: torch.Tensor, mine: torch.Tensor) -> None:
        if not torch.equal(theirs, mine):
            self.append(what)


def all_reduce_as_gloo(rank: int, world_size: int, arena: Arena) -> list[str]:
    """Return what differs from gloo's all-reduces, where the tensor goes through the windows."""
    gloo, ours, wrong = TorchComm().unchecked(), SharedComm(arena).unchecked(), Differences()
    for dtype, numel in itertools.product(DTYPES, SIZES):
        where, x = f"{dtype} {numel}", values(numel, dtype, rank)
        for op in operations(dtype):
            a, b = x.clone(), x.clone()
            gloo.all_reduce(a, op)
            ours.all_reduce(b, op)
            wrong.compare(f"all_reduce {op} {where}", a, b)
    column = torch.arange(8.0).view(4, 2)[:, 1] + rank
    ours.all_reduce(column)
    wrong.compare("a strided tensor", torch.arange(1.0, 8, 2) * world_size + sum(range(world_size)), column)
    return wrong


def others_as_gloo(rank: int, world_size: int, arena: Arena) -> list[str]:
    """Return what differs from gloo's all-reduces in the heap, and from its other collectives."""
    gloo, ours, wrong = TorchComm().unchecked(), SharedComm(arena).unchecked(), Differences()
    for dtype, numel in itertools.product(DTYPES, SIZES):
        where, x = f"{dtype} {numel}", values(numel, dtype, rank)
        for op in operations(dtype):
            a, b = x.clone(), ours.empty(numel, dtype).copy_(x)
            gloo.all_reduce(a, op)
            ours.all_reduce(b, op)  # in place
            wrong.compare(f"all_reduce in the heap {op} {where}", a, b)
        wide = values(numel * world_size, dtype, rank)
        a, b, kept = torch.empty_like(x), torch.empty_like(x), wide.clone()
        gloo.reduce_scatter(a, wide)
        ours.reduce_scatter(b, wide)
        wrong.compare(f"reduce_scatter {where}", a, b)
        wrong.compare(f"reduce_scatter left its input alone {where}", kept, wide)
        own = wide.chunk(world_size)[rank] if numel else wide
        ours.reduce_scatter(own, wide)
        wrong.compare(f"reduce_scatter into x's own slice {where}", a, own)
        shared = ours.empty(wide.numel(), dtype).copy_(kept)
        own = shared.chunk(world_size)[rank] if numel else shared
        ours.reduce_scatter(b.zero_(), shared)
        wrong.compare(f"reduce_scatter of the heap {where}", a, b)
        wrong.compare(f"reduce_scatter of the heap left its input alone {where}", kept, shared)
        ours.reduce_scatter(own, shared)
        wrong.compare(f"reduce_scatter into the heap {where}", a, own)
        a, b = torch.empty_like(kept), torch.empty_like(kept)
        gloo.all_gather(a, x)
        ours.all_gather(b, x)
        wrong.compare(f"all_gather {where}", a, b)
        ours.all_gather(shared, x)
        wrong.compare(f"all_gather into the heap {where}", a, shared)
        own.copy_(shared.zero_()[: len(own)]).copy_(x)
        ours.all_gather(shared, own)
        wrong.compare(f"all_gather from x's own slice of the heap {where}", a, shared)
        for src in {0, world_size - 1}:
            a, b = x.clone(), x.clone()
            gloo.broadcast(a, src)
            ours.broadcast(b, src)
            wrong.compare(f"broadcast from {src} {where}", a, b)
    return wrong


def large(rank: int, world_size: int, arena: Arena) -> list[bool]:
    """Sizes at which gloo cuts more than two segments a rank."""
    gloo, ours, equal = TorchComm(), SharedComm(arena), []
    for numel in (1_048_577, 2_500_001):
        x = values(numel, torch.float32, rank)
        gloo.all_reduce(a := x.clone())
        ours.all_reduce(x)
        equal.append(torch.equal(a, x))
    return equal


def cost(rank: int, world_size: int, arena: Arena) -> tuple:
    """Count barriers, and what the counters say."""
    ours = SharedComm(arena).unchecked()
    barriers = []
    plain = arena.barrier
    arena.barrier = lambda *args: (barriers.append(1), plain(*args))[1]
    counts = []
    for call in (
        lambda: ours.all_reduce(torch.ones(4096)),  # 16 KB through windows of 4 KB: 4 segments
        lambda: ours.all_reduce(ours.empty(4096, torch.float32).zero_()),
        lambda: ours.all_gather(torch.empty(4096 * world_size), torch.ones(4096)),
        lambda: ours.all_gather(ours.empty(4096 * world_size, torch.float32), torch.ones(4096)),
        lambda: ours.reduce_scatter(torch.empty(4096), ours.empty(4096 * world_size, torch.float32).zero_()),
        lambda: ours.broadcast(torch.ones(4096)),
    ):
        call()
        counts.append(len(barriers))
        barriers.clear()
    return counts, dict(ours.counters.calls), dict(ours.counters.bytes)


def through_other(rank: int, world_size: int, arena: Arena) -> tuple:
    """Messages, facts and sub-groups go through the process group."""
    ours = SharedComm(arena)
    got = torch.empty(2)
    ours.exchange(
        [(torch.full((2,), float(rank)), (rank + 1) % world_size, 3)], [(got, (rank - 1) % world_size, 3)]
    ).wait()
    half = ours.split(rank % 2)
    half.all_reduce(x := torch.tensor([float(rank)]))
    return got.tolist(), ours.agree({"rank": rank}), x.item()


def disagree(rank: int, world_size: int, arena: Arena) -> str:
    """One rank brings another dtype: refused on every rank, nothing changed."""
    ours = SharedComm(arena)
    x = torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32)
    try:
        ours.all_reduce(x)
    except ValueError as error:
        return f"{error} {x.tolist()}"
    return "accepted"


def elsewhere(rank: int, world_size: int, arena: Arena) -> tuple[str, list]:
    """Rank 1 brings a tensor of its own, the others one of the heap."""
    ours = SharedComm(arena)
    x = torch.ones(3) if rank == 1 else ours.empty(3, torch.float32).fill_(1)
    try:
        ours.all_reduce(x)
    except ValueError as error:
        return str(error), x.tolist()
    return "accepted", x.tolist()


def absent(rank: int, world_size: int, arena: Arena, never) -> None:
    """Rank 1 does not come to the collective."""
    ours = SharedComm(arena, timeout=0.5).unchecked()
    if rank == 1:
        never.wait()
    ours.all_reduce(torch.ones(4))


def another_size(rank: int, world_size: int, arena: Arena) -> str:
    """The arena is for more ranks than there are."""
    try:
        SharedComm(arena)
    except ValueError as error:
        return str(error)
    return "accepted"


def heap(rank: int, world_size: int, arena: Arena) -> list[bool]:
    """Which of three buffers are in the heap, whose room is for two."""
    ours, start = SharedComm(arena), arena.heap(rank).data_ptr()
    buffers = [ours.empty(10, torch.float32), ours.empty(ALIGNMENT, torch.uint8), ours.empty(1, torch.float32)]
    return [start <= b.data_ptr() < start + arena.heap_bytes for b in buffers]


class TestChunks(unittest.TestCase):
    def test_chunks_cover_the_tensor_in_order(self):
        for numel in (0, 1, 5, 1000, 3_000_001):
            for itemsize in (1, 2, 4, 8):
                for n in range(1, 9):
                    chunks = gloo_chunks(numel, itemsize, n)
                    self.assertEqual(len(chunks), n)
                    self.assertEqual([a for a, _ in chunks], [0, *(b for _, b in chunks[:-1])])
                    self.assertEqual(chunks[-1][1], numel)


@unittest.skipIf(why_not(), why_not())
class TestSharedComm(unittest.TestCase):
    def assert_same_as_gloo(self, worker):
        for n in range(1, 6):
            found = run_ranks(worker, n, Arena(n, heap_bytes=1 << 23, window_bytes=4096), timeout=100)
            self.assertEqual(found, [[]] * n, f"{n} ranks")

    def test_every_bit_of_an_all_reduce_through_the_windows_is_gloos(self):
        self.assert_same_as_gloo(all_reduce_as_gloo)

    def test_every_bit_of_all_else_is_gloos(self):
        self.assert_same_as_gloo(others_as_gloo)

    def test_every_bit_is_gloos_in_large_tensors(self):
        for n in (2, 3):
            self.assertEqual(run_ranks(large, n, Arena(n), timeout=100), [[True, True]] * n)

    def test_cost(self):
        for counts, calls, sent in run_ranks(cost, 3, Arena(3, heap_bytes=1 << 17, window_bytes=4096), timeout=60):
            self.assertEqual(counts, [4 + 1, 3, 4, 2, 2, 4])
            self.assertEqual(calls, {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1, "broadcast": 1})
            expected = {"all_reduce": 2 * 16384, "all_gather": 6 * 16384, "reduce_scatter": 3 * 16384}
            self.assertEqual(sent, expected | {"broadcast": 16384})

    def test_messages_facts_and_groups_go_through_the_process_group(self):
        found = run_ranks(through_other, 4, Arena(4), timeout=60)
        self.assertEqual([got for got, _, _ in found], [[3.0] * 2, [0.0] * 2, [1.0] * 2, [2.0] * 2])
        self.assertEqual([facts for _, facts, _ in found], [[{"rank": r} for r in range(4)]] * 4)
        self.assertEqual([x for _, _, x in found], [2.0, 4.0, 2.0, 4.0])

    def test_ranks_that_disagree_are_refused_on_every_rank(self):
        for text in run_ranks(disagree, 3, Arena(3), timeout=60):
            self.assertIn('dtype: rank 0, 2 has "float32"; rank 1 has "float64"', text)
            self.assertIn("[1.0, 1.0, 1.0]", text)

    def test_ranks_whose_tensors_live_in_different_places_are_refused(self):
        for text, values in run_ranks(elsewhere, 3, Arena(3, heap_bytes=128), timeout=60):
            self.assertIn("place in the heap: rank 0, 2 has 0; rank 1 has null", text)
            self.assertEqual(values, [1.0, 1.0, 1.0])

    def test_a_rank_that_does_not_come_is_named(self):
        with self.assertRaises(RankError) as caught:
            run_ranks(absent, 3, Arena(3), multiprocessing.get_context("fork").Event(), timeout=60)
        self.assertEqual(caught.exception.rank, 1)
        self.assertIn("waited 0.5 s for rank 1", str(caught.exception))

    def test_the_heap_is_used_while_there_is_room(self):
        self.assertEqual(run_ranks(heap, 2, Arena(2, heap_bytes=128), timeout=60), [[True, True, False]] * 2)

    def test_bad_arenas(self):
        for options in ({"heap_bytes": -64}, {"heap_bytes": 10}, {"window_bytes": 64}, {"window_bytes": True}):
            with self.assertRaisesRegex(ValueError, "must be a multiple of 64"):
                Arena(2, **options)
        with self.assertRaisesRegex(ValueError, "world_size"):
            Arena(0)
        for text in run_ranks(another_size, 2, Arena(3), timeout=60):
            self.assertEqual(text, "the arena is for 3 ranks, there are 2")


class TestElsewhere(unittest.TestCase):
    def test_where_ranks_are_spawned_there_is_a_reason(self):
        with unittest.mock.patch.dict("os.environ", {"RANKS_START_METHOD": "spawn"}):
            self.assertIn("inherited through fork", why_not())
            with self.assertRaisesRegex(RuntimeError, "inherited through fork"):
                Arena(2)


if __name__ == "__main__":
    unittest.main()
