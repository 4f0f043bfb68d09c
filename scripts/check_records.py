"""Numbers of GPU runs, which nobody can rerun at their desk: each stands in the committed record of its run.

A record is `docs/gpu_runs/NAME.txt`: lines `# card: ...`, `# torch: ...`, `# date: ...`, one `# command: ...` for each
run, and what the runs printed, untouched. The paragraph that tells of them links it. That paragraph, and a table right
above or below it, may hold no number that the record does not; what they write as `value (low to high)` stands in one
line of it.
"""

import re

from faults import Fault, read_text
from lessons import Course, Lesson

FIELDS = ("card", "torch", "date", "command")
_CARD = re.compile(r"\b(?:H100|H200|A100|B200)\b")
_LINK = re.compile(r"\]\((gpu_runs/[\w.-]+\.txt)\)")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_INTERVAL = re.compile(r"(?<![\w.])([\d.,]*\d) \(([\d.,]*\d) to ([\d.,]*\d)\)")
_MEASURED = re.compile(r"(?<![\w.])\d[\d,]*\.\d+\b(?!\.)")  # a version, 2.11.0, is none


def numbers(text: str) -> set[str]:
    """All numbers of a text, as `plain` writes them."""
    return {plain(number) for number in _NUMBER.findall(text)}


def plain(number: str) -> str:
    """A number without commas between thousands and zeros at the end of a fraction."""
    number = number.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def intervals(record: str) -> set[tuple[str, ...]]:
    """Any three numbers that stand next to each other in a line: a value and the ends of its interval, say."""
    lines = [[plain(number) for number in _NUMBER.findall(line)] for line in record.splitlines()]
    return {triple for line in lines for triple in zip(line, line[1:], line[2:], strict=False)}


def fields_of(record: str) -> dict[str, list[str]]:
    """The values of a record's `# name: value` lines."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^# (\w+): *(.+?) *$", record, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def paragraphs(lines: list[str]) -> list[tuple[int, str]]:
    """(first line, text) of what empty lines divide."""
    found: list[tuple[int, list[str]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            found.append((number + 1, []))
        elif not found:
            found.append((number, [line]))
        else:
            found[-1][1].append(line)
    return [(number, "\n".join(part)) for number, part in found if part]


def check_records(course: Course) -> list[Fault]:
    """A paragraph about a GPU run, with measured numbers in it or in the table beside it, links the run's record."""
    return [fault for lesson in course.lessons for fault in _faults_of(lesson)]


def _faults_of(lesson: Lesson) -> list[Fault]:
    path, faults, used = lesson.rel("docs/en.md"), [], set()
    parts = paragraphs((lesson.docs_text or "").splitlines())
    for place, (line, text) in enumerate(parts):
        links = _LINK.findall(text)
        used.update(links)
        tables = [
            part for part in (*parts[max(0, place - 1) : place], *parts[place + 1 : place + 2]) if part[1][0] == "|"
        ]
        if links:
            faults += _compare(lesson, links, [(line, text), *tables])
        elif _tells_of_a_run(text, tables):
            faults.append(Fault(path, line, "numbers of a GPU run link their record: [record](gpu_runs/NAME.txt)"))
    stored = sorted((lesson.folder / "docs" / "gpu_runs").glob("*"))
    lost = [file for file in stored if f"gpu_runs/{file.name}" not in used]
    return faults + [Fault(lesson.rel("docs", "gpu_runs", file.name), 1, "no text links this record") for file in lost]


def _tells_of_a_run(text: str, tables: list[tuple[int, str]]) -> bool:
    measured = [_MEASURED.search(re.sub(r"torch [\w.+]+", "", part)) for part in (text, *(part for _, part in tables))]
    return bool(_CARD.search(text)) and any(measured)


def _compare(lesson: Lesson, links: list[str], parts: list[tuple[int, str]]) -> list[Fault]:
    """Hold parts of the text, (line, text) each, against records; the first part is the one that links them."""
    path, (line, text) = lesson.rel("docs/en.md"), parts[0]
    records = [read_text(lesson.folder / "docs" / link) for link in links]
    faults = [message for pair in zip(links, records, strict=True) for message in record_faults(*pair, text)]
    if None in records:
        return [Fault(path, line, message) for message in faults]
    known, together = numbers("\n".join(records)), intervals("\n".join(records))
    found = [Fault(path, line, message) for message in faults]
    for begin, part in parts:
        missing = sorted(numbers(_LINK.sub("", part)) - known)
        found += [Fault(path, begin, f"{number} is not in {', '.join(links)}") for number in missing]
        for each in _INTERVAL.findall(part):
            if tuple(map(plain, each)) not in together:
                said = "{} ({} to {})".format(*each)
                found.append(Fault(path, begin, f"no line of {', '.join(links)} has {said}"))
    return found


def record_faults(link: str, record: str | None, text: str) -> list[str]:
    """What a record lacks, and what the paragraph that links it says otherwise."""
    if record is None:
        return [f"there is no {link}"]
    fields = fields_of(record)
    faults = [f"{link} has no line `# {name}: ...`" for name in FIELDS if name not in fields]
    for name in ("card", "torch", "date"):
        for value in fields.get(name, []):
            if not re.search(rf"(?<![\w.]){re.escape(value)}(?!\w)", text):
                faults.append(f"{link} says {name} {value}; this does not")
    return faults
