"""From a verdict to what a learner can use: expected and observed, the rank, the place in the learner's own file."""

import ast
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from exercises.source import parse
from grading.judge import Verdict

_NOT_EQUAL = re.compile(r"^(?:\w+ differ: )?(.{1,400}?) != (.{1,400}?)(?: : .*)?$")
_RANK = re.compile(r"\brank (\d+)\b")
_DEADLOCK = re.compile(r"\bDeadlockError\b|\brank \d+ waits for rank \d+")  # a word in any text is none
_WAITS = re.compile(r"[^.;\n]*\bwait(?:s|ed|ing)? for\b[^\n]*")
_STACK = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
AROUND = 3  # lines before and after
SHOWN, OBSERVED = 2000, 400  # characters of a message, and of what was observed


@dataclass
class Evidence:
    """Why an answer is not right. `line` is in the learner's file; `lines` are (number, text) around it."""

    test: str = ""
    expected: str = ""
    observed: str = ""
    rank: int | None = None
    waiting: str = ""  # who waited for whom
    file: str = ""
    line: int | None = None
    lines: list[tuple[int, str]] = field(default_factory=list)
    message: str = ""
    output: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without what is not known."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None, [])}


@dataclass
class Cut:
    """One module of a learner's: its file, its text, and the text of the lesson's module with the function in it."""

    file: str  # as it was handed in
    text: str
    grafted: str
    path: str  # in the lesson

    def line(self, number: int) -> int | None:
        """The line of the learner's file that a line of the grafted module is; None if it is the lesson's own."""
        if self.text == self.grafted:
            return number
        theirs, ours = parse(self.text), parse(self.grafted)
        inner = None
        for name, node in _functions(ours.tree):
            span = ours.span(node)
            if span.first <= number <= span.last and (inner is None or span.first >= inner[1].first):
                inner = (name, span)
        for name, node in _functions(theirs.tree) if inner else ():
            span = theirs.span(node)
            same = [line.strip() for line in ours.lines[inner[1].first - 1 : inner[1].last]]
            if name == inner[0] and [line.strip() for line in theirs.lines[span.first - 1 : span.last]] == same:
                return span.first + number - inner[1].first
        return None

    def first_line(self, qualname: str) -> int | None:
        """Where the learner's function begins."""
        source = parse(self.text)
        return next((source.span(node).first for name, node in _functions(source.tree) if name == qualname), None)


def _functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, ast.stmt]]:
    """Functions at the top and methods of classes, with their qualified names."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found += _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((f"{prefix}{node.name}", node))
        elif isinstance(node, ast.If | ast.Try):
            found += _functions(node, prefix)
    return found


def collect(verdict: Verdict, cuts: list[Cut], functions: tuple[str, ...]) -> Evidence:
    """The evidence of a verdict that is not correct."""
    failure = verdict.failure
    message = str(failure.get("message", "")).strip()
    evidence = Evidence(test=verdict.test, message=message[:SHOWN], output=verdict.output[-SHOWN:].strip())
    if failure:
        _values(evidence, failure, message)
        if rank := _RANK.search(message):
            evidence.rank = int(rank[1])
        if _DEADLOCK.search(f"{failure.get('kind')}: {message}"):
            evidence.waiting = "; ".join(part.strip() for part in _WAITS.findall(message))[:SHOWN] or message[:SHOWN]
    frames = [(str(file), int(line)) for file, line, _ in failure.get("frames", [])]
    frames += [(file, int(line)) for file, line, _ in reversed(_STACK.findall(verdict.stacks))]
    _place(evidence, frames, cuts, functions)
    if verdict.stacks and evidence.line and not failure:
        evidence.observed = f"it was still in line {evidence.line} of {evidence.file}"
    return evidence


def _values(evidence: Evidence, failure: dict, message: str) -> None:
    """Expected and observed: of `assertEqual(observed, expected)`; else what the test asserts, and what was raised."""
    kind, subtest = failure.get("kind", "error"), failure.get("subtest", "")
    evidence.expected = failure.get("assertion", "")
    first = message.splitlines()[0] if message else ""
    equal = _NOT_EQUAL.match(first)
    if kind == "AssertionError" and equal:
        evidence.observed, value = equal[1], equal[2]
        evidence.expected = f"{value}   ({evidence.expected})" if evidence.expected else value
    else:
        told = " ".join(message.split())[:OBSERVED] if kind == "AssertionError" else first  # a list of differences
        evidence.observed = f"{kind}: {told}" if told else kind
    evidence.test += f" {subtest}" if subtest else ""


def _place(evidence: Evidence, frames: list[tuple[str, int]], cuts: list[Cut], functions: tuple[str, ...]) -> None:
    """The innermost frame in the learner's own lines; else where the function begins."""
    for file, number in reversed(frames):
        for cut in cuts:
            if file.endswith(cut.path) and (line := cut.line(number)):
                evidence.file, evidence.line = cut.file, line
                evidence.lines = _around(cut.text, line)
                return
    module, _, qualname = functions[0].partition(".")
    for cut in cuts:
        if cut.path.endswith(f"/{module}.py") and (line := cut.first_line(qualname)):
            evidence.file, evidence.line = cut.file, line
            evidence.lines = _around(cut.text, line + AROUND)


def _around(text: str, line: int) -> list[tuple[int, str]]:
    lines = text.split("\n")  # as Python counts them: a form feed ends none
    first, last = max(1, line - AROUND), min(len(lines), line + AROUND)
    return [(number, lines[number - 1][:200]) for number in range(first, last + 1)]
