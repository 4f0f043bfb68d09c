"""Whose is what: the bulk downloads of Canvas, Moodle and Gradescope, and one folder (or zip, or file) a student.

Canvas      lastfirst_12345_67890_zero.py       flat; LATE after the name; -1 before .py: handed in again
Moodle      First Last_12345_assignsubmission_file_/zero.py
Gradescope  submission_123456/zero.py           and submission_metadata.yml, which says whose
else        ID or name/...                      also ID.zip
"""

import re
from dataclasses import dataclass, field

from grading.handin import METADATA, HandedFile, Tree, below

_CANVAS = re.compile(r"^(?P<name>[^_/]+?)(?P<late>_LATE)?_(?P<user>\d+)_(?P<submission>\d+)_(?P<file>[^/]+)$")
_MOODLE = re.compile(r"^(?P<name>.+)_(?P<user>\d+)_assignsubmission_\w+$")
_AGAIN = re.compile(r"-(\d+)(?=\.\w+$)")
_YAML_TOP = re.compile(r"^(\S[^:]*):\s*$")
_YAML_KEY = re.compile(r"^\s+(?:-\s+)?:?(name|sid|email|created_at):\s*(.*?)\s*$")


@dataclass
class Handed:
    """What one student handed in at one time."""

    label: str  # the folder or file that it came as
    names: list[str]  # what a roster may know the student by, the best first
    platform: str
    files: dict[str, bytes] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # path in `files` -> path in the download
    replaced: list[tuple[str, str]] = field(default_factory=list)  # (path in the download, path of the newer one)
    unread: list[str] = field(default_factory=list)  # files that are neither Python nor a zip
    problems: list[str] = field(default_factory=list)
    late: bool = False
    order: tuple = ()  # the newest is the greatest


def split(tree: Tree) -> tuple[list[Handed], list[str]]:
    """What was handed in, and the files that belong to nobody."""
    tree = _without_wrapper(tree)
    metadata = tree.files.pop(METADATA, None)
    people = read_metadata(metadata.data.decode(errors="replace")) if metadata else {}
    found: dict[str, Handed] = {}
    stray: list[str] = []
    orders: dict[str, dict[str, tuple]] = {}
    paths = tree.paths
    folders = {path.split("/")[0] for path in paths if "/" in path} | set(tree.folders)
    links = {path for path, _ in tree.problems if not path.lower().endswith(".py")}
    for top in dict.fromkeys(path.split("/")[0] for path in paths):
        folder = top in folders or top in links
        zipped = top.lower().endswith(".zip")
        if match := _CANVAS.match(top):
            key = f"{match['name']}_{match['user']}"
            handed = found.setdefault(key, Handed(key, [match["user"], match["name"]], "Canvas"))
            handed.late |= bool(match["late"])
            _take_canvas(tree, top, match, handed, orders.setdefault(key, {}))
            continue
        if folder or zipped:
            for number, handed in enumerate(_folders(top, people)):
                for path, file in below(tree.files, top):
                    handed.files[path], handed.origins[path] = file.data, f"{top}/{path}"
                    if not people:
                        handed.order = max(handed.order, (file.time,))
                found[f"{top}/{number}"] = handed
        else:
            stray.append(top)
    for handed in found.values():
        handed.problems += [f"{path}: {problem}" for path, problem in tree.problems if _is_of(path, handed)]
        handed.unread += [path for path in tree.unread if _is_of(path, handed)]
    return list(found.values()), stray


def _is_of(path: str, handed: Handed) -> bool:
    prefixes = (f"{handed.label}/", f"{handed.label}_")
    return path == handed.label or path.startswith(prefixes) or path.replace("_LATE", "").startswith(prefixes)


def _folders(top: str, people: dict[str, dict]) -> list[Handed]:
    """Whose the folder (or zip) is: one student's, or that of each in a group of Gradescope's."""
    if top in people:
        order = (people[top]["created"],)
        return [Handed(top, names, "Gradescope", order=order) for names in people[top]["group"] or [[]]]
    if match := _MOODLE.match(top):
        return [Handed(top, [match["name"]], "Moodle")]
    name = top[:-4] if top.lower().endswith(".zip") else top
    return [Handed(top, [name], "folder")]


def _take_canvas(tree: Tree, top: str, match: re.Match, handed: Handed, orders: dict[str, tuple]) -> None:
    """One file of a Canvas download, or a zip. Of two with the same name the one handed in last counts."""
    again = _AGAIN.search(match["file"])
    order = (int(match["submission"]), int(again[1]) if again else 0)
    handed.order = max(handed.order, order)
    inside = [(path, file, f"{top}/{path}") for path, file in below(tree.files, top)]
    if top in tree.files:
        inside.append((_AGAIN.sub("", match["file"]), tree.files[top], top))
    for path, file, origin in inside:
        if path in orders:
            old, new = sorted([(orders[path], handed.origins[path]), (order, origin)])
            handed.replaced.append((old[1], new[1]))
        if order >= orders.get(path, ()):
            orders[path] = order
            handed.files[path], handed.origins[path] = file.data, origin


def _without_wrapper(tree: Tree) -> Tree:
    """The tree without the one folder that a platform's zip puts around everything."""
    tops = {path.split("/")[0] for path in tree.files or tree.paths}
    if len(tops) != 1:
        return tree
    (top,) = tops
    inside: dict[str, HandedFile] = dict(below(tree.files, top))
    seconds = {path.split("/")[1] for path in tree.paths if path.startswith(f"{top}/")}
    wraps = METADATA in inside or any(_CANVAS.match(name) or _MOODLE.match(name) for name in seconds)
    if not wraps:
        return tree
    problems = [(path.removeprefix(f"{top}/"), problem) for path, problem in tree.problems]
    unread, folders = ([path.removeprefix(f"{top}/") for path in paths] for paths in (tree.unread, tree.folders))
    return Tree(inside, problems, unread, [path for path in folders if path != top])


def read_metadata(text: str) -> dict[str, dict]:
    """Gradescope's metadata: {folder: {"group": [[id, email, name], ...], "created": text that sorts by time}}.

    Only the few keys that are needed are read, line by line: a submission's students, and when it was made.
    """
    people: dict[str, dict] = {}
    current: dict | None = None
    students: list[dict[str, str]] = []
    for line in text.splitlines():
        if top := _YAML_TOP.match(line):
            current = people.setdefault(top[1].strip("\"'"), {"group": [], "created": ""})
            students = []
        elif current is not None and (key := _YAML_KEY.match(line)):
            value = key[2].strip("\"'")
            if key[1] == "created_at":
                current["created"] = current["created"] or value
            elif value:
                if not students or key[1] in students[-1] or line.lstrip().startswith("-"):
                    students.append({})
                students[-1][key[1]] = value
                current["group"] = [[v for n in ("sid", "email", "name") if (v := s.get(n))] for s in students]
    return people


def squashed(name: str) -> str:
    """Letters and digits alone, small: how Canvas writes a name into a file's."""
    return re.sub(r"[\W_]+", "", name.casefold())
