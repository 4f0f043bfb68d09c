"""The commands for grading: grade, similar, autograder, autograde."""

from collections.abc import Callable
from pathlib import Path

from grading.actions import grade_class
from grading.autograder import autograde, write_autograder
from grading.similar import show_similar


def register(add: Callable) -> None:
    """Add these commands: `add(name, action, text)` returns a parser; `action(course, args)` an exit code."""
    grade = add("grade", grade_class, "grade what a class handed in: each exercise alone, in a sandbox, with evidence")
    grade.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    grade.add_argument(
        "submissions",
        metavar="SUBMISSIONS",
        type=Path,
        help="a folder with one a student, or the bulk download of Canvas, Moodle or Gradescope; zips too",
    )
    grade.add_argument("--out", metavar="REPORT", type=Path, required=True, help="a new folder for the reports")
    grade.add_argument("--roster", metavar="CSV", type=Path, help="the class: id, name, or a platform's export")
    grade.add_argument("--only", metavar="STUDENT", help="one student, by id or name")
    grade.add_argument("--exercise", metavar="ID", action="append", default=[], help="only this exercise")
    grade.add_argument("--overrides", metavar="CSV", type=Path, help="student, exercise, points, reason: set by hand")
    grade.add_argument("--resume", action="store_true", help="keep reports whose submission has not changed")
    grade.add_argument("--jobs", metavar="J", type=int, default=3, help="students at a time (default: 3)")
    grade.add_argument("--json", action="store_true", help="print the class as JSON")
    grade.add_argument("--collective-seconds", metavar="S", type=float, help="one wait between ranks (default: 20)")
    grade.add_argument("--test-seconds", metavar="S", type=float, help="the most for one test (default: 120)")
    grade.add_argument("--run-seconds", metavar="S", type=float, help="the most for one exercise (default: 300)")
    grade.add_argument("--submission-seconds", metavar="S", type=float, help="one student's exercises (default: 900)")
    grade.add_argument("--memory", metavar="MIB", type=int, help="of all processes of a run (default: 6144)")
    grade.add_argument("--no-isolation", action="store_true", help="plain processes: for practice on your own code")
    similar = add("similar", show_similar, "which submissions are nearly the same, beyond the code that all were given")
    similar.add_argument("submissions", metavar="SUBMISSIONS", type=Path, help="as for grade")
    similar.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    similar.add_argument("--roster", metavar="CSV", type=Path, help="the class: id, name, or a platform's export")
    similar.add_argument("--least", metavar="P", type=float, default=50.0, help="percent of one's own (default: 50)")
    similar.add_argument("--json", action="store_true", help="print the pairs as JSON")
    autograder = add("autograder", write_autograder, "write an autograder for Gradescope: a zip to upload as it is")
    autograder.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    autograder.add_argument("file", metavar="FILE.zip", type=Path, help="the zip")
    autograder.add_argument("--force", action="store_true", help="overwrite it")
    autograder.add_argument("--json", action="store_true", help="print what was written as JSON")
    inside = add("autograde", autograde, "what the autograder runs on Gradescope: grades /autograder/submission")
    inside.add_argument("lesson", metavar="NN", help="the lesson's number, for example 76")
    inside.add_argument("--json", action="store_true", help="print results.json, too")
