"""Submissions that are nearly the same: what they share beyond the lesson's own code and its starter.

This proves nothing. Two learners may have found the same short loop, read the same page, or have been told the same
thing; and whoever changes the order of statements is found less. Look at the lines before you talk to anybody.
"""

import argparse
import math
from dataclasses import dataclass
from itertools import combinations

from exercises.model import load_exercises
from exercises.surgery import stub
from faults import UserError
from grading.fingerprints import grams, tokens, winnow
from grading.naming import find_module
from grading.submissions import Class, Work, read_class
from inputs import json_text
from lessons import Course, Lesson
from roster import announced_roster
from testrun import table

LEAST = 5  # fingerprints of one's own: fewer say nothing
NOTE = "Likeness is no proof: look at the lines, and talk."


@dataclass
class Prints:
    """One student's own fingerprints: {fingerprint: (file, line)}."""

    student: str
    own: dict[int, tuple[str, int]]


@dataclass(frozen=True)
class Pair:
    """Two students: how many fingerprints they share, the share of each one's own, and an example of lines."""

    first: str
    second: str
    shared: int
    of_first: float
    of_second: float
    lines: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """The larger of both shares: a part of one may be all of the other."""
        return max(self.of_first, self.of_second)


def given(lesson: Lesson) -> set[int]:
    """All grams of what every student was given: the lesson's code, and its starter."""
    known: set[int] = set()
    sources = {path.stem: path.read_text(encoding="utf-8") for path in lesson.modules()}
    for exercise in load_exercises(lesson):
        for module, names in exercise.by_module.items():
            for name in names:
                known.update(grams(tokens(stub(sources[module], name, exercise.stub_text))))
    for source in sources.values():
        known.update(grams(tokens(source)))
    return known


def prints(lesson: Lesson, work: Work, modules: list[str], known: set[int]) -> Prints:
    """The student's own fingerprints in the modules that hold exercises."""
    own: dict[int, tuple[str, int]] = {}
    for module in modules:
        try:
            path = find_module(work.handed, lesson, module)
        except UserError:
            continue  # it was handed in twice, and differently: grading says so
        if path is None:
            continue
        sequence = tokens(work.handed.files[path].decode(errors="replace"))
        hashes = grams(sequence)
        for value, at in winnow(hashes).items():
            if value not in known:
                own.setdefault(value, (work.handed.origins.get(path, path), sequence[at].line))
    return Prints(work.student.id, own)


def compare(of: Class, lesson: Lesson, least: float) -> list[Pair]:
    """The pairs that share at least this part (0 to 1) of what is one's own, those that share most first."""
    modules = sorted({module for exercise in load_exercises(lesson) for module in exercise.by_module})
    known = given(lesson)
    all_prints = [prints(lesson, work, modules, known) for work in of.works if work.handed]
    pairs = []
    for first, second in combinations(all_prints, 2):
        shared = sorted(first.own.keys() & second.own.keys(), key=first.own.get)
        if min(len(first.own), len(second.own)) < LEAST or not shared:
            continue
        lines = tuple((_place(first.own[value]), _place(second.own[value])) for value in shared[:3])
        pair = Pair(
            first.student,
            second.student,
            len(shared),
            len(shared) / len(first.own),
            len(shared) / len(second.own),
            lines,
        )
        pairs += [pair] if pair.share >= least else []
    return sorted(pairs, key=lambda pair: (-pair.shared, -pair.share, pair.first, pair.second))


def _place(at: tuple[str, int]) -> str:
    return f"{at[0]}:{at[1]}"


def show_similar(course: Course, args: argparse.Namespace) -> int:
    """Print the pairs; 0 whether there are some or not."""
    lesson = course.find(args.lesson)
    if not 0 <= args.least <= 100 or math.isnan(args.least):
        raise UserError(f"--least {args.least}: a percentage from 0 to 100 is expected")
    of = read_class(args.submissions, announced_roster(args.roster))
    pairs = compare(of, lesson, args.least / 100)
    if args.json:
        value = {"lesson": lesson.id, "note": NOTE, "least": args.least, "pairs": [vars(p) for p in pairs]}
        print(json_text(value | {"unmatched": [label for label, _ in of.unmatched]}), end="")
        return 0
    rows = [
        [
            p.first,
            p.second,
            str(p.shared),
            f"{p.of_first:.0%}",
            f"{p.of_second:.0%}",
            f"{p.lines[0][0]} {p.lines[0][1]}",
        ]
        for p in pairs
    ]
    if rows:
        print(table(["one", "other", "shared", "of the one", "of the other", "for example"], rows))
    else:
        compared = sum(bool(work.handed and work.handed.files) for work in of.works)
        print(f"no two of {compared} share {args.least:g}% of their own code")
    for label, why in of.unmatched:
        print(f"not matched: {label}: {why}")
    print(NOTE)
    return 0
