"""How far this machine lets one process be kept apart from the rest: tried once, in a child, and then used."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grading import hiding, linux
from grading.limits import MIB

READABLE = "students' code can read your files: other submissions, the class list, keys, solutions"


@dataclass(frozen=True)
class Isolation:
    """What is permitted here. Without `fork` nothing of it is: then results are for practice only."""

    fork: bool = False  # a supervisor that adopts orphans and kills every descendant (Linux)
    user: bool = False  # namespaces are made inside a user namespace of one's own: the grader is not root
    processes: bool = False  # a PID namespace: what is in it sees no process outside, and ends as one
    network: bool = False  # a network namespace: loopback, and nothing else
    mounts: bool = False  # a mount namespace: everything but the private folder is read-only; /dev/shm is private
    hidden: bool = False  # and other people's files are not even seen (see hiding.py)

    @property
    def missing(self) -> list[str]:
        """What is not kept apart, in words; empty if everything is."""
        if not self.fork:
            why = "by --no-isolation" if linux.LINUX else "this system is not Linux"
            text = f"practice only: no isolation at all ({why}), students' code can read and change all your files"
            return [f"{text}; scripts/INSTRUCTORS.md has a container command"]
        words = {
            "processes": "no PID namespace: descendants are found under /proc and killed; they can see other processes",
            "network": "no network namespace: the network can be reached",
            "mounts": f"no mount namespace: practice only, {READABLE}; changes to the lesson's are noticed",
            "hidden": f"files outside are not hidden: practice only, {READABLE}",
        }
        return [text for name, text in words.items() if not getattr(self, name) and (self.mounts or name != "hidden")]

    def to_json(self) -> dict:
        """As the reports show it."""
        return asdict(self) | {"missing": self.missing}


NONE = Isolation()


def enter(
    isolation: Isolation,
    folder: Path,
    folder_bytes: int,
    prepare: Callable[[], None] = lambda: None,
    hide: Sequence[str] = (),
) -> None:
    """Leave the host's namespaces, as far as permitted; `folder` becomes a private file system of that size.

    `prepare()` fills it, and still sees everything; then other people's files, `hide` among them, are covered. To be
    called in a process of one thread; the PID namespace begins with the next child, see `enter_processes`.
    """
    flags = linux.CLONE_NEWPID | linux.CLONE_NEWIPC if isolation.processes else 0
    flags |= linux.CLONE_NEWNET if isolation.network else 0
    flags |= linux.CLONE_NEWNS if isolation.mounts else 0
    uid, gid = os.getuid(), os.getgid()
    if flags:
        linux.unshare(flags | (linux.CLONE_NEWUSER if isolation.user else 0))
    if flags and isolation.user:
        linux.map_to_root(uid, gid)
    if isolation.network:
        linux.loopback_up()
    if isolation.mounts:
        linux.private_mounts()
        options = linux.MS_NOSUID | linux.MS_NODEV
        linux.set_read_only("/", True, recursive=True)
        linux.mount("private", folder, "tmpfs", options, f"size={folder_bytes},mode=700")
    prepare()
    if isolation.hidden:
        hiding.cover(hide, [*hiding.python_paths(), str(folder)], folder_bytes)
    if isolation.mounts:
        if Path("/dev/shm").is_dir():
            linux.mount("private", "/dev/shm", "tmpfs", options, f"size={folder_bytes},mode=1777")


def enter_processes(isolation: Isolation) -> None:
    """In the first process of a new PID namespace: let /proc show this namespace, where that is permitted."""
    if isolation.processes and isolation.mounts:
        with contextlib.suppress(OSError):  # a container may hide parts of /proc: then the old one stays, read-only
            linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)


_QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def probe(folder: Path) -> Isolation:
    """What this machine permits: the most that works when it is tried in a child. `folder` must exist."""
    if not linux.LINUX:
        return NONE
    user = os.getuid() != 0
    found = Isolation(fork=True)
    for name in ("mounts", "hidden", "network", "processes"):
        if name == "hidden" and not found.mounts:
            continue
        for candidate_user in (user, True):
            candidate = Isolation(**{**asdict(found), name: True, "user": candidate_user or found.user})
            if _works(candidate, folder):
                found = candidate
                break
    return found


def _works(isolation: Isolation, folder: Path) -> bool:
    """Whether a child, and a child of it, can enter and do what students' processes need."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter(isolation, folder, MIB)
            grandchild = os.fork()
            if grandchild == 0:
                enter_processes(isolation)
                linux.drop_capabilities()
                (folder / ".probe").write_text("")
                command = [sys.executable, "-c", "import ctypes, hashlib, multiprocessing.connection, tempfile"]
                os._exit(subprocess.run(command, **_QUIET).returncode if isolation.hidden else 0)
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        except OSError:
            pass
        finally:
            os._exit(0 if code == 0 else 1)
    return os.waitpid(child, 0)[1] == 0
