"""Which of the files that were handed in were looked at, under which name, and which were not: never silently."""

from pathlib import PurePosixPath
from typing import Any

from exercises.model import Exercise
from faults import UserError
from grading.grade import Result
from grading.layout import Layout
from grading.naming import find_module, names_like
from grading.platforms import Handed
from grading.submissions import Work
from lessons import Lesson
from words import counted

SHOWN = 20  # files that a text names; report.json has all


def files_json(lesson: Lesson, work: Work, exercises: list[Exercise], results: list[Result], layout: Layout) -> dict:
    """What report.json says about files. Paths are those of the download.

    looked_at  what exercises were taken from, with the modules that these import
    empty      of these, files in which nothing is written
    renamed    {"file", "as"}: looked at as a module whose own file is missing
    unclear    {"expected", "files"}: a module that is missing, and more than one file that may be it
    ignored    not looked at, though it is nothing that the lesson gave out
    given      not looked at, but known: of the lesson, where no exercise asks for it
    replaced   {"file", "by"}: handed in again
    """
    handed = work.handed or Handed("", [], "")
    shown = {path: handed.origins.get(path, path) for path in handed.files}
    found = {"looked_at": {file for result in results for file in result.files}, "renamed": [], "unclear": []}
    for module in dict.fromkeys(module for exercise in exercises for module in exercise.by_module):
        _look(handed, lesson, module, shown, found)
    rest = [path for path in [*shown.values(), *handed.unread] if path not in found["looked_at"]]
    return {
        "looked_at": sorted(found["looked_at"]),
        "empty": sorted(found["looked_at"] & {shown[path] for path, data in handed.files.items() if not data.strip()}),
        "renamed": found["renamed"],
        "unclear": found["unclear"],
        "ignored": [path for path in rest if PurePosixPath(path).name not in layout.given],
        "given": [path for path in rest if PurePosixPath(path).name in layout.given],
        "replaced": [{"file": old, "by": new} for old, new in handed.replaced],
    }


def _look(handed: Handed, lesson: Lesson, module: str, shown: dict[str, str], found: dict[str, Any]) -> None:
    try:
        path = find_module(handed, lesson, module)
    except UserError:
        return  # handed in twice, and differently: the exercise is blocked, and says so
    if path is None:
        like = [shown[each] for each in names_like(handed, lesson, module)]
        found["unclear"] += [{"expected": f"{module}.py", "files": like}] if like else []
        return
    found["looked_at"].add(shown[path])
    if PurePosixPath(shown[path]).name != f"{module}.py" and not _named_by_platform(shown[path], handed, path, module):
        found["renamed"].append({"file": shown[path], "as": f"{module}.py"})


def _named_by_platform(shown: str, handed: Handed, path: str, module: str) -> bool:
    """Whether it had the right name, to which Canvas added who handed it in, and how often."""
    return PurePosixPath(path).name == f"{module}.py" and handed.platform == "Canvas"


def notes(report: dict[str, Any]) -> list[str]:
    """What an instructor must know: work under another name, and work of which nothing was looked at."""
    files = report["files"]
    found = [f"{each['file']} was taken as {each['as']}, which was not handed in" for each in files["renamed"]]
    found += [
        f"{each['expected']} was not handed in; not looked at, because each may be it: {_list(each['files'])}"
        for each in files["unclear"]
    ]
    if files["empty"] and files["empty"] == files["looked_at"]:
        rest = f"; not looked at: {_list(files['ignored'])}" if files["ignored"] else ""
        found.append(f"nothing is written in {_list(files['empty'])}{rest}")
    if not files["looked_at"] and not files["unclear"] and report["submission"] is not None:
        rest, problems = files["ignored"] + files["given"], report["problems"]
        found += [f"none of its files has a name asked for: {_list(rest)}"] if rest else []
        found += [f"nothing of it could be read: {_list(problems)}"] if problems and not rest else []
        found += [] if rest or problems else ["no file was handed in"]
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The paragraph of report.md about files."""
    files = report["files"]
    found = [f"- Note: {note}." for note in notes(report)]
    for each in files["replaced"]:
        found.append(f"- `{each['by']}` counts; `{each['file']}`, handed in before, does not.")
    for what, names in (("Looked at", files["looked_at"]), ("Not looked at", files["ignored"])):
        found += [f"- {what}: {_list([f'`{name}`' for name in names])}"] if names else []
    if files["given"]:
        what = counted(len(files["given"]), "other file")
        found.append(f"- Not looked at: {what} of the lesson, for which no exercise asks")
    return ["", *found] if found else []


def _list(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
