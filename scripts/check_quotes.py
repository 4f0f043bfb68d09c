"""Quoted code is verbatim, commands could run, an output names its command."""

import ast
import re
import shlex
from pathlib import Path

from check_names import QUOTE, is_quote
from codeindex import CodeIndex
from faults import Fault, read_text
from lessons import Course, Lesson
from mdtext import Block, Document

SHELLS = ("bash", "sh", "shell", "console", "bat", "cmd", "powershell")
ELISION = "..."
_PROGRAM = re.compile(r"^(?:\S*[/\\])?(python3?|py|pytest|torchrun|course)(?:\.exe)?$")
_PLACEHOLDER = re.compile(r"NN|DIR\b|FILE\b|[<>${}*]|\.\.\.")
_SET = re.compile(r"^\w+=\S*$")


def _segments(block: Block) -> list[tuple[int, list[str]]]:
    """The quoted runs of consecutive lines as (line in the document, lines): what stands between elisions."""
    segments: list[tuple[int, list[str]]] = [(block.line + 2, [])]
    for number, line in enumerate(block.lines[1:], block.line + 2):
        if line.strip() == ELISION:
            segments.append((number + 1, []))
        else:
            segments[-1][1].append(line.rstrip())
    trimmed = []
    for number, lines in segments:
        while lines and not lines[0]:
            number, lines = number + 1, lines[1:]
        while lines and not lines[-1]:
            lines = lines[:-1]
        if lines:
            trimmed.append((number, lines))
    return trimmed


def find_run(lines: list[str], source: list[str], start: int) -> tuple[int | None, int]:
    """Where `lines` stand in `source` from `start` on; all of them may have lost the same indent.

    Returns (index after the run, len(lines)), or (None, how many of the lines the best attempt matched).
    """
    best = 0
    for at in range(start, len(source)):
        indent = " " * (len(source[at]) - len(lines[0]))
        shifted = [indent + line if line else "" for line in lines]
        window = source[at : at + len(lines)]
        matched = next(
            (i for i, pair in enumerate(zip(window, shifted, strict=False)) if pair[0] != pair[1]), len(window)
        )
        if matched == len(lines):
            return at + len(lines), matched
        best = max(best, matched)
    return None, best


def _quoted_file(course: Course, lesson: Lesson, index: CodeIndex, name: str) -> Path | None:
    for path in (
        lesson.folder / "code" / name,
        lesson.folder / "tests" / name,
        lesson.folder / name,
        course.root / name,
    ):
        if path.is_file():
            return path
    module = index.modules.get(Path(name).stem) if "/" not in name else None
    return course.root / module.path if module else None


def check_quotes(course: Course, lesson: Lesson, index: CodeIndex) -> list[Fault]:
    """Blocks that begin with `# module.py` repeat that module's consecutive lines; a line `...` leaves some out."""
    doc = lesson.rel("docs/en.md")
    faults = []
    for block in lesson.document.blocks:
        if block.language not in ("python", "py") or not is_quote(block):
            continue
        name = QUOTE.match(block.lines[0])[1]
        path = _quoted_file(course, lesson, index, name)
        if path is None:
            faults.append(Fault(doc, block.line + 1, f"quotes {name}, which does not exist"))
            continue
        source = [line.rstrip() for line in (read_text(path) or "").splitlines()]
        segments, position = _segments(block), 0
        if not segments:
            faults.append(Fault(doc, block.line, f"quotes nothing of {name}"))
        for number, lines in segments:
            after, matched = find_run(lines, source, position)
            if after is None:
                wrong = min(matched, len(lines) - 1)
                message = f"not verbatim in {name}, or not in this order: {lines[wrong].strip()!r}"
                faults.append(Fault(doc, number + wrong, message))
                break
            position = after
    return faults


def split_commands(text: str) -> list[list[str]]:
    """The commands of one shell line as words; prompts, comments and settings of variables are dropped."""
    commands = []
    for part in re.split(r"&&|\|\||[;|]", text.strip().removeprefix("$ ").removeprefix("> ")):
        try:
            words = shlex.split(part.replace("\\", "/"), comments=True)
        except ValueError:
            words = part.split()
        while words and _SET.match(words[0]):
            words = words[1:]
        if words:
            commands.append(words)
    return commands


class Commands:
    """The commands that texts name, checked against the files and options that exist."""

    def __init__(self, course: Course, index: CodeIndex, subcommands: dict[str, set[str]]) -> None:
        self.course, self.index, self.subcommands = course, index, subcommands

    def faults(self, words: list[str], folders: list[Path]) -> list[str]:
        """What is wrong with one command, run in any of `folders`."""
        program = _PROGRAM.match(words[0])
        if program is None:
            return []
        if program[1] == "course":
            return self._course(words[1:])
        script = next((i for i, word in enumerate(words[1:], 1) if word.endswith(".py")), None)
        if script is None:
            return self._folders(words, folders)
        if _PLACEHOLDER.search(words[script]):
            return []
        path = next((folder / words[script] for folder in folders if (folder / words[script]).is_file()), None)
        if path is None:
            return [f"there is no file {words[script]}"]
        if path == self.course.root / "scripts" / "course.py":
            return self._course(words[script + 1 :])
        return self._options(path, words[script + 1 :])

    def _course(self, words: list[str]) -> list[str]:
        if not words or words[0].startswith("-") or _PLACEHOLDER.search(words[0]):
            return []
        if words[0] not in self.subcommands:
            return [f"course has no command {words[0]!r}; known are {', '.join(self.subcommands)}"]
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        options = [word.split("=")[0] for word in own if word.startswith("--")]
        known = self.subcommands[words[0]]
        return [f"course {words[0]} has no option {option}" for option in options if option not in known]

    def _folders(self, words: list[str], folders: list[Path]) -> list[str]:
        """`-s FOLDER` of unittest, and the paths given to pytest."""
        named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-s", "--start-directory")]
        if "pytest" in words or words[0].endswith("pytest"):
            named += [
                word.split("::")[0] for word in words if "/" in word and not word.startswith("-") and word != words[0]
            ]
        named = [name for name in named if not _PLACEHOLDER.search(name)]
        return [f"there is no {name}" for name in named if not any((folder / name).exists() for folder in folders)]

    def _options(self, path: Path, words: list[str]) -> list[str]:
        """Options given to a lesson's script must be spelled somewhere in its code, or in the shared demo.py."""
        shared = self.index.modules.get("demo")
        sources = [*path.parent.glob("*.py"), *([self.course.root / shared.path] if shared else [])]
        known = {"--help"}
        for source in sources:
            try:
                tree = ast.parse(read_text(source) or "")
            except SyntaxError:
                continue
            known |= {
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
        options = [word.split("=")[0] for word in words if word.startswith("--") and len(word) > 2]
        return [f"{path.name} has no option {option}" for option in options if option not in known]


def _is_command(text: str) -> bool:
    return any(len(words) > 1 and _PROGRAM.match(words[0]) for words in split_commands(text))


def check_commands(path: Path, document: Document, commands: Commands, lesson: Lesson | None) -> list[Fault]:
    """Commands in shell blocks and inline code, meant for the root or for the lesson's folder."""
    home = [commands.course.root] if lesson is None else [commands.course.root, lesson.folder]
    faults = []
    for block in document.blocks:
        if block.language not in SHELLS:
            continue
        folders, text = home, ""
        for number, line in enumerate(block.lines, block.line + 1):
            text += line.rstrip()
            if text.endswith("\\"):
                text = text[:-1] + " "
                continue
            for words in split_commands(text):
                if words[0] == "cd" and len(words) == 2 and not _PLACEHOLDER.search(words[1]):
                    entered = [folder / words[1] for folder in folders if (folder / words[1]).is_dir()]
                    outside = not entered and words[1] != commands.course.root.name
                    faults += [Fault(path.as_posix(), number, f"there is no folder {words[1]}")] if outside else []
                    folders = entered or folders
                faults += [Fault(path.as_posix(), number, message) for message in commands.faults(words, folders)]
            text = ""
    for number, text in document.code_spans:
        if _is_command(text):
            found = [message for words in split_commands(text) for message in commands.faults(words, home)]
            faults += [Fault(path.as_posix(), number, message) for message in found]
    return faults


def check_file_names(path: Path, document: Document, course: Course) -> list[Fault]:
    """A bare `name.py` in inline code is a file of the repository."""
    known = {file.name for file in course.files}
    spans = [(line, text) for line, text in document.code_spans if re.fullmatch(r"\w+\.py", text)]
    return [
        Fault(path.as_posix(), line, f"there is no file called {text}") for line, text in spans if text not in known
    ]


def check_outputs(path: Path, document: Document) -> list[Fault]:
    """A ```text block is an output: the line before it, or the shell block before it, names the command.

    Right after an output comes more of the same.
    """
    ends = {block.end for block in document.blocks if block.language in SHELLS}
    spans = {line for line, text in document.code_spans if _is_command(text)}
    faults = []
    for block in document.blocks:
        if block.language != "text" or (block.lines and block.lines[0].startswith("$ ")):
            continue
        if re.fullmatch(r"[A-Z_]*", "".join(block.lines).strip()):
            faults.append(Fault(path.as_posix(), block.line, "an output block is empty, or holds a word in its place"))
        before = document.line_before(block.line)
        if before in ends or before in spans:
            ends.add(block.end)
        else:
            faults.append(
                Fault(path.as_posix(), block.line, "an output block must follow the line that names its command")
            )
    return faults


def check_texts(course: Course, index: CodeIndex, subcommands: dict[str, set[str]]) -> list[Fault]:
    """Commands, file names and outputs of every Markdown file."""
    commands = Commands(course, index, subcommands)
    faults = []
    for path in course.files:
        if path.suffix == ".md":
            document = Document(read_text(course.root / path) or "")
            lesson = next((item for item in course.lessons if path.is_relative_to(item.path)), None)
            faults += check_commands(path, document, commands, lesson)
            faults += check_outputs(path, document)
            faults += check_file_names(path, document, course)
    return faults
