"""`course check-outputs`: run the commands of the texts, and compare what they print with what the texts quote."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import sessions
from faults import Fault, read_text
from lessons import Course
from mdtext import Document
from reruns.compare import first_missing
from reruns.quoted import Quoted, quoted_commands

DEADLINE = 600.0  # seconds for one command
OTHER_TEXTS = ("README.md", "scripts/INSTRUCTORS.md")  # beside those of the lessons


def register(add: Callable) -> None:
    """Add this command: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
    text = "run the commands of a lesson's text, or of all, and compare their output with what the text quotes"
    command = add("check-outputs", check_outputs, text)
    command.add_argument("lesson", metavar="NN", nargs="?", help="the lesson's number (default: all, and the guides)")
    command.add_argument("--only", metavar="TEXT", help="only commands that contain this")
    command.add_argument("--list", action="store_true", help="only list the commands, and which cannot run here")
    command.add_argument(
        "--bench", action="store_true", help="also those that take minutes, mostly to measure this machine"
    )
    command.add_argument("--deadline", type=float, default=DEADLINE, metavar="S", help="seconds for one command")
    command.add_argument("--json", action="store_true", help="print faults and what was skipped as JSON")


def check_outputs(course: Course, args: argparse.Namespace) -> int:
    """One line a fault; 1 if there is one. Works on a copy of the course, so nothing is left behind."""
    texts = [Path(name) for name in OTHER_TEXTS] if args.lesson is None else []
    lessons = course.lessons if args.lesson is None else [course.find(args.lesson)]
    texts += [lesson.path / "docs" / "en.md" for lesson in lessons]
    report = {"ran": [], "skipped": [], "faults": []}
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        root = Path(scratch) / course.root.name
        if not args.list:
            copy_course(course, root)
        for text in texts:
            check_text(course, text, root, args, report)
    if args.json:
        print(json.dumps({**report, "faults": [str(fault) for fault in report["faults"]]}, indent=2))
    else:
        print(f"{len(report['ran'])} commands ran, {len(report['skipped'])} skipped, {len(report['faults'])} faults")
    return 1 if report["faults"] else 0


def copy_course(course: Course, root: Path) -> None:
    """Copy all files of the course that are committed, or would be."""
    for file in course.files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(course.root / file, root / file)


def check_text(course: Course, text: Path, root: Path, args: argparse.Namespace, report: dict) -> None:
    """Run one text's commands in the copy at `root`, in their order, since one may use what another wrote."""
    folder = root / (text.parent.parent if text.name == "en.md" else "")
    shutil.rmtree(root / "learn", ignore_errors=True)  # `course start` of another text: it would not overwrite that
    say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    for quoted in quoted_commands(Document(read_text(course.root / text) or "")):
        place = f"{text.as_posix()}:{quoted.line}"
        why = quoted.skipped or ("takes minutes (--bench)" if quoted.measures and not args.bench else None)
        if args.only and args.only not in quoted.command:
            continue
        if why or args.list:
            report["skipped"].append({"place": place, "command": quoted.command, "why": why})
            say(f"{place}: {why or 'runs'}: {quoted.command}")
            continue
        begin = time.monotonic()
        faults = run_quoted(text, quoted, folder if (folder / "code").is_dir() else root, root, args.deadline)
        report["ran"].append({"place": place, "command": quoted.command})
        report["faults"] += faults
        say(f"{place}: {quoted.command} ({time.monotonic() - begin:.1f} s)")
        for fault in faults:
            say(f"  {fault}")


def run_quoted(text: Path, quoted: Quoted, folder: Path, root: Path, deadline: float) -> list[Fault]:
    """Run one command; return how its end and its output differ from what the text says."""
    home = root if "scripts/course.py" in quoted.command or "phases/" in quoted.command else folder
    code, output = run_in(quoted.command, home, deadline)
    if code is None:
        return [Fault(text.as_posix(), quoted.line, f"{quoted.command}: still running after {deadline:g} s")]
    shown = [line for block, _ in quoted.outputs for line in block.lines]
    if code != 0 and not any("stopped:" in line or "Error" in line for line in shown):
        last = output[-1] if output else "no output"
        return [Fault(text.as_posix(), quoted.line, f"{quoted.command}: exit code {code}: {last}")]
    faults = []
    for block, differs in quoted.outputs:
        if differs == "words":
            continue
        missing = first_missing(list(block.lines), output, quoted.measures or differs == "numbers")
        if missing is not None:
            line = block.lines[missing].strip()
            faults.append(Fault(text.as_posix(), block.line + 1 + missing, f"{quoted.command} does not print: {line}"))
    return faults


def run_in(command: str, folder: Path, deadline: float) -> tuple[int | None, list[str]]:
    """Run a shell command with this Python first on the path; (exit code, lines). None: killed at the deadline."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    more = {"PATH": path, "COLUMNS": "120"}
    code, output = sessions.run(["bash", "-c", command], folder, deadline, environment=more)
    return code, output.splitlines()
