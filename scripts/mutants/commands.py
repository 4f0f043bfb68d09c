"""The commands for wrong answers: mutants, break."""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import sessions
from faults import UserError
from inputs import json_text
from lessons import Course
from mutants import demonstration, proof
from mutants.model import chosen
from testrun import table


def register(add: Callable) -> None:
    """Add these commands: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
    proving = add("mutants", prove, "prove that each exercise's tests reject wrong answers to it")
    proving.add_argument("lesson", metavar="NN", nargs="?", help="the lesson's number (default: all)")
    proving.add_argument("mutant", metavar="ID", nargs="?", help="one mutant (default: all of the lesson)")
    proving.add_argument("--jobs", type=int, default=2, metavar="J", help="how many run at once (default: 2)")
    proving.add_argument("--json", action="store_true", help="print the result as JSON")
    text = "run a lesson's demonstration with a fault in its code; what follows -- is passed to it"
    breaking = add("break", break_demo, text)
    breaking.add_argument("lesson", metavar="NN", help="the lesson's number, for example 77")
    breaking.add_argument("mutant", metavar="MUTANT", nargs="?", help="the fault's id; without one they are listed")
    breaking.add_argument("--json", action="store_true", help="print the list as JSON")


def _interruptible() -> None:
    """Have SIGTERM unwind as Ctrl-C does, so that copies are removed and processes ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def prove(course: Course, args: argparse.Namespace) -> int:
    """A row a mutant; 1 if one is not rejected."""
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    _interruptible()
    todo = chosen(course, args.lesson, args.mutant)
    with proof.servers(), ThreadPoolExecutor(args.jobs) as pool:
        try:
            lessons = {lesson.id: lesson for lesson, _ in todo}
            sets = {key: [mutant for lesson, mutant in todo if lesson.id == key] for key in lessons}
            runs = {key: pool.submit(proof.baseline, course, lessons[key], sets[key]) for key in lessons}
            passed = {key: run.result() for key, run in runs.items()}
            judged = [
                pool.submit(proof.judge, course, lesson, mutant, passed[lesson.id][mutant.caught_by])
                for lesson, mutant in todo
            ]
            for number, each in enumerate(judged, 1):
                mutant = each.result().mutant
                print(f"{number}/{len(judged)} {mutant.id}", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            sessions.end_all()
            raise
    return _report([each.result() for each in judged], args.json)


def _report(judged: list[proof.Judged], as_json: bool) -> int:
    survivors = [each for each in judged if not each.rejected]
    if as_json:
        rows = [
            {
                "lesson": each.lesson.number,
                "id": each.mutant.id,
                "exercise": each.mutant.exercise,
                "test": each.mutant.caught_by,
                "rejected": each.rejected,
                "found": each.fault or each.finding.first_line,
            }
            for each in judged
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 1 if survivors else 0
    rows = []
    for each in judged:
        by = each.mutant.caught_by if each.rejected else "NOT REJECTED"
        rows.append([each.lesson.number, each.mutant.id, each.mutant.exercise, by, _short(each)])
    print(table(["no", "mutant", "exercise", "rejected by", "how"], rows))
    for each in survivors:
        print(f"\nNOT REJECTED: {each.lesson.number} {each.mutant.id}: {each.fault or each.finding.text.strip()}")
    print(f"\n{len(judged) - len(survivors)} of {len(judged)} wrong answers are rejected")
    return 1 if survivors else 0


def _short(each: proof.Judged, length: int = 90) -> str:
    text = each.fault or each.finding.first_line
    return text if len(text) <= length else f"{text[: length - 3]}..."


def break_demo(course: Course, args: argparse.Namespace) -> int:
    """The demonstration with a fault: 0 if something noticed it, else 1. Without a fault's id: the list of them."""
    if args.mutant is None:
        heads = ["mutant", "exercise", "what"]
        rows = [[mutant.id, mutant.exercise, mutant.what] for _, mutant in chosen(course, args.lesson)]
        listed = [dict(zip(heads, row, strict=True)) for row in rows]
        print(json_text(listed).rstrip("\n") if args.json else table(heads, rows))
        return 0
    if args.json:
        raise UserError("--json is for the list of faults: leave out MUTANT")
    _interruptible()
    ((lesson, mutant),) = chosen(course, args.lesson, args.mutant)
    with proof.servers():
        return demonstration.break_lesson(course, lesson, mutant, args.passed_on)
