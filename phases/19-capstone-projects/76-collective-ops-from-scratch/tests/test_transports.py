"""One suite over every transport: the same programs give the same results and the same counters on each of them.

What they must be is what the virtual cluster gives, exactly. Then the deadlines: who waited for whom. What only
sockets can do wrong is in test_sockets.py.
"""

import hashlib
import os
import re
import signal
import sys
import tempfile
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import shared_mesh
import torch
import torch_mesh
import wire
from alltoall import alltoall
from arena import why_not
from barrier import barrier
from collectives import PRIMITIVES, ring_allreduce, ring_in_place
from halving import halving_allreduce
from hierarchical import hierarchical_allreduce
from listeners import FAMILIES, Listeners
from mesh import MAX_TAG, Mesh, MeshTimeout, QueueMesh
from mesh_comm import MeshComm
from nccl_mesh import NcclMesh
from pipelined import pipelined_broadcast
from ranks import RankError, run_ranks, start_method
from shared_mesh import SharedMesh, Slots
from socket_mesh import SocketMesh
from torch_mesh import TorchMesh
from tree import reduce, tree_allreduce
from virtual import VirtualCluster


@dataclass
class Transport:
    """How the launcher makes it (of N ranks), how a rank makes its mesh (rank, N, what was made, timeout), and when."""

    make: Callable
    mesh: Callable
    backend: str | None = None
    missing: str | None = None  # why it cannot be tried here


def of_group(mesh, rank, world_size, nothing, timeout=None):
    return mesh()  # its group knows the ranks, and has its own timeout


NO_UNIX = None if "unix" in FAMILIES else f"abstract Unix addresses exist on Linux, this is {sys.platform}"
FEW_GPUS = None if torch.cuda.device_count() > 1 else f"needs 2 GPUs, there are {torch.cuda.device_count()}"
TRANSPORTS = {
    "queues": Transport(lambda n: QueueMesh.inboxes(n, start_method(None)), QueueMesh),
    "tcp": Transport(Listeners, SocketMesh),
    "unix": Transport(partial(Listeners, family="unix"), SocketMesh, missing=NO_UNIX),
    "shared memory": Transport(Slots, SharedMesh, missing=why_not()),
    "gloo": Transport(lambda n: None, partial(of_group, TorchMesh), "gloo"),
    "nccl": Transport(lambda n: None, partial(of_group, NcclMesh), "nccl", FEW_GPUS),
}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]
BIG = 1 << 21  # elements of int32: 8 MB, more than any transport holds between two ranks


def plain(x):
    """Return a tensor as plain values that can be compared, and are few."""
    if not isinstance(x, torch.Tensor):
        return x
    data = wire.tensor_to_bytes(x)
    return wire.dtype_name(x.dtype), tuple(x.shape), data if len(data) < 64 else hashlib.sha256(data).hexdigest()


def start(mesh, numel: int, dtype=torch.float32) -> torch.Tensor:
    """Return distinct values for each rank and position, small enough for every dtype's sums to be exact."""
    return ((torch.arange(numel, device=mesh.device) * 3 + 5 * mesh.rank) % 17).to(dtype)


def around(mesh: Mesh, tensor: torch.Tensor) -> torch.Tensor:
    return mesh.sendrecv((mesh.rank + 1) % mesh.world_size, tensor, (mesh.rank - 1) % mesh.world_size)


# The programs. Each gets a mesh and returns tensors and plain values.


def pairs(mesh: Mesh) -> list:
    """Every rank sends to every other, under several tags; they are received in another order."""
    others, tags = [peer for peer in range(mesh.world_size) if peer != mesh.rank], (0, MAX_TAG, 7, 1)
    for tag in tags:
        for peer in others:
            mesh.send(peer, torch.tensor([mesh.rank, peer, tag], device=mesh.device), tag, lone=False)
    return [mesh.recv(peer, tag).tolist() for peer in reversed(others) for tag in sorted(tags)]


def in_order(mesh: Mesh) -> list:
    """`send` is buffered: the tensor is used again. Messages with one tag stay in order, others between them or not."""
    if mesh.world_size == 1:
        return []
    right, left = (mesh.rank + 1) % mesh.world_size, (mesh.rank - 1) % mesh.world_size
    reused = torch.tensor([100 * mesh.rank], device=mesh.device)
    for step in range(20):
        mesh.send(right, reused, step % 3, lone=False)
        reused += 1
    return [mesh.recv(left, step % 3).item() for step in sorted(range(20), key=lambda step: (step % 3 + 1) % 3)]


def messages(mesh: Mesh) -> list:
    """All dtypes and all kinds of memory; sizes around those at which a transport changes its way."""
    if mesh.world_size == 1:
        return []
    found = [around(mesh, start(mesh, 5, dtype)) for dtype in DTYPES]
    base = torch.arange(12.0, device=mesh.device).view(3, 4) + 100 * mesh.rank
    spiral = torch.complex(base, base + 1)
    odd = [base[:, 1], base.t(), base[0, 0], base[:0], base[:, :0], base[::2, 1::2], base[:1].expand(5, 4)]
    odd += [
        spiral.conj(),
        spiral.conj().imag,
        spiral[0, 0].conj().imag,
        base.clone().requires_grad_(),
        base.view(1, 3, 1, 1, 4, 1, 1, 1),
    ]
    found += [around(mesh, tensor) for tensor in odd]
    for numel in (229, 230, 231, 2047, 2048, 2049, 65535, 65536, 65537, 300001):
        found.append(around(mesh, start(mesh, numel)))
    return found


def everyone_sends_first(mesh: Mesh) -> list:
    """More than all buffers hold, to everyone, before anything is received."""
    page, n = torch.arange(BIG, dtype=torch.int32, device=mesh.device), mesh.world_size
    for step in range(1, n):
        mesh.send((mesh.rank + step) % n, page + (mesh.rank * n + (mesh.rank + step) % n), lone=False)
    return [torch.equal(mesh.recv(src), page + (src * n + mesh.rank)) for src in range(n) if src != mesh.rank]


def parts(mesh: Mesh) -> list:
    """Messages of sub-meshes that share a pair of ranks and a tag do not mix, small or large."""
    row, column = mesh.split(mesh.rank // 2), mesh.split(mesh.rank % 2, key=-mesh.rank)
    whole, groups = mesh.split(0, key=-mesh.rank), []
    for number, group in enumerate((row, column, whole, mesh)):
        peers = [peer for peer in range(group.world_size) if peer != group.rank]
        groups.append((group, peers))
        for peer in peers:
            for numel in (3, 100000):
                group.send(peer, start(mesh, numel) + number, 5, lone=False)
    found = [group.recv(peer, 5) for group, peers in reversed(groups) for peer in peers for _ in range(2)]
    deep = whole.split(whole.rank // 2).split(0)
    return [
        *found,
        row.members,
        column.members,
        deep.members,
        deep.agree(mesh.rank),
        ring_allreduce(deep, start(mesh, 5)),
    ]


def facts(mesh: Mesh) -> list:
    mine = {"rank": mesh.rank, "name": "ü" * 300, "pair": (1, 2)}
    return [mesh.agree(mine), mesh.agree("x" * 100000), mesh.agree(None)]


def collectives(mesh: Mesh) -> list:
    """All of the lesson's, on the mesh and on parts of it."""
    found, n = [], mesh.world_size
    for group in (mesh, mesh.split(mesh.rank % 2, key=-mesh.rank)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            x = start(mesh, 3 * group.world_size, dtype)
            found += [collective(group, x) for collective in PRIMITIVES.values()]
            found += [tree_allreduce(group, x), halving_allreduce(group, x), alltoall(group, x)]
            found += [hierarchical_allreduce(group, x, min(2, group.world_size))]
            found += [pipelined_broadcast(group, x, src=group.world_size - 1, chunks=3)]
            found += [reduce(group, x, dst=group.world_size - 1)]
        y = group.world_size * x.real  # its mean is exact, however it is divided
        found += [ring_allreduce(group, y, "avg"), halving_allreduce(group, y, "avg"), tree_allreduce(group, y, "max")]
        barrier(group)
    large = start(mesh, n * (1 << 18) + 5)  # more than a segment
    ring_in_place(mesh, large)
    return [*found, large, tree_allreduce(mesh, start(mesh, 100003)), alltoall(mesh, start(mesh, 60000 * n))]


def through_comm(mesh: Mesh) -> list:
    """Every method of `Comm`."""
    comm, n, rank = MeshComm(mesh), mesh.world_size, mesh.rank
    x, out, everyone = n * start(mesh, 2 * n), start(mesh, 2), start(mesh, 3 * n)
    works = [comm.all_reduce(x, "avg", async_op=True), comm.reduce_scatter(out, start(mesh, 2 * n), async_op=True)]
    works += [comm.all_gather(everyone, start(mesh, 3), async_op=True)]
    [work.wait() for work in works]
    y, strided = start(mesh, 4, torch.int16), start(mesh, 8).view(4, 2)
    comm.broadcast(y, src=n - 1)
    comm.all_reduce(strided[:, 1], "max")
    got = [start(mesh, 4), start(mesh, 3, torch.bool)]
    if n > 1:
        left, right = (rank - 1) % n, (rank + 1) % n
        sends = [(start(mesh, 4), right, 9), (start(mesh, 3, torch.bool), left, 4)]
        comm.exchange(sends, [(got[1], right, 4), (got[0], left, 9)]).wait()
    half = comm.split(rank % 2)
    half.unchecked().all_reduce(z := start(mesh, 5))
    buffer = comm.empty(3, torch.float64)
    seen = [comm.agree({"rank": rank}), half.agree(rank), half.rank, half.world_size, buffer.shape, buffer.dtype]
    try:
        comm.all_reduce(start(mesh, 2 + (rank == 0)))
    except ValueError as error:
        seen.append(str(error))
    return [x, out, everyone, y, strided, *got, z, *seen, dict(comm.counters.bytes), comm.counters.control_calls]


PROGRAMS = (pairs, in_order, messages, everyone_sends_first, parts, facts, collectives, through_comm)


def everything(mesh: Mesh) -> dict:
    """All programs, one after the other over one mesh, and the counters after each."""
    return {program.__name__: [[plain(x) for x in program(mesh)], str(mesh.counters)] for program in PROGRAMS}


# The suite


def run_everything(rank, world_size, name, made):
    return everything(TRANSPORTS[name].mesh(rank, world_size, made))


EXPECTED = {}  # world size -> results: computed once


def expected(n: int) -> list:
    if n not in EXPECTED:
        EXPECTED[n] = VirtualCluster(n).run(everything)
    return EXPECTED[n]


class Suite:
    """The tests that every transport must pass. A class below names the transport."""

    transport: str
    collective_timeout, deadline = 1.0, 60.0  # seconds

    @classmethod
    def setUpClass(cls):
        if reason := TRANSPORTS[cls.transport].missing:
            raise unittest.SkipTest(reason)

    def run_ranks(self, worker, n, *args, **options):
        options |= {"backend": TRANSPORTS[self.transport].backend, "timeout": self.deadline}
        return run_ranks(worker, n, self.transport, *args, **options)

    def test_results_and_counters_are_those_of_the_virtual_cluster(self):
        self.assert_as_virtual(1, 2, 3)

    def test_four_ranks_too(self):
        self.assert_as_virtual(4)

    def assert_as_virtual(self, *sizes):
        for n in (n for n in sizes if self.transport != "nccl" or n <= torch.cuda.device_count()):
            found = self.run_ranks(run_everything, n, TRANSPORTS[self.transport].make(n))
            for rank in range(n):
                for name, seen in expected(n)[rank].items():
                    with self.subTest(n=n, rank=rank, program=name):
                        self.assertEqual(found[rank][name], seen)

    def test_a_killed_rank_is_named_and_nothing_is_left(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            with self.assertRaises(RankError) as caught:
                self.run_ranks(one_is_killed, 2, TRANSPORTS[self.transport].make(2))
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual((caught.exception.rank, caught.exception.exitcode), (1, -signal.SIGKILL))
        self.assertIn("rank 1 was killed by SIGKILL", str(caught.exception))

    def test_a_circle_of_receives_is_named(self):
        with self.assertRaises(RankError) as caught:
            made = TRANSPORTS[self.transport].make(2)
            self.run_ranks(all_receive, 2, made, collective_timeout=self.collective_timeout)
        words = str(caught.exception)
        self.assertRegex(words, r"rank (\d) waited for a message \(tag 3\) from rank (?!\1)\d: ")
        self.assertRegex(words, r"deadlock: rank (0 waited for rank 1 waited for rank 0|1 .* rank 0 .* rank 1)")


def one_is_killed(rank, world_size, name, made):
    mesh = TRANSPORTS[name].mesh(rank, world_size, made)
    mesh.agree("all are here")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.recv(1)


def all_receive(rank, world_size, name, made):
    mesh = TRANSPORTS[name].mesh(rank, world_size, made)
    mesh.agree("all are here")
    mesh.timeout = 1.0
    mesh.recv((rank + 1) % world_size, tag=3)


class Deadlines:
    """Waits that end, and the mesh after that. Transports whose deadline is the mesh's own."""

    floods = True  # a message of 8 MB does not fit into its buffers

    def test_who_waited_for_whom_and_no_use_after_that(self):
        n, make = 3, TRANSPORTS[self.transport].make
        found = self.run_ranks(waits, n, [make(n) for _ in range(4)], self.floods)[0]
        for name, peer, what in (
            ("recv", 2, "a message (tag 4)"),
            ("agree", 2, "facts"),
            ("part", 1, "a message (tag 0)"),
        ):
            words, waited_for = found[name]
            self.assertRegex(words, rf"^rank 0 waited for {re.escape(what)} from rank {peer}: .*\b0\.2\b")
            self.assertEqual(waited_for, peer)
        if self.floods:
            self.assertEqual(found["send"], ("rank 0 waited for rank 2 to take a message (tag 5): not in 0.2 s", 2))
        for words in found["after"]:
            self.assertRegex(words, "^rank 0: this mesh cannot be used again after its failure: rank 0 waited for")


KEPT = []  # meshes of ranks that have returned: they must not end a connection


def waits(rank, world_size, name, hubs, floods):
    """Rank 0 waits in vain for others, which do nothing."""
    meshes = [TRANSPORTS[name].mesh(rank, world_size, hub, timeout=60.0) for hub in hubs]
    KEPT.extend(meshes)
    parts = [mesh.split(int(rank < 2), key=-rank) for mesh in meshes]  # ranks 1 and 0 in this order, and rank 2
    if rank > 0:
        return None
    for mesh in (*meshes, *parts):
        mesh.timeout = 0.2
    found = {"recv": failure(meshes[0].recv, 2, 4), "part": failure(parts[2].recv, 0)}
    found["agree"] = failure(meshes[1].agree, None)
    if floods:
        found["send"] = failure(meshes[3].send, 2, torch.zeros(BIG, dtype=torch.int32), 5)
    found["after"] = []
    for mesh in (meshes[0], parts[0], meshes[1], meshes[2], parts[2], *[meshes[3]] * floods):
        peer = 1 - mesh.rank
        for call in (partial(mesh.recv, peer), partial(mesh.send, peer, torch.ones(1)), partial(mesh.agree, 0)):
            try:
                call()
            except ValueError as error:
                found["after"].append(str(error))
            else:
                found["after"].append("it went through")
    return found


def failure(call, *args) -> tuple[str, int]:
    try:
        call(*args)
    except MeshTimeout as error:
        return str(error), error.waited_for
    return "it went through", -1


class TestQueues(Suite, Deadlines, unittest.TestCase):
    transport, floods = "queues", False  # a queue holds whatever it is given


class TestTcp(Suite, Deadlines, unittest.TestCase):
    transport = "tcp"


class TestUnix(Suite, Deadlines, unittest.TestCase):
    transport = "unix"


class TestSharedMemory(Suite, Deadlines, unittest.TestCase):
    transport = "shared memory"

    def test_a_slot_is_smaller_than_a_header_and_every_wait_blocks(self):
        for patience in (0, shared_mesh.PATIENCE):  # with 0, only the bells end a wait: none may be lost
            for slot_bytes, slots in ((64, 1), (1000, 3)):
                with mock.patch.object(shared_mesh, "PATIENCE", patience), self.subTest(slots=slots, patience=patience):
                    found = self.run_ranks(run_some, 4, Slots(4, slot_bytes, slots))
                    self.assertEqual(found, VirtualCluster(4).run(some))

    def test_slots_are_used_once(self):
        for worker, runs in ((two_meshes, 1), (one_mesh, 2)):  # twice in one rank, and in one run after another
            slots = Slots(2)
            for _ in range(runs - 1):
                run_ranks(worker, 2, slots, backend=None, timeout=60)
            with self.assertRaisesRegex(RankError, r"rank \d has used these slots before"):
                run_ranks(worker, 2, slots, backend=None, timeout=60)

    def test_bad_input(self):
        for slots, words in (
            ((0,), "world_size must be a whole number of at least 1, got 0"),
            ((2, -64), "slot_bytes must be a whole number of at least 1, got -64"),
            ((2, 1e6), "slot_bytes must be a whole number of at least 1, got 1000000.0"),
            ((2, 128, 0), "slots must be a whole number of at least 1, got 0"),
            ((2, 128, True), "slots must be a whole number of at least 1, got True"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                Slots(*slots)
        with self.assertRaisesRegex(ValueError, "the slots are for 2 ranks, there are 3"):
            SharedMesh(0, 3, Slots(2))
        with self.assertRaisesRegex(ValueError, "rank must be a rank from 0 to 1, got 2"):
            SharedMesh(2, 2, Slots(2))


class TestWithoutFork(unittest.TestCase):
    def test_there_are_no_slots(self):
        with mock.patch.dict(os.environ, RANKS_START_METHOD="spawn"), self.assertRaisesRegex(RuntimeError, "fork"):
            Slots(2)


def one_mesh(rank, world_size, slots):
    SharedMesh(rank, world_size, slots)


def two_meshes(rank, world_size, slots):
    SharedMesh(rank, world_size, slots), SharedMesh(rank, world_size, slots)


def some(mesh: Mesh) -> list:
    """Small messages, and some larger than all slots together, sent by all before any is received."""
    found, others = [*pairs(mesh), *in_order(mesh), *facts(mesh)], [r for r in range(mesh.world_size) if r != mesh.rank]
    half = mesh.split(mesh.rank % 2, key=-mesh.rank)
    for peer in others:
        mesh.send(peer, start(mesh, 5003 + peer), 1, lone=False)
    found += [plain(mesh.recv(peer, 1)) for peer in reversed(others)]
    return found + [plain(ring_allreduce(each, start(mesh, 1001))) for each in (half, mesh)]


def run_some(rank, world_size, name, slots):
    return some(SharedMesh(rank, world_size, slots, timeout=10.0))


class TestGloo(Suite, unittest.TestCase):
    transport = "gloo"

    def test_messages_that_have_arrived_are_not_kept(self):
        for most in run_ranks(sends_a_lot, 2, timeout=60):
            self.assertLessEqual(most, 2 * torch_mesh._BUFFERED + 2)


class TestNccl(Suite, unittest.TestCase):
    transport, collective_timeout, deadline = "nccl", 10.0, 300.0  # its first messages take longer


def sends_a_lot(rank, world_size):
    mesh, most = TorchMesh(), 0
    for step in range(200):
        got = mesh.sendrecv(1 - rank, torch.full((1000,), step), 1 - rank)
        most = max(most, len(torch_mesh._in_flight))
        assert got[0] == got[-1] == step
    return most


class TestPrograms(unittest.TestCase):
    """That all transports agree is one thing; here is what some of the programs must give."""

    def test_pairs(self):
        for rank, seen in enumerate(expected(4)):
            others, tags = [peer for peer in (3, 2, 1, 0) if peer != rank], (0, 1, 7, MAX_TAG)
            self.assertEqual(seen["pairs"][0], [[peer, rank, tag] for peer in others for tag in tags])

    def test_large_messages(self):
        for seen in expected(4):
            right, counters = seen["everyone_sends_first"]
            self.assertEqual(right, [True] * 3)
            self.assertGreater(int(re.search(r"bytes_received=(\d+)", counters)[1]), 3 * 4 * BIG)

    def test_messages(self):
        found = expected(3)[0]["messages"][0]
        for dtype, seen in zip(DTYPES, found, strict=False):
            self.assertEqual(seen, plain(((torch.arange(5) * 3 + 10) % 17).to(dtype)))


if __name__ == "__main__":
    unittest.main()
