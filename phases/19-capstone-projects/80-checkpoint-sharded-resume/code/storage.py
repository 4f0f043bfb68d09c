"""The disk: every file operation of a checkpoint goes through one small object, so that a test can interrupt each.

What changes the disk passes `Storage.perform`. `CrashingStorage` overrides that one method and dies at the k-th
operation; the rest of the lesson does not know.
"""

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: no lock on folders, so only one writer at a time in each
    fcntl = None

NO_LOCKS_HERE = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)  # some network file systems


class Storage:
    """The real disk."""

    lock_seconds = 60.0  # how long a save waits for another one into the same folder

    def perform(self, operation: str, path: Path, action: Callable):
        """Do one operation that changes the disk."""
        with _naming(path):
            return action()

    def make_folder(self, folder: Path) -> None:
        """Create a folder and the parents it lacks, each one durable."""
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        for path in reversed(missing):
            self.perform("mkdir", path, lambda path=path: path.mkdir(exist_ok=True))
            self.fsync_folder(path.parent)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, unbuffered. Raises FileExistsError rather than write over a file."""
        return self.perform("create", path, lambda: open(path, "xb", buffering=0))

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append all of `data`."""

        def write_all():
            left = memoryview(data)
            while left:  # one write call moves at most 2 GB
                left = left[file.write(left) :]

        self.perform("write", Path(file.name), write_all)

    def fsync(self, file: BinaryIO) -> None:
        """Return when the file's bytes would survive a power cut (its name may not: see `fsync_folder`)."""

        def flush():
            if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: plain fsync stops at the drive's own cache
                with suppress(OSError):  # not every file system has it
                    fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            os.fsync(file.fileno())

        self.perform("fsync", Path(file.name), flush)

    def fsync_folder(self, folder: Path) -> None:
        """Return when the folder's names (new, renamed, deleted) would survive a power cut."""
        if os.name == "nt":
            return  # Windows cannot open folders; NTFS journals names by itself

        def flush():
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.perform("fsync folder", folder, flush)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name in one step; whatever had that name is gone."""
        self.perform("rename", target, lambda: os.replace(source, target))

    def delete(self, path: Path) -> None:
        """Delete a file."""
        self.perform("delete", path, lambda: os.unlink(path))

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder."""
        self.perform("rmdir", folder, lambda: os.rmdir(folder))

    @contextmanager
    def lock(self, folder: Path):
        """Wait for and hold the one lock of a folder. The system releases it when the process dies.

        Raises TimeoutError if another save still holds it after `lock_seconds`.
        """
        if fcntl is None:
            yield
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            deadline = time.monotonic() + self.lock_seconds
            while not self._has_locked(descriptor, folder):
                if time.monotonic() > deadline:
                    held = f"another save holds its lock, for more than {self.lock_seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, held, str(folder))
                time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)

    def _has_locked(self, descriptor: int, folder: Path) -> bool:
        try:
            with _naming(folder):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
        return True

    def names(self, folder: Path) -> list[str]:
        """List the names in a folder, sorted."""
        return sorted(os.listdir(folder))

    def kind(self, path: Path) -> tuple[str, int]:
        """Return ("missing" | "file" | "folder" | "link" | "special file", size in bytes), without following links."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return "missing", 0
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
        return kinds.get(stat.S_IFMT(found.st_mode), "special file"), found.st_size

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading, unbuffered. A link is refused by the system, and what is no plain file here."""
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for one who writes
        file = open(path, "rb", buffering=0, opener=lambda name, given: os.open(name, given | flags))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "expected a plain file, found a special file", str(path))
        return file

    def read(self, path: Path) -> bytes:
        """Return all bytes of a file."""
        with self.open(path) as file, _naming(path):
            return file.readall()

    def read_into(self, file: BinaryIO, target: memoryview) -> int:
        """Fill `target` from the file; return the number of bytes, less than its length only where the file ends."""
        done = 0
        with _naming(file.name):
            while done < len(target) and (count := file.readinto(target[done:])):
                done += count
        return done

    def map(self, file: BinaryIO, size: int) -> mmap.mmap:
        """Map the first `size` bytes of a file, privately: a page is copied before it is changed, the file never is.

        Raises ValueError if the file is shorter.
        """
        with _naming(file.name):
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


@contextmanager
def _naming(path: Path):
    """Make an OSError say which file it is about: the system does not say so for reads, writes and fsync."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


DISK = Storage()


class Crash(BaseException):
    """The process ends here. Not an Exception: no error handling of the lesson may catch it."""


class CrashingStorage(Storage):
    """Dies at operation number `at` (from 0): "before" it, "after" it, or "during" it (half of a write is done).

    Once dead, it does nothing more, like a dead process. `log` lists the operations as "fsync rank0.bin". Fsync is
    counted but not done: the process dies, not the machine, and what a dead process wrote is still there.
    """

    def __init__(self, at: int | None = None, when: str = "before"):
        self.at, self.when, self.log, self.dead = at, when, [], False

    def perform(self, operation, path, action):
        """Do the operation, unless this is the moment to die."""
        self._die_if(self.dead)
        number = len(self.log)
        self.log.append(f"{operation} {path.name}")
        self._die_if(number == self.at and self.when == "before")
        result = None if operation.startswith("fsync") else super().perform(operation, path, action)
        if number == self.at and hasattr(result, "close"):
            result.close()  # as the system closes the files of a dead process
        self._die_if(number == self.at)
        return result

    def write(self, file, data):
        """Write; only half of it if this is the write to die in."""
        torn = len(self.log) == self.at and self.when == "during"
        super().write(file, memoryview(data)[: len(data) // 2] if torn else data)

    def _die_if(self, now: bool) -> None:
        if now:
            self.dead = True
            raise Crash(f"crash {self.when} operation {self.at}: {self.log[-1]}")
