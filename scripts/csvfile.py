"""CSV without loss: each cell keeps its raw text, so that a file can be changed in one cell and be the same elsewhere.

Commas, semicolons or tabs; LF, CRLF or CR; with or without a byte order mark. A fault names file and line.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults import UserError
from inputs import BOM, read_input
from shapes import shown

DELIMITERS = (",", ";", "\t")
FORMULA = ("=", "+", "-", "@")  # a spreadsheet runs a cell that begins so as a formula


@dataclass
class Record:
    """One record: the line it begins on, its cells as they stand in the file, and what ends it."""

    line: int
    raw: list[str]
    end: str

    def value(self, position: int) -> str:
        """The cell's text, without quotes and without spaces around it."""
        text = self.raw[position]
        if text.startswith('"'):
            text = text[1:-1].replace('""', '"')
        return text.strip()

    def values(self) -> list[str]:
        """All cells' texts."""
        return [self.value(position) for position in range(len(self.raw))]


def parse(text: str, delimiter: str, name: str) -> list[Record]:
    """All records. UserError where a quote is not closed, or text follows a closing quote."""
    cell = re.compile(rf'("[^"]*(?:""[^"]*)*"|(?!")[^{delimiter}\r\n]*)({delimiter}|\r\n|\n|\r|\Z)')
    records: list[Record] = []
    raw: list[str] = []
    at, line, begins = 0, 1, 1
    while at < len(text) or raw:
        match = cell.match(text, at)
        if match is None:
            raise UserError(f"{name}:{line}: a quote that is not closed, or text behind a closing quote")
        raw.append(match[1])
        line += len(re.findall(r"\r\n|\n|\r", match[0]))
        at = match.end()
        if match[2] != delimiter:
            records.append(Record(begins, raw, match[2]))
            raw, begins = [], line
    return records


@dataclass
class Table:
    """A CSV file: its heading and its rows, each as wide as the heading."""

    path: Path
    delimiter: str
    bom: str
    heading: Record
    rows: list[Record]

    @property
    def columns(self) -> list[str]:
        """The headings."""
        return self.heading.values()

    def fault(self, line: int, message: str) -> UserError:
        """An error that names this file and a line."""
        return UserError(f"{self.path}:{line}: {message}")

    def text(self) -> str:
        """The file again, byte for byte where no cell was changed."""
        return self.bom + "".join(self.delimiter.join(row.raw) + row.end for row in (self.heading, *self.rows))

    def filled(self) -> Iterator[Record]:
        """The rows in which something stands."""
        return (row for row in self.rows if any(row.values()))


def read_table(path: Path) -> Table:
    """Read and check: a heading for each column, none twice, no row longer or shorter than the heading."""
    text = read_input(path)
    bom = BOM if text.startswith(BOM) else ""
    delimiter = find_delimiter(text.removeprefix(bom), str(path))
    heading, *rows = parse(text.removeprefix(bom), delimiter, str(path))
    table = Table(path, delimiter, bom, heading, rows)
    seen: set[str] = set()
    for position, column in enumerate(table.columns, 1):
        if column in seen:
            raise table.fault(heading.line, f"two columns are called {shown(column)}")
        if column:
            seen.add(column)
        elif any(len(row.raw) >= position and row.value(position - 1) for row in rows):
            raise table.fault(heading.line, f"column {position} has no heading")
    for row in rows:
        if len(row.raw) != len(heading.raw) and any(row.values()):
            message = f"{_count(len(row.raw), 'cell')}, but the heading has {len(heading.raw)}"
            raise table.fault(row.line, message)
    return table


def find_delimiter(text: str, name: str) -> str:
    """The delimiter that splits every row into as many cells as the heading; else the first line's most frequent."""
    first_line = text.lstrip().splitlines()[0]
    likely = sorted(DELIMITERS, key=first_line.count, reverse=True)
    for delimiter in likely:
        try:
            records = parse(text, delimiter, name)
        except UserError:
            continue
        width = len(records[0].raw)
        if width > 1 and all(len(row.raw) == width or not any(row.values()) for row in records):
            return delimiter
    return likely[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def quoted(value: object, delimiter: str = ",") -> str:
    """A cell as it is written: in quotes if it must be."""
    text = "" if value is None else str(value)
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if re.search(rf'[{delimiter}"\r\n]|^\s|\s$', text) else text


def csv_text(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A CSV file's text: commas, LF, None as an empty cell."""
    return "".join(",".join(map(quoted, row)) + "\n" for row in (columns, *rows))


def formula_cells(texts: Iterable[str]) -> list[str]:
    """The texts that a spreadsheet would take for formulas. They are kept as they are; commands warn of them."""
    return [text for text in texts if text.startswith(FORMULA)]
