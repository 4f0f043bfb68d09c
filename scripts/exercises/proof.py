"""What CI proves of exercises: the lesson's code solves each, and its tests notice where it is missing."""

import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from exercises.folder import borrowed_files, lesson_files, write_folder
from exercises.judge import Verdict, failed_tests, judge
from exercises.model import Exercise, load_exercises
from exercises.starter import starter_files, stubbed
from faults import UserError
from lessons import Course, Lesson


@dataclass(frozen=True)
class Finding:
    """One thing that was proven of an exercise, or that is wrong with it (`fault` says what)."""

    lesson: str
    exercise: str
    claim: str  # solution, starter or stub
    seconds: float
    fault: str = ""


class Bench:
    """A lesson laid out once with its compiled modules; each proof gets a copy in which other functions are stubs."""

    def __init__(self, course: Course, lesson: Lesson, home: Path) -> None:
        self.course, self.lesson, self.base, self.home = course, lesson, home / "base", home
        self.exercises = load_exercises(lesson)
        files = {**lesson_files(course, lesson), **borrowed_files(course, lesson)}
        self.sources = {path: data.decode() for path, data in files.items() if path.endswith(".py")}
        write_folder(self.base, {path: data for path, data in files.items() if not path.endswith(".md")})
        compileall.compile_dir(self.base, quiet=2)

    def prove_solution(self, deadline: float) -> Finding:
        """Every test that an exercise names passes with the lesson's own code."""
        verdict = self._judge("solution", [], self._all_tests(), deadline)
        fault = "" if verdict.status == "passed" else f"{verdict.status}: {verdict.test} {verdict.message}"
        return Finding(self.lesson.id, "(all)", "solution", verdict.seconds, fault)

    def prove_stub(self, exercise: Exercise, deadline: float) -> Finding:
        """Where only this exercise is missing, its tests fail and show its hint."""
        verdict = self._judge(exercise.id, [exercise], exercise.tests, deadline)
        if verdict.status == "failed" and not _shows(verdict.output, exercise.stub_text):  # at the first failure
            verdict = self._judge(exercise.id, [exercise], exercise.tests, deadline, failfast=False)
        fault = ""
        if verdict.status != "failed":
            fault = f"the tests do not notice that it is missing: {verdict.status} {verdict.message}"
        elif not _shows(verdict.output, exercise.stub_text):
            fault = f"its hint is not shown: {verdict.test} {verdict.message}"
        return Finding(self.lesson.id, exercise.id, "stub", verdict.seconds, fault)

    def prove_starter(self, deadline: float) -> Finding:
        """The starter: the same bytes twice, its stubs are the exercises, each module imports, each exercise fails."""
        files = starter_files(self.course, self.lesson)
        faults = [] if files == starter_files(self.course, self.lesson) else ["two starters differ"]
        code = "".join(files[path].decode() for path in files if path.endswith(".py") and path in self.sources)
        ids = set(re.findall(r'NotImplementedError\(\s*"\[([^]]+)\] ', code))
        known = {exercise.id for exercise in self.exercises}
        faults += [f"stubs of {sorted(ids)}, exercises {sorted(known)}"] if ids != known else []
        folder = self._copy("starter", self.exercises)
        try:
            faults += self._import_faults(folder)
            verdict = judge(
                folder / self.lesson.path / "tests", self._all_tests(), deadline, failfast=False, kept=2**28
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed = failed_tests(verdict.output)
        quiet = [exercise.id for exercise in self.exercises if not any(_covers(exercise, test) for test in failed)]
        faults += [f"nothing fails of {', '.join(quiet)} ({verdict.status})"] if quiet else []
        return Finding(self.lesson.id, "(all)", "starter", verdict.seconds, "; ".join(faults))

    def _all_tests(self) -> list[str]:
        return sorted({test for exercise in self.exercises for test in exercise.tests})

    def _copy(self, name: str, stubs: list[Exercise]) -> Path:
        """A folder of its own in which the functions of these exercises are stubs."""
        folder = self.home / name
        shutil.copytree(self.base, folder)
        for path, text in stubbed(self.lesson, stubs, self.sources).items():
            for compiled in (folder / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
                compiled.unlink()  # so that no clock can make it pass for the stub's
            (folder / path).write_text(text, encoding="utf-8")
        return folder

    def _judge(self, name: str, stubs: list[Exercise], tests: Sequence[str], deadline: float, **how: bool) -> Verdict:
        folder = self._copy(name, stubs)
        try:
            return judge(folder / self.lesson.path / "tests", tests, deadline, **how)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _import_faults(self, folder: Path) -> list[str]:
        names = [path.stem for path in self.lesson.modules()]
        code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folder.glob("phases/*/*/code")))}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
        return [f"a module does not import: {run.stderr[-500:]}"] if run.returncode else []


def _shows(output: str, text: str) -> bool:
    """Whether a text was printed, however its lines were broken."""
    return " ".join(text.split()) in " ".join(output.split())


def _covers(exercise: Exercise, test: str) -> bool:
    """Whether a test that failed is one of the exercise's; of a class that could not begin, all are."""
    return any(test == name or test.startswith(f"{name}.") or name.startswith(f"{test}.") for name in exercise.tests)


def prove_lessons(
    course: Course,
    lessons: list[Lesson],
    ids: list[str],
    deadline: float,
    jobs: int,
    tell: Callable[[Finding], None],
    solutions: bool = True,
) -> list[Finding]:
    """All proofs of these lessons, or those of some exercises alone, `jobs` at a time; `tell` hears of each.

    Without `solutions` what the lessons' own tests prove is not proven again.
    """
    known = [exercise.id for lesson in lessons for exercise in load_exercises(lesson)]
    if unknown := [name for name in ids if name not in known]:
        raise UserError(f"no exercise {unknown[0]!r} in {', '.join(lesson.id for lesson in lessons)}")
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; 1 or more are expected")
    with tempfile.TemporaryDirectory(prefix="course-prove-") as holder, ThreadPoolExecutor(jobs) as pool:
        started = []
        for lesson in lessons:
            bench = Bench(course, lesson, Path(holder).resolve() / lesson.id)
            if bench.exercises and not ids:
                if solutions:
                    started.append(pool.submit(bench.prove_solution, 6 * deadline))
                started.append(pool.submit(bench.prove_starter, 6 * deadline))
            for exercise in bench.exercises:
                if not ids or exercise.id in ids:
                    started.append(pool.submit(bench.prove_stub, exercise, deadline))
        findings = []
        for future in started:
            findings.append(future.result())
            tell(findings[-1])
    return findings
