"""Runs tests in processes that have torch already: a line of JSON asks for a run, a line answers when it has ended.

A question: {"folder", "python_path", "result", "names"}. Two answers: the number of the process that runs the tests,
in a session of its own, and "ended" when it has. RESULT becomes a JSON object: a test's name to null if it passed, else
to (kind, the error's type, what it says). Where there is no fork, or it is unsafe, a process starts from nothing.
"""

import json
import os
import site
import subprocess
import sys
import unittest
from contextlib import suppress
from pathlib import Path


class Recorder(unittest.TestResult):
    """Remembers the first thing that went wrong with a test: "failed", "error" or "skipped"."""

    def __init__(self):
        super().__init__()
        self.failfast = True  # the first failing subtest is enough
        self.found: list[tuple[str, str, str]] = []

    def addFailure(self, test, err):  # noqa: D102
        super().addFailure(test, err)
        self._note("failed", err)

    def addError(self, test, err):  # noqa: D102
        super().addError(test, err)
        self._note("error", err)

    def addSubTest(self, test, subtest, err):  # noqa: D102
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note("failed" if issubclass(err[0], test.failureException) else "error", err)

    def addSkip(self, test, reason):  # noqa: D102
        super().addSkip(test, reason)
        self.found.append(("skipped", "SkipTest", reason))

    def addUnexpectedSuccess(self, test):  # noqa: D102
        super().addUnexpectedSuccess(test)
        self.found.append(("failed", "AssertionError", "an unexpected success"))

    def _note(self, kind: str, error: tuple) -> None:
        self.found.append((kind, error[0].__name__, str(error[1]).strip()))


def run(result: str, names: list[str]) -> None:
    """Run each test by itself, so that what the preparation of its class did wrong is the test's own."""
    outcomes = {}
    for name in names:
        recorder = Recorder()
        unittest.defaultTestLoader.loadTestsFromName(name).run(recorder)
        outcomes[name] = recorder.found[0] if recorder.found else None
        if recorder.testsRun == 0 and not recorder.found:
            outcomes[name] = ("error", "LookupError", "no test of that name ran")
    Path(result).write_text(json.dumps(outcomes), encoding="utf-8")


def _environment(question: dict) -> dict[str, str]:
    temporary = os.path.join(question["folder"], "tmp")
    os.makedirs(temporary, exist_ok=True)
    more = {"TMPDIR": temporary, "PYTHONPATH": question["python_path"], "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **more}  # a copy is used once, its bytecode never


def _become_the_run(question: dict) -> None:
    """In a forked process: be the run, and end."""
    code = 1
    try:
        os.setsid()
        with open(os.path.join(question["folder"], "output.txt"), "ab") as output, open(os.devnull) as nothing:
            for there, here in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(there.fileno(), here)
        os.environ.update(_environment(question))
        os.chdir(question["folder"])
        site.addsitedir(question["python_path"])
        sys.dont_write_bytecode = True
        run(question["result"], question["names"])
        code = 0
    finally:
        os._exit(code)


def serve() -> None:
    """Answer questions until there are no more."""
    warm = sys.platform == "linux"
    if warm:
        from grading.linux import become_subreaper
        from grading.processes import end_descendants

        become_subreaper()  # a test's command may have a session of its own: it comes to us, and ends here
        with suppress(ImportError):  # the tests say so
            import torch  # noqa: F401  # every run has it then
    for line in sys.stdin:
        question = json.loads(line)
        if warm:
            if (pid := os.fork()) == 0:
                _become_the_run(question)
            print(pid, flush=True)
            os.waitpid(pid, 0)
            end_descendants()
        else:
            with open(os.path.join(question["folder"], "output.txt"), "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, __file__, question["result"], *question["names"]],
                    cwd=question["folder"],
                    env=_environment(question),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            print(process.pid, flush=True)
            process.wait()
        print("ended", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1], sys.argv[2:])
    else:
        serve()
