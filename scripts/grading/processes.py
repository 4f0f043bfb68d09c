"""A process's descendants, as /proc shows them: how many, how much memory, and how to end them all."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def parents() -> dict[int, int]:
    """Each process's parent: {pid: parent's pid}. Processes that have ended and were not waited for count, too."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """All descendants of a process, parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, at = list(children.get(root, [])), 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


def own_memory(pid: int) -> int:
    """Bytes that a process holds in memory beside files: its own pages, and those shared through memory. 0 if gone."""
    total = 0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def end_descendants(patience: float = 10.0) -> list[int]:
    """Kill and wait for every descendant of this process, a subreaper, until none is left; return what is left.

    One that forks while it is looked for is found in the next round: its children become ours when it dies.
    """
    deadline = time.monotonic() + patience
    while True:
        reap()
        left = descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def reap() -> dict[int, int]:
    """Wait for all children that have ended: {pid: status}."""
    ended = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            ended[child[0]] = child[1]
    return ended


def living_descendants(root: int) -> list[int]:
    """The descendants found by walking down from `root`: fast, but one that is just being adopted may be missed."""
    found, at = _children(root), 0
    while at < len(found):
        found += _children(found[at])
        at += 1
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def close_all_but(kept: set[int]) -> None:
    """Close what this process has open, but for the standard streams and `kept`.

    What multiprocessing started in the parent is forgotten, too: its two helper processes listen behind what is closed,
    whose numbers may soon be those of other files. Who needs them starts new ones.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    from multiprocessing import forkserver, process, resource_tracker  # not everywhere; here is Linux

    for helper in (resource_tracker._resource_tracker, forkserver._forkserver):
        for attribute in ("_fd", "_pid", "_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"):
            if hasattr(helper, attribute):
                setattr(helper, attribute, None)
    process.current_process()._config.pop("tempdir", None)
