"""`course break`: the lesson's demonstration with one fault in its code, and what notices it."""

import difflib
import sys
from pathlib import Path

import sessions
from lessons import Course, Lesson
from mutants.model import Mutant, code_file
from mutants.proof import DEADLINE, copied, run_tests

DEMO_DEADLINE = 300.0  # seconds; demonstrations take a minute at most


def show_fault(course: Course, lesson: Lesson, mutant: Mutant, folder: Path) -> None:
    """Say what is wrong now, as a diff, and what to look for."""
    path = code_file(lesson, mutant)
    before, after = ((root / path).read_text(encoding="utf-8").splitlines() for root in (course.root, folder))
    print(f"{lesson.number} {mutant.id}: {mutant.what}\n")
    for line in difflib.unified_diff(before, after, path.name, f"{path.name} with the fault", n=1, lineterm=""):
        print(line)
    print(f"\nLook for: {mutant.symptom}", flush=True)


def run_demo(lesson: Lesson, folder: Path, arguments: list[str]) -> str | None:
    """Run the copy's main.py, its output passed on as it comes; return what noticed the fault, None if nothing did.

    What it would write goes into the copy, unless `--out` says otherwise.
    """
    main = folder / lesson.path / "code" / "main.py"
    if not any(argument.split("=")[0] == "--out" for argument in arguments):
        arguments = [*arguments, "--out", str(folder / "outputs")]
    print(f"\n== the demonstration with this fault: python {lesson.rel('code', 'main.py')}", flush=True)

    def pass_on(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    (folder / "tmp").mkdir(exist_ok=True)
    # output comes as it is written; a copy is used once, its bytecode never
    more = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(main), *arguments]
    code, output = sessions.run(command, folder, DEMO_DEADLINE, pass_on, more)
    failed = [line[4:].strip() for line in output.splitlines() if line.startswith("FAIL  ")]
    if code is None:
        return f"the demonstration: it did not end within {DEMO_DEADLINE:g} s"
    if failed:
        return f"the demonstration's check: {failed[0]}" + (f", and {len(failed) - 1} more" if failed[1:] else "")
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return f"the demonstration, which ends with an error: {last[0] if last else f'exit code {code}'}" if code else None


def break_lesson(course: Course, lesson: Lesson, mutant: Mutant, arguments: list[str]) -> int:
    """Run the demonstration with the fault, then the test that must reject it. 0 if one of them noticed it, else 1."""
    with copied(course, lesson, mutant) as folder:
        show_fault(course, lesson, mutant, folder)
        noticed = run_demo(lesson, folder, arguments)
        finding = run_tests(folder, lesson, [mutant.caught_by], DEADLINE)[mutant.caught_by]
    print()
    print(f"== caught by {noticed}" if noticed else "== the demonstration does not notice this fault")
    if finding.rejects(mutant):
        print(f"== caught by the test {mutant.caught_by}:\n   {finding.first_line}")
    else:
        print(f"== not caught by the test {mutant.caught_by}: {finding.first_line}")
    return 0 if noticed or finding.rejects(mutant) else 1
