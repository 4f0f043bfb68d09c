"""A Markdown file taken apart: headings, fenced blocks, inline code, links. Only what the checks need."""

import re
from dataclasses import dataclass
from functools import cached_property

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(\S*)")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]*)>?(?:\s+[\"'][^)]*)?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", re.MULTILINE)
_HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line of the opening fence, and the lines inside."""

    language: str
    line: int
    lines: tuple[str, ...]
    closed: bool = True

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + len(self.lines) + 1


@dataclass(frozen=True)
class Heading:
    """A heading: level 1 to 6, its text, its line."""

    level: int
    text: str
    line: int


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match.group())


class Document:
    """One Markdown text. Line numbers begin at 1."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.blocks: list[Block] = []
        prose: list[str] = []
        opening: re.Match | None = None
        start = 0
        for number, line in enumerate(self.lines, 1):
            fence = _FENCE.match(line)
            if opening is None and fence:
                opening, start = fence, number
            elif opening is not None and self._closes(line, opening):
                self._add_block(opening, start, number)
                opening = None
            elif opening is None:
                prose.append(line)
                continue
            prose.append("")
        if opening is not None:
            self._add_block(opening, start, len(self.lines) + 1, closed=False)
        # Prose keeps every line's number: blocks and comments are blanked, not removed.
        self.prose = _COMMENT.sub(_blank, "\n".join(prose))

    @staticmethod
    def _closes(line: str, opening: re.Match) -> bool:
        line = line.strip()
        return len(line) >= len(opening[2]) and set(line) == {opening[2][0]}

    def _add_block(self, opening: re.Match, start: int, end: int, closed: bool = True) -> None:
        indent = len(opening[1])
        inside = tuple(ln[indent:] if ln[:indent].isspace() else ln for ln in self.lines[start : end - 1])
        self.blocks.append(Block(opening[3].lower(), start, inside, closed))

    @cached_property
    def headings(self) -> list[Heading]:
        """All headings in order."""
        found = []
        for number, line in enumerate(self.prose.splitlines(), 1):
            if match := _HEADING.match(line):
                found.append(Heading(len(match[1]), match[2], number))
        return found

    @cached_property
    def code_spans(self) -> list[tuple[int, str]]:
        """Inline code as (line, text)."""
        return [(self._line(m.start()), " ".join(m[2].split())) for m in _CODE_SPAN.finditer(self.prose)]

    @cached_property
    def links(self) -> list[tuple[int, str]]:
        """Targets of links, images and link references as (line, target)."""
        text = _CODE_SPAN.sub(_blank, self.prose)
        found = [(self._line(m.start()), m[1]) for pattern in (_LINK, _REFERENCE) for m in pattern.finditer(text)]
        return sorted(found)

    @cached_property
    def anchors(self) -> set[str]:
        """What `#anchor` may say: GitHub's slugs of the headings, and explicit anchors."""
        seen: dict[str, int] = {}
        result = set(_HTML_ANCHOR.findall(self.prose))
        for heading in self.headings:
            slug = slugify(heading.text)
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            result.add(f"{slug}-{count}" if count else slug)
        return result

    def line_before(self, line: int) -> int:
        """The number of the last line above that is neither empty nor a comment; 0 if there is none."""
        before = line - 1
        while before > 0 and not _COMMENT.sub("", self.lines[before - 1]).strip():
            before -= 1
        return before

    def section_of(self, line: int) -> str:
        """The level-2 heading that a line stands under, or ''."""
        inside = [h.text for h in self.headings if h.level == 2 and h.line <= line]
        return inside[-1] if inside else ""

    def _line(self, offset: int) -> int:
        return self.prose.count("\n", 0, offset) + 1


def slugify(heading: str) -> str:
    """The anchor GitHub makes of a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link counts as its text
    text = re.sub(r"[^\w\- ]", "", text.lower())
    return text.replace(" ", "-")
