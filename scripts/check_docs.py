"""docs/en.md: its head, its sections in the contract's order; and the links of every Markdown file."""

from pathlib import Path
from urllib.parse import unquote

from faults import Fault, read_text
from lessons import FIELDS, Course, Lesson, UnknownLesson
from mdtext import Document

SECTIONS = (
    "Learning Objectives",
    "The Problem",
    "The Concept",
    "Build It",
    "Prove It",
    "Production patterns in the wild",
    "Use It",
    "Ship It",
    "Exercises",
    "Key Terms",
    "Further Reading",
)


def check_head(course: Course, lesson: Lesson) -> list[Fault]:
    """`# Title`, a quote of one line, then Type, Languages, Prerequisites, Time."""
    path, header = lesson.rel("docs/en.md"), lesson.header
    if lesson.docs_text is None:
        return []  # check_shape reports it
    faults = []
    if not header.title or header.lines["title"] != 1:
        faults.append(Fault(path, 1, "the first line must be `# Title`"))
    lines = [(number, line) for number, line in enumerate(lesson.document.lines[1:], 2) if line.strip()]
    quotes = [number for number, line in lines[:2] if line.startswith(">")]
    if not header.hook or len(quotes) != 1 or quotes[0] != lines[0][0]:
        faults.append(
            Fault(path, lines[0][0] if lines else 1, "after the title a quote of one line (`> ...`) is expected")
        )
    for name in FIELDS:
        if not header.fields.get(name):
            faults.append(Fault(path, header.lines.get(name, 1), f"the line `**{name}:** ...` is missing or empty"))
    order = [header.lines[name] for name in FIELDS if name in header.lines]
    if order != sorted(order):
        faults.append(Fault(path, order[0], f"these lines must stand in the order {', '.join(FIELDS)}"))
    if header.fields.get("Time") and header.minutes is None:
        faults.append(Fault(path, header.lines["Time"], "the time must read `~90 minutes`"))
    return faults + _prerequisite_faults(course, lesson)


def _prerequisite_faults(course: Course, lesson: Lesson) -> list[Fault]:
    path, line = lesson.rel("docs/en.md"), lesson.header.lines.get("Prerequisites", 1)
    faults = []
    for number in lesson.header.prerequisites[0]:
        try:
            needed = course.find(number)
        except UnknownLesson as error:
            faults.append(Fault(path, line, f"prerequisites: {error}"))
            continue
        if needed.path >= lesson.path:
            faults.append(Fault(path, line, f"prerequisites: {needed.id} does not come before this lesson"))
    return faults


def check_sections(lesson: Lesson) -> list[Fault]:
    """The contract's sections, each once, in order, none empty; anything more is a `###` under one of them."""
    if lesson.docs_text is None:
        return []
    path, document = lesson.rel("docs/en.md"), lesson.document
    found = [heading for heading in document.headings if heading.level <= 2 and heading.line > 1]
    names = [heading.text for heading in found]
    faults = [Fault(path, 1, f"the section `## {name}` is missing") for name in SECTIONS if name not in names]
    highest = -1
    for position, heading in enumerate(found):
        if heading.level == 1:
            faults.append(Fault(path, heading.line, "a second `#` heading; the title is the only one"))
        elif heading.text not in SECTIONS:
            faults.append(Fault(path, heading.line, f"unknown section {heading.text!r}; use `###` under a known one"))
        elif heading.text in names[:position]:
            faults.append(Fault(path, heading.line, f"the section {heading.text!r} is there twice"))
        else:
            place = SECTIONS.index(heading.text)
            if place < highest:
                message = f"the section {heading.text!r} must stand before {SECTIONS[highest]!r}"
                faults.append(Fault(path, heading.line, message))
            highest = max(highest, place)
        end = found[position + 1].line if position + 1 < len(found) else len(document.lines) + 1
        if not any(line.strip() for line in document.lines[heading.line : end - 1]):
            faults.append(Fault(path, heading.line, f"the section {heading.text!r} is empty"))
    return faults


def check_blocks(path: str, document: Document) -> list[Fault]:
    """Every fenced block is closed and names its language: an output without one could not be told from code."""
    faults = [Fault(path, block.line, "this block is never closed") for block in document.blocks if not block.closed]
    unnamed = [block for block in document.blocks if not block.language]
    return faults + [
        Fault(path, block.line, "a fenced block must name its language (python, text ...)") for block in unnamed
    ]


def link_fault(root: Path, source: Path, document: Document, target: str) -> str | None:
    """What is wrong with one link of the file `source` (relative to root), or None. Web addresses are not fetched."""
    if target.startswith(("http://", "https://", "mailto:")):
        return None
    name, _, anchor = unquote(target).partition("#")
    if not name and not anchor:
        return "a link to nowhere"
    if name.startswith("/"):
        return f"the link {target} must be relative"
    path = (root / source).parent.joinpath(name).resolve() if name else root / source
    if not path.is_relative_to(root):
        return f"the link {target} leaves the repository"
    if not path.exists():
        return f"the link {target} leads to nothing"
    if anchor and path.suffix == ".md":
        known = document if not name else Document(read_text(path) or "")
        return None if anchor in known.anchors else f"the link {target}: there is no heading for #{anchor}"
    if anchor.startswith("L") and anchor[1:].split("-")[0].isdigit():
        last = int(anchor.split("-")[-1].lstrip("L"))
        return None if last <= len((read_text(path) or "").splitlines()) else f"the link {target}: no such line"
    return None


def check_links(course: Course) -> list[Fault]:
    """Relative links and anchors of every Markdown file, and the state of its blocks."""
    faults = []
    for source in course.files:
        if source.suffix != ".md":
            continue
        document = Document(read_text(course.root / source) or "")
        faults += check_blocks(source.as_posix(), document)
        for line, target in document.links:
            if message := link_fault(course.root, source, document, target):
                faults.append(Fault(source.as_posix(), line, message))
    return faults


def check_map(course: Course) -> list[Fault]:
    """The README's map: one table row a lesson that links to it and gives its title and time as the lesson does."""
    text = read_text(course.root / "README.md")
    if text is None:
        return []  # check_top_level reports it
    rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("|")]
    faults = []
    for lesson in course.lessons:
        own = [(number, line) for number, line in rows if f"]({lesson.path.as_posix()}" in line]
        if len(own) != 1:
            message = f"the map must have one row that links to {lesson.path.as_posix()}; it has {len(own)}"
            faults.append(Fault("README.md", own[1][0] if own else 1, message))
            continue
        number, line = own[0]
        minutes = lesson.header.minutes
        for wanted in (lesson.header.title, f"{minutes} min" if minutes else None):
            if wanted and wanted not in line:
                faults.append(Fault("README.md", number, f"the row of {lesson.id} does not say {wanted!r}"))
    return faults
