"""The commands of a text, in order, each with the output blocks that quote it."""

import re
from dataclasses import dataclass, field

from check_quotes import SHELLS
from mdtext import Block, Document

_SPAN = re.compile(r"`((?:python|torchrun|course) [^`]+)`")
_PLACEHOLDER = re.compile(r"<|\$|\b[A-Z][A-Z_]{2,}\b(?!/)|\b(?:NN|DIR|FILE|PLAN|ID)\b")
OTHER_PLACES = {
    "needs GPUs": re.compile(r"\bnccl\b"),
    "installs something": re.compile(r"\bpip\b|\bvenv\b|\bapt\b"),
    "runs tests, which CI does by itself": re.compile(
        r"\bunittest\b|\bpytest\b|course(?:\.py)? (?:test\b|check-exercises$)"
    ),
    "asks a reader at the terminal": re.compile(r"course(?:\.py)? quiz \d+$"),
    "judges a learner's folder, in which nothing is solved yet": re.compile(r"\bcourse(?:\.py)? try\b"),
    "needs several hosts": re.compile(r"--nnodes"),
}


DIFFERS = re.compile(r"<!-- (numbers|words) differ from run to run -->")


@dataclass
class Quoted:
    """A command as the text gives it, the line where it stands first, and the blocks that show its output.

    A comment above a block, `<!-- numbers differ from run to run -->` or `<!-- words differ from run to run -->`, says
    that no two runs print it alike: then only its words are compared, or nothing.
    """

    command: str
    line: int
    outputs: list[tuple[Block, str | None]] = field(default_factory=list)  # (block, "numbers" or "words" that differ)

    @property
    def skipped(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if _PLACEHOLDER.search(self.command):
            return "has a placeholder"
        return next((why for why, pattern in OTHER_PLACES.items() if pattern.search(self.command)), None)

    @property
    def measures(self) -> bool:
        """Whether it takes minutes, mostly to measure this machine, so that no number of it can be the same again."""
        return re.search(r"--(?:bench|cost|real)\b", self.command) is not None


def commands_in(block: Block) -> list[tuple[int, str]]:
    """(line, command) of a shell block; lines that end in a backslash are joined, comments dropped."""
    found, text = [], ""
    for number, line in enumerate(block.lines, block.line + 1):
        text += re.sub(r"(?:^|\s)#.*$", "", line).strip().removeprefix("$ ")
        if text.endswith("\\"):
            text = text[:-1].rstrip() + " "
            continue
        if text:
            found.append((number, text))
        text = ""
    return found


def quoted_commands(document: Document) -> list[Quoted]:
    """All commands of a text's shell blocks and output lines, each once, in the order of the text."""
    found: dict[str, Quoted] = {}

    def note(line: int, command: str) -> Quoted:
        return found.setdefault(command, Quoted(command, line))

    last: tuple[int, Quoted] | None = None  # (the line after which its output may come, the command)
    for block in document.blocks:
        if block.language in SHELLS:
            for line, command in commands_in(block):
                last = block.end, note(line, command)
        elif block.language == "text":
            before = document.line_before(block.line)
            marks = DIFFERS.findall("\n".join(document.lines[max(0, before - 1) : block.line - 1]))
            output = block, marks[-1] if marks else None
            if last is None or before != last[0]:
                spans = _SPAN.findall(_paragraph(document, before))
                last = (before, note(before, spans[-1])) if spans else None
            if last is not None:
                last[1].outputs.append(output)
                last = block.end, last[1]  # right after an output comes more of the same
    return list(found.values())


def _paragraph(document: Document, line: int) -> str:
    """The text of the paragraph that ends at a line, as one line."""
    first = line
    while first > 1 and document.lines[first - 2].strip():
        first -= 1
    return " ".join(document.lines[first - 1 : line])
