"""Shared memory that a run left behind, where /dev/shm is not private to it."""

import contextlib
import os
from pathlib import Path

FOLDER = Path("/dev/shm")
MADE_BY_PYTHON = ("psm_", "torch_", "sem.mp-", "ranks-")  # how multiprocessing, torch and the lessons name theirs


class SharedMemory:
    """Remembers what is there; later removes what is new, ours, named as Python names it, and used by nobody."""

    def __init__(self) -> None:
        self.before = set(_names())

    def remove_new(self) -> list[str]:
        """The names of what was removed."""
        new = [name for name in _names() if name not in self.before and name.startswith(MADE_BY_PYTHON)]
        used = _in_use() if new else set()
        removed = []
        for name in new:
            path = FOLDER / name
            with contextlib.suppress(OSError):
                if (found := path.lstat()).st_uid == os.getuid() and found.st_ino not in used:
                    path.unlink()
                    removed.append(name)
        return removed


def _names() -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(FOLDER)
    return []


def _in_use() -> set[int]:
    """The inodes of files that a process has open or mapped.

    Their names would not do: a semaphore is mapped first, and gets its name then. Open files come first: a file is
    mapped and then closed, not the other way round.
    """
    found: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for each in os.scandir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):
                    found.add(each.stat().st_ino)
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{name}/maps").read_text(errors="replace").splitlines():
                found.add(int(line.split()[4]))
    return found
