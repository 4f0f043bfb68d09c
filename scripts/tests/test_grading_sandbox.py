"""What students' code does by accident or in anger, and that nothing of it is left."""

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading import leftovers, processes, records, sandbox
from grading.isolation import NONE, Isolation, probe
from grading.limits import MIB, Limits

LINUX = sys.platform == "linux"
PLAIN = Isolation(fork=True)
FULL = NONE
if LINUX:
    with tempfile.TemporaryDirectory() as _folder:
        FULL = probe(Path(_folder))
LIMITS = Limits(run_seconds=120, test_seconds=60)


def run(body, isolation=FULL, hide=(), **limits) -> sandbox.Ended:
    """Run `body(channel)` in a sandbox, in a child of this process, which becomes a subreaper."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="sb-") as folder:
        child = os.fork()
        if child == 0:
            try:
                limits = dataclasses.replace(LIMITS, **limits)
                ended = sandbox.run(body, Path(folder), limits, isolation, hide=hide)
                text = json.dumps(dataclasses.asdict(ended) | {"children": processes.descendants(os.getpid())})
                os.write(writer, text.encode()[: 1 << 16])
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            value = json.loads(file.read())
        os.waitpid(child, 0)
    if value.pop("children"):
        raise AssertionError("processes are left")
    return sandbox.Ended(**value)


def marked(name: str) -> int:
    """How many processes have this word among their arguments."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.count(name)


@unittest.skipUnless(LINUX, "the sandbox needs Linux")
class Both(unittest.TestCase):
    """Each test twice: with all that the machine permits, and with none of the namespaces."""

    isolation = FULL

    def sandboxed(self, body, **limits) -> sandbox.Ended:
        return run(body, self.isolation, **limits)


class TestRuns(Both):
    def test_what_it_prints_and_its_exit_code(self):
        def body(channel):
            print("hello")
            os.write(2, b"there\n")
            os._exit(3)

        ended = self.sandboxed(body)
        self.assertEqual((ended.reason, ended.exit_code, ended.output), ("exited", 3, "hello\nthere\n"))

    def test_an_exception_is_exit_code_1(self):
        def body(channel):
            raise KeyError("k")

        ended = self.sandboxed(body)
        self.assertEqual((ended.exit_code, ended.output), (1, "KeyError: 'k'\n"))

    def test_a_signal_is_a_negative_exit_code(self):
        ended = self.sandboxed(lambda channel: os.kill(os.getpid(), signal.SIGKILL))
        self.assertEqual((ended.reason, ended.exit_code), ("exited", -signal.SIGKILL))

    def test_there_is_no_input(self):
        ended = self.sandboxed(lambda channel: print(repr(sys.stdin.read()), repr(os.read(0, 9))))
        self.assertEqual(ended.output, "'' b''\n")

    def test_environment_and_folder_are_private(self):
        os.environ["SECRET_OF_THE_GRADER"] = "x"
        self.addCleanup(os.environ.pop, "SECRET_OF_THE_GRADER")

        def body(channel):
            here = Path.cwd()
            print("SECRET_OF_THE_GRADER" in os.environ, Path(tempfile.gettempdir()) == here / "tmp")
            print(Path.home() == here / "home", all(Path(os.environ[n]).is_dir() for n in ("HOME", "TMPDIR")))

        self.assertEqual(self.sandboxed(body).output, "False True\nTrue True\n")

    def test_no_descriptor_of_the_grader_is_open(self):
        with tempfile.TemporaryFile() as file:
            os.set_inheritable(file.fileno(), True)
            number, ours = file.fileno(), os.fstat(file.fileno()).st_ino

            def body(channel):
                try:
                    print(os.fstat(number).st_ino == ours)
                except OSError as error:
                    print(error.strerror)

            self.assertIn(self.sandboxed(body).output, ("False\n", "Bad file descriptor\n"))


class TestExcess(Both):
    def test_an_endless_loop_ends_at_the_deadline(self):
        def body(channel):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass

        ended = self.sandboxed(body, run_seconds=0.5)
        self.assertEqual((ended.reason, ended.detail), ("deadline", "more than 0.5 s"))

    def test_processor_time_is_limited_for_each_process(self):
        def body(channel):
            while True:
                pass

        self.assertIn(self.sandboxed(body, cpu_seconds=1).exit_code, (-signal.SIGXCPU, -signal.SIGKILL))

    def test_a_fork_bomb_is_counted(self):
        def body(channel):
            for _ in range(12):  # 4,096 at most, should the sandbox fail
                os.fork()
            time.sleep(30)

        ended = self.sandboxed(body, processes=20)
        self.assertEqual(ended.reason, "processes")
        self.assertEqual(ended.left, [])

    def test_gigabytes_are_refused_to_the_one_who_asks(self):
        ended = self.sandboxed(lambda channel: bytearray(1 << 33), data_bytes=512 * MIB)
        self.assertEqual((ended.exit_code, ended.output), (1, "MemoryError: \n"))

    def test_memory_is_counted_over_all_processes(self):
        def body(channel):
            for _ in range(4):
                if os.fork() == 0:
                    held = bytearray(os.urandom(1)) * (60 * MIB)
                    time.sleep(30)
                    del held
            time.sleep(30)

        ended = self.sandboxed(body, memory_bytes=150 * MIB)
        self.assertEqual(ended.reason, "memory")

    def test_a_flood_of_output_is_cut_and_then_ended(self):
        def body(channel):
            print("first")
            sys.stdout.flush()
            while True:
                os.write(1, b"x" * 4096)

        ended = self.sandboxed(body, flood_bytes=8 * MIB, output_bytes=1000)
        self.assertEqual(ended.reason, "output")
        self.assertTrue(ended.output.startswith("first\nxx"))
        self.assertLess(len(ended.output), 1100)
        self.assertIn("bytes of output were dropped here", ended.output)

    def test_a_big_file_is_refused(self):
        def body(channel):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            with open("big", "wb") as file:
                file.write(bytes(3 * MIB))

        self.assertIn("File too large", self.sandboxed(body, file_bytes=MIB).output)

    def test_too_many_open_files(self):
        def body(channel):
            files = [open(os.devnull) for _ in range(200)]
            print(len(files))

        self.assertIn("Too many open files", self.sandboxed(body, open_files=100).output)

    def test_no_core_file(self):
        ended = self.sandboxed(lambda channel: os.abort())
        self.assertEqual(ended.exit_code, -signal.SIGABRT)


class TestNothingIsLeft(Both):
    def test_a_child_that_detached_is_gone(self):
        word = f"detached-{os.getpid()}-{self.isolation.processes}"

        def body(channel):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork() == 0:
                    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", word])
                os._exit(0)
            os.wait()

        ended = self.sandboxed(body)
        self.assertEqual((ended.reason, ended.exit_code, ended.left), ("exited", 0, []))
        self.assertEqual(marked(word), 0)

    def test_shared_memory_is_removed(self):
        name = f"psm_left_{os.getpid()}"

        def body(channel):
            Path("/dev/shm", name).write_bytes(b"left")
            print(Path("/dev/shm", name).exists())

        self.assertEqual(self.sandboxed(body).output, "True\n")
        self.assertFalse(Path("/dev/shm", name).exists())


@unittest.skipUnless(LINUX, "the sandbox needs Linux")
class TestSharedMemory(unittest.TestCase):
    def test_what_others_made_meanwhile_stays(self):
        before = leftovers.SharedMemory()
        lock = multiprocessing.get_context("spawn").Lock()
        path = Path(f"/dev/shm/psm_open_{os.getpid()}")
        self.addCleanup(path.unlink, missing_ok=True)
        with path.open("wb"):
            before.remove_new()
            self.assertTrue(path.exists())
        before.remove_new()
        self.assertFalse(path.exists())
        self.assertTrue(Path(f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}").exists())


class TestKillers(Both):
    """Who kills the parent, the group or everybody within reach is never taken for a success."""

    def end(self, body) -> sandbox.Ended:
        def run_tests(channel):
            write = records.Writer(channel.records, channel.nonce)
            write("found", tests=["t"])
            write("start", test="t")
            body()
            write("pass", test="t")

        ended = self.sandboxed(run_tests, run_seconds=60)
        outcome = records.read(ended.nonce, ended.records)
        self.assertEqual(outcome.tests, ["t"])
        self.assertFalse(outcome.clean)
        return ended

    def test_the_parent(self):
        def body():
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.2)
            os._exit(0)

        ended = self.end(body)
        self.assertEqual(ended.reason, "exited" if self.isolation.processes else "lost")

    def test_the_group(self):
        self.assertEqual(self.end(lambda: os.killpg(0, signal.SIGKILL)).exit_code, -signal.SIGKILL)

    def test_exit_code_0_is_no_success(self):
        self.assertEqual(self.end(lambda: os._exit(0)).exit_code, 0)


class TestRunsPlainly(TestRuns):
    isolation = PLAIN


class TestExcessPlainly(TestExcess):
    isolation = PLAIN


class TestNothingIsLeftPlainly(TestNothingIsLeft):
    isolation = PLAIN


class TestKillersPlainly(TestKillers):
    isolation = PLAIN


class TestNamespaces(Both):
    def test_nothing_outside_the_folder_can_be_written(self):
        if not self.isolation.mounts:
            self.skipTest("no mount namespace is permitted here")
        outside = tempfile.TemporaryDirectory()
        self.addCleanup(outside.cleanup)
        target = Path(outside.name, "f")

        def body(channel):
            Path("inside").write_text("x")
            for path in (target, Path(__file__).with_name("written.txt"), Path(os.__file__).with_name("written.txt")):
                try:
                    path.write_text("x")
                except OSError as error:
                    print(error.strerror)

        missing = "No such file or directory\n" if self.isolation.hidden else "Read-only file system\n"
        self.assertEqual(self.sandboxed(body).output, missing * 2 + "Read-only file system\n")
        self.assertFalse(target.exists())

    def test_the_private_folder_has_a_size(self):
        if not self.isolation.mounts:
            self.skipTest("no mount namespace is permitted here")

        def body(channel):
            for number in range(10):
                Path(str(number)).write_bytes(bytes(MIB))

        self.assertIn("No space left", self.sandboxed(body, folder_bytes=4 * MIB).output)

    def test_mounts_cannot_be_undone(self):
        if not self.isolation.mounts:
            self.skipTest("no mount namespace is permitted here")

        def body(channel):
            from grading import linux

            for attempt in (lambda: linux.set_read_only("/", False, True), lambda: linux.unshare(linux.CLONE_NEWNS)):
                try:
                    attempt()
                    print("permitted")
                except OSError as error:
                    print(error.strerror.split(": ")[1])

        self.assertEqual(self.sandboxed(body).output, "Operation not permitted\n" * 2)

    def test_the_network_is_loopback_alone(self):
        if not self.isolation.network:
            self.skipTest("no network namespace is permitted here")

        def body(channel):
            with socket.create_server(("127.0.0.1", 0)) as server:
                with socket.create_connection(server.getsockname(), timeout=5):
                    print([name for _, name in socket.if_nameindex() if name == "lo"])
            try:
                socket.create_connection(("192.0.2.1", 80), timeout=5)
            except OSError as error:
                print(error.strerror)

        self.assertEqual(self.sandboxed(body).output, "['lo']\nNetwork is unreachable\n")

    def test_no_process_outside_is_seen(self):
        if not self.isolation.processes:
            self.skipTest("no PID namespace is permitted here")
        pid = os.getpid()

        def body(channel):
            print(os.getppid())
            try:
                os.kill(pid, 0)
                print("seen", pid)
            except ProcessLookupError:
                print("no such process")

        self.assertEqual(self.sandboxed(body).output, "1\nno such process\n")

    def test_what_is_missing_is_said(self):
        self.assertEqual(Isolation(True, False, True, True, True, True).missing, [])
        (hidden,) = Isolation(True, False, True, True, True, False).missing
        self.assertEqual(hidden.split(", ")[0], "files outside are not hidden: practice only")
        self.assertEqual([text.split(":")[0] for text in NONE.missing], ["practice only"])
        self.assertEqual(
            [text.split(":")[0] for text in PLAIN.missing],
            ["no PID namespace", "no network namespace", "no mount namespace"],
        )


if __name__ == "__main__":
    unittest.main()
