import csv
import io
import json
import sys
import unittest
from decimal import Decimal
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import QuizCase

from quizzes.gradebook import number

# As Canvas exports it: a mark, CRLF, names in quotes, a row of manual posting, read-only totals, the test student.
EXPORT = (
    "\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Homework (11),Quiz 76 (12),Final Score\r\n"
    ",,,,,,Manual Posting,\r\n"
    "    Points Possible,,,,,5.00,6.00,(read only)\r\n"
    '"Lovelace, Ada",101,u1,ada,"Lab ""A"", B",4.00,,88.5\r\n'
    '"Hopper, Grace",102,u2,grace,One,,3.00,70.1\r\n'
    '"Turing, Alan",103,103x,alan,One,"5.00",EX,60\r\n'
    "Noether,104,u4,emmy,One,1,,\r\n"
    "Noether,105,u5,emmy2,One,1,,\r\n"
    '"Student, Test",999,,,One,,,\r\n'
)
COLUMN = "Quiz 76 (12)"


class TestNumber(unittest.TestCase):
    def test_numbers(self):
        for text, value in [("12", "12"), ("12.50", "12.5"), ("0", "0"), ("12,5", "12.5")]:
            self.assertEqual(number(text), Decimal(value))
        for text in ("", "-1", "nan", "inf", "1e3", "1,000.00", " 1", "+1", "1.", ".5", "1_0", "\u0661", "9" * 30):
            self.assertIsNone(number(text), text)


class TestCanvas(QuizCase):
    def fill(self, grades: str, *args: object, book: str | bytes = EXPORT, code: int = 0) -> tuple[dict, str | None]:
        """(what the command says, the text of the gradebook that it wrote)."""
        path, target = self.file("book.csv", book), self.work / "out.csv"
        target.unlink(missing_ok=True)
        given = ("--grades", self.file("grades.csv", grades), "--column", COLUMN, "--out", target)
        out, _ = self.course("canvas", path, *given, "--json", *args, code=code)
        return json.loads(out), target.read_bytes().decode() if target.exists() else None

    def assert_fault(self, message: str, grades: str = "student,points\n101,3\n", book: str | bytes = EXPORT, *args):
        path = self.file("book.csv", book)
        (self.work / "out.csv").unlink(missing_ok=True)
        given = ("--grades", self.file("grades.csv", grades), "--column", COLUMN, "--out", self.work / "out.csv")
        self.refused(message, "canvas", path, *given, *args)
        self.assertFalse((self.work / "out.csv").exists())

    def test_only_the_cells_of_the_column_change(self):
        value, text = self.fill("student,points,of\n101,4,6\nu2,5.5,6\nalan,1,6\nemmy2,0,6\n")
        wanted = EXPORT
        for old, new in [
            ('B",4.00,,88.5', 'B",4.00,4,88.5'),
            ("One,,3.00,70.1", "One,,5.5,70.1"),
            ("105,u5,emmy2,One,1,,", "105,u5,emmy2,One,1,0,"),
        ]:
            self.assertEqual(wanted.count(old), 1)
            wanted = wanted.replace(old, new)
        self.assertEqual(text, wanted)
        self.assertEqual(value["filled"], ["101", "u2", "emmy2"])
        self.assertEqual(value["changed"], ["u2"])
        self.assertEqual(value["excused"], ["alan"])
        self.assertEqual(value["left"], ["Noether"])
        self.assertEqual(value["unmatched"], [])

    def test_an_equal_grade_is_left_as_it_stands(self):
        value, text = self.fill("student,points\n102,3\n")
        self.assertEqual(text, EXPORT)
        self.assertEqual((value["filled"], value["changed"]), (["102"], []))

    def test_the_order_of_matching(self):
        # 103 is one student's ID and, in another book, another's login: the ID wins.
        book = EXPORT.replace("u4,emmy,", "u4,103,")
        self.assertEqual(self.fill("student,points\n103x,1\n104,2\n", book=book)[0]["excused"], ["103x"])
        self.assertEqual(self.fill("student,points\n103,1\n", book=book)[0]["excused"], ["103"])
        _, text = self.fill('student,points\n"Lovelace, Ada",2\n')
        self.assertIn('B",4.00,2,88.5', text)

    def test_grades_with_ids_and_names(self):
        # Their id tells the two Noethers apart; a name is tried where the gradebook does not know the id.
        grades = 'student,id,points,of\nNoether,u5,2,6\n"Lovelace, Ada",x1,4,6\n"Turing, Alan",102,5,6\nNobody,x2,1,6\n'
        value, text = self.fill(grades, "--allow-unmatched")
        self.assertEqual(value["filled"], ["Noether", "Lovelace, Ada", "Turing, Alan"])
        self.assertEqual((value["unmatched"], value["left"]), (["Nobody"], ["Turing, Alan", "Noether"]))
        self.assertIn("emmy2,One,1,2,", text)
        self.assertIn('B",4.00,4,88.5', text)
        self.assertIn("grace,One,,5,70.1", text)  # the id counts more than the name

    def test_ambiguous_names_and_ids(self):
        self.assert_fault("book.csv: Student 'Noether' is ambiguous: lines 7, 8", "student,points\nNoether,3\n")
        book = EXPORT.replace("u5,emmy2", "u4,emmy2")
        self.assert_fault("SIS User ID 'u4' is ambiguous: lines 7, 8", "student,points\nu4,3\n", book)
        self.assert_fault(
            "grades.csv:3: a second grade for 'u1'; the first is on line 2", "student,points\n101,1\nu1,2\n"
        )

    def test_names_match_exactly(self):
        value, text = self.fill('student,points\n101,1\nlovelace,2\nAda Lovelace,3\n"Student, Test",4\n', code=1)
        self.assertEqual(value["unmatched"], ["lovelace", "Ada Lovelace", "Student, Test"])
        self.assertIsNone(text)  # nothing is written
        self.assertFalse(value["written"])
        value, text = self.fill("student,points\n101,1\nlovelace,2\n", "--allow-unmatched")
        self.assertEqual((value["unmatched"], value["written"]), (["lovelace"], True))
        self.assertIn('B",4.00,1,88.5', text)

    def test_without_points(self):
        value, text = self.fill("student,points,of,status\n101,,6,missing\n102,4,6,graded\n")
        self.assertEqual((value["without"], value["filled"]), (["101"], ["102"]))
        self.assertIn('B",4.00,,88.5', text)

    def test_points_and_the_assignments_points(self):
        self.assert_fault(
            "grades.csv:2: points of 18, but the assignment's Points Possible are 6.00; --scale",
            "student,points,of\n101,9,18\n",
        )
        _, text = self.fill("student,points,of\n101,9,18\n102,17,18\n", "--scale")
        self.assertIn('B",4.00,3,88.5', text)
        self.assertIn("One,,5.67,70.1", text)
        self.assert_fault("grades.csv:2: 7 points, but", "student,points\n101,7\n")
        self.assert_fault("the column 'of' must say", "student,points\n101,5\n", EXPORT, "--scale")
        self.assert_fault("the column 'of' must say", "student,points,of\n101,5,0\n", EXPORT, "--scale")

    def test_bad_grades(self):
        for points in ("x", "-1", "nan", "1e3", "1,5x"):
            self.assert_fault(f"grades.csv:2: points is {points!r}", f'student,points\n101,"{points}"\n')
        for message, grades in [
            ("grades.csv:1: the column 'student' is missing", "name,points\nAda,1\n"),
            ("grades.csv:1: the column 'points' is missing", "student,score\nAda,1\n"),
            ("grades.csv:2: the student is empty", "student,points\n,1\n"),
            ("grades.csv:1: no grade follows", "student,points\n"),
            ("grades.csv:1: is empty", ""),
        ]:
            self.assert_fault(message, grades)

    def test_bad_gradebooks(self):
        for message, old, new in [
            ("book.csv:1: no Canvas gradebook: the column 'Section' is missing", ",Section,", ",Sektion,"),
            ("book.csv:1: no Canvas gradebook: the column 'ID' is missing", ",ID,", ",Number,"),
            ("book.csv:1: 'Homework (11)' stands before Section", "Section,Homework (11)", "Homework (11),Section"),
            ("book.csv:1: 'SIS Login ID' stands behind Section", "SIS Login ID,Section", "Section,SIS Login ID"),
            ("book.csv:1: the first column is 'ID'", "Student,ID", "ID,Student"),
            ("book.csv:1: 0 rows 'Points Possible'", "    Points Possible", "Points"),
            ("book.csv:4: 2 rows 'Points Possible'", '"Lovelace, Ada"', "Points Possible"),
            ("book.csv:3: Points Possible of 'Quiz 76 (12)' is ''; a number above 0", "6.00", ""),
            ("book.csv:3: Points Possible of 'Quiz 76 (12)' is '0'", "6.00", "0"),
            ("book.csv:3: Points Possible of 'Quiz 76 (12)' is '(read only)'", "6.00", "(read only)"),
            ("did you mean 'Quiz 76 (13)'", COLUMN, "Quiz 76 (13)"),
            ("book.csv:1: two columns are called 'Quiz 76 (12)'", "Homework (11)", COLUMN),
            ("book.csv:7: 7 cells, but the heading has 8", "Noether,104,u4", "Noether,104"),
        ]:
            with self.subTest(message=message):
                self.assertIn(old, EXPORT)
                self.assert_fault(message, book=EXPORT.replace(old, new, 1))
        self.assert_fault("book.csv:1: no student in this", book="".join(EXPORT.splitlines(True)[:3]))
        self.assert_fault("byte 0xe9 is no UTF-8", book=EXPORT.replace("Ada", "\u00e9").encode("latin-1", "ignore"))

    def test_more_columns_about_students(self):
        book = EXPORT.replace(",Section,", ",Integration ID,Root Account,Section,", 1)
        lines = book.splitlines(True)
        book = lines[0] + "".join(self.widened(line) for line in lines[1:])
        _, text = self.fill("student,points\n101,4\n", book=book)
        (before,), (after,) = (
            [row for row in csv.reader(io.StringIO(each)) if row[1] == "101"] for each in (book, text)
        )
        self.assertEqual(after, [*before[:8], "4", before[9]])

    def widened(self, line: str) -> str:
        """The line with two cells more before Section."""
        row = next(csv.reader([line]))
        out = io.StringIO()
        csv.writer(out).writerow([*row[:4], "", "", *row[4:]])
        return out.getvalue()

    def test_semicolons_and_decimal_commas(self):
        book = EXPORT.replace('"', "").replace("Lovelace, Ada", "Ada").replace("Hopper, ", "").replace("Turing, ", "")
        book = book.replace("Student, Test", "Test Student").replace("Lab A, B", "Lab")
        book = book.replace(",", ";").replace("6.00", "6,00")
        _, text = self.fill("student;points\n101;4,5\n", book=book)
        self.assertEqual(text, book.replace("Lab;4.00;;88.5", "Lab;4.00;4,5;88.5"))
        self.assertNotEqual(text, book)

    def test_files_in_the_way(self):
        book, grades = self.file("book.csv", EXPORT), self.file("grades.csv", "student,points\n101,3\n")
        given = ("canvas", book, "--grades", grades, "--column", COLUMN, "--out")
        self.refused("is the gradebook itself", *given, book, "--force")
        self.refused("grades.csv: exists already", *given, grades)
        self.refused("a folder", *given, self.work)
        self.refused("a folder", "canvas", self.work, *given[2:], self.work / "o.csv")
        self.assertEqual(book.read_bytes().decode(), EXPORT)

    def test_grades_of_grade_quiz_go_in_as_they_are(self):
        for student, wrong in (("101", 0), ("u2", 4)):
            self.file(f"in/{student}.json", self.sheet(student, "3", **self.letters("3", wrong)))
        self.course("grade-quiz", self.work / "in", "--out", self.work / "g")
        _, text = self.fill((self.work / "g" / "01-grades.csv").read_text())
        self.assertIn('B",4.00,6,88.5', text)
        self.assertIn("One,,2,70.1", text)

    def test_what_is_printed(self):
        book, grades = self.file("book.csv", EXPORT), self.file("grades.csv", "student,points\n101,3\n103,4\nx,1\n")
        given = ("canvas", book, "--grades", grades, "--column", COLUMN, "--out", self.work / "o.csv")
        out, _ = self.course(*given, code=1)
        for line in (
            "filled 'Quiz 76 (12)': 1",
            "excused, left so: 1: 103",
            "not in the gradebook: 1: x",
            "in the gradebook, without a grade: 3: Hopper, Grace; Noether; Noether",
            "nothing was written",
        ):
            self.assertIn(line, out)
