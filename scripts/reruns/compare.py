"""Whether a command's output still says what a text quotes of it. Times are masked; the other numbers must agree."""

import re

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_TIMED = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)(\s*)(?=(?:ns|us|ms|s|seconds?|min|[kMG]?B/s|tokens/s)\b)")
_COLUMN = re.compile(r"(?:^|[\s(])(?:ns|us|ms|s|seconds|time|measured|tokens/s)(?:$|[\s),])|/s\b")
_RULE = re.compile(r"^\s*-{2,}(?:\s+-{2,})*\s*$")
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/?")
TINY = 1e-3  # an error by rounding: its digits belong to the processor


def normalised(lines: list[str], measured: bool) -> list[str]:
    """Mask what changes from run to run: times by their unit, or by the head of their column; with `measured`, all."""
    result, columns = [], []
    for number, line in enumerate(lines):
        rule = lines[number + 1] if number + 1 < len(lines) else ""
        if _RULE.match(line):
            result.append("---")
            continue
        if _RULE.match(rule):  # this line is the head of a table
            columns = timed_columns(line, rule)
            result.append(squeeze(line))
            continue
        if not line.strip():
            columns = []
        for start, end in columns:
            line = line[:start] + re.sub(r"\S", "#", line[start:end]) + line[end:]
        line = _TIMED.sub("#", line)
        if measured:
            line = re.sub(r"\b(?:met|open|missed)\b", "#", NUMBER.sub("#", line))
        result.append(squeeze(_PATH.sub("PATH", line)))
    return result


def timed_columns(head: str, rule: str) -> list[tuple[int, int]]:
    """The places (start, end) of a table's columns that hold times, by the words of their heads."""
    places = [match.span() for match in re.finditer(r"-+", rule)]
    return [(start, end) for start, end in places if _COLUMN.search(head[start:end])]


def squeeze(line: str) -> str:
    """One blank between words; a run of masks is one mask; a chart's bars are as long as they like."""
    return re.sub(r"#+", "#", " ".join(line.split()))


def same(quoted: str, printed: str) -> bool:
    """Two normalised lines: the same words, and numbers that agree to the last digit shown, give or take one."""
    if NUMBER.sub("#", quoted) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(quoted), NUMBER.findall(printed), strict=True)
    return all(first == second or _agree(first, second) for first, second in pairs)


def _agree(first: str, second: str) -> bool:
    if not re.search(r"[.e]", first + second):
        return False  # whole numbers are counts
    one, other = (float(text.replace(",", "")) for text in (first, second))
    if max(abs(one), abs(other)) < TINY:
        return True
    digits = min(len(text.partition("e")[0].partition(".")[2]) for text in (first, second))
    exponent = re.search(r"e([-+]?\d+)", first)
    unit = 10.0 ** (-digits + (int(exponent[1]) if exponent else 0))
    return abs(one - other) < 1.5 * unit


def first_missing(quoted: list[str], printed: list[str], measured: bool) -> int | None:
    """The number of the first quoted line that is not in the output, after the lines before it; None if all are.

    A quote may leave lines out: what it shows must stand in the output, in its order. `...` stands for anything.
    """
    output, place = normalised(printed, measured), 0
    for number, line in enumerate(normalised(quoted, measured)):
        if line in ("", "---", "..."):
            continue
        while place < len(output) and not same(line, output[place]):
            place += 1
        if place == len(output):
            return number
        place += 1
    return None
