"""The commands for starters: start, export, try, check-exercises."""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from exercises import folder as folders
from exercises.folder import Files, check_free, write_folder
from exercises.proof import Finding, prove_lessons
from exercises.starter import export_files, starter_files
from exercises.trial import Report, Trial, check_deadline, try_folder
from lessons import Course, Lesson
from words import counted


LEFT_OUT = """That is not taken by course grade, which judges each exercise in the lesson's own code: your functions of
the exercise, and what is new in your modules. Put it into those, or into names of your own."""


def register(add: Callable) -> None:
    """Add these commands: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
    start = add("start", start_lesson, "a folder of your own for a lesson's exercises, without their solutions")
    start.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    start.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="a new folder (default: learn/NN-name)")
    start.add_argument("--json", action="store_true", help="print what was written as JSON")
    export = add("export", export_lesson, "copy a lesson, with the modules it borrows, into a folder that runs alone")
    export.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    export.add_argument("folder", metavar="DIR", type=Path, help="a new folder")
    export.add_argument("--starter", action="store_true", help="without solutions and quiz keys, as start does")
    export.add_argument("--json", action="store_true", help="print what was written as JSON")
    trying = add("try", try_exercises, "test your functions in order, until one does not pass: then its hint")
    trying.add_argument("folder", metavar="DIR", type=Path, help="a folder that course start has made")
    trying.add_argument(
        "exercise", metavar="ID", nargs="?", help="only this one, and what is written of those it builds on"
    )
    trying.add_argument("--deadline", type=float, default=300.0, metavar="S", help="seconds for one (default: 300)")
    trying.add_argument("--json", action="store_true", help="print the result as JSON")
    proof = add(
        "check-exercises",
        check_exercises,
        "prove that the lessons' code solves each exercise, and that its tests notice where it is missing",
    )
    proof.add_argument("lessons", metavar="NN", nargs="*", help="numbers of lessons (default: all)")
    proof.add_argument("--only", action="append", default=[], metavar="ID", help="only this exercise")
    proof.add_argument("--missing", action="store_true", help="only what is missing; course test proves the solutions")
    proof.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="J", help="at a time (default: one a core)")
    proof.add_argument("--deadline", type=float, default=300.0, metavar="S", help="seconds for one (default: 300)")
    proof.add_argument("--json", action="store_true", help="print the result as JSON")


def start_lesson(course: Course, args: argparse.Namespace) -> int:
    """Write a starter."""
    lesson = course.find(args.lesson)
    folder = Path("learn", lesson.id) if args.folder is None else args.folder
    check_free(course, folder, above=args.folder is not None)
    return _write(lesson, folder, starter_files(course, lesson), args.json)


def export_lesson(course: Course, args: argparse.Namespace) -> int:
    """Write a lesson that runs alone."""
    lesson = course.find(args.lesson)
    check_free(course, args.folder)
    files = starter_files(course, lesson) if args.starter else export_files(course, lesson)
    return _write(lesson, args.folder, files, args.json)


def _write(lesson: Lesson, folder: Path, files: Files, as_json: bool) -> int:
    write_folder(folder, files)
    marker = folders.read_marker(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": len(files), **vars(marker)}, indent=2))
        return 0
    print(f"{folder}: lesson {lesson.number}, {counted(len(files), 'file')}")
    if marker.starter:
        print(
            f"The text: {folder / lesson.path / 'docs' / 'en.md'}\nWhat is next: python scripts/course.py try {folder}"
        )
    return 0


def try_exercises(course: Course, args: argparse.Namespace) -> int:
    """0 if all passed."""
    check_deadline(args.deadline)
    width = 0

    def tell(report: Report) -> None:
        if not args.json and report.status != "not reached":
            seconds = f"{report.seconds:6.1f} s" if report.seconds else ""
            print(f"{report.exercise.id:{width}}  {report.status:11}  {seconds}".rstrip(), flush=True)

    trial = try_folder(course, args.folder, [args.exercise] if args.exercise else [], args.deadline, tell)
    points = sum(report.exercise.points for report in trial.reports if report.status == "passed")
    total = sum(report.exercise.points for report in trial.reports)
    if args.json:
        print(json.dumps(_as_json(trial, points, total), indent=2, ensure_ascii=False))
    else:
        _tell_end(trial, points, total)
    return 0 if trial.passed else 1


def _as_json(trial: Trial, points: int, total: int) -> dict:
    rows = [
        {
            "id": report.exercise.id,
            "title": report.exercise.title,
            "points": report.exercise.points,
            "status": report.status,
            "seconds": round(report.seconds, 3),
            "test": report.test,
            "message": report.message,
            "note": report.note,
            "hint": report.exercise.hint,
        }
        for report in trial.reports
    ]
    tests = "the folder's own" if trial.own_tests else "the course's"
    facts = {"lesson": trial.marker.lesson, "tests": tests, "points": points, "of": total}
    return {**facts, "left_out": trial.left_out, "exercises": rows}


def _tell_end(trial: Trial, points: int, total: int) -> None:
    if trial.own_tests:
        print("\nThe folder was made from another version of the lesson: its own tests were used. Nothing was lent.")
    for report in trial.reports:
        if report.note:
            print(f"\n{report.exercise.id} is {report.note}")
    if trial.left_out:
        print(f"\nYou changed more of the lesson's own code: {', '.join(trial.left_out)}\n{LEFT_OUT}")
    stop = next((report for report in trial.reports if report.status not in ("passed", "not reached")), None)
    if stop is not None:
        print(f"\n{stop.exercise.title} ({', '.join(stop.exercise.functions)})")
        print("\n".join(f"    {line}" for line in [stop.test, *stop.message.splitlines()] if line))
        print(f"Hint: {stop.exercise.hint}")
        print(f"Its tests: {' '.join(stop.exercise.tests)}")
    passed = sum(report.status == "passed" for report in trial.reports)
    print(f"\n{passed} of {counted(len(trial.reports), 'exercise')} passed, {points} of {counted(total, 'point')}")


def check_exercises(course: Course, args: argparse.Namespace) -> int:
    """0 if nothing is wrong with any exercise."""
    check_deadline(args.deadline)
    begin = time.monotonic()
    lessons = [course.find(name) for name in args.lessons] or course.lessons

    def tell(finding: Finding) -> None:
        if not args.json:
            result = f"FAULT: {finding.fault}" if finding.fault else "ok"
            print(
                f"{finding.lesson[:2]} {finding.exercise} {finding.claim} {finding.seconds:.1f} s: {result}", flush=True
            )

    findings = prove_lessons(course, lessons, args.only, args.deadline, args.jobs, tell, not args.missing)
    faults = sum(bool(finding.fault) for finding in findings)
    if args.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print(f"{counted(len(findings), 'proof')}, {counted(faults, 'fault')}, {time.monotonic() - begin:.0f} s")
    return 1 if faults else 0
