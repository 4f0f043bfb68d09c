"""Metrics as JSON lines: a line a step, in the file the moment the step is done, and no step in it twice."""

import json
import math
from pathlib import Path


MEND = " (mend the line, or move the file away)"


def to_line(row: dict) -> str:
    """Return a row as one line of strict JSON, which knows no NaN and no infinity: such a value becomes null.

    What it was is kept under "not_finite", as "nan", "inf" or "-inf". Raises ValueError unless all values are JSON's.
    """
    odd = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    strict = row | dict.fromkeys(odd) | ({"not_finite": odd} if odd else {})
    try:
        return json.dumps(strict, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"a row of metrics must hold numbers, texts, true, false or null, got {row!r}") from error


def from_line(line: str | bytes, where: str) -> dict:
    """Return the row that `to_line` was given.

    Raises ValueError, which begins with `where`, if the line is no row or its step no whole number from 1.
    """
    try:
        row = json.loads(line, parse_constant=_not_json)
        step = row["step"]
        row |= {name: float(text) for name, text in row.pop("not_finite", {}).items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a line of metrics: {error!r}{MEND}") from None
    if type(step) is not int or step < 1:
        raise ValueError(f"{where}: step: expected a whole number of at least 1, found {step!r}{MEND}")
    return row


def read_metrics(path: Path | str) -> list[dict]:
    """Return the rows of a file of metrics, by step. Raises ValueError, naming file and line, for what is no row.

    Half a line at the end, which a crash can leave, is no row and no error.
    """
    with open(path, "rb") as file:
        return [row for row, _ in _rows(file, Path(path))]


class MetricsFile:
    """A file of metrics that goes on after step `position`: lines of later steps are dropped, since they come again.

    with MetricsFile(path, position=10) as metrics:
        metrics.write({"step": 11, "loss": 2.5})

    One process opens it (rank 0). A file of something else raises ValueError and is left as it is. Each line is handed
    to the system at once: a killed process loses none, a power cut may lose the last ones, and then these steps are
    missing if the checkpoint is newer.
    """

    def __init__(self, path: Path | str, position: int):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            self.rewind(position)
        except BaseException:
            self.close()
            raise

    def rewind(self, position: int) -> None:
        """Drop the lines of steps after `position`, and half a line at the end. (Writing goes on at the end.)"""
        self._file.seek(0)
        size = self.last = 0
        for row, end in _rows(self._file, self.path):
            if row["step"] > position:
                break
            size, self.last = end, row["step"]
        self._file.truncate(size)

    def write(self, row: dict) -> None:
        """Add the row of a step, later than all steps that are there."""
        if row["step"] <= self.last:
            raise ValueError(f"{self.path}: step {row['step']} after step {self.last}: rewind first")
        self._file.write(to_line(row).encode())
        self._file.flush()
        self.last = row["step"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _rows(file, path: Path):
    """Yield (row, where its line ends in the file) for each whole line of a binary file."""
    end = last = 0
    for number, line in enumerate(file, 1):
        where = f"{path}:{number}"
        if not line.endswith(b"\n") and line.startswith(b"{"):
            return  # the last line of a process that was killed
        row = from_line(line, where)
        if row["step"] <= last:
            raise ValueError(f"{where}: step {row['step']} comes after step {last}{MEND}")
        end, last = end + len(line), row["step"]
        yield row, end


def _not_json(name: str):
    raise ValueError(f"{name} is not JSON")
