"""What the commands grade, similar and autograder do."""

import argparse
import dataclasses
import math
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exercises.model import choose, load_exercises
from faults import UserError
from grading import looked
from grading.classrun import ClassRun, check_out
from grading.isolation import NONE
from grading.judge import Judge
from grading.limits import MIB, Limits
from grading.overrides import read_overrides
from grading.submissions import Work, read_class
from inputs import json_text
from lessons import Course
from roster import announced_roster
from words import counted


def grade_class(course: Course, args: argparse.Namespace) -> int:
    """0 if everything was judged, 1 if something could not be, 130 if it was interrupted."""
    lesson = course.find(args.lesson)
    exercises = choose(load_exercises(lesson), args.exercise)
    if not exercises:
        raise UserError(f"lesson {lesson.number} has no exercises: there is nothing to grade")
    check_jobs(args.jobs)
    check_out(args.out, args.resume, lesson.id, [exercise.id for exercise in exercises])
    roster = announced_roster(args.roster)
    of = read_class(args.submissions, roster)
    works = of.only(args.only) if args.only else of.works
    overrides = read_overrides(args.overrides, of, exercises) if args.overrides else {}
    limits, isolation = limits_of(args), NONE if args.no_isolation else None
    before = signal.signal(signal.SIGTERM, _interrupt)  # like Ctrl-C: no run is left behind
    try:
        with Judge(course, lesson, limits, isolation, _private(args)) as judge:
            run = ClassRun(judge, exercises, of, args.out, overrides, _command(args), args.resume)
            return _grade(run, works, args)
    except KeyboardInterrupt:
        print("course: interrupted; the same command with --resume goes on", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _private(args: argparse.Namespace) -> list[Path]:
    """What students' code must not see of the class."""
    return [path for path in (args.submissions, args.out, args.roster, args.overrides) if path]


def _grade(run: ClassRun, works: list[Work], args: argparse.Namespace) -> int:
    for text in run.judge.isolation.missing:
        print(f"course: {text}", file=sys.stderr)
    if not args.json:
        _tell_begin(run, works, args.jobs)
    done = run.with_others(run.run(works, args.jobs, _teller(args.json, len(works))))
    run.write_class(done)
    if args.json:
        print(json_text(run.class_json(done)), end="")
    else:
        _tell_class(args, run, done)
    return 1 if any(report["points"] is None for report in done) else 0


def _tell_begin(run: ClassRun, works: list[Work], jobs: int) -> None:
    """What is going to happen: nothing else is printed before the first student is done."""
    count = run.waiting(works)
    kept = f" ({counted(len(works) - count, 'report')} kept)" if count < len(works) else ""
    what = f"{counted(count, 'student')} to grade{kept}, {counted(len(run.exercises), 'exercise')}"
    first = "; first its tests are run on the lesson's own code" if count > jobs else ""
    print(f"lesson {run.judge.lesson.number}: {what}, {jobs} at a time{first}" if count else f"{what}", flush=True)


def check_jobs(jobs: int) -> None:
    """UserError unless it is a number of things to do at a time."""
    if not 1 <= jobs <= 256:
        raise UserError(f"--jobs {jobs}: a number from 1 to 256 is expected")


def limits_of(args: argparse.Namespace) -> Limits:
    """The default limits, with those that the command line sets."""
    given: dict[str, Any] = {}
    for name in ("collective_seconds", "test_seconds", "run_seconds", "submission_seconds"):
        value = getattr(args, name)
        if value is not None:
            if not 0 < value < math.inf:
                raise UserError(f"--{name.replace('_', '-')} {value}: a number of seconds above 0 is expected")
            given[name] = value
    if args.memory is not None:
        if args.memory < 256:
            raise UserError(f"--memory {args.memory}: at least 256 MiB are expected")
        given["memory_bytes"] = args.memory * MIB
    return dataclasses.replace(Limits(), **given)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _command(args: argparse.Namespace) -> list[str]:
    roster = ["--roster", str(args.roster)] if args.roster else []
    return ["python", "scripts/course.py", "grade", args.lesson, str(args.submissions), *roster]


def _teller(quiet: bool, count: int):
    lock, done = threading.Lock(), [0]

    def tell(report: dict[str, Any], kept: bool) -> None:
        with lock:
            done[0] += 1
            if not quiet:
                points = "open" if report["points"] is None else f"{report['points']:g}"
                how = "as before" if kept else f"{report['seconds']:.1f} s"
                name = report["student"]["id"]
                print(f"[{done[0]}/{count}] {name}: {points} of {report['of']:g} ({how})", flush=True)

    return tell


def _tell_class(args: argparse.Namespace, run: ClassRun, done: Sequence[dict[str, Any]]) -> None:
    for label, why in run.of.unmatched:
        print(f"not matched: {label}: {why}")
    for name in run.of.stray:
        print(f"belongs to nobody: {name}")
    for report in done:
        for note in looked.notes(report):
            print(f"files: {report['student']['id']}: {note}")
        for item in report["exercises"]:
            if item["status"] == "error":
                print(f"not decided: {report['student']['id']} {item['exercise']}: {item['reason']}")
    print(f"{args.out / 'class.md'}: {counted(len(done), 'student')}; also class.csv, class.json, and a folder each")
