"""Files as they were handed in, read into memory: a folder or a zip, zips inside it, nothing extracted to disk.

Only Python files, zips and Gradescope's metadata are read. Links are not followed. What breaks a limit is a problem of
the student whose it is, not of the class.
"""

import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath

from faults import UserError
from grading.limits import MIB

FILE_BYTES = 2 * MIB  # one Python file
ZIP_BYTES = 64 * MIB  # one zip, as it comes
TOTAL_BYTES = 64 * MIB  # of Python files in one zip
MEMBERS = 10_000  # files of any kind in one zip
CLASS = 100  # times as many in the zip of a class
METADATA = "submission_metadata.yml"
_JUNK = ("__MACOSX", "__pycache__", ".git", ".venv", ".ipynb_checkpoints")
_DRIVE = re.compile(r"^[A-Za-z]:")


@dataclass
class HandedFile:
    """One file: its content, and when it was written (seconds since 1970; 0 if nothing says so)."""

    data: bytes
    time: float = 0.0


@dataclass
class Tree:
    """Files by path (with /), and what was wrong with some: (path, problem)."""

    files: dict[str, HandedFile] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, path: str, data: bytes, time: float) -> None:
        """Take a file, or all of a zip at the folder that has its name."""
        if not path.lower().endswith(".zip"):
            self.files[path] = HandedFile(data, time)
            return
        inside = read_zip(data)
        self.files.update({f"{path}/{name}": file for name, file in inside.files.items()})
        self.problems += [(f"{path}/{name}" if name else path, problem) for name, problem in inside.problems]


def read_tree(path: Path) -> Tree:
    """All of a folder, or of a zip. UserError if it is neither, or if it is a zip that cannot be read."""
    if path.is_dir():
        return _read_folder(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: a folder or a zip of submissions is expected")
    tree, nested = read_zip(data, whole=True), Tree()
    if tree.problems and not tree.files:
        raise UserError(f"{path}: {tree.problems[0][1]}")
    nested.problems = tree.problems
    for name, file in tree.files.items():
        nested.add(name, file.data, file.time)
    return nested


def _read_folder(root: Path) -> Tree:
    tree = Tree()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _JUNK)
        for name in sorted(names):
            path = Path(folder, name)
            shown = path.relative_to(root).as_posix()
            if not _wanted(shown):
                continue
            try:
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    tree.problems.append((shown, "a link or something else that is no plain file"))
                elif found.st_size > (ZIP_BYTES if name.lower().endswith(".zip") else FILE_BYTES):
                    tree.problems.append((shown, f"{found.st_size:,} bytes are too many"))
                else:
                    tree.add(shown, path.read_bytes(), found.st_mtime)
            except OSError as error:
                tree.problems.append((shown, error.strerror or str(error)))
    return tree


def read_zip(data: bytes, whole: bool = False) -> Tree:
    """The Python files of a zip; with `whole`, one of a class, also the zips in it (as files)."""
    tree = Tree()
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            members = archive.infolist()
            if len(members) > (limit := MEMBERS * (CLASS if whole else 1)):
                raise zipfile.BadZipFile(f"more than {limit:,} files")
            budget = TOTAL_BYTES * (8 if whole else 1)
            for member in members:
                budget = _read_member(archive, member, tree, budget, whole)
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError, NotImplementedError, EOFError) as error:
        tree.problems.append(("", f"a zip that cannot be read: {error}"))
    return tree


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, tree: Tree, budget: int, whole: bool) -> int:
    name = member.filename.replace("\\", "/")
    if member.is_dir() or not _wanted(name) or (name.lower().endswith(".zip") and not whole):
        return budget
    if name.startswith("/") or _DRIVE.match(name) or ".." in PurePosixPath(name).parts:
        tree.problems.append((name.lstrip("/"), "a path that leads out of the zip"))
    elif stat.S_ISLNK(member.external_attr >> 16):
        tree.problems.append((name, "a link"))
    elif member.flag_bits & 1:
        tree.problems.append((name, "encrypted"))
    else:
        limit = min(ZIP_BYTES if name.lower().endswith(".zip") else FILE_BYTES, budget)
        with archive.open(member) as file:
            content = file.read(limit + 1)  # whatever its header claims
        if len(content) > limit:
            tree.problems.append((name, f"more than {limit:,} bytes when unpacked"))
        else:
            tree.files[name] = HandedFile(content, _seconds(member.date_time))
            budget -= len(content)
    return budget


def _wanted(path: str) -> bool:
    parts = PurePosixPath(path).parts
    if any(part in _JUNK for part in parts) or parts[-1].startswith("._"):
        return False
    return path.lower().endswith((".py", ".zip")) or parts[-1] == METADATA


def _seconds(moment: tuple[int, ...]) -> float:
    """A zip's date as a number that grows with it; zips know no time zone."""
    year, month, day, hour, minute, second = moment
    return float(((((year - 1970) * 12 + month) * 31 + day) * 24 + hour) * 3600 + minute * 60 + second)


def below(files: dict[str, HandedFile], folder: str) -> Iterator[tuple[str, HandedFile]]:
    """The files in a folder, their paths relative to it."""
    for path, file in files.items():
        if path.startswith(f"{folder}/"):
            yield path[len(folder) + 1 :], file
