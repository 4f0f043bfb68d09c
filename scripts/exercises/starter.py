"""What a learner is handed: the lesson without the solutions of its exercises and without the keys of its quiz."""

import json
import re
from pathlib import PurePosixPath

from check_names import QUOTE, is_quote
from check_quotes import ELISION, find_run
from exercises.folder import MARKER, Files, Marker, borrowed_files, lesson_files, version
from exercises.model import Exercise, load_exercises
from exercises.surgery import body_lines, stub
from faults import UserError
from lessons import Course, Lesson
from mdtext import Document

KEYS = ("correct", "explanation", "feedback")  # of a question, for those who ask it
_LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")
START = "START.md"  # how to begin


def export_files(course: Course, lesson: Lesson) -> Files:
    """The lesson as it is, with the modules it borrows."""
    return _folder(course, lesson, lesson_files(course, lesson), starter=False)


def starter_files(course: Course, lesson: Lesson) -> Files:
    """The lesson with the body of each exercise's functions replaced by its hint; the same bytes every time."""
    exercises = load_exercises(lesson)
    if not exercises:
        raise UserError(f"lesson {lesson.number} has no exercises: there is nothing to start")
    files = lesson_files(course, lesson)
    sources = {path: data.decode() for path, data in files.items() if path.endswith(".py")}
    docs, quiz = lesson.rel("docs/en.md"), lesson.rel("quiz.json")
    files[docs] = without_solutions(lesson, files[docs].decode(), exercises, sources).encode()
    files[quiz] = without_keys(files[quiz].decode()).encode()
    files.update({path: text.encode() for path, text in stubbed(lesson, exercises, sources).items()})
    return _folder(course, lesson, files, starter=True)


def stubbed(lesson: Lesson, exercises: list[Exercise], sources: dict[str, str]) -> dict[str, str]:
    """The modules that hold functions of these exercises, with stubs: {path: text}."""
    changed: dict[str, str] = {}
    for exercise in exercises:
        for module, names in exercise.by_module.items():
            path = lesson.rel("code", f"{module}.py")
            for name in names:
                changed[path] = stub(changed.get(path, sources[path]), name, exercise.stub_text)
    return changed


def without_keys(text: str) -> str:
    """A quiz without right answers, explanations and feedback."""
    quiz = json.loads(text)
    for question in quiz["questions"]:
        for key in KEYS:
            question.pop(key, None)
    return json.dumps(quiz, indent=2, ensure_ascii=False) + "\n"


def without_solutions(lesson: Lesson, text: str, exercises: list[Exercise], sources: dict[str, str]) -> str:
    """The lesson's text; where it quotes the body of an exercise's function, a comment names the exercise instead."""
    lines = text.splitlines()
    for block in Document(text).blocks:
        if block.language not in ("python", "py") or not is_quote(block):
            continue
        source = sources.get(lesson.rel("code", QUOTE.match(block.lines[0])[1]))
        if source is not None:
            solved = _solved_lines(exercises, PurePosixPath(QUOTE.match(block.lines[0])[1]).stem, source)
            kept = _mask(list(block.lines), source.splitlines(), solved)
            lines[block.line : block.end - 1] = kept + [None] * (len(block.lines) - len(kept))
    return "\n".join(line for line in lines if line is not None) + "\n"


def _solved_lines(exercises: list[Exercise], module: str, source: str) -> dict[int, str]:
    """The lines of a module that a learner is to write, each with the exercise's id."""
    return {
        line: exercise.id
        for exercise in exercises
        for name in exercise.by_module.get(module, [])
        for line in body_lines(source, name)
    }


def _mask(quoted: list[str], source: list[str], solved: dict[int, str]) -> list[str]:
    """A quote's lines; those of a solution become one comment."""
    kept, position, at = [quoted[0]], 0, 1
    masked = None
    while at < len(quoted):
        run = at
        while run < len(quoted) and quoted[run].strip() != ELISION:
            run += 1
        segment = [line.rstrip() for line in quoted[at:run]]
        while segment and not segment[-1]:
            segment.pop()
        after, _ = find_run(segment, source, position) if segment and segment[0] else (None, 0)
        position = after if after is not None else position
        for offset, line in enumerate(quoted[at : run + 1]):
            number = position - len(segment) + offset + 1  # of the line in the module
            name = solved.get(number) if after is not None and offset < len(segment) else None
            if name is None:
                elision = line.strip() == ELISION
                if elision and masked and solved.get(position + 1):
                    continue  # what was left out lies in the solution, too
                kept.append(line)
                masked = None if line.strip() else masked
            elif name != masked:
                blanks = line[: len(line) - len(line.lstrip())]
                kept.append(f"{blanks}# your turn: exercise {name}")
                masked = name
        at = run + 1
    return kept


def _folder(course: Course, lesson: Lesson, files: Files, starter: bool) -> Files:
    marker = Marker(lesson.id, lesson.path.as_posix(), version(course, lesson), starter)
    files = {**files, **borrowed_files(course, lesson), MARKER: marker.to_json()}
    if starter:
        files[START] = _start_text(lesson).encode()
    files[lesson.rel("docs/en.md")] = _links(lesson, files).encode()
    return dict(sorted(files.items()))


def _links(lesson: Lesson, files: Files) -> str:
    """The lesson's text, in which a link to what is not in the folder is only its words."""
    docs = PurePosixPath(lesson.rel("docs"))

    def keep(match: re.Match) -> str:
        target = match[2].partition("#")[0]
        if not target or ":" in target:
            return match[0]
        parts: list[str] = []
        for part in (docs / target).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        return match[0] if any(name == path or name.startswith(f"{path}/") for name in files) else match[1]

    return _LINK.sub(keep, files[lesson.rel("docs/en.md")].decode())


def _start_text(lesson: Lesson) -> str:
    return f"""# {lesson.header.title}: your turn

The text of the lesson is `{lesson.path.as_posix()}/docs/en.md`. In its code, the functions that you are to write raise
`NotImplementedError` with a hint; `exercises.json` lists them in order, with their tests and points. Modules of other
lessons that this one uses are here, too.

What is next? This tries your functions in order and stops at the first that does not pass, with its hint. It is run in
the course's own folder, and given the path of this one:

```bash
python scripts/course.py try FOLDER
```

All tests of the lesson, and its demonstration, run here without the course:

```bash
python -m unittest discover -s {lesson.path.as_posix()}/tests
python {lesson.path.as_posix()}/code/main.py
```

To hand in your work: the files that you changed in `{lesson.path.as_posix()}/code`, under their own names, with any
new modules of yours that they import; or a zip of this folder. Each exercise is judged in the lesson's own code: your
functions of that exercise, and all that is new in your files (functions, classes, methods, values), are put into it.
What you changed in other code that was there is not taken (`course try` names it), so that no exercise can fail because
of another; write a new function instead. A function that is asked for is defined with `def`, where it stands now.
"""
