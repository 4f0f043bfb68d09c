"""Signals that wait, and a launcher that is interrupted more than once, or asked to stop."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from comm import TorchComm
from endings import say_why
from held_signals import HeldSignals
from ranks import check_launch, run_ranks

DEADLINE = 120  # seconds: only a hang takes that long


def send(number: int) -> None:
    """Send a signal to this process. Python runs the handler before the next line."""
    os.kill(os.getpid(), number)


@unittest.skipUnless(os.name == "posix", "signals of POSIX")
class TestHeldSignals(unittest.TestCase):
    def setUp(self):
        self.calls = []
        for number, handler in ((signal.SIGINT, self.interrupt), (signal.SIGTERM, signal.SIG_DFL)):
            self.addCleanup(signal.signal, number, signal.signal(number, handler))

    def interrupt(self, number, frame):
        self.calls.append(number)
        raise KeyboardInterrupt

    def test_it_happens_where_it_is_answered(self):
        with HeldSignals(signal.SIGINT) as signals:
            send(signal.SIGINT)
            self.assertEqual((signals.heard, self.calls), ([signal.SIGINT], []))
            with self.assertRaises(KeyboardInterrupt):
                signals.answer()
            self.assertEqual((signals.heard, self.calls), ([], [signal.SIGINT]))
            signals.answer()
        self.assertEqual(signal.getsignal(signal.SIGINT), self.interrupt)
        self.assertEqual(self.calls, [signal.SIGINT])

    def test_what_is_left_happens_at_the_end(self):
        done = []
        with self.assertRaises(KeyboardInterrupt), HeldSignals(signal.SIGINT):
            send(signal.SIGINT)
            done.append("all")
        self.assertEqual((done, self.calls), (["all"], [signal.SIGINT]))
        self.assertEqual(signal.getsignal(signal.SIGINT), self.interrupt)

    def test_an_error_on_its_way_is_not_replaced(self):
        with self.assertRaises(ZeroDivisionError), HeldSignals(signal.SIGINT):
            send(signal.SIGINT)
            raise ZeroDivisionError
        self.assertEqual(self.calls, [])

    def test_what_would_have_ended_the_process_does_nothing(self):
        with HeldSignals(signal.SIGINT, signal.SIGTERM) as signals:
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            self.assertEqual(signals.heard, [signal.SIGTERM] * 2)
            signals.answer()
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def test_what_is_ignored_stays_ignored(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with HeldSignals(signal.SIGINT) as signals:
            send(signal.SIGINT)
            self.assertEqual(signals.heard, [])

    def test_one_inside_another(self):
        with self.assertRaises(KeyboardInterrupt), HeldSignals(signal.SIGINT) as outer:
            with HeldSignals(signal.SIGINT) as inner:
                send(signal.SIGINT)
                self.assertEqual((inner.heard, outer.heard), ([signal.SIGINT], []))
            self.assertEqual((outer.heard, self.calls), ([signal.SIGINT], []))

    def test_in_another_thread_nothing_is_held(self):
        found = []

        def work():
            with HeldSignals(signal.SIGINT):
                found.append(signal.getsignal(signal.SIGINT) == self.interrupt)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(DEADLINE)
        self.assertEqual(found, [True])

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_a_forked_process_has_its_old_handlers(self):
        with HeldSignals(signal.SIGINT, signal.SIGTERM):
            if (child := os.fork()) == 0:
                os._exit(10 * (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) + self._is_interrupted())
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 11)

    def _is_interrupted(self) -> bool:
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            return True
        return False


@unittest.skipUnless(os.name == "posix", "signals of POSIX")
class TestInterruptedLauncher(unittest.TestCase):
    """`kind` says what the ranks do with SIGTERM. The pipe of the output closes when the last process is gone."""

    def launch(self, kind: str, stop_within: float | None) -> subprocess.Popen:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        here = Path(__file__).resolve()
        code = f"import test_held_signals as t; t.launcher({kind!r}, {stop_within}, {folder.name!r})"
        paths = [here.parent, *here.parents[3].glob("*/*/code")]
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.addCleanup(process.kill)
        self.assertEqual(process.stdout.readline(), "ready\n")
        return process

    def end(self, process: subprocess.Popen) -> tuple[int, str]:
        out = process.communicate(timeout=DEADLINE)[0]
        return process.returncode, out

    def test_twice_while_it_ends_its_ranks(self):
        """The second comes when a rank has heard that it must end, and does not: it is killed all the same."""
        for stop_within in (None, 1000.0):
            with self.subTest(stop_within=stop_within):
                process = self.launch("does not end", stop_within)
                process.send_signal(signal.SIGINT)
                self.assertEqual(process.stdout.readline(), "heard\n")
                process.send_signal(signal.SIGINT)
                self.assertEqual(self.end(process), (130, "stopped: by Ctrl-C\n"))

    def test_often_at_any_time(self):
        """Also in the lines in which the launcher is on its way from one to the next, and in Python's own ending."""
        process = self.launch("does not end", None)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        code, out = self.end(process)
        self.assertEqual((code, out.replace("heard\n", "")), (130, "stopped: by Ctrl-C\n"))

    def test_a_signal_is_passed_on_and_results_come_back(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(signal=number):
                process = self.launch("returns", 1000.0)
                process.send_signal(number)
                self.assertEqual(self.end(process), (0, "heard\n[10, 11]\n"))

    def test_schedulers_repeat_sigterm(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        ready = Path(folder.name, "ready")
        process = self.launch(str(ready), 1000.0)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.stdout.readline(), "heard\n")
        process.send_signal(signal.SIGTERM)
        ready.touch()
        self.assertEqual(self.end(process), (0, "[10, 11]\n"))

    def test_who_does_not_return_in_time_is_killed(self):
        process = self.launch("does not end", 0.5)
        process.send_signal(signal.SIGTERM)
        code, out = self.end(process)
        self.assertEqual(code, 1, out)
        self.assertIn("stopped: rank 0 had not finished within 0.5 s of SIGTERM\n", out)

    def test_without_a_deadline_sigterm_ends_the_launcher(self):
        process = self.launch("does not end", None)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(self.end(process)[0], -signal.SIGTERM)

    def test_the_deadline_must_be_one(self):
        for seconds in (0, -1.0, float("nan"), True):
            with self.assertRaisesRegex(ValueError, "^stop_within must be a positive number of seconds"):
                check_launch(waits, 2, stop_within=seconds)


def launcher(kind: str, stop_within: float | None, scratch: str) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, and so this one, may ignore it
    tempfile.tempdir = scratch

    def program() -> int:
        print(run_ranks(waits, 2, kind, backend="gloo", stop_within=stop_within), flush=True)
        return 0

    code = say_why(program)
    if os.listdir(scratch):
        raise AssertionError(f"left: {os.listdir(scratch)}")
    sys.exit(code)


def waits(rank: int, world_size: int, kind: str) -> int:
    """Return 10 + rank when asked to stop (and when there is a file `kind`), or wait on. Rank 0 says what happens."""
    asked = threading.Event()

    def hear(*_):
        if rank == 0 and not asked.is_set():
            print("heard", flush=True)
        asked.set()

    signal.signal(signal.SIGTERM, hear)
    comm = TorchComm()
    comm.agree("all can hear")
    if rank == 0:
        print("ready", flush=True)
    while not (asked.wait(0.01) and (kind == "returns" or os.path.exists(kind))):
        pass
    return 10 + rank


if __name__ == "__main__":
    unittest.main()
