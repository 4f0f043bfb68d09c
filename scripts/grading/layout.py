"""A lesson laid out once, with its compiled modules: what each run gets a fresh copy of."""

import compileall
import py_compile
import shutil
import threading
from pathlib import Path, PurePosixPath

from exercises.folder import Files, borrowed_files, digest, lesson_files, write_folder
from exercises.starter import START
from lessons import Course, Lesson


class Layout:
    """`folder` holds the lesson's code and tests, and the modules that it borrows, at the same paths as the course."""

    def __init__(self, course: Course, lesson: Lesson, folder: Path) -> None:
        self.lesson, self.folder = lesson, folder
        files = {**lesson_files(course, lesson), **borrowed_files(course, lesson)}
        self.given = {PurePosixPath(path).name for path in files} | {START}  # names of all that students are given
        self.files: Files = {path: data for path, data in files.items() if _runs(lesson, path)}
        self.version = digest(self.files)
        self.repairs = 0
        self._lock = threading.Lock()
        self._write()

    def _write(self) -> None:
        write_folder(self.folder, self.files)
        checked = py_compile.PycInvalidationMode.CHECKED_HASH  # whatever a copy's clock says, its source decides
        compileall.compile_dir(self.folder, quiet=2, invalidation_mode=checked)

    @property
    def needs_torch(self) -> bool:
        """Whether importing torch once is worth it."""
        return any(b"import torch" in data for data in self.files.values())

    @property
    def tests(self) -> str:
        """The folder of the tests, relative."""
        return self.lesson.rel("tests")

    def path(self, module: str) -> str:
        """A module's file, relative."""
        return self.lesson.rel("code", f"{module}.py")

    def source(self, module: str) -> str | None:
        """A module's text as the course has it; None if the lesson has no such module."""
        data = self.files.get(self.path(module))
        return None if data is None else data.decode()

    def mend(self) -> list[str]:
        """The files that are not what they were; all are put back, and `repairs` counts up. Threads may share this.

        Compiled modules need no care: each holds the hash of its source.
        """
        with self._lock:
            found = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.py")}
            changed = [path for path, data in self.files.items() if not _holds(self.folder / path, data)]
            added = sorted(found - self.files.keys())
            for path in added:
                shutil.rmtree(self.folder / path) if (self.folder / path).is_dir() else (self.folder / path).unlink()
            for path in changed:
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / f"{path}.new").write_bytes(self.files[path])
                (self.folder / f"{path}.new").replace(self.folder / path)
            self.repairs += bool(changed or added)
            return changed + added


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _runs(lesson: Lesson, path: str) -> bool:
    """Whether a run needs this file: code and tests, no texts."""
    own = path.startswith(f"{lesson.path.as_posix()}/")
    return not own or path.startswith((lesson.rel("code/"), lesson.rel("tests/")))
