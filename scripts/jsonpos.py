"""JSON with line numbers, so that a fault in question 5 points at question 5."""

import json
from typing import Any

_DECODER = json.JSONDecoder()
Place = tuple[str | int, ...]  # ("questions", 4, "correct")


class Located:
    """A JSON value and the line on which each of its parts begins."""

    def __init__(self, text: str) -> None:
        """Raise json.JSONDecodeError where the text is not JSON, or says the same key twice."""
        self._text = text
        self._lines: dict[Place, int] = {}
        json.loads(text)  # the standard parser's own messages for text that is no JSON at all
        self.value, _ = self._read(0, ())

    def line(self, *place: str | int) -> int:
        """The line of a part; of the nearest part around it if it does not exist."""
        while place not in self._lines:
            place = place[:-1]
        return self._lines[place]

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in " \t\r\n":
            at += 1
        return at

    def _read(self, at: int, place: Place) -> tuple[Any, int]:
        at = self._skip(at)
        self._lines[place] = self._text.count("\n", 0, at) + 1
        if self._text[at] == "{":
            return self._read_object(at, place)
        if self._text[at] == "[":
            return self._read_array(at, place)
        return _DECODER.raw_decode(self._text, at)

    def _read_object(self, at: int, place: Place) -> tuple[dict, int]:
        result: dict[str, Any] = {}
        at = self._skip(at + 1)
        while self._text[at] != "}":
            start = self._skip(at + 1) if self._text[at] == "," else at
            key, at = _DECODER.raw_decode(self._text, start)
            if key in result:
                raise json.JSONDecodeError(f"the key {key!r} is there twice", self._text, start)
            result[key], at = self._read(self._skip(at) + 1, (*place, key))
            at = self._skip(at)
        return result, at + 1

    def _read_array(self, at: int, place: Place) -> tuple[list, int]:
        result: list[Any] = []
        at = self._skip(at + 1)
        while self._text[at] != "]":
            at = at + 1 if self._text[at] == "," else at
            item, at = self._read(at, (*place, len(result)))
            result.append(item)
            at = self._skip(at)
        return result, at + 1
