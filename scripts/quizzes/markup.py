"""The little markup that quizzes use, `code` and *emphasis*, as HTML that is safe to import."""

import html
import re

from faults import UserError

_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_EMPHASIS = re.compile(r"(?<![\w*])\*(?![\s*])([^*]*[^\s*])\*(?![\w*])")
_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold


def to_html(text: str) -> str:
    """`<p>...</p>`, all characters that mean something in HTML escaped. UserError for those XML cannot hold."""
    bad = _FORBIDDEN.search(text)
    if bad:
        raise UserError(f"the character {bad[0]!r} in {text!r} cannot be exported")
    parts, at = [], 0
    for match in _CODE.finditer(text):
        parts += [_prose(text[at : match.start()]), f"<code>{html.escape(match[2].strip(), quote=False)}</code>"]
        at = match.end()
    return f"<p>{''.join([*parts, _prose(text[at:])])}</p>"


def _prose(text: str) -> str:
    escaped = html.escape(text, quote=False)
    return _EMPHASIS.sub(r"<em>\1</em>", escaped).replace("\n", "<br>")
