"""How far the run is: one line drawn again and again on a terminal, now and then a line elsewhere (a log file, CI)."""

import os
import sys
import time


class Progress:
    """Progress over `total` steps after step `position`, for one process (rank 0).

    with Progress(total=1000) as progress:
        progress.write({"step": 1, "loss": 2.5})
        progress.say("saved")

    On a terminal the line is drawn at most ten times a second and is never wider than the window. Elsewhere a line is
    written for the first step, then at most one in `every` seconds, and one for the last step.
    """

    REDRAW = 0.1  # seconds
    SHOWN = ("loss", "norm", "tokens_per_second")  # of a row

    def __init__(self, total: int, position: int = 0, stream=None, every: float = 10.0, clock=time.monotonic):
        self.total, self.stream, self.clock = total, stream or sys.stderr, clock
        self.terminal = self.stream.isatty()
        self.every = self.REDRAW if self.terminal else every
        self._began, self._first = clock(), position  # of what the remaining time is judged by
        self._shown = None  # when a line was written last
        self._drawn = ""  # the line on the terminal that the next one replaces

    def write(self, row: dict) -> None:
        """Show that row["step"] is done."""
        step, now = row["step"], self.clock()
        if self._shown is not None and now - self._shown < self.every and step < self.total:
            return
        self._shown = now
        text = " ".join(
            [f"step {step}/{self.total}", *(f"{name} {row[name]:.4g}" for name in self.SHOWN if name in row)]
        )
        left = (now - self._began) / max(1, step - self._first) * (self.total - step)
        text += f" {_minutes(left)} left"
        if self.terminal:
            self._draw(with_bar(text, step / self.total, _width(self.stream)))
        else:
            print(text, file=self.stream, flush=True)

    def rewind(self, position: int) -> None:
        """Go on after step `position`: later ones are done again."""
        self._began, self._first = self.clock(), position

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._draw("")
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Leave the last line where it is."""
        if self._drawn:
            print(file=self.stream, flush=True)
            self._drawn = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _draw(self, line: str) -> None:
        """Replace the line that is drawn; spaces cover what a longer one would leave."""
        if self._drawn or line:
            rest = " " * (len(self._drawn) - len(line))
            self.stream.write("\r" + line + rest + ("" if line else "\r"))
            self.stream.flush()
        self._drawn = line


def with_bar(text: str, part: float, width: int) -> str:
    """Return `text` behind a bar, together one character narrower than `width`; without a bar where none fits."""
    room = width - 1 - len(text) - 3  # two brackets and a space; the last column would wrap the line
    if room < 5:
        return text[: max(0, width - 1)]
    room = min(room, 40)
    return f"[{'#' * int(part * room):<{room}}] {text}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _width(stream) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a terminal that does not know
    except (AttributeError, OSError, ValueError):
        return 80
