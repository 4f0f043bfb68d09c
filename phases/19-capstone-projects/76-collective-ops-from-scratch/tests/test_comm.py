"""Comm: one suite over gloo, queues, gloo point-to-point and the virtual cluster: same results, same counters."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import torch.distributed as dist
import wire
from comm import Comm, TorchComm
from mesh_comm import MeshComm
from mesh import QueueMesh
from ranks import RankError, run_ranks, start_method
from torch_mesh import TorchMesh
from virtual import VirtualCluster

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
TRANSPORTS = ("gloo", "queues", "our ring over gloo")


def plain(x):
    """A tensor as plain values, to be compared with ==."""
    return [wire.dtype_name(x.dtype), list(x.shape), wire.tensor_to_bytes(x)] if isinstance(x, torch.Tensor) else x


def start(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    """Distinct for each rank and position, and small enough for every dtype's sums to be exact."""
    return ((torch.arange(numel) * 3 + 5 * rank) % 17).to(dtype)


def reductions(comm: Comm) -> list:
    seen, n = [], comm.world_size
    for dtype in DTYPES:
        ops = ["sum"] + ["max"] * (not dtype.is_complex) + ["avg"] * (dtype.is_floating_point or dtype.is_complex)
        for op in ops:
            x = start(comm.rank, 2 * n + 1, dtype)
            comm.all_reduce(x, op)
            out, x2 = torch.zeros(3, dtype=dtype), start(comm.rank, 3 * n, dtype)
            comm.reduce_scatter(out, x2, op)
            seen += [x, out, x2]
    return seen


def movements(comm: Comm) -> list:
    seen, n = [], comm.world_size
    for dtype in [*DTYPES, torch.uint16, torch.float8_e4m3fn]:
        out, x = torch.zeros(3 * n, dtype=dtype), start(comm.rank, 3, dtype)
        comm.all_gather(out, x)
        seen += [out, x]
        for src in range(n):
            y = start(comm.rank, 4, dtype)
            comm.broadcast(y, src)
            seen.append(y)
    return seen


def shapes(comm: Comm) -> list:
    """Strided memory in and out: only the view's own elements change."""
    n, rank = comm.world_size, comm.rank
    pages = [start(rank, 8 * n).view(4 * n, 2) for _ in range(4)]
    comm.all_reduce(pages[0][:, 1])
    comm.broadcast(pages[1][::2, 0], src=n - 1)
    comm.reduce_scatter(pages[2][:4, 1], pages[2][:, 0])
    comm.all_gather(pages[3][:, 1], start(rank, 8)[::2])
    transposed = start(rank, 6).view(2, 3).t()
    comm.all_reduce(transposed)
    conjugate = torch.complex(start(rank, 4), start(rank, 4)).conj()
    comm.all_reduce(conjugate)
    leaf = start(rank, 3).requires_grad_()
    comm.all_reduce(leaf)
    empties = [torch.empty(0), torch.empty(3, 0), torch.tensor(float(rank + 1))]
    for x in empties:
        comm.all_reduce(x)
        comm.broadcast(x, src=n - 1)
    gathered = torch.empty(n)
    comm.all_gather(gathered, torch.tensor(float(rank)))
    comm.all_gather(torch.empty(0), torch.empty(0))
    comm.reduce_scatter(torch.empty(0, 2), torch.empty(3, 0))
    return [*pages, transposed, conjugate, leaf, *empties, gathered]


def in_place(comm: Comm) -> list:
    """The flat buffers of ZeRO: a rank's own slice is the output of the one and the input of the other."""
    n, rank = comm.world_size, comm.rank
    flat = start(rank, 4 * n)
    mine = flat[4 * rank : 4 * rank + 4]
    comm.reduce_scatter(mine, flat)
    mine += 1
    comm.all_gather(flat, mine)
    return [flat]


def asynchronous(comm: Comm) -> list:
    n, rank = comm.world_size, comm.rank
    x, y, z = start(rank, 5), start(rank, 2 * n), start(rank, 3)
    out, everyone = torch.zeros(2), torch.zeros(3 * n)
    works = [
        comm.all_reduce(x, "avg", async_op=True),
        comm.reduce_scatter(out, y, async_op=True),
        comm.all_gather(everyone, start(rank, 3), async_op=True),
        comm.broadcast(z, n - 1, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
        work.wait()  # does nothing
    return [x, out, everyone, z]


def exchanges(comm: Comm) -> list:
    """Around a ring, tags out of order, different shapes and dtypes; then an empty exchange."""
    n, rank = comm.world_size, comm.rank
    if n == 1:
        return []
    left, right = (rank - 1) % n, (rank + 1) % n
    got = [torch.zeros(6, 2), torch.zeros(3, dtype=torch.int16), torch.zeros(0), torch.zeros((), dtype=torch.bool)]
    sent = [start(rank, 6), start(rank, 3, torch.int16), torch.zeros(0), torch.tensor(rank > 0)]
    work = comm.exchange(
        [(sent[0], right, 9), (sent[1], left, 4), (sent[2], right, 1), (sent[3], right, 5)],
        [(got[3], left, 5), (got[1], right, 4), (got[0][:, 1], left, 9), (got[2], left, 1)],
    )
    work.wait()
    comm.exchange([], []).wait()
    return [*got, *sent]


def control(comm: Comm) -> list:
    n, rank = comm.world_size, comm.rank
    seen = [
        comm.agree(rank),
        comm.agree({"pair": (rank, None), "name": "é"}),
        comm.agree("x" * (200 * (rank + 1))),  # longer than one message
        comm.agree(""),
    ]
    part = comm.split(rank % 2, key=rank)
    x = torch.tensor([rank + 1])
    part.all_reduce(x)
    y = torch.tensor([rank])
    part.broadcast(y, src=part.world_size - 1)  # a rank of the part, not of the whole
    alone = part.split(part.rank)
    alone.all_reduce(y)
    seen += [[part.rank, part.world_size, part.agree(rank), alone.world_size], x, y]
    if part.world_size > 1:
        z = torch.zeros(1)
        peer = (part.rank + 1) % part.world_size
        part.exchange([(torch.tensor([float(rank)]), peer, 0)], [(z, (part.rank - 1) % part.world_size, 0)]).wait()
        seen.append(z)
    return [*seen, comm.empty(3, torch.int16).shape, n]


MANY = (reductions, movements)  # a call for each dtype: without the comparison before each, which costs more than they
PARTS = (*MANY, shapes, in_place, asynchronous, exchanges, control)


def everything(comm: Comm) -> dict:
    quiet = comm.unchecked()
    seen = {part.__name__: [plain(x) for x in part(quiet if part in MANY else comm)] for part in PARTS}
    before = comm.counters.control_calls
    x = start(comm.rank, 4)
    quiet.all_reduce(x)
    seen["unchecked"] = [plain(x), comm.counters.control_calls - before, quiet.counters is comm.counters]
    return seen | {"counters": [dict(comm.counters.calls), dict(comm.counters.bytes), comm.counters.control_calls]}


def outcome(call, *tensors) -> list:
    """The words of the refusal, and whether the tensors are what they were."""
    before = [plain(t) for t in tensors]
    try:
        call()
    except ValueError as error:
        return [str(error), [plain(t) for t in tensors] == before]
    return ["it went through"]


def refusals(comm: Comm) -> dict:
    """What ranks must agree on. Each rank's words, with its payload counters, which must stay empty."""
    n, rank, last = comm.world_size, comm.rank, comm.rank == comm.world_size - 1
    x = torch.ones(4 * n)
    odd = x.view(4, n) if last else x
    double = x.double() if last else x
    y, z = torch.ones(4), torch.ones(4 * n, dtype=double.dtype)
    seen = {
        "shape": outcome(lambda: comm.all_reduce(odd), x),
        "dtype": outcome(lambda: comm.all_reduce(double), double),
        "gather": outcome(lambda: comm.all_gather(z, y.to(z.dtype)), z),
        "scatter": outcome(lambda: comm.reduce_scatter(y.to(z.dtype), z), z),
        "reduction": outcome(lambda: comm.all_reduce(x, "max" if last else "sum"), x),
        "source": outcome(lambda: comm.broadcast(x, src=rank), x),
        "operation": outcome(lambda: comm.all_reduce(x) if last else comm.broadcast(x), x),
    }
    return seen | {"counters": dict(comm.counters.calls)}


def local_faults(comm: Comm) -> list:
    """What a rank can see alone: no communication at all."""
    n = comm.world_size
    x, before = torch.ones(4), comm.counters.control_calls
    expanded = torch.ones(1).expand(4)
    peer = (comm.rank + 1) % n
    calls = [
        lambda: comm.all_reduce([1.0]),
        lambda: comm.all_reduce(x, "median"),
        lambda: comm.all_reduce(torch.arange(4), "avg"),
        lambda: comm.all_reduce(torch.ones(2) * 1j, "max"),
        lambda: comm.all_reduce(x.to("meta")),
        lambda: comm.all_reduce(expanded),
        lambda: comm.broadcast(expanded),
        lambda: comm.all_gather(torch.ones(1).expand(4 * n), x),
        lambda: comm.all_gather(torch.ones(4 * n + 1), x),
        lambda: comm.all_gather(torch.ones(4 * n).double(), x),
        lambda: comm.reduce_scatter(torch.ones(4), torch.ones(4 * n + 1)),
        lambda: comm.reduce_scatter(torch.ones(4).double(), torch.ones(4 * n)),
        lambda: comm.broadcast(x, src=-1),
        lambda: comm.broadcast(x, src=n),
        lambda: comm.broadcast(x, src=True),
        lambda: comm.exchange([(x, comm.rank, 0)], []),
        lambda: comm.exchange([(x, n, 0)], []),
        lambda: comm.exchange([(x, peer, -1)], []),
        lambda: comm.exchange([], [(expanded, peer, 0)]),
        lambda: comm.exchange([([1.0], peer, 0)], []),
    ]
    return [[outcome(call)[0] for call in calls], comm.counters.control_calls - before, dict(comm.counters.calls)]


def process_ranks(rank, world_size, boxes):
    comms = (TorchComm(), MeshComm(QueueMesh(rank, world_size, boxes)), MeshComm(TorchMesh()))
    return [(everything(comm), refusals(fresh(comm)), local_faults(fresh(comm))) for comm in comms]


def virtual_rank(mesh):
    comm = MeshComm(mesh)
    return everything(comm), refusals(fresh(comm)), local_faults(fresh(comm))


def fresh(comm: Comm) -> Comm:
    """The same group with counters of its own."""
    return MeshComm(comm.mesh) if isinstance(comm, MeshComm) else TorchComm(comm.group)


class TestEveryTransport(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sizes = (1, 2, 3, 4)
        cls.virtual = {n: VirtualCluster(n).run(virtual_rank) for n in cls.sizes}
        cls.processes = {
            n: run_ranks(process_ranks, n, QueueMesh.inboxes(n, start_method("gloo")), timeout=300) for n in cls.sizes
        }

    def found(self, part: int):
        """(world size, transport, each rank's part of the results)"""
        for n in self.sizes:
            yield n, "virtual", [rank[part] for rank in self.virtual[n]]
            for i, transport in enumerate(TRANSPORTS):
                yield n, transport, [rank[i][part] for rank in self.processes[n]]

    def test_all_agree_on_results_and_counters(self):
        for n, transport, ranks in self.found(0):
            for rank, seen in enumerate(ranks):
                for name, expected in self.virtual[n][rank][0].items():
                    with self.subTest(n=n, transport=transport, rank=rank, part=name):
                        self.assertEqual(seen[name], expected)

    def test_unchecked_leaves_the_comparison_out(self):
        for n, transport, ranks in self.found(0):
            for seen in ranks:
                with self.subTest(n=n, transport=transport):
                    _, control_calls, shares_counters = seen["unchecked"]
                    self.assertEqual((control_calls, shares_counters), (0, True))

    def test_refusals_are_the_same_everywhere_and_change_nothing(self):
        for n, transport, ranks in self.found(1):
            with self.subTest(n=n, transport=transport):
                if n == 1:
                    continue
                for seen in ranks:
                    self.assertEqual(seen, ranks[0])  # every rank reads the same words
                    self.assertEqual(seen["counters"], {})
                    for what in ("shape", "dtype", "reduction", "source", "operation"):
                        self.assertEqual(seen[what][1:], [True], seen[what])
                        self.assertIn(f"ranks disagree on a collective: {what}: rank 0", seen[what][0])
                    for what in ("gather", "scatter"):
                        self.assertIn("dtype: rank 0", seen[what][0])
                        self.assertIn(f'rank {n - 1} has "float64"', seen[what][0])

    def test_local_faults_raise_without_communication(self):
        for n, transport, ranks in self.found(2):
            for words, control_calls, calls in ranks:
                with self.subTest(n=n, transport=transport):
                    self.assertNotIn("it went through", words)
                    self.assertEqual((control_calls, calls), (0, {}))

    def test_the_words_of_local_faults(self):
        words = self.virtual[3][1][2][0]
        self.assertIn("all_reduce needs a tensor, got list", words)
        self.assertIn("op must be one of sum, avg, max, got 'median'", words)
        self.assertIn("all_reduce: tensor on meta, but this group works on cpu", words)
        self.assertIn("all_gather: 3 ranks, 4 elements in, 13 out do not fit", words)
        self.assertIn("broadcast source must be a rank from 0 to 2, got -1", words)
        self.assertIn("rank 1 cannot exchange messages with itself", words)
        self.assertIn("a tag is a whole number from 0 to 2147483647, got -1", words)


class TestValues(unittest.TestCase):
    """That all transports agree is one thing; here is what they agree on."""

    def each(self, part, n=3):
        return VirtualCluster(n).run(lambda mesh: part(MeshComm(mesh)))

    def test_reductions(self):
        n = 3
        for rank, seen in enumerate(self.each(reductions, n)):
            found = iter(seen)
            for dtype in DTYPES:
                whole = torch.stack([start(r, 2 * n + 1, dtype) for r in range(n)])
                parts = torch.stack([start(r, 3 * n, dtype).view(n, 3)[rank] for r in range(n)])
                for op in (
                    ["sum"] + ["max"] * (not dtype.is_complex) + ["avg"] * (dtype.is_floating_point or dtype.is_complex)
                ):
                    for stack in (whole, parts):
                        total = stack.sum(0).to(dtype) if op != "max" else stack.amax(0)
                        real = torch.view_as_real(total) if dtype.is_complex else total  # each part is rounded once
                        mean = torch.view_as_complex(real / n) if dtype.is_complex else real / n
                        expected = mean if op == "avg" else total
                        self.assertTrue(torch.equal(next(found), expected), (dtype, op))
                    self.assertTrue(torch.equal(next(found), start(rank, 3 * n, dtype)))  # reduce_scatter's input

    def test_movements(self):
        n = 3
        for rank, seen in enumerate(self.each(movements, n)):
            found = iter(seen)
            for dtype in [*DTYPES, torch.uint16, torch.float8_e4m3fn]:
                inputs = [start(r, 3, dtype) for r in range(n)]
                self.assertEqual(plain(next(found)), plain(torch.cat(inputs)))
                self.assertEqual(plain(next(found)), plain(inputs[rank]))
                for src in range(n):
                    self.assertEqual(plain(next(found)), plain(start(src, 4, dtype)))

    def test_only_a_views_own_elements_change(self):
        n = 3
        for rank, (reduced, broadcast, scattered, gathered, transposed, conjugate, leaf, *_) in enumerate(
            self.each(shapes, n)
        ):
            mine = start(rank, 8 * n).view(4 * n, 2)
            everyone = [start(r, 8 * n).view(4 * n, 2) for r in range(n)]
            for page in (reduced, gathered):
                self.assertTrue(torch.equal(page[:, 0], mine[:, 0]))
            self.assertTrue(torch.equal(reduced[:, 1], sum(everyone)[:, 1]))
            self.assertTrue(torch.equal(broadcast[::2, 0], everyone[n - 1][::2, 0]))
            self.assertTrue(torch.equal(broadcast[1::2], mine[1::2]) and torch.equal(broadcast[:, 1], mine[:, 1]))
            self.assertTrue(torch.equal(scattered[:4, 1], sum(everyone)[4 * rank : 4 * rank + 4, 0]))
            self.assertTrue(torch.equal(scattered[4:], mine[4:]))
            self.assertTrue(torch.equal(gathered[:, 1], torch.cat([start(r, 8)[::2] for r in range(n)])))
            self.assertTrue(torch.equal(transposed, sum(start(r, 6) for r in range(n)).view(2, 3).t()))
            total = sum(start(r, 4) for r in range(n))
            self.assertTrue(torch.equal(conjugate, torch.complex(total, -total)))
            self.assertTrue(leaf.is_leaf and leaf.requires_grad)

    def test_in_place(self):
        n = 3
        for (flat,) in self.each(in_place, n):
            self.assertTrue(torch.equal(flat, sum(start(r, 4 * n) for r in range(n)) + 1))

    def test_exchange(self):
        got = self.each(exchanges)[1]
        self.assertTrue(torch.equal(got[0][:, 1], start(0, 6)))
        self.assertTrue(torch.equal(got[1], start(2, 3, torch.int16)))
        self.assertFalse(got[3].item())

    def test_control(self):
        for rank, seen in enumerate(self.each(control, 5)):
            part = list(range(rank % 2, 5, 2))
            self.assertEqual(seen[0], list(range(5)))
            self.assertEqual(seen[1], [{"pair": [r, None], "name": "é"} for r in range(5)])
            self.assertEqual(seen[2], ["x" * (200 * (r + 1)) for r in range(5)])
            self.assertEqual(seen[4], [part.index(rank), len(part), part, 1])
            self.assertEqual((seen[5].item(), seen[6].item()), (sum(part) + len(part), part[-1]))
            self.assertEqual(seen[7].item(), part[part.index(rank) - 1])

    def test_counters(self):
        def work(mesh):
            comm = MeshComm(mesh)
            comm.all_reduce(torch.ones(5))
            comm.all_reduce(torch.ones(5, dtype=torch.bfloat16))
            comm.reduce_scatter(torch.ones(2), torch.ones(6))
            comm.all_gather(torch.ones(6), torch.ones(2))
            comm.broadcast(torch.ones(7))
            comm.exchange([(torch.ones(2), (comm.rank + 1) % 3, 0)], [(torch.ones(2), (comm.rank - 1) % 3, 0)]).wait()
            comm.agree(0)
            return comm.counters

        for counters in VirtualCluster(3).run(work):
            self.assertEqual(
                dict(counters.calls),
                {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1, "exchange": 1},
            )
            self.assertEqual(  # the T of the formulas: whole input, but whole output of all_gather
                dict(counters.bytes),
                {"all_reduce": 30, "reduce_scatter": 24, "all_gather": 24, "broadcast": 28, "exchange": 8},
            )
            self.assertEqual(counters.control_calls, 6)


class TestMeshComm(unittest.TestCase):
    def test_a_message_of_another_kind_is_refused_and_nothing_is_filled(self):
        def work(mesh):
            comm, out = MeshComm(mesh), torch.zeros(2)
            if comm.rank == 0:
                comm.exchange([(torch.ones(3, dtype=torch.int64), 1, 4)], []).wait()
            else:
                return outcome(lambda: comm.exchange([], [(out, 0, 4)]).wait(), out)

        words = "rank 1 expected torch.float32 (2,) from rank 0 (tag 4), got torch.int64 (3,)"
        self.assertEqual(VirtualCluster(2).run(work)[1], [words, True])

    def test_keys_order_the_ranks_of_a_split(self):
        def work(mesh):
            part = MeshComm(mesh).split(0, key=-mesh.rank)
            x = torch.tensor([mesh.rank])
            part.broadcast(x, src=0)
            return part.rank, part.agree(mesh.rank), x.item()

        self.assertEqual(VirtualCluster(3).run(work), [(2 - rank, [2, 1, 0], 2) for rank in range(3)])

    def test_a_call_that_meets_another_agreement_is_refused(self):
        def work(mesh):
            comm, x = MeshComm(mesh), torch.ones(2)
            if comm.rank == 0:
                comm.agree("unrelated")
            else:
                return outcome(lambda: comm.all_reduce(x), x)

        words, unchanged = VirtualCluster(2).run(work)[1]
        self.assertIn('rank 0 has "unrelated"', words)
        self.assertTrue(unchanged)


def split_out_of_order(rank, world_size):
    return outcome(lambda: TorchComm().split(0, key=-rank))


def timeouts_of_parts(rank, world_size):
    part = TorchComm().split(rank % 2)
    return part.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def stalls_in_a_part(rank, world_size):
    part = TorchComm().split(0).unchecked()
    part.all_reduce(torch.ones(2))
    if rank == 1:
        part = part.split(0)  # which the other ranks do not join
    part.all_reduce(torch.ones(2))


def splits_apart(rank, world_size):
    """Split in two; one part splits twice more, then the other once, then all again."""
    comm = TorchComm()
    part = comm.split(rank % 2)
    part = part.split(0).split(0) if rank % 2 else part.split(part.rank)
    x, y = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    part.all_reduce(x)
    comm.split(rank // 2).all_reduce(y)
    return x.item(), y.item()


class TestTorchComm(unittest.TestCase):
    def test_parts_split_without_the_others(self):
        found = run_ranks(splits_apart, 4, collective_timeout=20.0, timeout=60)
        self.assertEqual(found, [(0.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)])

    def test_it_needs_a_group(self):
        self.assertFalse(dist.is_initialized())
        with self.assertRaisesRegex(RuntimeError, "no process group"):
            TorchComm()

    def test_a_key_that_would_change_the_order_is_refused(self):
        for words in run_ranks(split_out_of_order, 3):
            self.assertEqual(words, ["keys must not change the order of ranks, got [0, -1, -2]", True])

    def test_parts_inherit_the_deadline(self):
        self.assertEqual(run_ranks(timeouts_of_parts, 2, collective_timeout=37.0), [37.0, 37.0])

    def test_a_stall_in_a_part_ends_by_that_deadline(self):
        with self.assertRaises(RankError):
            run_ranks(stalls_in_a_part, 3, collective_timeout=2.0, timeout=60)


if __name__ == "__main__":
    unittest.main()
