import io
import os
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from progress import Progress, with_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def shown(self) -> list[str]:
        """What a terminal shows: a carriage return goes back to the first column, later text covers what is there."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for text in line.split("\r"):
                shown = text + shown[len(text) :]
            lines.append(shown.rstrip())
        return lines


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class TestElsewhere(unittest.TestCase):
    def run_for(self, steps: int, seconds: float, every: float, done: int = 0) -> list[str]:
        out, clock = io.StringIO(), Clock()
        with Progress(done + steps, done, out, every, clock) as progress:
            for step in range(done + 1, done + steps + 1):
                clock.now += seconds
                progress.write({"step": step, "loss": 4 / step})
        self.assertNotIn("\r", out.getvalue())
        return out.getvalue().splitlines()

    def test_the_first_step_then_one_in_some_seconds_then_the_last(self):
        lines = self.run_for(10, 1.0, every=4.0)
        self.assertEqual([line.split()[1] for line in lines], ["1/10", "5/10", "9/10", "10/10"])
        self.assertEqual(lines[1], "step 5/10 loss 0.8 0:05 left")
        self.assertEqual(lines[-1], "step 10/10 loss 0.4 0:00 left")

    def test_the_time_left_is_judged_by_the_steps_of_this_process(self):
        self.assertEqual(self.run_for(4, 30.0, every=1.0, done=6)[0], "step 7/10 loss 0.5714 1:30 left")

    def test_a_rollback(self):
        out, clock = io.StringIO(), Clock()
        progress = Progress(10, 0, out, 0.0, clock)
        progress.write({"step": 8})
        progress.say("back to step 4")
        progress.rewind(4)
        clock.now += 2.0
        progress.write({"step": 5})
        self.assertEqual(out.getvalue().splitlines()[1:], ["back to step 4", "step 5/10 0:10 left"])


class TestTerminal(unittest.TestCase):
    def test_one_line_is_drawn_again(self):
        out, clock = Terminal(), Clock()
        with Progress(200, 0, out, clock=clock) as progress:
            for step in range(1, 201):
                clock.now += 1 / 16
                progress.write({"step": step, "loss": 4.0})
        self.assertEqual(out.getvalue().count("\n"), 1)
        self.assertEqual(out.getvalue().count("\r"), 101, "not more than ten times a second, and the last step")
        self.assertRegex(out.shown()[0], r"^\[#{40}\] step 200/200 loss 4 0:00 left$")

    def test_a_message_stays_and_leaves_no_rest(self):
        out, clock = Terminal(), Clock()
        with Progress(10, 0, out, clock=clock) as progress:
            progress.write({"step": 5, "loss": 1.2345})
            progress.say("saved")
            clock.now += 1
            progress.write({"step": 6})
        self.assertEqual(out.shown()[0], "saved")
        self.assertIn("step 6/10", out.shown()[1])

    def test_a_shorter_line_covers_a_longer_one(self):
        out, clock = Terminal(), Clock()
        with Progress(10, 0, out, clock=clock) as progress:
            progress.write({"step": 5, "loss": 1.2345, "norm": 1.2345, "bytes": 5})
            clock.now += 1
            progress.write({"step": 6})
        self.assertTrue(out.shown()[0].endswith("left"), out.shown())
        self.assertNotIn("1.23", out.shown()[0])

    def test_nothing_is_drawn_if_nothing_happened(self):
        out = Terminal()
        with Progress(10, 0, out):
            pass
        self.assertEqual(out.getvalue(), "")

    @unittest.skipUnless(hasattr(os, "openpty"), "needs a pseudo-terminal")
    def test_a_real_terminal(self):
        import fcntl
        import struct
        import termios

        ours, theirs = os.openpty()
        self.addCleanup(os.close, ours)
        for columns in (30, 80, 0):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            with open(os.dup(theirs), "w") as stream:
                progress = Progress(10, 0, stream)
                progress.write({"step": 5, "loss": 1.5})
            drawn = os.read(ours, 4096).decode().strip("\r\n")
            self.assertEqual("[" in drawn, columns != 30)
            self.assertLess(len(drawn), columns or 80)
        os.close(theirs)


class TestBar(unittest.TestCase):
    def test_the_line_is_narrower_than_the_window(self):
        for width in range(0, 130):
            for part in (0.0, 0.3, 1.0):
                line = with_bar("step 3/10 loss 2.5", part, width)
                self.assertLess(len(line), max(1, width))
                if width >= 18 + 5 + 4:
                    self.assertTrue(line.endswith("] step 3/10 loss 2.5"))
                    self.assertEqual(line.count("#"), int(part * min(40, width - 22)))
                elif width > 18:
                    self.assertEqual(line, "step 3/10 loss 2.5")


if __name__ == "__main__":
    unittest.main()
