"""The records that a run writes about its tests: one line each, `nonce {json}`; and what they prove."""

import json
import os
import time
from dataclasses import dataclass, field


def line(nonce: str, record: dict) -> bytes:
    """One record as it is written."""
    return f"{nonce} {json.dumps(record)}\n".encode()


def parse(nonce: str, text: str) -> dict | None:
    """The record in a line, None if it is none of ours."""
    given, _, body = text.partition(" ")
    if given != nonce:
        return None
    try:
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


@dataclass
class Channel:
    """What the function of a run gets: where it writes records and stacks (file descriptors), and the nonce."""

    records: int
    stacks: int
    nonce: str


class Writer:
    """Writes records, from the process that made it only: a forked child that goes on with the tests says nothing."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor, self._nonce, self._pid = descriptor, nonce, os.getpid()

    def __call__(self, event: str, **more: object) -> None:
        """Write one. OSError if somebody closed the channel."""
        if os.getpid() != self._pid:
            os._exit(70)
        data = line(self._nonce, {"event": event, **more})
        while data:
            data = data[os.write(self._descriptor, data) :]


class Clock:
    """Which test runs, and since when: the supervisor's deadline for one test, or for what comes between two."""

    GRACE = 2.0  # seconds more, in which the run writes where it hangs

    def __init__(self, nonce: str, seconds: float) -> None:
        self._nonce, self._seconds = nonce, seconds
        self._test, self._since = "", 0.0

    def note(self, text: str) -> None:
        """A line has come."""
        record = parse(self._nonce, text)
        if record is not None:
            between = "" if record["event"] == "finished" else "what prepares the next test"
            self._test = str(record.get("test", "")) if record["event"] == "start" else between
            self._since = time.monotonic()

    def overdue(self) -> str:
        """The test that runs for too long; empty if none does."""
        late = time.monotonic() - self._since > self._seconds + self.GRACE
        return self._test if self._test and late else ""


@dataclass
class Outcome:
    """What the records of a run say."""

    tests: list[str] = field(default_factory=list)  # as they were found, before any ran
    passed: list[str] = field(default_factory=list)  # those that were skipped among them
    skipped: list[str] = field(default_factory=list)
    failure: dict | None = None  # the first record that is no success
    running: str = ""  # a test that began and did not end
    finished: bool = False  # the run came to its own end
    foreign: int = 0  # lines that are no records of ours
    noted: list[str] = field(default_factory=list)  # what a witness saw, for somebody to look at

    @property
    def clean(self) -> bool:
        """Nothing failed, everything that was found ran exactly once and in order, and nothing else was written.

        At least one test was not skipped: else nothing is proven.
        """
        whole = self.finished and not self.foreign and self.failure is None and not self.running
        return whole and self.passed == self.tests and len(self.skipped) < len(self.tests)

    def proves(self, expected: "Outcome") -> bool:
        """Clean, with exactly the tests that were expected; none was skipped that should have run."""
        return self.clean and self.tests == expected.tests and self.skipped == expected.skipped


def read(nonce: str, lines: list[str]) -> Outcome:
    """Put the records together."""
    outcome = Outcome()
    for text in lines:
        record = parse(nonce, text)
        event = record["event"] if record else ""
        if event == "found":
            outcome.tests += [str(test) for test in record.get("tests", [])]
        elif event == "start":
            outcome.running = str(record.get("test", ""))
        elif event == "pass":
            outcome.passed.append(str(record.get("test", "")))
            outcome.skipped += outcome.passed[-1:] if record.get("skipped") else []
            outcome.running = ""
        elif event == "fail":
            outcome.failure = outcome.failure or record
            outcome.running = ""
        elif event == "noted":
            outcome.noted.append(f"{record.get('what')} in {record.get('place')}")
        elif event == "finished":
            outcome.finished = True
        elif event != "loading":
            outcome.foreign += 1
    return outcome
