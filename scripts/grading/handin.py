"""Files as they were handed in, read into memory: a folder or a zip, zips inside it, nothing extracted to disk.

Only Python files, zips and Gradescope's metadata are read; the names of others are kept, so that a report can say what
was not looked at. Links are not followed. What breaks a limit is a problem of its student, not of the class.
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
_JUNK = ("__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini")
_DRIVE = re.compile(r"^[A-Za-z]:")


@dataclass
class HandedFile:
    """One file: its content, and when it was written (seconds since 1970; 0 if nothing says so)."""

    data: bytes
    time: float = 0.0


@dataclass
class Tree:
    """Files by path (with /), and what was wrong with some: (path, problem).

    `unread` are the paths of files of other kinds; `folders` those of folders and zips, empty ones too.
    """

    files: dict[str, HandedFile] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """All that is there, whether it could be read or not."""
        return [*self.files, *(path for path, _ in self.problems), *self.unread, *self.folders]

    def add(self, path: str, data: bytes, time: float) -> None:
        """Take a file, or all of a zip at the folder that has its name."""
        if not path.lower().endswith(".zip"):
            self.files[path] = HandedFile(data, time)
            return
        inside = read_zip(data)
        self.folders += [path, *(f"{path}/{name}" for name in inside.folders)]
        self.unread += [f"{path}/{name}" for name in inside.unread]
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
    nested.problems, nested.unread, nested.folders = tree.problems, tree.unread, tree.folders
    for name, file in tree.files.items():
        nested.add(name, file.data, file.time)
    return nested


def _read_folder(root: Path) -> Tree:
    tree = Tree()

    def unreadable(error: OSError) -> None:
        tree.problems.append((Path(error.filename).relative_to(root).as_posix(), error.strerror or str(error)))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if _seen(name))
        for name in folders:
            path = Path(folder, name)
            _note_folder(tree, path.relative_to(root).as_posix(), path.is_symlink())
        for name in sorted(names):
            _read_file(root, Path(folder, name), tree)
    return tree


def _note_folder(tree: Tree, shown: str, link: bool) -> None:
    if link:
        tree.problems.append((shown, "a link, which is not followed"))
        return
    tree.folders.append(shown)
    if shown.lower().endswith(".py"):
        tree.problems.append((shown, "a folder, where a file is expected"))


def _read_file(root: Path, path: Path, tree: Tree) -> None:
    shown, name = path.relative_to(root).as_posix(), path.name
    if not _wanted(shown):
        tree.unread += [shown] if _seen(name) else []
        return
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
    if not all(map(_seen, PurePosixPath(name).parts)):
        return budget
    if member.is_dir():
        _note_folder(tree, name.strip("/"), link=False)
    elif not _wanted(name) or (name.lower().endswith(".zip") and not whole):
        tree.unread.append(name)
    elif name.startswith("/") or _DRIVE.match(name) or ".." in PurePosixPath(name).parts:
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
    """Whether the file is read."""
    parts = PurePosixPath(path).parts
    return all(map(_seen, parts)) and (path.lower().endswith((".py", ".zip")) or parts[-1] == METADATA)


def _seen(name: str) -> bool:
    """Whether a file or folder is somebody's work: none that is hidden, or that systems and tools make."""
    return name not in _JUNK and (not name.startswith(".") or name == "..")


def _seconds(moment: tuple[int, ...]) -> float:
    """A zip's date as a number that grows with it; zips know no time zone."""
    year, month, day, hour, minute, second = moment
    return float(((((year - 1970) * 12 + month) * 31 + day) * 24 + hour) * 3600 + minute * 60 + second)


def below(files: dict[str, HandedFile], folder: str) -> Iterator[tuple[str, HandedFile]]:
    """The files in a folder, their paths relative to it."""
    for path, file in files.items():
        if path.startswith(f"{folder}/"):
            yield path[len(folder) + 1 :], file
