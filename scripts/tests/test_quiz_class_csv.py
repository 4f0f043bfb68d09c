import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import QuizCase

from csvfile import read_table
from faults import UserError
from quizzes.grade import read_answers


class TestClassCsv(QuizCase):
    def columns(self, kind: str) -> list[str]:
        return [question.id if kind == "id" else question.text for question in self.quiz.questions]

    def cells(self, wrong: int = 0) -> list[str]:
        return [q.options[(q.correct + (n < wrong)) % 4] for n, q in enumerate(self.quiz.questions)]

    def points(self, data: str | bytes, *args: object) -> list[tuple[str, int]]:
        found = json.loads(self.course("grade-quiz", self.file("c.csv", data), *args, "--json")[0])[0]
        return [(each["student"], each["points"]) for each in found["grades"]]

    def csv(self, *rows: list[str], delimiter: str = ",", end: str = "\n") -> str:
        return end.join(delimiter.join(row) for row in rows) + end

    def test_letters_under_ids(self):
        right = list(self.letters(None).values())
        data = self.csv(
            ["student", *self.columns("id")],
            ["s1", *right],
            ["s2", *self.letters(None, 5).values()],
            ["s3", "", "", *right[2:]],
        )
        self.assertEqual(self.points(data, "--lesson", "1"), [("s1", 6), ("s2", 1), ("s3", 4)])

    def test_google_forms(self):
        texts = self.columns("text")
        more = [f"{text} [{what}]" for text in texts for what in ("Score", "Feedback")]
        heading = ["Timestamp", "Username", "Total score", *texts, *more]
        fill = ["1.00 / 1", ""] * 6
        data = self.csv(
            heading,
            ["2027/01/02 3:04:05 PM", "ada@x", "6.00 / 6", *self.cells(), *fill],
            ["2027/01/02 3:05:05 PM", "alan@x", "4.00 / 6", *self.cells(2), *fill],
        )
        self.assertEqual(self.points(data), [("ada@x", 6), ("alan@x", 4)])

    def test_microsoft_forms_as_excel_saves_them(self):
        texts = self.columns("text")
        more = [f"{what} - {text}" for text in texts for what in ("Points", "Feedback")]
        heading = [
            "ID",
            "Start time",
            "Completion time",
            "Email",
            "Name",
            "Total points",
            "Quiz feedback",
            *texts,
            *more,
        ]
        rows = [[str(n), "1/2/27", "1/2/27", f"s{n}@x", "", "", "", *self.cells(n), *[""] * 12] for n in (1, 2)]
        data = "\ufeff" + self.csv(heading, *rows, delimiter=";", end="\r\n")
        self.assertEqual(self.points(data), [("s1@x", 5), ("s2@x", 4)])

    def test_letters_from_paper_are_those_of_the_rows_seed(self):
        heading = ["student", "lesson", "quiz", "seed", *self.columns("id")]
        rows = [[f"s{n}", "01", self.quiz.sha256, f"1#s{n}", *self.letters(f"1#s{n}", n).values()] for n in range(4)]
        self.assertEqual(self.points(self.csv(heading, *rows)), [(f"s{n}", 6 - n) for n in range(4)])
        rows[2][3] = ""
        path = self.file("c.csv", self.csv(heading, *rows))
        self.refused("c.csv:4: the seed is empty, and not in other rows", "grade-quiz", path)
        path.write_text(self.csv(*([*row[:3], *row[4:]] for row in (heading, *rows))))
        self.refused("c.csv:1: a column quiz, and no column seed", "grade-quiz", path)
        path.write_text(self.csv(*([row[0], *row[4:]] for row in (heading, *rows))))
        _, err = self.course("grade-quiz", path, "--lesson", "1")
        self.assertEqual(err, f"course: {path}: no row has a seed; its letters are those of the quiz's own order\n")

    def test_a_missing_column_is_a_fault(self):
        ids, right = self.columns("id"), list(self.letters(None).values())
        for gone, told in [((5,), "question 'w5'"), ((1, 3), "questions 'w1', 'w3'")]:
            heading, row = ([cell for place, cell in enumerate(cells) if place not in gone] for cells in (ids, right))
            path = self.file("c.csv", self.csv(["id", *heading], ["s1", *row]))
            self.refused(f"c.csv:1: no column for the {told} of 01-wheels", "grade-quiz", path, "--lesson", "1")
        data = self.csv(["id", *ids[:2]], ["s1", *right[:2]])
        self.assertEqual(self.points(data, "--lesson", "1", "--stage", "pre"), [("s1", 1)])  # w0 is all of it
        path = self.file("c.csv", data)
        self.refused(
            "no column for the questions 'w2', 'w3' of", "grade-quiz", path, "--lesson", "1", "--stage", "check"
        )

    def graded(self, *args: object, code: int = 0) -> dict:
        return json.loads(self.course("grade-quiz", *args, "--json", code=code)[0])[0]

    def test_an_empty_row_is_no_sheet(self):
        right = list(self.letters(None).values())
        data = self.csv(
            ["student", "name", "lesson", *self.columns("id")],
            ["s1", "Ada", "1", *right],
            ["s2", "Grace", "1", *[" "] * 6],
            ["s3", "Alan", "1", "", *right[1:]],  # one blank is a wrong answer
        )
        path = self.file("c.csv", data)
        roster = self.file("r.csv", "id,name\ns1,Ada\ns2,Grace\ns3,Alan\ns4,Edsger\n")
        for args, missing in (((), ["s2"]), (("--roster", roster), ["s2", "s4"])):
            found = self.graded(path, *args)
            self.assertEqual([(each["student"], each["points"]) for each in found["grades"]], [("s1", 6), ("s3", 5)])
            self.assertEqual([each["student"] for each in found["missing"]], missing)
            self.assertEqual({each["students"] for each in found["questions"]}, {2})
            self.assertEqual([each["blank"] for each in found["questions"]], [1, 0, 0, 0, 0, 0])
        out, _ = self.course("grade-quiz", path, "--out", self.work / "g")
        self.assertIn("No sheet of 1: s2", out)
        self.assertNotIn("0/6", out)
        grades = read_table(self.work / "g" / "01-grades.csv")
        rows = {row.value(0): dict(zip(grades.columns, row.values(), strict=True)) for row in grades.rows}
        self.assertEqual([rows["s2"][name] for name in ("points", "status", "file")], ["", "missing", ""])

    def test_an_empty_row_beside_a_sheet(self):
        heading = ["student", "lesson", *self.columns("id")]
        path = self.file("c.csv", self.csv(heading, ["s1", "1", *[""] * 6]))
        self.refused("c.csv: no row holds an answer to 01-wheels", "grade-quiz", path)
        sheet = self.file("s1.json", self.sheet("S1", "4", **self.letters("4")))
        found = self.graded(path, sheet)  # who handed in on the computer is in the table for paper, too
        self.assertEqual([(each["student"], each["points"]) for each in found["grades"]], [("S1", 6)])
        self.assertEqual(found["missing"], [])

    def test_an_absent_student_who_is_not_in_the_roster(self):
        heading = ["student", "lesson", *self.columns("id")]
        data = self.csv(heading, ["s1", "1", *self.letters(None).values()], ["s9", "1", *[""] * 6])
        roster = self.file("r.csv", "id,name\ns1,Ada\n")
        self.refused("c.csv:3: the student 's9' is not in", "grade-quiz", self.file("c.csv", data), "--roster", roster)

    def test_faults_name_file_and_line(self):
        ids, right = self.columns("id"), list(self.letters(None).values())
        sha = self.quiz.sha256
        texts = self.columns("text")
        for message, *rows in [
            (
                "c.csv:1: unknown column 'w9': no question of 01-wheels",
                ["student", "lesson", *ids, "w9"],
                ["s1", "1", *right, "A"],
            ),
            ("c.csv:1: unknown column 'Colour'", ["student", "Colour", "lesson", *ids], ["s1", "red", "1", *right]),
            (
                "c.csv:1: unknown column 'Feedback - no'",
                ["student", "lesson", *ids, "Feedback - no"],
                ["s1", "1", *right, ""],
            ),
            (
                "c.csv:3: column 2: 'E' is no option of 'w0'",
                ["student", *ids, "lesson"],
                ["s1", *right, "1"],
                ["s2", "E", *right[1:], "1"],
            ),
            ("c.csv:2: no lesson '99'", ["student", "lesson", *ids], ["s1", "99", *right]),
            ("c.csv:3: no lesson ''", ["student", "lesson", *ids], ["s1", "1", *right], ["s2", "", *right]),
            (
                "c.csv:3: the lesson is '2', in other rows",
                ["student", "lesson", *ids],
                ["s1", "1", *right],
                ["s2", "2", *right],
            ),
            (
                "c.csv:3: answers to another version",
                ["student", "lesson", "quiz", "seed", *ids],
                ["s1", "1", sha, "", *right],
                ["s2", "1", "0" * 64, "", *right],
            ),
            (
                "c.csv:1: the columns must hold the questions of one lesson, by id or text; found: 01-wheels and",
                ["student", *ids],
                ["s1", *right],
            ),
            (
                "c.csv:1: the columns must hold the questions of one lesson, by id or text; found: none",
                ["student", "q1"],
                ["s1", "A"],
            ),
            ("c.csv:1: no column says who answered", ["lesson", *ids], ["1", *right]),
            ("c.csv:1: no column holds answers", ["student", "lesson"], ["s1", "1"]),
            (
                "c.csv:1: two columns for the question 'w0'",
                ["student", "lesson", "w0", texts[0]],
                ["s1", "1", "A", "A"],
            ),
            ("c.csv:1: two columns are called 'w0'", ["student", "lesson", "w0", "w0"], ["s1", "1", "A", "A"]),
            ("c.csv:2: the student is ''", ["student", "lesson", *ids], ["", "1", *right]),
            ("c.csv:1: no row follows", ["student", "lesson", *ids]),
            ("c.csv:2: 3 cells, but the heading has 8", ["student", "lesson", *ids], ["s1", "1", "A"]),
            ("two sheets of student 's1': ", ["student", "lesson", *ids], ["s1", "1", *right], ["s1", "1", *right]),
        ]:
            with self.subTest(message=message):
                self.refused(message, "grade-quiz", self.file("c.csv", self.csv(*rows)))
        for message, data in [
            ("c.csv:1: is empty", ""),
            ("c.csv:2: byte 0xe9", "student,w0\n\u00e9,A".encode("latin-1")),
        ]:
            self.refused(message, "grade-quiz", self.file("c.csv", data))

    def test_which_lesson_the_columns_belong_to(self):
        # Both fake quizzes call their questions w0 to w5; one id more decides.
        data = self.csv(["student", *self.columns("id")], ["s1", *self.letters(None).values()])
        self.refused("--lesson NN says which", "grade-quiz", self.file("c.csv", data))
        self.assertEqual(self.points(data, "--lesson", "1"), [("s1", 6)])
        self.replace(f"{self.CARTS}/quiz.json", '"id": "w5"', '"id": "load"')
        self.assertEqual(self.points(data), [("s1", 6)])

    def test_the_newest_row(self):
        data = self.csv(
            ["student", "lesson", *self.columns("id")],
            ["s1", "1", *self.letters(None).values()],
            ["s1", "1", *self.letters(None, 4).values()],
        )
        self.assertEqual(self.points(data, "--newest"), [("s1", 2)])

    def test_thousands_of_columns(self):
        heading = ["student", "lesson", *(f"c{n}" for n in range(5000))]
        self.refused(
            "unknown column 'c0'", "grade-quiz", self.file("c.csv", self.csv(heading, ["s1", "1"] + ["A"] * 5000))
        )

    def test_read_answers_refuses_a_missing_file(self):
        with self.assertRaisesRegex(UserError, "none.csv: No such file"):
            read_answers([self.work / "none.csv"], self.bank)
