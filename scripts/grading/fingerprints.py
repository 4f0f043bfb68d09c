"""Which pieces of code two texts share, whatever their names, comments and layout: winnowing.

Schleimer, Wilkerson and Aiken: Winnowing: Local Algorithms for Document Fingerprinting. SIGMOD 2003. Every run of
`WINDOW + K - 1` tokens that two texts share is found; no run shorter than K tokens is.
"""

import io
import keyword
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

K = 12  # tokens in a gram
WINDOW = 8  # of this many grams in a row at least one is kept

_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Token:
    """A token without its name, and the line it is on."""

    text: str
    line: int


def tokens(source: str) -> list[Token]:
    """Names become `n`, texts `s`, numbers `0`; comments and layout go. What is no Python is taken as far as it is."""
    found: list[Token] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in _SKIPPED:
                continue
            text = token.string
            if token.type == tokenize.NAME and not keyword.iskeyword(text):
                text = "n"
            elif token.type == tokenize.NUMBER:
                text = "0"
            elif token.type == tokenize.STRING or "STRING" in tokenize.tok_name[token.type]:
                text = "s"
            found.append(Token(text, token.start[0]))
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last is Python 3.12's answer to a NUL
        pass
    return found


def grams(sequence: Sequence[Token]) -> list[int]:
    """A hash of each run of K tokens."""
    texts = [token.text for token in sequence]
    return [crc32(" ".join(texts[at : at + K]).encode()) for at in range(len(texts) - K + 1)]


def winnow(hashes: Sequence[int]) -> dict[int, int]:
    """{hash: where it is}: the smallest of each window, the rightmost of equals; one of a text shorter than that."""
    kept: dict[int, int] = {}
    for begin in range(max(1, len(hashes) - WINDOW + 1)) if hashes else ():
        window = hashes[begin : begin + WINDOW]
        smallest = min(window)
        at = begin + max(index for index, value in enumerate(window) if value == smallest)
        kept.setdefault(smallest, at)
    return kept
