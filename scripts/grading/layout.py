"""A lesson laid out once, with its compiled modules: what each run gets a fresh copy of."""

import compileall
import hashlib
import py_compile
import shutil
from pathlib import Path

from exercises.folder import Files, borrowed_files, digest, lesson_files, write_folder
from lessons import Course, Lesson


class Layout:
    """`folder` holds the lesson's code and tests, and the modules that it borrows, at the same paths as the course."""

    def __init__(self, course: Course, lesson: Lesson, folder: Path) -> None:
        self.lesson, self.folder = lesson, folder
        files = {**lesson_files(course, lesson), **borrowed_files(course, lesson)}
        self.files: Files = {path: data for path, data in files.items() if _runs(lesson, path)}
        self.version = digest(self.files)
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

    def source(self, module: str) -> str:
        """A module's text as the course has it."""
        return self.files[self.path(module)].decode()

    def mend(self) -> list[str]:
        """The files that are not what they were; all are put back. For where a run can write outside its folder."""
        changed = []
        for path, data in self.files.items():
            try:
                same = hashlib.sha256((self.folder / path).read_bytes()).digest() == hashlib.sha256(data).digest()
            except OSError:
                same = False
            changed += [] if same else [path]
        found = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}
        changed += sorted(path for path in found - self.files.keys() if "__pycache__" not in path)
        if changed:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._write()
        return changed


def _runs(lesson: Lesson, path: str) -> bool:
    """Whether a run needs this file: code and tests, no texts."""
    own = path.startswith(f"{lesson.path.as_posix()}/")
    return not own or path.startswith((lesson.rel("code/"), lesson.rel("tests/")))
