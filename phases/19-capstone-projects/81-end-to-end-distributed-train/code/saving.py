"""Which checkpoints a run has: when the next is due, which are kept, and going back to one of them."""

import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from asyncsave import AsyncSaver  # 80
from checkpoint import save_shard  # 80
from comm import TorchComm  # 76
from manifest import MANIFEST, CheckpointError, read_manifest  # 80
from publish import DELETED  # 80
from rotation import complete_checkpoints, rotate_checkpoints  # 80
from storage import DISK, Storage  # 80
from team import Team  # 80: all ranks, or none


class Checkpoints:
    """The checkpoints of a run, in folder/step_<n>. All ranks make one, and call its methods together.

    `positions` are the steps after which there is one, ascending; the newest may still be being written, while training
    goes on. One is due every `every_steps` steps, and when the last save is `every_minutes` old (None: never). Only
    `keep_last` are kept, beside the one being written.

    A failed save is an error of the next call, a CheckpointError on every rank.
    """

    def __init__(self, folder: Path, comm, every_steps=None, every_minutes=None, keep_last=2, clock=time.monotonic):
        self.folder, self.every_steps, self.every_minutes = folder, every_steps, every_minutes
        self.keep_last, self.clock, self.team = keep_last, clock, Team.of_comm(comm)
        self.positions: list[int] = self.team.on_rank_0(self._look)
        self._saver = AsyncSaver(comm) if isinstance(comm, TorchComm) else BlockingSaver(comm)
        self._last = clock()

    def path(self, position: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / f"step_{position}"

    def is_time(self) -> bool:
        """Say whether `every_minutes` have passed on this rank's clock. Clocks differ: ask one, and tell the others."""
        return self.every_minutes is not None and self.clock() - self._last >= 60 * self.every_minutes

    def is_due(self, step: int) -> bool:
        """Say whether `step` is one of every `every_steps`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def save(self, state: dict, position: int) -> None:
        """Save the state after `position` steps, when the save before it has ended; delete the oldest checkpoints."""
        self._rotate()
        self._saver.save(state, self.path(position), position)
        self.positions.append(position)
        self._last = self.clock()

    def go_back(self, position: int) -> Path:
        """Return the folder of an older checkpoint, now the newest: later ones are of a past that will not be."""
        self._saver.wait()
        later = [each for each in self.positions if each > position]
        self.team.on_rank_0(lambda: [take_back(self.path(each)) for each in later])
        self.positions = [each for each in self.positions if each <= position]
        self._rotate()
        return self.path(position)

    def close(self) -> None:
        """Return when the last save has ended."""
        self._saver.close()
        self._rotate()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:  # else the error that is on its way must not wait
            self.close()

    def _look(self) -> list[int]:
        DISK.make_folder(self.folder)
        found = complete_checkpoints(self.folder)
        strange = [str(folder) for position, folder in found if folder != self.path(position)]
        if strange:
            raise CheckpointError(f"{', '.join(strange)}: not named as checkpoints of a run are: step_<n>")
        positions = [position for position, _ in found]
        self._refuse_damage(newer_than=max(positions, default=-1))
        return positions

    def _refuse_damage(self, newer_than: int) -> None:
        """No crash leaves a manifest that does not hold (lesson 80). To go on from an older checkpoint loses work."""
        for name in DISK.names(self.folder):
            found = re.fullmatch(r"step_(\d+)", name, re.ASCII)
            if found and int(found[1]) > newer_than and DISK.kind(self.folder / name / MANIFEST)[0] == "file":
                try:
                    read_manifest(self.folder / name).check_files(self.folder / name, DISK)
                except CheckpointError as error:
                    raise CheckpointError(f"{error} (to go on from an older checkpoint, move this one away)") from None

    def _rotate(self) -> None:
        """Delete the oldest. No save may be under way: half a checkpoint looks like one that is half deleted."""
        self._saver.wait()
        self.team.on_rank_0(lambda: rotate_checkpoints(self.folder, self.keep_last))
        self.positions = self.positions[-self.keep_last :]


@contextmanager
def alone_in(folder: Path, team: Team, seconds: float = 5.0):
    """Keep other runs out of a folder of checkpoints: rank 0 holds its lock, which the system frees if it is killed.

    Raises CheckpointError on every rank if another run still holds it after `seconds` (a killed one takes a moment).
    Where folders have no locks (Windows, some network mounts) nobody is kept out.
    """

    disk = Storage()
    disk.lock_seconds = seconds

    def lock():
        disk.make_folder(folder)
        try:
            held.enter_context(disk.lock(folder))
        except TimeoutError:
            raise CheckpointError(f"{folder}: another run is going on here; end it, or use another folder") from None

    with ExitStack() as held:
        team.on_rank_0(lock)
        yield


class BlockingSaver:
    """Saves as `AsyncSaver` does, but on the spot: for communicators that a second thread cannot use."""

    def __init__(self, comm):
        self.comm = comm

    def save(self, state: dict, folder: Path, step: int) -> None:
        """Save this rank's state; return when all ranks' are on disk."""
        save_shard(state, folder, step, self.comm)

    def wait(self) -> None:
        """Return at once: nothing is under way."""

    close = wait


def take_back(folder: Path) -> None:
    """Make a checkpoint one that rotation has begun to delete (lesson 80); the next rotation deletes the rest."""
    with DISK.lock(folder):
        DISK.rename(folder / MANIFEST, folder / DELETED)
        DISK.fsync_folder(folder)
