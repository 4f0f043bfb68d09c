"""What one run of a student's code may use, and the environment that it sees."""

import os
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

MIB = 2**20
KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")  # of the grader's own environment; nothing else is passed on


@dataclass(frozen=True)
class Limits:
    """Seconds are of the wall clock unless named otherwise; memory that is copied on write counts as the parent's."""

    collective_seconds: float = 20.0  # the longest wait in one communication between ranks that are processes
    test_seconds: float = 120.0  # one test; adjusted to what the lesson's own code takes (see judge.py)
    run_seconds: float = 300.0  # one exercise
    submission_seconds: float = 900.0  # all exercises of one student
    cpu_seconds: int = 300  # of processor time, each process
    data_bytes: int = 4096 * MIB  # private memory that one process may ask for
    memory_bytes: int = 6144 * MIB  # all processes together, while they run
    folder_bytes: int = 1024 * MIB  # the private folder, and shared memory (where a mount namespace is permitted)
    file_bytes: int = 256 * MIB  # one file
    open_files: int = 1024  # each process
    processes: int = 64  # at once
    output_bytes: int = 200_000  # kept: the first half and the last half
    flood_bytes: int = 64 * MIB  # more output than this ends the run


def set_resource_limits(limits: Limits, count_tasks: bool) -> None:
    """The kernel's limits for this process and those that it starts. `count_tasks` also bounds processes and threads.

    The last only means something in a user namespace of one's own: elsewhere root is exempt, and for everybody else
    what they run beside this counts along.
    """
    bounds = {
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_DATA: limits.data_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
    }
    if count_tasks:
        bounds[resource.RLIMIT_NPROC] = 16 * limits.processes
    for kind, value in bounds.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def environment(folder: Path) -> dict[str, str]:
    """All variables that a student's process gets. `folder` is its private one: home/ and tmp/ are in it.

    GPUs are hidden and one thread computes, so that a verdict does not depend on the machine or on its other work.
    """
    own = {name: os.environ[name] for name in KEPT if name in os.environ}
    fixed = {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "TEMP": str(folder / "tmp"),
        "TMP": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return own | fixed
