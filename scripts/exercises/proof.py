"""What CI proves of exercises: who has solved those before it can solve each, and its tests notice if not."""

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from exercises.folder import borrowed_files, lesson_files, write_folder
from exercises.judge import judge
from exercises.model import Exercise, load_exercises, with_dependencies
from exercises.starter import starter_files, stubbed
from exercises.surgery import is_stub
from lessons import Course, Lesson


@dataclass(frozen=True)
class Finding:
    """One thing that was proven of an exercise, or that is wrong with it (`fault` says what)."""

    lesson: str
    exercise: str
    claim: str
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

    def copy(self, name: str, stubs: list[Exercise]) -> Path:
        """A folder of its own in which the functions of these exercises are stubs."""
        folder = self.home / name
        shutil.copytree(self.base, folder)
        for path, text in stubbed(self.lesson, stubs, self.sources).items():
            for compiled in (folder / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
                compiled.unlink()  # so that no clock can make it pass for the stub's
            (folder / path).write_text(text, encoding="utf-8")
        return folder

    def prove(self, exercise: Exercise, claim: str, deadline: float) -> Finding:
        """Run the exercise's tests where it and what it depends on are solved, or where it alone of these is a stub."""
        solved = with_dependencies(self.exercises, exercise)
        if claim == "stub":
            solved.remove(exercise)
        folder = self.copy(f"{exercise.id}-{claim}", [other for other in self.exercises if other not in solved])
        try:
            verdict = judge(folder / self.lesson.path / "tests", exercise.tests, deadline)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        said = " ".join(verdict.output.split())
        if claim == "solved":
            hit = [other.id for other in self.exercises if f"[{other.id}] " in said]
            because = f"; they need {', '.join(hit)}" if hit else ""
            fault = "" if verdict.status == "passed" else f"{verdict.status}{because}: {verdict.test} {verdict.message}"
        elif verdict.status == "failed":
            fault = "" if " ".join(exercise.stub_text.split()) in said else f"its hint is not shown: {verdict.message}"
        else:
            fault = f"the tests do not notice that it is missing: {verdict.status} {verdict.message}"
        return Finding(self.lesson.id, exercise.id, claim, verdict.seconds, fault)

    def prove_starter(self) -> list[Finding]:
        """The starter is the same bytes twice, its stubs are the exercises, and every module of it imports."""
        files = starter_files(self.course, self.lesson)
        faults = [] if files == starter_files(self.course, self.lesson) else ["two starters differ"]
        for exercise in self.exercises:
            for module, names in exercise.by_module.items():
                text = files[self.lesson.rel("code", f"{module}.py")].decode()
                faults += [f"{module}.{name} is no stub" for name in names if not is_stub(text, name)]
        folder = self.home / "starter"
        write_folder(folder, files)
        names = [path.stem for path in self.lesson.modules()]
        code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
        path = os.pathsep.join(map(str, folder.glob("phases/*/*/code")))
        environment = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
        faults += [f"a module does not import: {run.stderr[-500:]}"] if run.returncode else []
        return [Finding(self.lesson.id, "(all)", "starter", 0.0, "; ".join(faults))]


def prove_lesson(
    course: Course, lesson: Lesson, ids: list[str], deadline: float, jobs: int, tell: Callable[[Finding], None]
) -> list[Finding]:
    """All proofs of a lesson, `jobs` at a time; `tell` hears of each as it is done."""
    with tempfile.TemporaryDirectory(prefix="course-prove-") as holder:
        bench = Bench(course, lesson, Path(holder).resolve())
        wanted = [exercise for exercise in bench.exercises if not ids or exercise.id in ids]
        findings = [] if ids or not wanted else bench.prove_starter()
        for finding in findings:
            tell(finding)
        with ThreadPoolExecutor(jobs) as pool:
            started = [
                pool.submit(bench.prove, exercise, claim, deadline)
                for exercise in wanted
                for claim in ("solved", "stub")
            ]
            for future in started:
                findings.append(future.result())
                tell(findings[-1])
    return findings
