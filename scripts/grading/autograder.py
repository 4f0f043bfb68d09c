"""A complete autograder for Gradescope: one zip, the same bytes from the same course.

It holds the course's scripts and all lessons, solutions included. That is no leak: the solutions are public, in this
repository. A student's run cannot read the other submissions, nor write outside of its folder.
"""

import argparse
import json
import os
import shlex
import sys
import time
import zipfile
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import gradescope
from exercises.model import load_exercises
from faults import UserError
from grading import report as reports
from grading.grade import grade
from grading.handin import read_tree
from grading.judge import Judge
from grading.platforms import Handed
from grading.submissions import Work
from inputs import json_text, write_output
from lessons import Course
from roster import Student
from words import counted

ROOT = "AUTOGRADER"  # variable: where /autograder is, for tests
BUNDLED = ("scripts", "phases", "pyproject.toml", "README.md", "LICENSE", "catalog.json")
_MOMENT = (2020, 1, 1, 0, 0, 0)

SETUP = """#!/usr/bin/env bash
# Runs once, when Gradescope builds the image: Python, and PyTorch for the CPU.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv python3-pip
python3 -m venv /opt/course
/opt/course/bin/pip install --no-cache-dir "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
/opt/course/bin/pip install --no-cache-dir numpy matplotlib
"""

RUN = """#!/usr/bin/env bash
# Runs for each submission: reads /autograder/submission, writes /autograder/results/results.json.
set -uo pipefail
root=${{AUTOGRADER:-/autograder}}
python=${{COURSE_PYTHON:-/opt/course/bin/python}}
mkdir -p "$root/results"
rm -f "$root/results/results.json"
cd "$root/source"
exec "$python" scripts/course.py --root "$root/source" autograde {lesson}
"""


def write_autograder(course: Course, args: argparse.Namespace) -> int:
    """Write the zip."""
    lesson = course.find(args.lesson)
    exercises = load_exercises(lesson)
    if not exercises:
        raise UserError(f"lesson {lesson.number} has no exercises: there is nothing to grade")
    data = bundle(course, lesson.number)
    write_output(args.file, data, args.force)
    facts = {"file": str(args.file), "lesson": lesson.id, "bytes": len(data)}
    facts["points"] = sum(exercise.points for exercise in exercises)
    if args.json:
        print(json_text(facts), end="")
    else:
        print(f"{args.file}: lesson {lesson.number}, {counted(facts['points'], 'point')}, {len(data):,} bytes")
    return 0


def bundle(course: Course, lesson: str) -> bytes:
    """The zip's bytes: setup.sh, run_autograder, and what they need of the course."""
    files = {
        path.as_posix(): (course.root / path).read_bytes()
        for path in course.files
        if path.parts[0] in BUNDLED and "tests" not in path.parts[:2]
    }
    files |= {"setup.sh": SETUP.encode(), "run_autograder": RUN.format(lesson=shlex.quote(lesson)).encode()}
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _MOMENT)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix, wherever this runs
            info.external_attr = (0o100755 if name in ("setup.sh", "run_autograder") else 0o100644) << 16
            archive.writestr(info, files[name])
    return buffer.getvalue()


def autograde(course: Course, args: argparse.Namespace) -> int:
    """Grade /autograder/submission: 0 once results.json is written; 1 if this machine cannot judge."""
    root = Path(os.environ.get(ROOT, "/autograder"))
    begin = time.monotonic()
    lesson = course.find(args.lesson)
    exercises = load_exercises(lesson)
    if not (root / "submission").is_dir():
        raise UserError(f"{root / 'submission'}: there is no such folder; this command is for Gradescope's machines")
    tree = read_tree(root / "submission")
    files = {path: file.data for path, file in tree.files.items()}
    problems = [f"{path}: {problem}" for path, problem in tree.problems]
    student = _student(root / "submission_metadata.json")
    handed = Handed("submission", [student.id], "Gradescope", files, problems=problems, unread=tree.unread)
    work = Work(student, handed)
    with Judge(course, lesson) as judge:
        results = grade(judge, exercises, work)
        more = {"seconds": round(time.monotonic() - begin, 3)}
        report = reports.student_json(judge, work, results, exercises, more)
    undecided = [item for item in report["exercises"] if item["points"] is None]
    if undecided:
        told = f"The autograder could not judge this; please tell your instructor.\n{undecided[0]['reason']}"
        value = gradescope.results([], score=0, output=told)
    else:
        value = reports.gradescope_json(report)
    value["extra_data"] = {"lesson": lesson.id, "version": judge.layout.version, "isolation": asdict(judge.isolation)}
    gradescope.check_results(value)
    write_output(root / "results" / "results.json", json_text(value), force=True)
    if args.json:
        print(json_text(value), end="")
    for item in undecided:
        print(f"not decided: {item['exercise']}: {item['reason']}", file=sys.stderr)
    return 1 if undecided else 0


def _student(metadata: Path) -> Student:
    """The first of the submission's students, as Gradescope tells the autograder; nameless if it does not."""
    try:
        user = json.loads(metadata.read_text(encoding="utf-8"))["users"][0]
        return Student(str(user.get("sid") or user["email"]), str(user["name"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return Student("submission", "the student")
