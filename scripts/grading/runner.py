"""Inside the sandbox: lay out the lesson with the student's function in it, run the tests, write a record of each."""

import faulthandler
import importlib
import linecache
import os
import re
import shutil
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grading import hiding, witness
from grading.records import Channel, Writer, line
from grading.tamper import Guard

LOADING = "loading"  # what a failure is said to be of, if it comes before the first test
MESSAGE = 12_000  # characters of an error's text that are kept
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)(?:, in ([^\n]+))?')


@dataclass(frozen=True)
class Request:
    """What is to be run: a lesson laid out in `source`, the changed files in it, and the tests.

    `changed` maps paths relative to `source` to texts, `tests` is a folder in it, `names` are names for unittest.
    """

    source: str
    tests: str
    names: list[str]
    changed: dict[str, str] = field(default_factory=dict)
    test_seconds: float = 60.0
    run_seconds: float = 300.0
    collective_seconds: float = 20.0


def perform(request: Request, folder: Path, channel: Channel) -> None:
    """Run all of it in this process. `folder` is the private folder; the lesson is laid out in it."""
    write = Writer(channel.records, channel.nonce)
    write("loading")
    os.chdir(folder / request.tests)
    importlib.invalidate_caches()
    sys.modules["__main__"] = types.ModuleType("__main__")  # what multiprocessing's spawn would start again
    sys.argv = ["unittest"]
    faulthandler.enable(channel.stacks)
    watch = Watch(request.test_seconds, channel.stacks)
    guard = Guard()
    _let_watch(request, folder, channel)
    try:
        tests = unique(load(request.names))
    except BaseException as error:
        write("fail", test=LOADING, **describe(error, folder))
        return
    shorten_collectives(request.collective_seconds)
    write("found", tests=[test.id() for test in tests])
    recorder = Recorder(write, watch, guard, folder)
    recorder.failfast = True
    guard.watch(tests, folder / request.tests)
    guard.watch_object(recorder)
    unittest.TestSuite(tests).run(recorder)
    write("finished")


def _let_watch(request: Request, folder: Path, channel: Channel) -> None:
    """Let a witness write what it sees, also from a child of this process."""

    def tell(event: str, what: str, file: str, function: str) -> None:
        place = f"{_inside(file, folder) or file}, {function}"
        record = {"event": event, "what": what, "place": place}
        if event == "fail":
            message = f"{what} was called in {place}: no exercise needs that, and the test proves nothing"
            record |= {"test": "", "kind": "Tampered", "message": message, "frames": [], "assertion": ""}
        os.write(channel.records, line(channel.nonce, record))

    witness.watch(tell, [*hiding.python_paths(), str(hiding.REPOSITORY / "scripts"), str(folder / request.tests)])


def lay_out(request: Request, folder: Path) -> None:
    """The lesson's files in the private folder, the changed ones among them."""
    shutil.copytree(request.source, folder, dirs_exist_ok=True)
    for path, text in request.changed.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        for compiled in (folder / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            compiled.unlink()  # of the lesson's own module: it holds the solution


class Watch:
    """Writes the stacks of all threads when a test takes too long; the supervisor ends it soon after."""

    def __init__(self, seconds: float, descriptor: int) -> None:
        self._seconds, self._descriptor = seconds, descriptor
        self.again()

    def again(self) -> None:
        """From now on."""
        faulthandler.dump_traceback_later(self._seconds, file=self._descriptor)


class Recorder(unittest.TestResult):
    """Writes a record of each test; the first failure ends the run."""

    def __init__(self, write: Writer, watch: Watch, guard: Guard, folder: Path) -> None:
        super().__init__()
        self._write, self._watch, self._guard, self._folder = write, watch, guard, folder
        self._subtest_failed = False

    def startTest(self, test):  # noqa: D102
        super().startTest(test)
        self._subtest_failed = False
        self._write("start", test=test.id())
        self._watch.again()

    def stopTest(self, test):  # noqa: D102
        super().stopTest(test)
        self._watch.again()

    def addSuccess(self, test):  # noqa: D102
        if replaced := self._guard.mend():
            message = f"{', '.join(replaced[:5])} was replaced: the test proves nothing"
            self._write("fail", test=test.id(), kind="Tampered", message=message, frames=[], assertion="")
            self.stop()
        else:
            self._write("pass", test=test.id(), skipped=False)

    def addExpectedFailure(self, test, err):  # noqa: D102
        self.addSuccess(test)

    def addSkip(self, test, reason):  # noqa: D102
        self._write("pass", test=test.id(), skipped=True)

    def addUnexpectedSuccess(self, test):  # noqa: D102
        self._fail(test, AssertionError("a failure was expected"))

    def addError(self, test, err):  # noqa: D102
        self._fail(test, err[1])

    def addFailure(self, test, err):  # noqa: D102
        self._fail(test, err[1])

    def addSubTest(self, test, subtest, err):  # noqa: D102
        if err is not None and not self._subtest_failed:
            self._subtest_failed = True
            self._fail(test, err[1], subtest._subDescription())

    def _fail(self, test, error: BaseException, subtest: str = "") -> None:
        self._guard.mend()  # or what follows may not work
        self._write("fail", test=test.id(), subtest=subtest, **describe(error, self._folder))
        self.stop()


def load(names: list[str]) -> unittest.TestSuite:
    """The tests with these names. What goes wrong when their module is imported is raised."""
    for name in names:
        module = importlib.import_module(name.split(".")[0])
        for part in name.split(".")[1:2]:
            getattr(module, part)
    return unittest.TestLoader().loadTestsFromNames(names)


def unique(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    """All tests of a suite, each once."""

    def walk(item: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
        if isinstance(item, unittest.TestSuite):
            for part in item:
                yield from walk(part)
        else:
            yield item

    return list({test.id(): test for test in walk(suite)}.values())


def shorten_collectives(seconds: float) -> None:
    """The longest wait in one communication, where a test does not set its own."""
    defaults = getattr(getattr(sys.modules.get("ranks"), "run_ranks", None), "__kwdefaults__", None) or {}
    if isinstance(defaults.get("collective_timeout"), float):
        defaults["collective_timeout"] = min(defaults["collective_timeout"], seconds)


def describe(error: BaseException, folder: Path) -> dict:
    """The error as evidence: its type, text, the line of the test that raised it, and where it came from.

    `frames` are [path in the folder, line, function], outermost first: those of the error, then those that its text
    names (a RankError holds the traceback of a rank).
    """
    try:
        text = str(error)
    except Exception as broken:  # a student's class of errors
        text = f"(its text cannot be shown: {type(broken).__name__})"
    frames: list[list] = []
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain and len(chain) < 8:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    for each in reversed(chain):
        for frame in traceback.extract_tb(each.__traceback__):
            frames.append([frame.filename, frame.lineno or 0, frame.name])
    if isinstance(error, SyntaxError) and error.filename:
        frames.append([error.filename, error.lineno or 0, ""])
    frames += [[file, int(line), name or ""] for file, line, name in _FRAME.findall(text)]
    inside = [[_inside(file, folder), line, name] for file, line, name in frames]
    return {
        "kind": type(error).__name__,
        "failed": isinstance(error, AssertionError),
        "message": text[:MESSAGE].replace(f"{folder}{os.sep}", ""),
        "frames": [frame for frame in inside if frame[0]][:100],
        "assertion": _assertion(error),
    }


def _inside(file: str, folder: Path) -> str:
    path = Path(file)
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""


def _assertion(error: BaseException) -> str:
    """The statement of the tests that raised the error, if one did, on one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tests" in Path(frame.filename).parts]
    if not frames:
        return ""
    text = ""
    for number in range(frames[-1].lineno or 0, (frames[-1].lineno or 0) + 8):
        text = f"{text} {linecache.getline(frames[-1].filename, number).strip()}".strip()
        if text.count("(") <= text.count(")"):
            break
    return text[:500]
