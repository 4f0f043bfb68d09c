"""Files that people hand to a command, and files it writes. What is wrong is a UserError with file and line."""

import json
import os
import tempfile
from pathlib import Path

from faults import UserError
from jsonpos import Located

BOM = "\ufeff"
LIMIT = 64 * 2**20  # bytes; what is larger is no roster, sheet or table
os.umask(_UMASK := os.umask(0))  # asked once: it is read by setting it, and threads that write would meet


def read_input(path: Path) -> str:
    """The file's text as it is: line ends kept, and a byte order mark too. Empty files are refused."""
    if path.is_dir():
        raise UserError(f"{path}: a folder; a file is expected")
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise UserError(f"{str(path)!r}: {error}") from error
    if len(data) > LIMIT:
        raise UserError(f"{path}: more than {LIMIT // 2**20} MiB")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}:1: is UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte 0x{data[error.start]:02x} is no UTF-8; save the file as UTF-8") from error
    if not text.strip(BOM + " \t\r\n"):
        raise UserError(f"{path}:1: is empty")
    if "\0" in text:
        raise UserError(f"{path}:{text.count(chr(10), 0, text.index(chr(0))) + 1}: holds a NUL character; no text file")
    return text


def read_json(path: Path) -> Located:
    """The file's JSON with line numbers."""
    text = read_input(path).removeprefix(BOM)
    try:
        return Located(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: no valid JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # nested thousands deep; an integer of thousands of digits
        raise UserError(f"{path}:1: no JSON that can be read: {error}") from error


def check_writable(path: Path, force: bool = False) -> None:
    """UserError if `write_output` would be refused: a local fault, found before any work is done."""
    if path.is_dir():
        raise UserError(f"{path}: a folder; the name of a file is expected")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist")
    if path.exists() and not force:
        raise UserError(f"{path}: exists already; --force overwrites it")


def write_output(path: Path, data: str | bytes, force: bool = False) -> None:
    """Write the whole file or nothing of it. Text is UTF-8, line ends as they are, half a surrogate escaped."""
    check_writable(path, force)
    data = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            if os.name == "posix":
                os.chmod(name, 0o666 & ~_UMASK)  # mkstemp's files are for the owner alone
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make the folder and those above it, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def json_text(value: object) -> str:
    """JSON as all commands print and write it. NaN is refused: it is no JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
