"""Grade a class: some students at a time, each report written when it is done, so that an interruption loses little."""

import contextlib
import hashlib
import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from exercises.model import Exercise
from faults import UserError
from grading import report as reports
from grading.grade import Result, grade
from grading.judge import Judge
from grading.overrides import Override
from grading.submissions import Class, Work
from inputs import json_text, make_folder, write_output

FORMAT = 6  # another one, and --resume keeps no earlier report
Tell = Callable[[dict[str, Any], bool], None]


@dataclass
class ClassRun:
    """What is graded and where reports go."""

    judge: Judge
    exercises: list[Exercise]
    of: Class
    out: Path
    overrides: dict[tuple[str, str], Override]
    command: list[str]  # that graded them, without --out, --only and --exercise
    resume: bool = False

    def run(self, works: list[Work], jobs: int, tell: Tell) -> list[dict[str, Any]]:
        """The reports of these students, in their order; `tell(report, kept)` hears of each when it is written.

        Interrupted, it leaves tables of the class that hold what is known until then.
        """
        make_folder(self.out)
        folders = self._folders()
        done: dict[str, dict[str, Any]] = {}

        def one(work: Work, kept: list[Result] | None = None) -> None:
            report = self._report(work, kept)
            self._write(self.out / folders[work.student.id], report)
            done[work.student.id] = report
            tell(report, kept is not None)

        todo = []
        for work in works:
            if kept := self._kept(self.out / folders[work.student.id], work) if self.resume else None:
                one(work, kept)
            else:
                todo.append(work)
        try:
            if todo:
                self.write_class(self.with_others(list(done.values())), unfinished=True)
                self._run(todo, jobs, one)
        except BaseException:
            self.write_class(self.with_others(list(done.values())), unfinished=True)
            raise
        return [done[work.student.id] for work in works]

    def _run(self, works: list[Work], jobs: int, one: Callable[[Work], None]) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            many = len(works) > jobs  # then nearly every exercise is needed, and students would wait for each in turn
            first = [pool.submit(self.judge.prepare, exercise) for exercise in self.exercises if many]
            started = [pool.submit(one, work) for work in works]
            try:
                for future in started:
                    future.result()
            except BaseException:
                for future in first + started:
                    future.cancel()
                self.judge.stop()  # or leaving the pool would wait for those who are being graded
                raise

    def waiting(self, works: list[Work]) -> int:
        """How many of these students are to be graded: of the others the reports still hold."""
        folders = self._folders() if self.resume else {}
        return sum(not folders or self._kept(self.out / folders[work.student.id], work) is None for work in works)

    def with_others(self, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """These reports and, after `--only` with `--resume`, those of the others that still hold."""
        known = {report["student"]["id"]: report for report in done}
        folders = self._folders()
        for work in self.of.works if self.resume else ():
            if work.student.id not in known:
                folder = self.out / folders[work.student.id]
                if (kept := self._kept(folder, work)) is not None:
                    known[work.student.id] = self._report(work, kept)
                    self._write(folder, known[work.student.id])  # overrides may have changed
        return [known[work.student.id] for work in self.of.works if work.student.id in known]

    def write_class(self, done: list[dict[str, Any]], unfinished: bool = False) -> None:
        """class.csv, class.md and class.json; `unfinished`: of some students there is no report yet."""
        lesson = self.judge.lesson
        write_output(self.out / "class.csv", reports.class_csv(done, self.exercises), force=True)
        text = reports.class_md(lesson, done, self.exercises, self.of, self.judge.isolation)
        if unfinished:
            head, _, rest = text.partition("\n")
            text = (
                f"{head}\n\n**Not finished: {len(done)} of {len(self.of.works)} so far.** `--resume` goes on.\n{rest}"
            )
        write_output(self.out / "class.md", text, force=True)
        write_output(self.out / "class.json", json_text(self.class_json(done)), force=True)

    def class_json(self, done: list[dict[str, Any]]) -> dict[str, Any]:
        """All of it as data; `unmatched` and `stray` are what nobody is graded for."""
        return {
            "lesson": self.judge.lesson.id,
            "isolation": self.judge.isolation.to_json(),
            "unmatched": [{"label": label, "reason": reason} for label, reason in self.of.unmatched],
            "stray": self.of.stray,
            "students": [{key: value for key, value in report.items() if key != "isolation"} for report in done],
        }

    def _folders(self) -> dict[str, str]:
        """A folder's name for each student of the class, no two of them the same, whatever the system's capitals."""
        found: dict[str, str] = {}
        used: set[str] = {"class.csv", "class.md", "class.json"}
        for work in self.of.works:
            name = base = reports.folder_name(work.student.id)
            number = 1
            while name.casefold() in used:
                number += 1
                name = f"{base}~{number}"
            used.add(name.casefold())
            found[work.student.id] = name
        return found

    def _key(self, work: Work) -> str:
        """A hash of all that decides a verdict: what was handed in, the lesson, the exercises, the limits."""
        facts = [FORMAT, work.digest, self.judge.layout.version, asdict(self.judge.limits)]
        facts += [self.judge.isolation.to_json(), [asdict(exercise) for exercise in self.exercises]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _kept(self, folder: Path, work: Work) -> list[Result] | None:
        """Results of an earlier run that still hold: same files, same lesson, nothing undecided."""
        try:
            old = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            names = {item.name for item in fields(Result)}
            results = [Result(**{k: v for k, v in item.items() if k in names}) for item in old["exercises"]]
            if old["key"] != self._key(work):
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        for result in results:
            if result.override:
                result.points, result.override = result.override["was"], None
        return None if any(result.status == "error" for result in results) else results

    def _report(self, work: Work, kept: list[Result] | None) -> dict[str, Any]:
        begin = time.monotonic()
        results = grade(self.judge, self.exercises, work) if kept is None else kept
        for result in results:
            if override := self.overrides.get((work.student.id, result.exercise)):
                result.override = {"was": result.points, "reason": override.reason}
                result.points = override.points
        command = shlex.join([*self.command, "--out", "again", "--only", work.student.id])
        more = {"key": self._key(work), "seconds": round(time.monotonic() - begin, 3), "command": command}
        return reports.student_json(self.judge, work, results, self.exercises, more)

    def _write(self, folder: Path, report: dict[str, Any]) -> None:
        make_folder(folder)
        write_output(folder / "report.md", reports.student_md(report), force=True)
        if report["points"] is not None:
            write_output(folder / "results.json", json_text(reports.gradescope_json(report)), force=True)
        write_output(folder / "report.json", json_text(report), force=True)  # last: --resume goes by it


def check_out(out: Path, resume: bool, lesson: str, exercises: list[str]) -> None:
    """UserError unless reports on these exercises of this lesson may be written there."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file; a folder for the reports is expected")
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise UserError(f"{out} is not empty: --resume goes on with it, or name a new folder")
    for file in sorted(out.glob("*/report.json")):
        other, ids = lesson, exercises
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # what is no report is written anew
            report = json.loads(file.read_bytes())
            other = report["lesson"]
            ids = [item["exercise"] for item in report["exercises"]]
        if other != lesson:
            raise UserError(f"{file}: a report on {other}; a folder for reports on {lesson} is expected")
        if ids != exercises:
            more = f"it would be replaced by one on {', '.join(exercises)}; name a new folder"
            raise UserError(f"{file}: a report on {', '.join(ids)}; {more}")
