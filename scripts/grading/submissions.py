"""The students of a class with what they handed in last."""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from faults import UserError
from grading.handin import read_tree
from grading.platforms import Handed, split, squashed
from roster import Roster, Student

_SPELLED = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "\u0131": "i"})


@dataclass
class Work:
    """One student, what counts, and what was replaced by it; `handed` is None if nothing came."""

    student: Student
    handed: Handed | None = None
    superseded: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash of all that was handed in."""
        total = hashlib.sha256()
        for path, data in sorted(self.handed.files.items() if self.handed else ()):
            total.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode(errors="backslashreplace"))
        return total.hexdigest()


@dataclass
class Class:
    """All students, and what could not be matched: (label, why)."""

    works: list[Work]
    unmatched: list[tuple[str, str]] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)

    def only(self, wanted: str) -> list[Work]:
        """The student with this id or name; UserError if there is none."""
        key = wanted.strip().casefold()
        found = [work for work in self.works if key in (work.student.id.casefold(), work.student.name.casefold())]
        if not found:
            known = ", ".join(work.student.id for work in self.works[:10])
            raise UserError(f"--only {wanted!r}: no such student; there are {known or 'none'}")
        return found


def read_class(path: Path, roster: Roster | None) -> Class:
    """All that was handed in, matched by the roster; without one each name on a folder or file is a student.

    In the roster's order; without one by name.
    """
    handed, stray = split(read_tree(path))
    if not handed:
        raise UserError(f"{path}: nothing was handed in: no folder of a student, and no file of a platform's download")
    works: dict[str, Work] = {}
    unmatched: list[tuple[str, str]] = []
    for student in roster.students if roster else ():
        works[student.id] = Work(student)
    for item in sorted(handed, key=lambda item: (item.order, item.label)):
        student, why = match(item, roster)
        if student is None:
            unmatched.append((item.label, why))
            continue
        work = works.setdefault(student.id, Work(student))
        if work.handed is not None:
            work.superseded.append(work.handed.label)
        work.handed = item
    in_order = sorted(works.values(), key=lambda work: (work.student.line, work.student.name.casefold()))
    return Class(in_order, sorted(unmatched), stray)


def match(handed: Handed, roster: Roster | None) -> tuple[Student | None, str]:
    """Whose it is: by id, email address or exact name, then by the name's letters; or why nobody's."""
    if roster is None:
        name = handed.names[-1] if handed.names else handed.label
        return Student(handed.names[0] if handed.platform == "Gradescope" and handed.names else name, name), ""
    for name in handed.names:
        try:
            if student := roster.find(name):
                return student, ""
        except UserError as error:
            return None, str(error)
    for name in handed.names:
        wanted = squashed(_plain(name))
        found = [student for student in roster.students if wanted and wanted in _spellings(student.name)]
        if len(found) == 1:
            return found[0], ""
        if found:
            return None, f"{name} could be any of {', '.join(student.id for student in found)}"
    return None, f"nobody in {roster.path.name} goes by {' or '.join(handed.names) or 'no name'}"


def _plain(text: str) -> str:
    """Small, without accents; letters that are no other letter with an accent, as platforms spell them: luk for Łuk."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return plain.translate(_SPELLED)


def _spellings(name: str) -> set[str]:
    """The name's words in each order that begins elsewhere, without spaces: annamarielee, leeannamarie ..."""
    words = _plain(name).replace(",", " ").split()
    return {squashed("".join(words[at:] + words[:at])) for at in range(len(words))}
