"""run_ranks: what comes back, who is blamed for each kind of failure, and that nothing is left behind."""

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import flight
import rank_process
import ranks
import torch
import torch.distributed as dist
from comm import TorchComm
from mesh_comm import MeshComm
from mesh import QueueMesh
from ranks import RankError, run_ranks

SECONDS = 120  # for a whole run: only a hang takes that long, and then the error is not the expected one
TMP = tempfile.gettempdir()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a grandchild that has ended may wait for its new parent to take notice
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def for_ever() -> None:
    threading.Event().wait()


def ignore_sigterm_and_stall() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for_ever()


def raise_value_error() -> None:
    raise ValueError("seven is not a batch size")


def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def fork_then_die() -> None:
    """Leave behind a child that keeps every file open by which the launcher could notice the death."""
    if os.fork() == 0:
        for_ever()
    kill_me("SIGKILL")


def kill_me(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


class DiesWhenPickled:
    def __reduce__(self):
        kill_me("SIGKILL")


class CannotBeDecoded:
    def __reduce__(self):
        return int, ("no number",)


FAULTS = {
    "raise": raise_value_error,
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(7)": lambda: os._exit(7),
    "SIGKILL": lambda: kill_me("SIGKILL"),
    "SIGSTOP": lambda: kill_me("SIGSTOP"),
    "KeyboardInterrupt": raise_keyboard_interrupt,
    "stall": for_ever,
    "stall, SIGTERM ignored": ignore_sigterm_and_stall,
    "fork, then SIGKILL": fork_then_die,
    "none": lambda: None,
}


def two_collectives(rank, world_size, fault, at_fault, folder):
    """All ranks meet, then one of them goes wrong, while the others enter the second collective."""
    Path(folder, str(os.getpid())).touch()
    comm = TorchComm().unchecked()
    comm.all_reduce(torch.ones(4))
    if rank == at_fault:
        FAULTS[fault]()
    comm.broadcast(torch.ones(4))
    return rank


def meet(rank, world_size, boxes):
    """A mesh whose deadline is short from the moment when all ranks have started."""
    mesh = QueueMesh(rank, world_size, boxes)
    mesh.agree("all are here")
    mesh.timeout = 1.0
    return mesh


def fault_in_queues(rank, world_size, boxes, fault, at_fault, folder):
    Path(folder, str(os.getpid())).touch()
    comm = MeshComm(meet(rank, world_size, boxes)).unchecked()
    comm.all_reduce(torch.ones(4))
    if rank == at_fault:
        FAULTS[fault]()
    comm.all_reduce(torch.ones(4))


def lone_messages(rank, world_size, boxes, folder, senders):
    """Outside any collective: every rank waits for its right neighbour; only `senders` have sent."""
    Path(folder, str(os.getpid())).touch()
    mesh = meet(rank, world_size, boxes)
    if rank in senders:
        mesh.send((rank - 1) % world_size, torch.ones(2))
        for_ever()
    mesh.recv((rank + 1) % world_size)


def leaves_early(rank, world_size, folder):
    Path(folder, str(os.getpid())).touch()
    if rank != 2:
        TorchComm().unchecked().all_reduce(torch.ones(4))


def fault_outside(rank, world_size, folder, error):
    """A rank raises what a lost connection raises, too, while the others compute."""
    Path(folder, str(os.getpid())).touch()
    TorchComm().unchecked().all_reduce(torch.ones(4))
    if rank == 1:
        raise error
    for_ever()


def wrapped_loss(rank, world_size, folder):
    """Rank 0 dies; the others dress up what they see."""
    Path(folder, str(os.getpid())).touch()
    comm = TorchComm().unchecked()
    comm.all_reduce(torch.ones(4))
    try:
        if rank == 0:
            for_ever()
        comm.all_reduce(torch.ones(4))
    except RuntimeError as error:
        raise ValueError(f"step 3 failed on rank {rank}") from error


def returns(rank, world_size, folder, make):
    Path(folder, str(os.getpid())).touch()
    TorchComm().agree("all are here")
    return (
        {"class": DiesWhenPickled, "wrong": CannotBeDecoded, "local": lambda: lambda: None}[make]()
        if rank == 1
        else rank
    )


def echo(rank, world_size, *args):
    return rank, world_size, args


def many_tensors(rank, world_size):
    base = torch.arange(12.0).view(3, 4) + rank
    return {
        "strided": base[:, 1],
        "bfloat16": base.to(torch.bfloat16),
        "needs grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base),
        "bool": base > 4,
        "empty": torch.empty(3, 0),
        "complex": torch.complex(base, base).conj(),
        "sparse": base.to_sparse(),
        "module": torch.nn.Linear(2, 2).state_dict(),
    }


def big(rank, world_size):
    return torch.full((50 << 20,), rank, dtype=torch.uint8)


def threads(rank, world_size):
    return torch.get_num_threads(), dist.is_initialized(), os.environ.get("GLOO_SOCKET_IFNAME")


def summed(rank, world_size, value):
    x = torch.tensor([value * (rank + 1)])
    TorchComm().all_reduce(x)
    return x.item()


def launches_more(rank, world_size):
    return run_ranks(summed, 1, 5.0 + rank)


def loaded_modules(rank, world_size):
    comm, x = TorchComm(), torch.ones(4)
    comm.all_reduce(x, op="avg")
    comm.reduce_scatter(torch.empty(4 // world_size), x)
    comm.all_gather(torch.empty(4 * world_size), x)
    comm.broadcast(x)
    comm.split(0)
    return [name for name in sys.modules if name.startswith("torch.")]


def queue_total(rank, world_size, boxes):
    comm, x = MeshComm(QueueMesh(rank, world_size, boxes)), torch.tensor([rank + 1])
    comm.all_reduce(x)
    return x.item()


class RanksCase(unittest.TestCase):
    def setUp(self):
        self.pids = self.temporary()
        self.scratch = self.temporary()  # where the launcher puts its files
        self.enterContext_(mock.patch.object(tempfile, "tempdir", self.scratch))

    def temporary(self) -> str:
        folder = tempfile.TemporaryDirectory(dir=TMP)
        self.addCleanup(folder.cleanup)
        return folder.name

    def enterContext_(self, manager):  # unittest has it from Python 3.11 on
        self.addCleanup(manager.__exit__, None, None, None)
        return manager.__enter__()

    def failure(self, worker, world_size, *args, **options) -> RankError:
        with self.assertRaises(RankError) as caught:
            run_ranks(worker, world_size, *args, timeout=SECONDS, **options)
        self.assertEqual(len(os.listdir(self.pids)), world_size, "not all ranks had started")
        self.assert_nothing_left()
        return caught.exception

    def assert_nothing_left(self):
        self.assertEqual([pid for pid in map(int, os.listdir(self.pids)) if alive(pid)], [])
        self.assertEqual(os.listdir(self.scratch), [])


class TestResults(RanksCase):
    def test_results_come_in_rank_order_with_all_arguments(self):
        self.assertEqual(run_ranks(echo, 3, "a", [1]), [(rank, 3, ("a", [1])) for rank in range(3)])
        self.assert_nothing_left()

    def test_all_kinds_of_tensors_come_back_whole(self):
        expected = many_tensors(1, 2)
        found = run_ranks(many_tensors, 2, backend=None)[1]
        for kind in ("strided", "bfloat16", "needs grad", "bool", "empty", "complex"):
            self.assertTrue(torch.equal(found[kind], expected[kind]), kind)
            self.assertEqual((found[kind].dtype, found[kind].requires_grad), (expected[kind].dtype, False), kind)
        self.assertIsInstance(found["parameter"], torch.nn.Parameter)
        self.assertTrue(torch.equal(found["parameter"], expected["parameter"]))
        self.assertTrue(torch.equal(found["sparse"].to_dense(), expected["sparse"].to_dense()))
        self.assertEqual([*found["module"]], ["weight", "bias"])

    def test_a_result_of_50_megabytes(self):
        found = run_ranks(big, 2, backend=None, timeout=SECONDS)
        self.assertEqual(
            [(len(each), int(each[0]), int(each[-1])) for each in found], [(50 << 20, r, r) for r in (0, 1)]
        )

    def test_ranks_run_one_thread_and_the_caller_keeps_its_own(self):
        before = torch.get_num_threads()
        self.assertEqual(run_ranks(threads, 2, backend=None), [(1, False, None)] * 2)
        self.assertEqual(torch.get_num_threads(), before)

    def test_nothing_is_imported_that_only_comparisons_need(self):
        for name in run_ranks(loaded_modules, 2)[0]:
            for heavy in (
                "_dynamo",
                "optim.adam",
                "distributed.fsdp",
                "distributed.checkpoint",
                "distributed.pipelining",
            ):
                self.assertFalse(name.startswith(f"torch.{heavy}") and name not in sys.modules, name)

    def test_importing_the_lesson_adds_nothing_of_torch(self):
        code = (
            "import sys, torch, torch.distributed; before = set(sys.modules)\n"
            "import comm, demo, ranks, sidebyside, torch_mesh, verify, virtual\n"
            "print([name for name in set(sys.modules) - before if name.startswith('torch.')])"
        )
        self.assertEqual(python(code).strip(), "[]")


class TestFailures(RanksCase):
    """One of four ranks goes wrong between an all-reduce and a broadcast."""

    def fault(self, fault: str, at_fault: int = 2, **options) -> RankError:
        error = self.failure(two_collectives, 4, fault, at_fault, self.pids, **options)
        self.assertEqual(error.rank, at_fault)
        self.assertEqual(error.collective, "after communication 1 (all_reduce)")
        self.assertIn(error.collective, str(error))
        return error

    def test_raise(self):
        for rank in (0, 3):
            with self.subTest(rank=rank):
                self.pids = self.temporary()
                error = self.fault("raise", rank)
                self.assertEqual(error.exitcode, 1)
                self.assertIn(f"rank {rank} raised ValueError: seven is not a batch size", str(error))
                self.assertIn("in raise_value_error", error.traceback)

    def test_sys_exit(self):
        error = self.fault("sys.exit(3)")
        self.assertEqual(error.exitcode, 3)
        self.assertIn("raised SystemExit: 3", str(error))

    def test_exit_without_a_word(self):
        for code in (0, 7):
            with self.subTest(code=code):
                self.pids = self.temporary()
                error = self.fault(f"os._exit({code})")
                self.assertEqual(error.exitcode, code)
                self.assertIn(f"exited with code {code}", str(error))

    def test_keyboard_interrupt(self):
        self.assertIn("raised KeyboardInterrupt", str(self.fault("KeyboardInterrupt")))

    def test_killed(self):
        error = self.fault("SIGKILL")
        self.assertEqual(error.exitcode, -9)
        self.assertIn("was killed by SIGKILL", str(error))

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_killed_while_a_child_of_it_lives_on(self):
        self.assertEqual(self.fault("fork, then SIGKILL").exitcode, -9)

    def test_stall_while_the_others_wait_in_a_collective(self):
        error = self.fault("stall", at_fault=0, collective_timeout=1.0)  # the source: all others need it
        self.assertIsNone(error.exitcode)
        self.assertIn("rank 0 stalled while rank", str(error))
        self.assertIn("in communication 2 (broadcast)", str(error))
        self.assertIn("in for_ever", error.traceback)  # where it stands

    @unittest.skipUnless(hasattr(signal, "SIGSTOP"), "needs SIGSTOP")
    def test_stopped(self):
        error = self.fault("SIGSTOP", at_fault=0, collective_timeout=1.0)
        self.assertIsNone(error.exitcode)
        self.assertIn("rank 0 stalled while rank", str(error))

    def test_a_rank_that_ignores_sigterm_ends_too(self):
        error = self.failure(two_collectives, 4, "stall, SIGTERM ignored", 0, self.pids, collective_timeout=1.0)
        self.assertEqual(error.rank, 0)

    def test_the_deadline_of_the_run(self):
        seconds = 4.0 if ranks.start_method("gloo") == "fork" else 30.0
        message = f"rank 1 had not finished within {seconds:g} s, the run's deadline"
        with self.assertRaisesRegex(RankError, message) as caught:
            run_ranks(two_collectives, 4, "stall", 1, self.pids, timeout=seconds)
        self.assertIsNone(caught.exception.exitcode)
        self.assertIn("in for_ever", caught.exception.traceback)
        self.assert_nothing_left()

    def test_a_rank_that_leaves_a_collective_out(self):
        error = self.failure(leaves_early, 3, self.pids, collective_timeout=1.0)
        self.assertEqual((error.rank, error.exitcode), (2, None))
        self.assertIn("rank 2 finished while rank", str(error))

    def test_connection_errors_of_a_ranks_own_are_its_own(self):
        for kind in (ConnectionResetError, TimeoutError, EOFError):
            with self.subTest(kind=kind):
                self.pids = self.temporary()
                error = self.failure(fault_outside, 3, self.pids, kind("the data server is down"))
                self.assertEqual((error.rank, error.exitcode), (1, 1))

    def test_the_cause_is_found_behind_errors_that_ranks_dress_up(self):
        error = self.failure(wrapped_loss, 3, self.pids, collective_timeout=1.0)
        self.assertEqual(error.rank, 0)
        self.assertIn("step 3 failed on rank", str(error))


class TestDelivery(RanksCase):
    def test_killed_while_delivering(self):
        error = self.failure(returns, 3, self.pids, "class")
        self.assertEqual((error.rank, error.exitcode), (1, -9))

    def test_a_result_that_cannot_be_encoded(self):
        error = self.failure(returns, 3, self.pids, "local")
        self.assertEqual((error.rank, error.exitcode), (1, 1))
        self.assertIn("pickle", str(error))

    def test_a_result_that_cannot_be_decoded(self):
        error = self.failure(returns, 3, self.pids, "wrong")
        self.assertEqual((error.rank, error.exitcode), (1, 0))
        self.assertIn("cannot be decoded", str(error))

    def test_rank_error_can_be_pickled(self):
        error = RankError(3, -9, "was killed", "in communication 1 (x)", "trace")
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((str(copy), copy.rank, copy.exitcode), (str(error), 3, -9))


class TestQueueFailures(RanksCase):
    """The same over queues, where nothing but a deadline tells a rank that its peer is gone."""

    def boxes(self, world_size):
        return QueueMesh.inboxes(world_size, ranks.start_method(None))

    def test_each_fault_names_its_rank(self):
        for fault, code in (("raise", 1), ("SIGKILL", -9), ("stall", None)):
            with self.subTest(fault=fault):
                self.pids = self.temporary()
                error = self.failure(fault_in_queues, 4, self.boxes(4), fault, 2, self.pids, backend=None)
                self.assertEqual((error.rank, error.exitcode), (2, code))

    def test_a_lone_receive_names_the_rank_that_did_not_send(self):
        # Rank 1 gets its message and is content. Rank 0 waits for 1 in vain, and rank 3 for 0: rank 1 is to blame.
        error = self.failure(lone_messages, 4, self.boxes(4), self.pids, [2], backend=None)
        self.assertEqual(error.rank, 1)
        self.assertRegex(str(error), r"rank 1 finished while rank [03] waited .*: .*\b1\b")

    def test_a_cycle_of_waiting_ranks_is_called_a_deadlock(self):
        error = self.failure(lone_messages, 2, self.boxes(2), self.pids, [], backend=None)
        self.assertRegex(
            str(error), "deadlock: rank (0 waited for rank 1 waited for rank 0|1 waited for rank 0 waited)"
        )


class TestWhoIsBehind(unittest.TestCase):
    def test_who_computes_keeps_those_who_wait(self):
        """In a pipeline rank 1 may have entered more communications than rank 0, which waits for it."""
        behind = ranks._Launch._furthest_behind
        inside, outside = (
            lambda count, state=state: flight.Position(count, state, "exchange") for state in (True, False)
        )
        for positions, expected in (
            ([inside(9), outside(15), inside(12)], 1),
            ([inside(5), outside(4), outside(3)], 2),
            ([inside(6), inside(5), inside(6)], 1),
            ([flight.Position(), inside(1), inside(1)], 0),
        ):
            self.assertEqual(behind({0, 1, 2}, positions), expected)
        self.assertEqual(behind({0, 2}, [inside(9), outside(1), inside(12)]), 0)


class TestParentsDeath(RanksCase):
    """Whatever ends the launcher, its ranks and what they started end within 5 seconds."""

    @unittest.skipUnless(hasattr(os, "fork"), "needs POSIX signals")
    def test_no_process_outlives_the_launcher(self):
        for name in ("SIGKILL", "SIGTERM", "SIGINT"):
            with self.subTest(signal=name):
                code = f"import test_ranks; test_ranks.launcher_to_be_killed({self.scratch!r})"
                parent = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=environment(),
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self.assertEqual(parent.stdout.readline(), "ready\n")
                parent.send_signal(getattr(signal, name))
                # All of them hold the other end of this pipe: when it closes, the last one is gone.
                self.assertEqual(parent.communicate(timeout=5)[0], "")
                self.assertEqual([each for each in os.listdir(self.scratch) if each.startswith("ranks-")], [])


def launcher_to_be_killed(scratch):
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, and so this one, may ignore it
    tempfile.tempdir = scratch
    run_ranks(with_children, 3)


def with_children(rank, world_size):
    subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    if os.fork() == 0:
        for_ever()
    TorchComm().agree("all have started theirs")
    if rank == 0:
        print("ready", flush=True)
    for_ever()


class TestArguments(RanksCase):
    def refused(self, message, *args, **options):
        with (
            mock.patch.object(ranks, "get_context", side_effect=AssertionError("a process was started")),
            self.assertRaisesRegex(ValueError, message),
        ):
            run_ranks(*args, **options)

    def test_refused_before_any_process_starts(self):
        for world_size in (0, -1, True, "2", 2.0, None):
            self.refused(f"world_size must be a whole number of at least 1, got {world_size!r}", echo, world_size)
        self.refused("worker must be a function", "echo", 2)
        self.refused("backend must be 'gloo', 'nccl' or None, got 'mpi'", echo, 2, backend="mpi")
        for seconds in (0, -1.0, float("nan"), float("inf"), "5", True):
            self.refused("timeout must be a positive number of seconds", echo, 2, timeout=seconds)
            self.refused("collective_timeout must be a positive", echo, 2, collective_timeout=seconds)
        self.refused(
            "collective_timeout must be a positive number of seconds, got None", echo, 2, collective_timeout=None
        )

    @unittest.skipIf(torch.cuda.device_count() > 64, "that many GPUs")
    def test_nccl_needs_a_gpu_for_each_rank(self):
        self.refused("needs a GPU for each rank: 65 ranks", echo, 65, backend="nccl")

    def test_the_start_method_can_be_forced_to_two_values(self):
        with mock.patch.dict(os.environ, RANKS_START_METHOD="magic"), self.assertRaisesRegex(ValueError, "magic"):
            run_ranks(echo, 1)


class TestInterface(RanksCase):
    """GLOO_SOCKET_IFNAME: respected if set, and checked; else loopback."""

    def interface(self, value):
        environ = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        environ |= {} if value is None else {"GLOO_SOCKET_IFNAME": value}
        with mock.patch.dict(os.environ, environ, clear=True):
            seen = run_ranks(threads, 2)[1][2]
            self.assertEqual(os.environ.get("GLOO_SOCKET_IFNAME"), value)  # the caller's is left alone
        return seen

    def test_unset_or_empty_means_loopback(self):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.assertEqual([self.interface(None), self.interface(""), self.interface(loopback)], [loopback] * 3)

    def test_one_that_does_not_exist_is_refused_at_once_with_those_that_do(self):
        for name in ("^lo", "nosuch0", "lo,nosuch0"):
            with self.assertRaisesRegex(ValueError, "no such interface; there are .*lo") as caught:
                self.interface(name)
            self.assertIn(repr(name), str(caught.exception))

    def test_without_a_group_it_does_not_matter(self):
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nosuch0"):
            self.assertEqual(run_ranks(threads, 1, backend=None), [(1, False, "nosuch0")])


class TestSeveralRuns(RanksCase):
    def test_two_runs_at_once_in_threads(self):
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(run_ranks, summed, 3, value) for value in (1.0, 10.0)]
            self.assertEqual([run.result() for run in runs], [[6.0] * 3, [60.0] * 3])

    def test_a_failed_run_does_not_touch_another(self):
        with ThreadPoolExecutor(2) as pool:
            bad = pool.submit(run_ranks, two_collectives, 2, "raise", 1, self.pids)
            good = pool.submit(run_ranks, summed, 3, 1.0)
            self.assertEqual(good.result(), [6.0] * 3)
            self.assertEqual(bad.exception().rank, 1)

    def test_a_rank_can_launch_ranks_of_its_own(self):
        self.assertEqual(run_ranks(launches_more, 2, timeout=SECONDS), [[5.0], [6.0]])


class TestSpawn(RanksCase):
    def setUp(self):
        super().setUp()
        self.enterContext_(mock.patch.dict(os.environ, RANKS_START_METHOD="spawn"))

    def test_queues_and_a_worker_of_a_module_loaded_by_path(self):
        file = Path(self.temporary(), "main.py")
        file.write_text("from test_ranks import queue_total\ndef work(*args):\n    return queue_total(*args) + BONUS\n")
        file.write_text(file.read_text() + "BONUS = 100\n")
        spec = importlib.util.spec_from_file_location("main_loaded_by_path", file)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {"main_loaded_by_path": module}):
            spec.loader.exec_module(module)
            boxes = QueueMesh.inboxes(2, ranks.start_method(None))
            self.assertEqual(run_ranks(module.work, 2, boxes, backend=None, timeout=SECONDS), [103, 103])

    def test_an_unpicklable_worker_is_refused_and_nothing_is_left(self):
        with self.assertRaisesRegex(Exception, "[pP]ickle"):
            run_ranks(lambda rank, world_size: rank, 2)
        self.assert_nothing_left()


class TestTorchrun(RanksCase):
    """Under torchrun the processes exist already: `run_ranks` joins them."""

    def joined(self, rank, world_size, code, life=0):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        variables |= {"TORCHELASTIC_RESTART_COUNT": life}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment() | {name: str(value) for name, value in variables.items()},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.kill)
        return process

    def setUp(self):
        super().setUp()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent does

    def test_each_process_gets_all_results_also_of_a_second_run(self):
        code = (
            "import os, test_ranks as t\n"
            "print(os.getpid() == t.run_ranks(t.its_pid, 2)[int(os.environ['RANK'])], t.run_ranks(t.summed, 2, 1.0))"
        )
        both = [self.joined(rank, 2, code) for rank in (0, 1)]
        for process in both:
            out, err = process.communicate(timeout=SECONDS)
            self.assertEqual(out, "True [3.0, 3.0]\n", err)

    def test_the_group_ends_before_the_interpreter_does(self):
        code = (
            "import atexit, torch.distributed as dist, test_ranks as t\n"
            "atexit.register(lambda: print(dist.is_initialized()))\n"  # the first to register is the last to run
            "print(t.run_ranks(t.summed, 2, 1.0), t.run_ranks(t.summed, 2, 1.0), dist.is_initialized())"
        )
        for process in [self.joined(rank, 2, code) for rank in (0, 1)]:
            out, err = process.communicate(timeout=SECONDS)
            self.assertEqual((out, process.returncode), ("[3.0, 3.0] [3.0, 3.0] True\nFalse\n", 0), err)

    def test_a_restarted_run_does_not_call_the_dead(self):
        """The launcher's store still holds their addresses; the process that comes first must wait for the living."""
        code = "import test_ranks as t\nprint('here', flush=True)\nprint(t.run_ranks(t.summed, 2, 1.0))"
        for life in (0, 1):
            last = self.joined(1, 2, code, life)
            self.assertEqual(last.stdout.readline(), "here\n")
            for process in (last, self.joined(0, 2, code, life)):
                out, err = process.communicate(timeout=SECONDS)
                self.assertEqual(out.removeprefix("here\n"), "[3.0, 3.0]\n", err)

    def test_another_world_size_is_refused(self):
        process = self.joined(0, 1, "import test_ranks as t\nt.run_ranks(t.summed, 3, 1.0)")
        self.assertIn("world_size 3, but the launcher started 1 processes", process.communicate(timeout=SECONDS)[1])
        self.assertEqual(process.returncode, 1)


def its_pid(rank, world_size):
    return os.getpid()


class TestBlame(unittest.TestCase):
    """The choice among several failures, without processes."""

    def cause(self, failures: list, *counts: int) -> int:
        launch = object.__new__(ranks._Launch)
        launch.run = rank_process.Run(Path("nowhere"), len(counts), "nccl", 60.0)
        launch.failures = {failure.rank: failure for failure in failures}

        positions = [flight.Position(count) for count in counts]
        with (
            mock.patch.object(flight, "read", return_value=positions),
            mock.patch.object(launch, "_stack", return_value=""),
        ):
            return launch._blame().rank

    def test_a_failure_of_a_ranks_own_comes_before_those_of_victims(self):
        own = ranks._Failure(2, "raised KeyError", 1, when=5.0, traceback="t")
        victim = ranks._Failure(0, "raised RuntimeError: gloo/transport", 1, when=4.0, traceback="t", victim=True)
        self.assertEqual(self.cause([victim, own], 3, 3, 3), 2)

    def test_of_two_the_first_is_the_cause(self):
        late, early = (ranks._Failure(rank, "raised", 1, when=9.0 - rank, traceback="t") for rank in (0, 1))
        self.assertEqual(self.cause([late, early], 3, 3), 1)

    def test_who_was_waited_for_comes_before_who_is_behind(self):
        waited = ranks._Failure(0, "raised MeshTimeout", 1, traceback="t", victim=True, waited_for=2)
        self.assertEqual(self.cause([waited], 3, 1, 3), 2)
        unknown = ranks._Failure(0, "raised MeshTimeout", 1, traceback="t", victim=True)
        self.assertEqual(self.cause([unknown], 3, 1, 3), 1)

    def test_nccls_watchdog_aborts_a_victim_if_another_rank_is_behind(self):
        aborted = ranks._Failure(0, "was killed by SIGABRT", -6, victim=True)
        self.assertEqual(self.cause([aborted], 3, 3, 2, 3), 2)
        self.assertEqual(self.cause([aborted], 3, 3, 4), 0)
        self.assertEqual(self.cause([aborted], 2, 3), 0)


class TestPosition(unittest.TestCase):
    def test_the_board_keeps_what_each_rank_recorded(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(flight, "_recorder", flight._Recorder()):
            board = Path(folder, "positions")
            flight.create(board, 2)
            flight.attach(board, 1)
            with flight.inside("all_reduce"):
                self.assertEqual(str(flight.read(board)[1]), "in communication 1 (all_reduce)")
            with flight.inside("all_gather"), flight.inside("agree"):
                self.assertEqual(str(flight.position()), "in communication 2 (all_gather)")
            with flight.waiting("all_gather"):
                self.assertEqual(str(flight.read(board)[1]), "in communication 2 (all_gather)")
            self.assertEqual(str(flight.read(board)[1]), "after communication 2 (all_gather)")
            with self.assertRaises(KeyError), flight.inside("b" * 99):
                raise KeyError
            self.assertEqual(
                [str(p) for p in flight.read(board)],
                ["before its first communication", f"in communication 3 ({'b' * 59})"],
            )
            flight._recorder.board.close()

    def test_reports_tell_a_lost_peer_from_a_fault(self):
        gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        self.assertTrue(rank_process._lost_a_peer(gloo))
        self.assertFalse(rank_process._lost_a_peer(RuntimeError("shape mismatch")))
        self.assertFalse(rank_process._lost_a_peer(dist.DistBackendError("ncclInvalidUsage")))


def environment() -> dict:
    """For a new interpreter that imports this file and the lesson."""
    here = Path(__file__).resolve()
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [here.parent, *here.parents[3].glob("*/*/code")]))}


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    if run.returncode:
        raise AssertionError(run.stderr)
    return run.stdout


if __name__ == "__main__":
    unittest.main()
