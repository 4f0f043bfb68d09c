"""What reports say about files: taken under another name, not looked at, replaced. Nothing of that is silent."""

import io
import os
import sys
import unittest
import zipfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading_course import RIGHT, RINGS, WRONG, Grading


class Files(Grading):
    """Only what a test hands in itself."""

    def setUp(self):
        super().setUp()
        for name in ("s1", "s2", "s3", "s4", "x9"):
            (self.root / "in" / name / "code" / "rings.py").unlink()
            (self.root / "in" / name / "code").rmdir()
            (self.root / "in" / name).rmdir()

    def grade_all(self, *options: str) -> None:
        self.assertEqual(self.grade(*options), 0, self.out + self.err)


class TestNames(Files):
    def test_a_changed_name_is_taken_and_said(self):
        self.put("in/s1/rings (1).py", WRONG)
        self.put("in/s2/rings.py", RINGS)
        self.put("in/s2/rings (1).py", WRONG)
        self.grade_all()
        note = "s1/rings (1).py was taken as rings.py, which was not handed in"
        self.assertIn(f"files: s1: {note}\n", self.out)
        self.assertIn(f"- s1: {note}\n", self.text("out/class.md"))
        text = self.text("out/s1/report.md")
        self.assertIn(f"- Note: {note}.\n", text)
        self.assertIn("- Looked at: `s1/rings (1).py`\n", text)
        self.assertEqual(self.report("s1")["points"], 5)
        self.assertEqual(self.report("s1")["exercises"][0]["evidence"]["file"], "s1/rings (1).py")
        self.assertEqual(self.report("s1")["files"]["renamed"], [{"file": "s1/rings (1).py", "as": "rings.py"}])
        self.assertEqual(self.report("s2")["points"], 8)
        self.assertIn("- Not looked at: `s2/rings (1).py`\n", self.text("out/s2/report.md"))
        self.assertNotIn("files: s2", self.out)
        self.grade_all("--resume")
        self.assertIn(f"files: s1: {note}\n", self.out)

    def test_of_two_none_is_taken_and_that_is_said(self):
        self.put("in/s1/rings (1).py", WRONG)
        self.put("in/s1/rings (2).py", RINGS)
        self.grade_all()
        both = "s1/rings (1).py, s1/rings (2).py"
        self.assertIn(
            f"files: s1: rings.py was not handed in; not looked at, because each may be it: {both}\n", self.out
        )
        self.assertEqual(self.statuses("s1"), ["not attempted"] * 2)
        self.assertIn(f"rings.py was not handed in; which of these is it: {both}?", self.text("out/s1/report.md"))

    def test_nothing_of_it_was_looked_at(self):
        self.put("in/s1/rings.ipynb", "{}")
        self.put("in/s1/test_wheel.py", "")
        (self.root / "in/s2").mkdir()
        self.put("in/s3.zip", "no zip")
        self.grade_all()
        self.assertIn("files: s1: none of its files has a name asked for: s1/rings.ipynb, s1/test_wheel.py\n", self.out)
        self.assertIn("files: s2: no file was handed in\n", self.out)
        self.assertIn("files: s3: nothing of it could be read: s3.zip: a zip that cannot be read: ", self.out)
        self.assertNotIn("files: s4", self.out)
        self.assertIn("Nothing was handed in by: s4, s5\n", self.text("out/class.md"))

    def test_an_empty_file_is_named(self):
        self.put("in/s1/rings.py", "\n")
        self.put("in/s1/answers.txt", "def turn ...")
        self.put("in/s2/rings.py", "# nothing yet\n")
        self.grade_all()
        note = "s1: nothing is written in s1/rings.py; not looked at: s1/answers.txt\n"
        self.assertIn(f"files: {note}", self.out)
        self.assertIn(f"- {note}", self.text("out/class.md"))
        self.assertEqual(self.report("s1")["files"]["empty"], ["s1/rings.py"])
        self.assertNotIn("files: s2", self.out)

    def test_helpers_are_looked_at_and_the_lessons_own_files_only_counted(self):
        self.put("in/s1/code/rings.py", f"from spokes import f\n{RINGS.replace(RIGHT, 'return f(ring, steps)')}")
        self.put("in/s1/code/spokes.py", "def f(ring, n):\n    return ring[n:] + ring[:n]\n")
        self.put("in/s1/code/main.py", "")
        self.put("in/s1/tests/test_wheel.py", "")
        self.put("in/s1/START.md", "")
        self.put("in/s1/diary.txt", "")
        self.grade_all("--only", "s1")
        files = self.report("s1")["files"]
        self.assertEqual(files["looked_at"], ["s1/code/rings.py", "s1/code/spokes.py"])
        self.assertEqual(files["ignored"], ["s1/diary.txt"])
        text = self.text("out/s1/report.md")
        self.assertIn("- Not looked at: 3 other files of the lesson, for which no exercise asks\n", text)

    def test_canvas_says_which_of_two_counted(self):
        self.put("in/leeanna_11_500_rings.py", WRONG)
        self.put("in/leeanna_11_500_rings-1.py", RINGS)
        self.put("in/dykbo_12_501_rings-1.py", RINGS)
        self.grade_all()
        text = self.text("out/s1/report.md")
        counts = "- `leeanna_11_500_rings-1.py` counts; `leeanna_11_500_rings.py`, handed in before, does not.\n"
        self.assertIn(counts, text)
        self.assertEqual(self.report("s1")["points"], 8)
        self.assertIn("- Looked at: `leeanna_11_500_rings-1.py`\n", text)
        self.assertNotIn("files: ", self.out)  # Canvas itself writes -1: nothing to worry about


class TestOddFiles(Files):
    """As editors and systems elsewhere save them: none is the student's fault, or it is said what is wrong."""

    def points(self, data: bytes) -> float:
        path = self.root / "in/s1/rings.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.grade_all("--only", "s1", "--resume")
        return self.report("s1")["points"]

    def test_what_is_python_all_the_same(self):
        text = RINGS.replace(RIGHT, "return ring[steps:] + ring[:steps]  # grün")
        for data in (
            text.replace("\n", "\r\n").encode(),
            text.replace("\n", "\r").encode(),
            b"\xef\xbb\xbf" + text.encode(),
            b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
            b"# coding: latin-1\n" + text.encode("latin-1"),
            text.rstrip("\n").encode(),
        ):
            self.assertEqual(self.points(data), 8, data[:20])

    def test_what_is_none_is_blocked_with_the_line(self):
        text = RINGS.replace(RIGHT, "return ring  # grün")
        line = text[: text.index("grün")].count("\n") + 1
        for data, number in (
            (text.encode("latin-1"), line),
            (text.encode("utf-16"), 1),
            (text.replace("grün", "\0").encode(), line),
            (text.replace("return ring  #", "\treturn ring #").encode(), line),
        ):
            self.assertEqual(self.points(data), 0)
            self.assertEqual(self.statuses("s1"), ["blocked"] * 2)
            evidence = self.report("s1")["exercises"][0]["evidence"]
            self.assertEqual(evidence, {"file": "s1/rings.py", "line": number})

    def test_a_zip_in_a_folder_and_a_link(self):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("work/code/rings.py", RINGS)
        self.put("in/s1/.keep", "")
        (self.root / "in/s1/mine.zip").write_bytes(buffer.getvalue())
        self.put("in/s2/notes.txt", "")
        (self.root / "in/s2/rings.py").mkdir()
        if os.name == "posix":
            self.put("in/s3/.keep", "")
            os.symlink(self.root / "roster.csv", self.root / "in/s3/rings.py")
        self.grade_all()
        self.assertEqual(self.report("s1")["points"], 8)
        self.assertEqual(self.report("s1")["files"]["looked_at"], ["s1/mine.zip/work/code/rings.py"])
        self.assertIn("Problem: s2/rings.py: a folder, where a file is expected\n", self.text("out/s2/report.md"))
        if os.name == "posix":
            self.assertIn("Problem: s3/rings.py: a link", self.text("out/s3/report.md"))


class TestOneStudent(Files):
    def test_one_is_no_plural(self):
        self.put("roster.csv", "id,name\ns1,Anna Lee\n")
        self.put("in/s1/rings.py", RINGS)
        self.grade_all()
        self.assertTrue(self.text("out/class.md").startswith("# Lesson 01-wheels: 1 student\n"))
        self.assertIn("class.md: 1 student; also", self.out)
        self.put("roster.csv", "id,name\ns1,Anna Lee\ns2,Bo Dyk\n")
        self.grade_all("--resume")
        self.assertTrue(self.text("out/class.md").startswith("# Lesson 01-wheels: 2 students\n"))


if __name__ == "__main__":
    unittest.main()
