import os
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from stopping import StopSignals

DEADLINE = 120  # seconds; many tests share few cores


def send(number: int) -> None:
    """Send a signal to this process. Python runs the handler before the next line."""
    os.kill(os.getpid(), number)


@unittest.skipIf(sys.platform == "win32", "signals of POSIX")
class TestStopSignals(unittest.TestCase):
    def test_a_signal_sets_the_flag(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with StopSignals() as stop:
                self.assertFalse(stop.requested)
                send(number)
                self.assertTrue(stop.requested)

    def test_sigterm_may_come_again(self):
        with StopSignals() as stop:
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            self.assertTrue(stop.requested)

    def test_a_second_ctrl_c_is_not_patient(self):
        for first in (signal.SIGINT, signal.SIGTERM):
            with StopSignals():
                send(first)
                with self.assertRaises(KeyboardInterrupt):
                    send(signal.SIGINT)

    def test_the_handlers_come_back(self):
        heard = []
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
            mine = signal.getsignal(signal.SIGTERM)
            with self.assertRaises(ZeroDivisionError), StopSignals() as stop:
                send(signal.SIGTERM)
                raise ZeroDivisionError
            self.assertTrue(stop.requested)
            self.assertEqual(heard, [])
            self.assertIs(signal.getsignal(signal.SIGTERM), mine)
            self.assertIs(signal.getsignal(signal.SIGINT), before[signal.SIGINT])
            send(signal.SIGTERM)
            self.assertEqual(heard, ["mine"])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_in_another_thread_only_request_asks(self):
        found = []

        def work():
            handler = signal.getsignal(signal.SIGTERM)
            with StopSignals() as stop:
                found.append(signal.getsignal(signal.SIGTERM) is handler)
                stop.request()
                found.append(stop.requested)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(DEADLINE)
        self.assertEqual(found, [True, True])

    def test_a_process_ends_by_itself(self):
        code = (
            "from stopping import StopSignals\nimport sys, signal\n"
            "with StopSignals() as stop:\n"
            "    print('ready', flush=True)\n"
            "    while not stop.requested:\n"
            "        signal.pause()\n"
            "print('saved')"
        )
        folder = Path(__file__).resolve().parents[1] / "code"
        with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            try:
                self.assertEqual(process.stdout.readline(), "ready\n")
                process.send_signal(signal.SIGTERM)
                self.assertEqual(process.communicate(timeout=DEADLINE)[0], "saved\n")
                self.assertEqual(process.returncode, 0)
            finally:
                process.kill()


if __name__ == "__main__":
    unittest.main()
