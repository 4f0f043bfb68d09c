"""Is a changed module a right answer to an exercise? Its tests decide, in a sandbox.

    with Judge(course, course.find("79")) as judge:
        verdict = judge.judge(exercise, {"schedule": text_of_the_module})

The same tests are first run on the lesson as it is: what has to pass, and what is skipped on this machine, is known
from there. If that run fails, the machine cannot judge, and nobody's points are decided.
"""

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exercises.model import Exercise
from grading import hiding
from grading import isolation as apart
from grading.isolation import Isolation
from grading.layout import Layout
from grading.limits import Limits
from grading.loading import raised_by
from grading.plain import Plain
from grading.records import Outcome, read
from grading.runner import LOADING, Request
from grading.sandbox import Ended
from grading.zygote import PRELOADED, SupervisorLost, Zygote
from lessons import Course, Lesson

PATIENCE, FACTOR = 15.0, 5  # seconds for one test; and so many times what all tests take with the lesson's own code
TRIES = 3  # of a run whose files somebody else has changed meanwhile
REASONS = {
    "deadline": "the exercise took too long",
    "test deadline": "a test took too long",
    "memory": "too much memory",
    "processes": "too many processes",
    "output": "too much output",
    "records": "the channel of the results was flooded",
    "lost": "the code ended the processes that watch it",
}


@dataclass
class Verdict:
    """correct, incorrect or error (this machine cannot judge it); with what was seen.

    `failure` is the record of the test that failed (see runner.describe), `stacks` where a run hung, `own_seconds` how
    long the tests took with the lesson's own code.
    """

    status: str
    reason: str = ""
    test: str = ""
    tests: int = 0
    passed: int = 0
    failure: dict = field(default_factory=dict)
    stacks: str = ""
    output: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    own_seconds: float = 0.0
    peak_memory: int = 0
    peak_processes: int = 0
    reused: bool = False
    noted: list[str] = field(default_factory=list)  # for the instructor


class Stopped(Exception):
    """`Judge.stop` was called: there is no verdict."""


class Judge:
    """Judges for one lesson. Threads may share it: each gets a process of its own that runs its tests."""

    def __init__(
        self,
        course: Course,
        lesson: Lesson,
        limits: Limits | None = None,
        isolation: Isolation | None = None,
        private: Iterable[Path] = (),
    ):
        """`private`: files and folders of the class; no run sees them, nor the folders that they lie in."""
        self.lesson, self.limits = lesson, limits or Limits()
        self._home = tempfile.TemporaryDirectory(prefix="cg-", ignore_cleanup_errors=True)
        home = Path(self._home.name).resolve()
        (home / "probe").mkdir()
        self.isolation = apart.probe(home / "probe") if isolation is None else isolation
        self.layout = Layout(course, lesson, home / "lesson")
        self._hide = hiding.with_folders([*private, course.root / "phases", hiding.REPOSITORY / "scripts"])
        self._hide.append(str(self.layout.folder))
        self._lock = threading.Lock()
        self._known: dict[str, Future] = {}
        self._local = threading.local()
        self._runs: list[Zygote | Plain] = []
        self._stopped = False

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._runs:
            process.close()
        self._home.cleanup()

    def stop(self) -> None:
        """End all runs that are going on; the threads that wait for their verdicts get Stopped."""
        self._stopped = True
        with self._lock:
            for process in self._runs:
                process.interrupt()

    def prepare(self, exercise: Exercise) -> None:
        """Run the tests on the lesson as it is, unless that has been done: what every answer is compared with."""
        self._expected(exercise)

    def judge(self, exercise: Exercise, changed: dict[str, str]) -> Verdict:
        """The verdict on the lesson with these modules' texts in place of its own.

        A module that the lesson lacks is added to it. A text that was judged before is not run again: `reused` says so.
        """
        changed = {module: text for module, text in changed.items() if text != self.layout.source(module)}
        if not changed:
            expected, ended = self._expected(exercise)
            return replace(self._correct(expected, ended), reused=True) if expected.clean else _unable(expected, ended)
        key = hashlib.sha256(json.dumps([exercise.tests, sorted(changed.items())]).encode()).hexdigest()
        return self._once(key, lambda: self._judge(exercise, changed))

    def _judge(self, exercise: Exercise, changed: dict[str, str]) -> Verdict:
        expected, ended = self._expected(exercise)
        if not expected.clean:
            return _unable(expected, ended)
        slow = FACTOR * ended.seconds  # on this machine, now: a right answer must not fail because others use it, too
        test_seconds = min(PATIENCE + slow, max(self.limits.test_seconds, slow))
        own = ended.seconds
        outcome, ended = self._run(exercise, changed, test_seconds, max(self.limits.run_seconds, slow))
        if ended.reason == "setup":
            return Verdict("error", f"the run could not be started: {ended.detail}")
        noted = [each for each in outcome.noted if each not in expected.noted]
        verdict = replace(self._correct(outcome, ended), own_seconds=own, noted=noted)
        if ended.whole and outcome.proves(expected) and not ended.detail:
            return verdict
        why = _why(outcome, expected, ended)
        if why["test"] == LOADING and not self._is_theirs(why["failure"], changed):
            failure = why["failure"]
            what = f"{failure['kind']}: {failure['message'][:500]}"
            reason = f"the tests could not be loaded, and no line of what was handed in was at work: {what}"
            return replace(verdict, status="error", **why | {"reason": reason})
        return replace(verdict, status="incorrect", **why)

    def _is_theirs(self, failure: dict, changed: dict[str, str]) -> bool:
        texts = {self.layout.path(module): (text, self.layout.source(module)) for module, text in changed.items()}
        return raised_by(failure, texts)

    def _expected(self, exercise: Exercise) -> tuple[Outcome, Ended]:
        """How the tests go on the lesson as it is; a second try if they fail, for a machine that was busy."""

        def attempt() -> tuple[Outcome, Ended]:
            seconds = FACTOR * self.limits.run_seconds
            outcome, ended = self._run(exercise, {}, seconds, seconds)
            return (outcome, ended) if outcome.clean else self._run(exercise, {}, seconds, seconds)

        return self._once(f"as it is: {' '.join(exercise.tests)}", attempt)

    def _run(self, exercise: Exercise, changed: dict[str, str], test: float, run: float) -> tuple[Outcome, Ended]:
        request = Request(
            source=str(self.layout.folder),
            tests=self.layout.tests,
            names=list(exercise.tests),
            changed={self.layout.path(module): text for module, text in changed.items()},
            test_seconds=test,
            run_seconds=run,
            collective_seconds=self.limits.collective_seconds,
        )
        touched: list[str] = []
        for _ in range(TRIES):
            repairs = self.layout.repairs
            ended = self._perform(request)
            outcome = read(ended.nonce, ended.records)
            if outcome.clean and self.isolation.mounts:
                return outcome, ended
            touched = self.layout.mend()
            if not self.isolation.mounts and touched:
                ended.reason, ended.detail = "exited", f"it changed files outside its folder: {', '.join(touched[:5])}"
            if not self.isolation.mounts or self.layout.repairs == repairs:
                return outcome, ended
        why = f"files of the laid out lesson are changed from outside: {', '.join(touched[:5])}"
        return Outcome(), Ended("setup", detail=why)  # a run cannot write there: it was somebody else

    def _perform(self, request: Request) -> Ended:
        try:
            if self._stopped:
                raise Stopped
            ended = self._process().run(request)
            if ended.reason == "cancelled" or self._stopped:
                raise Stopped
            return ended
        except SupervisorLost as error:
            if self._stopped:
                raise Stopped from None
            return Ended("lost", detail=str(error))

    def _process(self) -> "Zygote | Plain":
        if not hasattr(self._local, "process"):
            if self.isolation.fork:
                preloaded = PRELOADED if self.layout.needs_torch else ()
                process = Zygote(self.limits, self.isolation, [self.layout.tests], preloaded, self._hide)
            else:
                process = Plain(self.limits, [self.layout.tests])
            self._local.process = process
            with self._lock:
                self._runs.append(self._local.process)
        return self._local.process

    def _once(self, key: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, done by the first thread that asks; a Verdict is marked as reused for the others."""
        with self._lock:
            first = key not in self._known
            future = self._known.setdefault(key, Future())
        if first:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                raise
            return future.result()
        result = future.result()
        return replace(result, reused=True) if isinstance(result, Verdict) else result

    @staticmethod
    def _correct(outcome: Outcome, ended: Ended) -> Verdict:
        return Verdict(
            "correct",
            tests=len(outcome.tests),
            passed=len(outcome.passed),
            output=ended.output,
            seconds=ended.seconds,
            cpu_seconds=ended.cpu_seconds,
            peak_memory=ended.peak_memory,
            peak_processes=ended.peak_processes,
            noted=outcome.noted,
        )


def _unable(expected: Outcome, ended: Ended) -> Verdict:
    what = ended.detail or ended.reason
    if expected.failure:
        what = f"{expected.failure['test']}: {expected.failure['kind']}: {expected.failure['message'][:500]}"
    if expected.tests and expected.skipped == expected.tests:
        return Verdict("error", "every test is skipped on this machine", output=ended.output)
    return Verdict("error", f"the tests fail here on the lesson as it is: {what}", output=ended.output)


def _why(outcome: Outcome, expected: Outcome, ended: Ended) -> dict[str, Any]:
    """The first thing that keeps a run from being a proof."""
    at = outcome.running
    if outcome.failure is not None:
        record = outcome.failure
        hung = {"stacks": ended.stacks} if ended.stacks else {}
        return {"reason": "a test failed", "test": record["test"], "failure": record, **hung}
    if ended.reason != "exited":
        detail = f" ({ended.detail})" if ended.detail and ended.detail != at else ""
        return {"reason": f"{REASONS[ended.reason]}{detail}", "test": at, "stacks": ended.stacks}
    if ended.detail:
        return {"reason": ended.detail, "test": at}
    if not outcome.finished:
        code = ended.exit_code
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return {"reason": f"the process ended {how} in the middle of the tests", "test": at, "stacks": ended.stacks}
    if not ended.whole and ended.reason == "exited":
        reason = f"the process ended with exit code {ended.exit_code}, though not at the end of its own program"
        return {"reason": reason, "test": at}
    if outcome.foreign:
        return {"reason": "something else was written into the channel of the results", "test": at}
    skipped = [test for test in outcome.skipped if test not in expected.skipped]
    if skipped:
        return {"reason": "a test was skipped that runs with the lesson's own code", "test": skipped[0]}
    missing = [test for test in expected.tests if test not in outcome.passed]
    return {"reason": "not every test ran exactly once", "test": missing[0] if missing else ""}
