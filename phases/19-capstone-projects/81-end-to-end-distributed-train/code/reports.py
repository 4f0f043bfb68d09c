"""What a run tells: a file of metrics, TensorBoard's events, progress on the screen. Only rank 0 tells it."""

from pathlib import Path

from metrics import MetricsFile
from progress import Progress
from team import Team  # 80: all ranks, or none
from tensorboard_file import EventFile


class Reports:
    """Where rows go, from step `position` + 1 on. All ranks make one; a file that cannot be opened is all ranks' error.

    `metrics` is a file, `tensorboard` a folder, `steps` the number of them if progress is to be shown; None for none.
    """

    def __init__(self, comm, position: int, metrics: Path | None, tensorboard: Path | None, steps: int | None):
        self._open = []

        def start():
            if metrics is not None:
                self._open.append(MetricsFile(metrics, position))
            if tensorboard is not None:
                self._open.append(EventFile(tensorboard, position))
            if steps is not None:
                self._open.append(Progress(steps, position))

        try:
            Team.of_comm(comm).on_rank_0(start)
        except BaseException:
            self.close()
            raise

    def write(self, row: dict) -> None:
        """Tell of a step."""
        for each in self._open:
            each.write(row)

    def rewind(self, position: int, why: str) -> None:
        """Tell that the run goes back to step `position`."""
        for each in self._open:
            each.rewind(position)
            if isinstance(each, Progress):
                each.say(why)

    def close(self) -> None:
        """Close all files."""
        for each in self._open:
            each.close()

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_) -> None:
        self.close()
