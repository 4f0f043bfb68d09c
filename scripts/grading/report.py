"""A student's report.md, report.json and results.json (Gradescope), and the class's tables."""

import re
from dataclasses import asdict
from typing import Any

import gradescope
from csvfile import csv_text
from exercises.model import Exercise
from grading import byhand, looked
from grading.grade import STATUSES, Result
from grading.isolation import Isolation
from grading.judge import Judge
from grading.submissions import Class, Work
from lessons import Lesson
from words import counted

SHORT = {"correct": "✓", "incorrect": "✗", "not attempted": "-", "blocked": "b", "error": "E"}
APART = (
    "each run was kept apart: it saw nobody's files, no other process, no network; it wrote into its own folder alone"
)
BY_HAND = "Code that reaches for its tests or behind Python's scenes. It changed no points: ask what it is for."
OWN_CODE = "Each exercise is judged in the lesson's own code, to which only what is new in yours was added."
PUBLISHED = "Everybody can read these. Short ones many find by themselves; of a long one, ask how it works."


def folder_name(student_id: str) -> str:
    """A student's id as the name of a folder."""
    safe = re.sub(r"[^\w.@+-]", "_", student_id).strip(".")
    return safe[:80] or "_"


def total(results: list[Result]) -> tuple[float | None, float]:
    """(points, of); points are None while one exercise is undecided."""
    points = [result.points for result in results]
    return None if None in points else sum(points), sum(result.of for result in results)


def student_json(
    judge: Judge, work: Work, results: list[Result], exercises: list[Exercise], more: dict
) -> dict[str, Any]:
    """report.json."""
    points, of = total(results)
    lesson, isolation = judge.lesson, judge.isolation
    handed = work.handed
    titles = {exercise.id: exercise.title for exercise in exercises}
    return {
        "lesson": lesson.id,
        "student": {"id": work.student.id, "name": work.student.name},
        "submission": handed.label if handed else None,
        "platform": handed.platform if handed else None,
        "late": handed.late if handed else False,
        "superseded": work.superseded,
        "problems": handed.problems if handed else [],
        "files": looked.files_json(lesson, work, exercises, results, judge.layout),
        "by_hand": byhand.suspects(work, results, judge.layout),
        "points": points,
        "of": of,
        "exercises": [asdict(result) | {"title": titles.get(result.exercise, "")} for result in results],
        "isolation": isolation.to_json(),
        **more,
    }


def student_md(report: dict[str, Any]) -> str:
    """report.md, from the same data."""
    student = report["student"]
    shown = "not decided yet" if report["points"] is None else f"{report['points']:g} of {report['of']:g} points"
    lines = [f"# {student['name']} ({student['id']}): lesson {report['lesson']}", "", f"**{shown}**", ""]
    lines += [f"Handed in: {_code(report['submission'])}" + (" (late)" if report["late"] else "")]
    lines += [f"Replaced by it: {', '.join(map(_code, report['superseded']))}"] if report["superseded"] else []
    lines += [f"Problem: {problem}" for problem in report["problems"]]
    lines += [f"Isolation: {text}" for text in report["isolation"]["missing"]]
    lines += looked.lines(report)
    lines += ["", "| exercise | status | points | tests | |", "|---|---|---:|---:|---|"]
    for item in report["exercises"]:
        points = "open" if item["points"] is None else f"{item['points']:g}"
        note = f"set by hand: {item['override']['reason']}" if item["override"] else ""
        note = (note or (item["reason"] if item["status"] == "not attempted" else "")).replace("|", "/")
        lines.append(
            f"| {item['exercise']} | {item['status']} | {points} / {item['of']:g} | {item['tests'] or ''} | {note} |"
        )
    for item in report["exercises"]:
        if item["override"] or item["status"] not in ("correct", "not attempted"):
            lines += ["", *exercise_md(item, report)]
    return "\n".join(lines) + "\n"


def exercise_md(item: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """What is to be said about one exercise."""
    lines = [f"## {item['title'] or item['exercise']}: {item['status']}", ""]
    if item["override"]:
        was = "open" if item["override"]["was"] is None else f"{item['override']['was']:g}"
        lines += [f"Points set by hand: {item['points']:g} instead of {was}. {item['override']['reason']}", ""]
    evidence = item["evidence"]
    lines += [f"{_sentence(item['reason'])}.", ""] if item["reason"] else []
    names = {"test": "test", "expected": "expected", "observed": "observed", "rank": "rank", "waiting": "deadlock"}
    lines += [f"- {word}: {_code(evidence[key])}" for key, word in names.items() if evidence.get(key) not in (None, "")]
    if evidence.get("file"):
        place = f"{evidence['file']}:{evidence['line']}" if evidence.get("line") else evidence["file"]
        lines.append(f"- in: {_code(place)}")
    if evidence.get("not_taken"):
        names = ", ".join(map(_code, evidence["not_taken"][: looked.SHOWN]))
        lines.append(f"- not taken: your changes in {names}. {OWN_CODE}")
    if evidence.get("lines"):
        marked = [f"{'>' if n == evidence.get('line') else ' '} {n:4} {text}" for n, text in evidence["lines"]]
        lines += ["", *_block("python", "\n".join(marked))]
    message = evidence.get("message", "")
    if "\n" in message:
        lines += ["", *_block("text", message)]
    if evidence.get("output"):
        lines += ["", "It printed (the end):", "", *_block("text", evidence["output"])]
    if item["status"] == "incorrect" and report.get("command"):
        lines += ["", "To see it again:", "", *_block("bash", f"{report['command']} --exercise {item['exercise']}")]
    return lines


def _sentence(text: str) -> str:
    """With a capital first, unless a name of code or of a file comes first."""
    return (
        text if re.match(r"\S+\.py\b|\w*[_.]\w|\w+ is (?:no function|defined) ", text) else text[:1].upper() + text[1:]
    )


def _code(text: object) -> str:
    plain = " ".join(str(text).split())
    return f"``{plain}``" if "`" in plain else f"`{plain}`"


def _block(language: str, text: str) -> list[str]:
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return [f"{fence}{language}", text, fence]


def gradescope_json(report: dict[str, Any]) -> dict[str, Any]:
    """results.json of one student. ValueError while an exercise is undecided."""
    tests = []
    for item in report["exercises"]:
        if item["points"] is None:
            raise ValueError(f"{item['exercise']} is not decided: {item['reason']}")
        text = "\n".join(exercise_md(item, {})) if item["status"] != "correct" or item["override"] else ""
        name = f"{item['title'] or item['exercise']} ({item['status']})"
        tests.append(gradescope.test(name, item["points"], item["of"], text, output_format="md"))
    told = "\n".join([*looked.notes(report), *report["problems"], *report["isolation"]["missing"]])
    return gradescope.results(tests, output=told, execution_time=report.get("seconds"))


def class_csv(reports: list[dict[str, Any]], exercises: list[Exercise]) -> str:
    """Columns student, id, points, of, and one for each exercise; empty cells are undecided."""
    rows = []
    for report in reports:
        cells = {item["exercise"]: item["points"] for item in report["exercises"]}
        student = report["student"]
        own = [cells.get(exercise.id) for exercise in exercises]
        rows.append([student["name"], student["id"], report["points"], report["of"], *own])
    return csv_text(["student", "id", "points", "of", *(exercise.id for exercise in exercises)], rows)


def _published(reports: list[dict]) -> list[str]:
    """A line for each student of whom some answers are the course's own."""
    found = []
    for report in reports:
        same = [item["exercise"] for item in report["exercises"] if item["published"]]
        found += [f"- {report['student']['id']}: {', '.join(same)}"] if same else []
    return found


def class_md(lesson: Lesson, reports: list[dict], exercises: list[Exercise], of: Class, isolation: Isolation) -> str:
    """The table of the class, what could not be matched, and what the signs mean."""
    lines = [f"# Lesson {lesson.id}: {counted(len(reports), 'student')}", ""]
    lines += [*(f"- {text}" for text in isolation.missing or [APART]), ""]
    heads = ["student", "id", "points", *(exercise.id for exercise in exercises)]
    lines += [f"| {' | '.join(heads)} |", f"|---|---|---:|{':-:|' * len(exercises)}"]
    for report in reports:
        marks = {item["exercise"]: SHORT[item["status"]] + "*" * bool(item["override"]) for item in report["exercises"]}
        points = "open" if report["points"] is None else f"{report['points']:g} / {report['of']:g}"
        student = report["student"]
        own = [marks.get(exercise.id, "") for exercise in exercises]
        cells = [student["name"], student["id"], points, *own]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    lines += ["", f"{', '.join(f'{SHORT[status]} {status}' for status in STATUSES)}; * points set by hand."]
    late = [report["student"]["id"] for report in reports if report["late"]]
    nothing = [report["student"]["id"] for report in reports if report["submission"] is None]
    for what, who in (("Late", late), ("Nothing was handed in by", nothing)):
        lines += ["", f"{what}: {', '.join(who)}"] if who else []
    if names := [f"- {report['student']['id']}: {note}" for report in reports for note in looked.notes(report)]:
        lines += ["", "## Files under another name, and files that were not looked at", "", *names]
    if copies := _published(reports):
        lines += ["", "## Word for word the published solution", "", PUBLISHED, "", *copies]
    if suspects := [line for report in reports for line in byhand.lines(report)]:
        lines += ["", "## To be looked at by hand", "", BY_HAND, "", *suspects]
    if of.unmatched:
        lines += ["", "## Not matched", "", *(f"- `{label}`: {why}" for label, why in of.unmatched)]
    if of.stray:
        lines += ["", "## Files that belong to nobody", "", *(f"- `{name}`" for name in of.stray)]
    return "\n".join(lines) + "\n"
