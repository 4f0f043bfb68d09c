"""Bad input: the same ValueError, with the values, on every rank; else a RankError that names the rank."""

import math
import sys
import tempfile
import threading
import unittest
import warnings
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from alltoall import alltoall
from barrier import barrier
from collectives import allgather, broadcast, reduce_scatter, ring_allreduce
from comm import Comm, TorchComm
from mesh_comm import MeshComm
from halving import halving_allreduce
from hierarchical import hierarchical_allreduce
from mesh import MeshTimeout, QueueMesh
from pipelined import pipelined_broadcast
from ranks import RankError, run_ranks, start_method
from torch_mesh import TorchMesh
from tree import reduce, tree_allreduce
from verify import gloo_reference, run_mesh, verify_against_gloo
from virtual import DeadlockError, VirtualCluster


def hierarchical(mesh, tensor, **options):
    return hierarchical_allreduce(mesh, tensor, **{"node_size": 2} | options)


REDUCE = {
    "all_reduce": ring_allreduce,
    "reduce_scatter": reduce_scatter,
    "reduce": reduce,
    "tree_all_reduce": tree_allreduce,
    "halving_all_reduce": halving_allreduce,
    "hierarchical_all_reduce": hierarchical,
}
MOVE = {
    "broadcast": broadcast,
    "all_gather": allgather,
    "pipelined_broadcast": pipelined_broadcast,
    "all_to_all": alltoall,
}
ALL = REDUCE | MOVE
SECONDS = 60


def outcome(call) -> str:
    """The words of a ValueError; "it went through" if there is none. Other errors pass, and fail the test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "it went through"


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors whose elements do not lie in memory one after the other, with what is said of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, and what torch will drop one day
        odd = {
            "one that is sparse_coo": torch.eye(4).to_sparse(),
            "one that is sparse_csr": torch.eye(4).to_sparse_csr(),
            "one that is nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
        if hasattr(torch, "quantize_per_tensor"):
            odd["one that is quantized"] = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    return odd


class VirtualCase(unittest.TestCase):
    def on_every_rank(self, call, n: int = 4) -> str:
        """Run `call(mesh)` on n virtual ranks; return the words of its ValueError, which must be every rank's.

        Nothing may have been sent.
        """
        outcomes = VirtualCluster(n).run(lambda mesh: (outcome(lambda: call(mesh)), mesh.counters.messages_sent))
        self.assertEqual(set(outcomes), {outcomes[0]})
        words, sent = outcomes[0]
        self.assertEqual(sent, 0, words)
        self.assertNotEqual(words, "it went through")
        return words

    def locally(self, call, n: int = 4) -> str:
        """The same, and nothing was communicated at all."""

        def checked(mesh):
            try:
                call(mesh)
            finally:
                self.assertEqual(mesh.counters.control_messages, 0)

        return self.on_every_rank(checked, n)


class TestTensors(VirtualCase):
    def test_tensors_without_plain_memory(self):
        for kind, tensor in odd_tensors().items():
            for name, collective in ALL.items():
                with self.subTest(kind=kind, collective=name):
                    words = self.locally(lambda mesh, c=collective, t=tensor: c(mesh, t))
                    self.assertEqual(words, f"{name} needs a dense tensor, got {kind}")
            with self.subTest(kind=kind):
                words = self.locally(lambda mesh, t=tensor: mesh.send((mesh.rank + 1) % 4, t))
                self.assertEqual(words, f"send needs a dense tensor, got {kind}")
                words = self.locally(lambda mesh, t=tensor: MeshComm(mesh).broadcast(t))
                self.assertEqual(words, f"broadcast needs a dense tensor, got {kind}")

    def test_tensors_on_another_device(self):
        meta = torch.ones(4, device="meta")
        for name, collective in ALL.items():
            words = self.locally(lambda mesh, c=collective: c(mesh, meta))
            self.assertEqual(words, f"{name}: tensor on meta, but this group works on cpu")
        words = self.locally(lambda mesh: mesh.send((mesh.rank + 1) % 4, meta))
        self.assertEqual(words, "send: tensor on meta, but this group works on cpu")

        def on_a_gpu(mesh):
            mesh.device = torch.device("cuda")
            ring_allreduce(mesh, torch.ones(2))

        self.assertEqual(self.locally(on_a_gpu), "all_reduce: tensor on cpu, but this group works on cuda")

    def test_before_any_process_starts(self):
        for function in (run_mesh, gloo_reference, verify_against_gloo):
            for kind, tensor in odd_tensors().items():
                words = outcome(lambda f=function, t=tensor: f("broadcast", 2, [t, t]))
                self.assertEqual(words, f"broadcast needs a dense tensor, got {kind}")
            words = outcome(lambda f=function: f("broadcast", 1, [torch.ones(1, device="meta")]))
            self.assertEqual(words, "broadcast: a tensor on meta has no elements to move")

    def test_tensors_in_a_graph_and_of_inference_mode_are_taken(self):
        def work(mesh):
            with torch.inference_mode():
                x = torch.ones(4) + mesh.rank
            leaf = (torch.ones(4) + mesh.rank).requires_grad_()
            total = [c(mesh, t).tolist() for c in (ring_allreduce, halving_allreduce) for t in (x, leaf, leaf * 1)]
            MeshComm(mesh).all_reduce(leaf)
            return [*total, leaf.tolist(), leaf.grad_fn, leaf.requires_grad]

        for found in VirtualCluster(4).run(work):
            self.assertEqual(found, [*[[10.0] * 4] * 7, None, True])

    def test_no_tensor_at_all(self):
        for name, collective in ALL.items():
            for thing in ([1.0] * 4, 1.0, None, "x"):
                words = self.locally(lambda mesh, c=collective, t=thing: c(mesh, t))
                self.assertEqual(words, f"{name} needs a tensor, got {type(thing).__name__}")


class TestOptions(VirtualCase):
    def test_reductions(self):
        for name, collective in REDUCE.items():
            for op in (None, "", "min", 3, ["sum"], {"sum"}, True):
                with self.subTest(collective=name, op=op):
                    words = self.locally(lambda mesh, c=collective, op=op: c(mesh, torch.ones(4), op=op))
                    self.assertEqual(words, f"op must be one of sum, avg, max, got {op!r}")
            words = self.locally(lambda mesh, c=collective: c(mesh, torch.arange(4), op="avg"))
            self.assertEqual(words, "avg needs floating-point elements, got int64")

    def test_sources_and_roots(self):
        for name in ("broadcast", "pipelined_broadcast"):
            for src in (-1, 4, 99, True, 1.0, "0", None, torch.tensor(1)):
                words = self.locally(lambda mesh, c=MOVE[name], s=src: c(mesh, torch.ones(4), src=s))
                self.assertEqual(words, f"{name} source must be a rank from 0 to 3, got {src!r}")
        for dst in (-1, 4, None):
            words = self.locally(lambda mesh, dst=dst: reduce(mesh, torch.ones(4), dst=dst))
            self.assertEqual(words, f"reduce destination must be a rank from 0 to 3, got {dst!r}")

    def test_sizes_of_nodes_and_numbers_of_chunks(self):
        for size in (0, 5, -1, True, 2.0, "2", None):
            words = self.locally(lambda mesh, s=size: hierarchical(mesh, torch.ones(4), node_size=s))
            self.assertEqual(words, f"node_size must be a whole number from 1 to 4, the ranks, got {size!r}")
        for chunks in (0, -1, True, 2.0, "2", None):
            words = self.locally(lambda mesh, c=chunks: pipelined_broadcast(mesh, torch.ones(4), chunks=c))
            self.assertEqual(words, f"chunks must be a whole number of at least 1, got {chunks!r}")

    def test_dimension_0_must_divide(self):
        for name, what in (("reduce_scatter", "reduce_scatter"), ("all_to_all", "alltoall")):
            for shape in ((3,), (), (6, 4)):
                words = self.locally(lambda mesh, c=ALL[name], s=shape: c(mesh, torch.ones(s)))
                self.assertEqual(
                    words, f"{what} cuts dimension 0 into 4 equal chunks, which shape {shape} does not allow"
                )

    def test_facts_that_are_not_json(self):
        circle = []
        circle.append(circle)
        for facts in (object(), {1}, b"x", torch.ones(2), {(1, 2): 3}, circle):
            for call in (lambda mesh, f=facts: mesh.agree(f), lambda mesh, f=facts: MeshComm(mesh).agree(f)):
                words = self.locally(call)
                self.assertTrue(words.startswith(f"facts must be a JSON value, got {facts!r}: "), words)

    def test_colors_and_keys(self):
        for bad in ("tp", 1.0, True, None, math.nan, [1], (1, 2), {1}, object()):
            for split in (lambda mesh: mesh.split, lambda mesh: MeshComm(mesh).split):
                words = self.locally(lambda mesh, s=split, b=bad: s(mesh)(b))
                self.assertEqual(words, f"color must be a whole number, got {bad!r}")
                words = self.locally(lambda mesh, s=split, b=bad: s(mesh)(0, b))
                self.assertEqual(words, f"key must be a whole number, got {bad!r}")

    def test_meshes(self):
        boxes = [None] * 3
        for world_size in (0, -1, True, 2.0, "3"):
            words = outcome(lambda n=world_size: QueueMesh(0, n, boxes))
            self.assertEqual(words, f"world_size must be a whole number of at least 1, got {world_size!r}")
        for rank in (-1, 3, True, 1.0, None):
            words = outcome(lambda r=rank: QueueMesh(r, 3, boxes))
            self.assertEqual(words, f"rank must be a rank from 0 to 2, got {rank!r}")
        for seconds in (0, -1.0, math.nan, math.inf, "5", True, None):
            words = outcome(lambda s=seconds: QueueMesh(0, 3, boxes, timeout=s))
            self.assertEqual(words, f"timeout must be a positive number of seconds, got {seconds!r}")
        self.assertEqual(outcome(lambda: QueueMesh(0, 2, boxes)), "2 ranks need as many inboxes, got 3")

    def test_exchanges_and_buffers(self):
        x = torch.ones(2)
        for message in (x, (x, 1), (x, 1, 0, 0), None, "abcd"):
            for lists in (([message], []), ([], [message])):
                words = self.locally(lambda mesh, lists=lists: MeshComm(mesh).exchange(*lists))
                self.assertTrue(
                    words.startswith(f"exchange needs messages (tensor, peer, tag), got {message!r}"), words
                )
        for numel in (-1, 1.5, True, "3", None):
            words = self.locally(lambda mesh, n=numel: MeshComm(mesh).empty(n, torch.float32))
            self.assertEqual(words, f"numel must be a whole number of at least 0, got {numel!r}")
        words = self.locally(lambda mesh: MeshComm(mesh).empty(1, "float32"))
        self.assertEqual(words, "dtype must be a torch.dtype, got 'float32'")


class TestDisagreement(VirtualCase):
    """Rank 3 of 4 calls differently from the others."""

    def differ(self, usual, other, *parts: str) -> None:
        words = self.on_every_rank(lambda mesh: (other if mesh.rank == 3 else usual)(mesh))
        for part in ("ranks disagree on a collective: ", *parts):
            self.assertIn(part, words)

    def test_shape_and_dtype(self):
        x, longer, double = torch.ones(4), torch.ones(8), torch.ones(4, dtype=torch.float64)
        for name, c in ALL.items():
            with self.subTest(collective=name):
                usual = lambda mesh, c=c: c(mesh, x)  # noqa: E731
                self.differ(usual, lambda mesh, c=c: c(mesh, longer), "shape: rank 0, 1, 2 has [4]; rank 3 has [8]")
                words = 'dtype: rank 0, 1, 2 has "float32"; rank 3 has "float64"'
                self.differ(usual, lambda mesh, c=c: c(mesh, double), words)

    def test_operation(self):
        x, names = torch.ones(4), list(ALL)
        for i, name in enumerate(names):
            following = names[(i + 1) % len(names)]
            with self.subTest(usual=name, other=following):
                words = f'operation: rank 0, 1, 2 has "{name}"; rank 3 has "{following}"'
                self.differ(lambda mesh, n=name: ALL[n](mesh, x), lambda mesh, f=following: ALL[f](mesh, x), words)

    def test_reduction_source_and_settings(self):
        x = torch.ones(4)
        for name, c in REDUCE.items():
            with self.subTest(collective=name):
                words = 'reduction: rank 0, 1, 2 has "sum"; rank 3 has "max"'
                self.differ(lambda mesh, c=c: c(mesh, x), lambda mesh, c=c: c(mesh, x, op="max"), words)
        for c, option, what in (
            (broadcast, "src", "source"),
            (pipelined_broadcast, "src", "source"),
            (reduce, "dst", "source"),
            (pipelined_broadcast, "chunks", "chunks"),
            (hierarchical, "node_size", "node_size"),
        ):
            self.differ(
                lambda mesh, c=c, o=option: c(mesh, x, **{o: 2}),
                lambda mesh, c=c, o=option: c(mesh, x, **{o: 3}),
                f"{what}: rank 0, 1, 2 has 2; rank 3 has 3",
            )

    def test_a_rank_that_leaves_a_call_out(self):
        for name, c in ALL.items():
            with self.subTest(collective=name), self.assertRaisesRegex(DeadlockError, "rank 3.*, which has finished"):
                VirtualCluster(4).run(lambda mesh, c=c: mesh.rank == 3 or c(mesh, torch.ones(4)))
        with self.assertRaisesRegex(DeadlockError, "which has finished"):
            VirtualCluster(4).run(lambda mesh: mesh.rank == 3 or barrier(mesh))

    def test_a_fault_on_one_rank_only_is_that_ranks(self):
        x = torch.ones(4)
        for bad, words in (
            (lambda mesh: broadcast(mesh, x, src=9), "broadcast source must be a rank from 0 to 3, got 9"),
            (lambda mesh: mesh.agree({1}), "facts must be a JSON value, got {1}"),
            (lambda mesh: mesh.split("a"), "color must be a whole number, got 'a'"),
            (lambda mesh: reduce_scatter(mesh, torch.ones(5)), "into 4 equal chunks, which shape (5,) does not allow"),
        ):
            with self.assertRaises(RankError) as caught:
                VirtualCluster(4).run(lambda mesh, bad=bad: bad(mesh) if mesh.rank == 2 else ring_allreduce(mesh, x))
            self.assertEqual(caught.exception.rank, 2)
            self.assertIn(words, str(caught.exception))


def refused_over_gloo(rank: int, world_size: int) -> list[str]:
    """What TorchComm says of the same faults, alike on every rank, and that the group works on after them."""
    comm, x, peer = TorchComm(), torch.ones(2), (rank + 1) % world_size
    odd = [outcome(lambda t=tensor: comm.broadcast(t)) for tensor in odd_tensors().values()]
    calls = [
        lambda: comm.all_reduce(x, None),
        lambda: comm.agree({1}),
        lambda: comm.split("a"),
        lambda: comm.split(0, None),
        lambda: comm.exchange([(x, peer, 1 << 31)], []),
        lambda: comm.exchange([x], []),
        lambda: comm.empty(-1, torch.float32),
        lambda: TorchMesh().send(peer, x, tag=1 << 63),
    ]
    words = [*odd, *map(outcome, calls)]
    comm.all_reduce(x)
    return [*words, str(x.tolist())]


def exchanges_of_another_kind(rank: int, world_size: int, dtype: torch.dtype, numel: int) -> list | None:
    """Rank 0 sends one float64 or three float32; rank 1 expects something else. It must not be filled."""
    comm, got = TorchComm(), torch.full((4,), -1.0)
    if rank == 0:
        comm.exchange([(torch.ones(numel, dtype=dtype), 1, 5)], []).wait()
        return None
    work = comm.exchange([], [(got, 0, 5)])
    return [outcome(work.wait), got.tolist()]


def too_few_messages(rank: int, world_size: int) -> None:
    comm, got = TorchComm(), [torch.zeros(1), torch.zeros(1)]
    peer = 1 - rank
    comm.exchange([(torch.ones(1), peer, 0)] * (1 + rank), [(each, peer, 0) for each in got]).wait()


def uses_what_failed(comm: Comm, rank: int) -> list[str]:
    """Rank 2 does not come. The others swallow that, and go on with a group that has failed."""
    if rank == 2:
        threading.Event().wait()
    words = []
    try:
        comm.all_reduce(torch.ones(2))
    except (RuntimeError, MeshTimeout) as error:
        words.append(str(error))
    for call in (
        lambda: comm.unchecked().all_reduce(torch.ones(2)),
        lambda: comm.agree(0),
        lambda: comm.exchange([], []),
        lambda: comm.split(0),
    ):
        words.append(outcome(call))
    return words


def swallows_over_gloo(rank: int, world_size: int, folder) -> None:
    comm = TorchComm()
    comm.agree("all are here")
    words = uses_what_failed(comm, rank)
    Path(folder, f"words{rank}").write_text("\n".join(words))
    comm.all_reduce(torch.ones(2))  # its error must not hide the rank that did not come


def swallows_over_queues(rank: int, world_size: int, boxes, folder) -> None:
    mesh = QueueMesh(rank, world_size, boxes)
    mesh.agree("all are here")
    mesh.timeout, comm = 1.0, MeshComm(mesh)
    words = uses_what_failed(comm, rank)
    Path(folder, f"words{rank}").write_text("\n".join(words))
    comm.all_reduce(torch.ones(2)) if rank == 0 else ring_allreduce(mesh, torch.ones(2))


class WithoutWords(Exception):
    """An error that cannot be pickled, nor printed."""

    waited_for = object()

    def __str__(self):
        raise RuntimeError("no words")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


RESULTS = {"generator": lambda: (i for i in range(3)), "meta": lambda: torch.ones(2, device="meta")}


def misbehaves(rank: int, world_size: int, how: str):
    TorchComm().agree("all are here")
    if rank == 1 and how == "error":
        raise WithoutWords
    if rank == 1 and how == "exit":
        raise SystemExit(1 << 40)
    if rank == 1:
        return RESULTS[how]()
    TorchComm().all_reduce(torch.ones(1))


class TestProcesses(unittest.TestCase):
    def failure(self, worker, world_size: int, *args, **options) -> RankError:
        with self.assertRaises(RankError) as caught:
            run_ranks(worker, world_size, *args, timeout=SECONDS, **options)
        return caught.exception

    def test_over_gloo_every_rank_is_told_the_same_and_the_group_works_on(self):
        first, *others = run_ranks(refused_over_gloo, 3, timeout=SECONDS)
        self.assertEqual(others, [first] * 2)
        odd = [f"broadcast needs a dense tensor, got {kind}" for kind in odd_tensors()]
        expected = [
            "op must be one of sum, avg, max, got None",
            "facts must be a JSON value, got {1}: Object of type set is not JSON serializable",
            "color must be a whole number, got 'a'",
            "key must be a whole number, got None",
            "a tag is a whole number from 0 to 2147483647, got 2147483648",
            "exchange needs messages (tensor, peer, tag), got tensor([1., 1.])",
            "numel must be a whole number of at least 0, got -1",
            "a tag is a whole number from 0 to 2147483647, got 9223372036854775808",
            "[3.0, 3.0]",
        ]
        self.assertEqual(first, odd + expected)

    def test_a_message_of_another_dtype_or_size(self):
        for dtype, numel in ((torch.int32, 4), (torch.float64, 2), (torch.float32, 3), (torch.float32, 0)):
            _, (words, got) = run_ranks(exchanges_of_another_kind, 2, dtype, numel, timeout=SECONDS)
            self.assertEqual(words, f"rank 1 expected torch.float32 (4,) from rank 0 (tag 5), got {dtype} ({numel},)")
            self.assertEqual(got, [-1.0] * 4)

    def test_a_message_longer_than_its_tensor_ends_the_receiver(self):
        error = self.failure(exchanges_of_another_kind, 2, torch.float32, 5)  # gloo's own doing, before we see it
        self.assertEqual((error.rank, error.collective), (1, "in communication 1 (exchange)"))

    def test_a_message_that_does_not_come(self):
        error = self.failure(too_few_messages, 2, collective_timeout=1.0)
        self.assertEqual(error.rank, 0)
        self.assertIn("rank 0 finished while rank 1 waited in communication 1 (exchange)", str(error))
        self.assertEqual(error.traceback, "")  # where a rank that has finished waits says nothing

    def test_a_group_that_has_failed_is_not_used_again_and_does_not_hide_the_cause(self):
        boxes = QueueMesh.inboxes(3, start_method(None))
        for what, worker, args, options in (
            ("gloo", swallows_over_gloo, (), {"collective_timeout": 1.0}),
            ("queues", swallows_over_queues, (boxes,), {"backend": None}),
        ):
            with self.subTest(what), tempfile.TemporaryDirectory() as folder:
                error = self.failure(worker, 3, *args, folder, **options)
                self.assertEqual((error.rank, error.exitcode), (2, None))
                self.assertIn("rank 2 stalled while rank", str(error))
                self.assertIn("cannot be used again after its failure", str(error))
                for path in Path(folder).iterdir():
                    why, *words = path.read_text().splitlines()
                    rank = path.name.removeprefix("words")
                    expected = f"rank {rank}: this group cannot be used again after its failure: {why}"
                    self.assertEqual(words[:3], [expected] * 3)
                    self.assertEqual(words[3].replace("this mesh", "this group"), expected)

    def test_errors_that_cannot_be_pickled_or_printed(self):
        error = self.failure(misbehaves, 2, "error")
        self.assertEqual((error.rank, error.exitcode), (1, 1))
        self.assertIn("rank 1 raised", str(error))
        self.assertIn("WithoutWords: <exception str() failed>", str(error))
        error = self.failure(misbehaves, 2, "exit")
        self.assertEqual((error.reason, error.exitcode), (f"raised SystemExit: {1 << 40}", 0))  # as the system cuts it

    def test_results_that_cannot_be_pickled(self):
        for how, kind in (("generator", "generator"), ("meta", "Tensor")):
            error = self.failure(misbehaves, 2, how)
            self.assertEqual((error.rank, error.exitcode), (1, 1))
            self.assertIn(f"raised ValueError: a result of type {kind} cannot be sent to the launcher: ", str(error))


if __name__ == "__main__":
    unittest.main()
