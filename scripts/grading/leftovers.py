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
        used = _mapped() if new else ""
        removed = []
        for name in new:
            path = FOLDER / name
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and f"{FOLDER}/{name}" not in used:
                    path.unlink()
                    removed.append(name)
        return removed


def _names() -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(FOLDER)
    return []


def _mapped() -> str:
    """All mappings of all processes that we may look at."""
    texts = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                texts.append(Path(f"/proc/{name}/maps").read_text(errors="replace"))
    return "\n".join(texts)
