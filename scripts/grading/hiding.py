"""What a run does not see: other people's files. What stays is the system, Python, and the run's private folder.

Each folder at the top that is not the system's (/home, /root, /mnt, /tmp, /work ...) is covered with an empty file
system that cannot be written; what Python needs from below it is mounted there again. `hide` names more to be covered,
wherever it lies: submissions, reports, the class's folder, the course.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from grading import linux

SYSTEM = ("bin", "etc", "gnu", "lib", "lib32", "lib64", "libx32", "nix", "proc", "sbin", "sys", "usr")
DEVICES = tuple(f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero"))  # no disk is among them
PACKAGES = ("numpy", "torch")  # may be installed "editable", from a folder that none of those names
REPOSITORY = Path(__file__).resolve().parents[2]
_FLAGS = linux.MS_NOSUID | linux.MS_NODEV


def python_paths() -> list[str]:
    """What this Python may read later: its own folders, packages, and the links that lead to its program."""
    own = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = [*own, *sysconfig.get_paths().values(), *site.getsitepackages(), *libraries, *_links(sys.executable)]
    found += [file for name in PACKAGES if (file := getattr(sys.modules.get(name), "__file__", None))]
    found = [str(Path(path).parent) if path.endswith("__init__.py") else path for path in found]
    both = {os.path.normpath(each) for path in found if os.path.isabs(path) for each in (path, os.path.realpath(path))}
    ours = {path for path in both if _within(path, str(REPOSITORY)) and not any(_within(path, each) for each in own)}
    return sorted(path for path in both - ours - {"/"} if os.path.exists(path))


def _links(path: str) -> list[str]:
    """A program, and the links on the way to it."""
    found = [path]
    while os.path.islink(found[-1]) and len(found) < 40:
        found.append(os.path.normpath(os.path.join(os.path.dirname(found[-1]), os.readlink(found[-1]))))
    return found


def with_folders(paths: Iterable[Path]) -> list[str]:
    """What an instructor named, and the folder that each lies in: the whole class's, unless it is a system's folder."""
    found = {os.path.realpath(path) for path in paths}
    return sorted(found.union(parent for path in found if not _is_systems(parent := os.path.dirname(path))))


def _is_systems(folder: str) -> bool:
    """`/`, a folder at the top that stays visible, or one of the first below /usr."""
    parts = Path(folder).parts[1:]
    return not parts or (parts[0] in (*SYSTEM, "dev") and len(parts) <= (2 if parts[0] == "usr" else 1))


def cover(hide: Sequence[str], keep: Sequence[str], size: int) -> None:
    """Cover everything that is not the system's, and `hide`; what is in `keep` is seen again. Linux, mounts permitted.

    The caller is in a mount namespace of its own in which everything else is read-only. /tmp stays writable: it is
    empty, private, and holds `size` bytes at most.
    """
    opened: dict[str, int] = {}
    done: list[str] = []
    try:
        for path in sorted({*keep, *DEVICES}):
            if os.path.exists(path):
                opened[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        for path in [*_tops(), *sorted(hide, key=lambda path: path.count("/"))]:
            if os.path.lexists(path) and path not in opened and not _is_covered(path, done, opened):
                _cover_one(path, opened, size)
                done.append(path)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _tops() -> list[str]:
    folders = [entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)]
    return sorted(path for path in folders if path[1:] not in SYSTEM)


def _is_covered(path: str, done: list[str], opened: dict[str, int]) -> bool:
    """Whether the last that was put over it left nothing of it."""
    covering = [each for each in done if _within(path, each)]
    return bool(covering) and not any(_within(path, each) and _within(each, covering[-1]) for each in opened)


def _cover_one(path: str, opened: dict[str, int], size: int) -> None:
    if not os.path.isdir(path):
        linux.mount("/dev/null", path, "none", linux.MS_BIND)
        return
    inside = [each for each in opened if _within(each, path)]
    linux.mount("hidden", path, "tmpfs", _FLAGS, f"size={size},mode={'1777' if path == '/tmp' else '755'}")
    bound: list[str] = []
    for each in sorted(inside, key=lambda each: each.count("/")):
        if not any(_within(each, other) for other in bound):
            _show_again(each, opened[each])
            bound.append(each)
    if path == "/dev":
        os.mkdir("/dev/shm")
        for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    if path != "/tmp":
        linux.set_read_only(path, True, recursive=False)


def _show_again(path: str, descriptor: int) -> None:
    """Mount what is open at its own place, which is empty now."""
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    linux.mount(source, path, "none", linux.MS_BIND | linux.MS_REC)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
