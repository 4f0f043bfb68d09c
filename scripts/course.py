"""The course's one command line. What instructors use is in packages: each registers its own commands."""

import argparse
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import catalog
import exercises.commands
import grading.commands
import mutants.commands
import quizzes.commands
import reruns.commands
from check_all import check_course
from faults import Fault, UserError
from lessons import Course, UnknownLesson
from quietly import quietly
from testrun import run_tests, summary, table
from words import counted

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 1800.0  # seconds for the tests of one lesson
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # a full disk, and folders that others own


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="course", description="Distributed training from scratch: the lessons.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the course's folder (default: where this file is)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, action: Callable[[Course, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(action=action)
        return command

    listing = add("list", list_lessons, "show the lessons as a table")
    listing.add_argument("--json", action="store_true", help="as JSON, like catalog.json's list of lessons")
    run = add("run", run_lesson, "run a lesson's demonstration; what follows -- is passed to it: run 81 -- --steps 40")
    run.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    test = add("test", run_lesson_tests, "run the tests of a lesson, or of all lessons and of scripts")
    test.add_argument("lesson", metavar="NN", nargs="?", help="the lesson's number (default: everything)")
    test.add_argument("--deadline", type=float, default=DEADLINE, metavar="S", help="seconds for one lesson's tests")
    test.add_argument(
        "--json", action="store_true", help="print the table as JSON; what the tests print goes to stderr"
    )
    checking = add("check", check, "check lessons, quizzes, docs and catalog; one line a fault")
    checking.add_argument("--json", action="store_true", help="print the faults as JSON")
    writing = add("catalog", write_catalog, "write catalog.json from the lessons")
    writing.add_argument("--check", action="store_true", help="only compare; exit 1 if it is out of date")
    writing.add_argument("--json", action="store_true", help="print what was written, or is out of date, as JSON")
    ladder = add("ladder", climb, "run every combination of parallelism and hold it against the golden run (lesson 81)")
    ladder.add_argument("--quick", action="store_true", help="chosen plans, as in CI")
    ladder.add_argument("--only", action="append", default=[], metavar="PLAN", help="such as 'dp2 pp2 zero1 m2'")
    ladder.add_argument(
        "--dtype",
        metavar="D",
        help="of all plans: float32, float64 or bfloat16, which leaves out those without ZeRO; not with --only",
    )
    ladder.add_argument("--processes", action="store_true", help="as processes, not as virtual ranks")
    ladder.add_argument("--tied", action="store_true", help="the head's matrix is the token embedding")
    ladder.add_argument("--steps", metavar="N", help="steps of the run (default: 30)")
    ladder.add_argument("--json", action="store_true", help="print the result as JSON")
    saved = add(
        "checkpoint", checkpoint, "look at a checkpoint of lesson 80, check it, convert it to or from safetensors"
    )
    saved.add_argument("job", metavar="JOB", choices=["show", "verify", "convert"], help="show, verify or convert")
    saved.add_argument("folder", metavar="DIR", help="a checkpoint; for convert also safetensors files")
    saved.add_argument("--json", action="store_true", help="print the result as JSON")
    saved.add_argument("--fast", action="store_true", help="verify: compare the CRC-32, if one was recorded")
    saved.add_argument("--to", metavar="OUT", help="convert: the folder to write into")
    saved.add_argument(
        "--step", type=int, metavar="N", help="convert: the step, for files that do not say (default: 0)"
    )
    needs = add(
        "memory", memory, "bytes that each ZeRO stage needs on a rank; by default for 7B, 70B, 1T on 8-1,024 ranks"
    )
    needs.add_argument("--params", metavar="P", help="number of parameters: 7e9 or 7B")
    needs.add_argument("--ranks", metavar="N", help="number of ranks")
    needs.add_argument("--dtype", metavar="D", help="dtype of the parameters: bf16, fp16 or fp32 (default: bf16)")
    needs.add_argument("--json", action="store_true", help="print bytes as JSON")
    for package in (exercises, quizzes, grading, mutants, reruns):
        package.commands.register(add)
    return parser


def options_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Each command's options, so that the docs' commands can be checked."""
    subparsers = next(item for item in parser._actions if isinstance(item, argparse._SubParsersAction))
    return {name: set(command._option_string_actions) for name, command in subparsers.choices.items()}


def list_lessons(course: Course, args: argparse.Namespace) -> int:
    """A row a lesson. A lesson with a broken quiz or text is shown all the same."""
    entries = catalog.entries(course)
    if args.json:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
        return 0
    rows = []
    for entry in entries:
        needs = ", ".join(name[:2] for name in entry["prerequisites"])
        quiz = "/".join(str(count) for count in entry["quiz"].values())
        minutes = "?" if entry["minutes"] is None else str(entry["minutes"])
        rows.append(
            [entry["id"][:2], entry["title"] or "?", minutes, needs, quiz, str(entry["exercises"]), entry["path"]]
        )
    print(table(["no", "title", "minutes", "needs", "quiz", "exercises", "folder"], rows))
    return 0


def run_lesson(course: Course, args: argparse.Namespace) -> int:
    """`python code/main.py ARGS` in the caller's folder."""
    main = course.find(args.lesson).folder / "code" / "main.py"
    if not main.is_file():
        raise UnknownLesson(f"lesson {args.lesson} has no {main.relative_to(course.root).as_posix()}")
    return become([str(main), *args.passed_on])


def become(script: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a Python script in this one's place; return its exit code where a process cannot become another."""
    command = [sys.executable, str(Path(__file__).with_name("quietly.py")), *script]
    environment = {**os.environ, **(environment or {})}
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(command[0], command, environment)  # a signal for this command must not miss the other
    return subprocess.call(command, env=environment)


def checkpoint(course: Course, args: argparse.Namespace) -> int:
    """What `checkpoint_tools` of lesson 80 does, with every lesson's code at hand."""
    options = [f"--{name}" for name in ("json", "fast") if getattr(args, name)]
    for name in ("to", "step"):
        options += [] if getattr(args, name) is None else [f"--{name}", str(getattr(args, name))]
    return become_module(course, "80", "checkpoint_tools.py", [args.job, args.folder, *options])


def memory(course: Course, args: argparse.Namespace) -> int:
    """What `memory_calculator` of lesson 78 prints."""
    given = {name: getattr(args, name) for name in ("params", "ranks", "dtype")}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return become_module(course, "78", "memory_calculator.py", [*options, *(["--json"] if args.json else [])])


def climb(course: Course, args: argparse.Namespace) -> int:
    """What `ladder` of lesson 81 does, with every lesson's code at hand."""
    options = [f"--{name}" for name in ("quick", "processes", "tied", "json") if getattr(args, name)]
    options += [f"--only={plan}" for plan in args.only]
    options += [f"--{name}={getattr(args, name)}" for name in ("dtype", "steps") if getattr(args, name)]
    return become_module(course, "81", "ladder.py", options)


def become_module(course: Course, lesson: str, module: str, arguments: list[str]) -> int:
    """Run a lesson's module, with every lesson's code at hand, in this command's place."""
    folders = [str(each.folder / "code") for each in course.lessons]
    script = [str(course.find(lesson).folder / "code" / module), *arguments]
    return become(script, {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])})


def run_lesson_tests(course: Course, args: argparse.Namespace) -> int:
    """A process a folder of tests; a table at the end; 1 if one failed or ran no test."""
    if args.lesson is not None:
        lesson = course.find(args.lesson)
        folders = [(lesson.id, lesson.folder / "tests")]
    else:
        folders = [(lesson.id, lesson.folder / "tests") for lesson in course.lessons]
        folders.append(("scripts", course.root / "scripts" / "tests"))
    runs = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests that run now end, too
    for name, folder in folders:
        print(f"== {name}", flush=True, file=sys.stderr if args.json else sys.stdout)
        runs.append(run_tests(name, folder, args.deadline))
    print(
        json.dumps([vars(run) | {"result": run.result} for run in runs], indent=2)
        if args.json
        else f"\n{summary(runs)}"
    )
    return 0 if all(run.result == "ok" for run in runs) else 1


def check(course: Course, args: argparse.Namespace) -> int:
    """All checks; `path:line: message` a fault, 1 if there is one."""
    faults = check_course(course, options_of(build_parser()))
    if args.json:
        print(_faults_json(faults, lessons=len(course.lessons)))
        return 1 if faults else 0
    for fault in faults:
        print(fault)
    print(f"{counted(len(course.lessons), 'lesson')} checked, {counted(len(faults), 'fault')}", file=sys.stderr)
    return 1 if faults else 0


def write_catalog(course: Course, args: argparse.Namespace) -> int:
    """Write catalog.json, or compare it."""
    if not args.check:
        catalog.write(course)
        if args.json:
            print(_faults_json([], file=catalog.FILE, lessons=len(course.lessons)))
            return 0
        print(f"{catalog.FILE}: {counted(len(course.lessons), 'lesson')}")
        return 0
    faults = catalog.check_catalog(course)
    if args.json:
        print(_faults_json(faults, file=catalog.FILE, lessons=len(course.lessons)))
    for fault in () if args.json else faults:
        print(fault)
    return 1 if faults else 0


def _faults_json(faults: list[Fault], **facts: object) -> str:
    return json.dumps({**facts, "faults": [vars(fault) for fault in faults]}, indent=2, ensure_ascii=False)


def main(argv: list[str] | None = None) -> int:
    """Run one command; 2 if the command line is wrong, names an unknown lesson, or the system refuses a file."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    args = parser.parse_args(argv[:cut])
    args.passed_on = argv[cut + 1 :]
    if args.passed_on and args.command not in ("run", "break"):
        parser.error("only run and break pass anything on after --")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show ends no command
    try:
        return args.action(Course(args.root), args)
    except UserError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"course: {where}{error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(quietly(main))
