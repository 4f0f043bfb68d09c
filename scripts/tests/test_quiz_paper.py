import json
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import REAL, QuizCase

from csvfile import read_table
from lessons import Course
from quizzes.bank import Bank, Quiz, plain

STAGES = ("pre", "check", "post")


class PaperCase(QuizCase):
    """What is printed is read here as a person reads it: from top to bottom."""

    def forms(self, lesson: str, folder: str) -> Path:
        """Forms of two students."""
        roster = self.file("r.csv", "id,name\ns1,Ada\ns2,Grace\n")
        self.course("quiz-forms", lesson, "--roster", roster, "--out", self.work / folder, "--seed", "7")
        return self.work / folder

    def printed(self, path: Path) -> list[tuple[int, str, str]]:
        """(number, id, the rest) of each question on a printed form, downwards."""
        parts = re.split(r"\n\n *(\d+)\. ", path.read_text())[1:]
        found = []
        for number, text in zip(parts[::2], parts[1::2], strict=True):
            name = re.search(r"^    \((\S+)\)$", text, re.MULTILINE)
            found.append((int(number), name[1], plain(text)))
        return found

    def right_letters(self, quiz: Quiz, path: Path) -> list[str]:
        """What somebody who knows all the answers marks, downwards."""
        letters = []
        for _, _, text in self.printed(path):
            (question,) = [each for each in quiz.questions if text.startswith(plain(each.text))]
            marks = re.findall(r"\[ \] ([a-d]) (.+?)(?= \[ \] |$)", text.split(" == ")[0].split(" seed ")[0])
            (letter,) = [letter for letter, option in marks if option == plain(question.options[question.correct])]
            letters.append(letter.upper())
        return letters

    def assert_paper_is_graded(self, lesson: str, quiz: Quiz, folder: str) -> None:
        """A perfect form, typed from the first question to the last into the columns from left to right."""
        forms = self.forms(lesson, folder)
        answers, key = (read_table(forms / "instructor" / f"{name}.csv") for name in ("answers", "key"))
        for row, right, path in zip(answers.rows, key.rows, sorted((forms / "forms").glob("*.txt")), strict=True):
            row.raw[5:] = self.right_letters(quiz, path)
            self.assertEqual(right.raw[3:], row.raw[5:])
            asked = self.printed(path)
            self.assertEqual([number for number, _, _ in asked], list(range(1, len(quiz.questions) + 1)))
            self.assertEqual([name for _, name, _ in asked], answers.columns[5:])
            self.assertEqual([f"{number} {name}" for number, name, _ in asked], key.columns[3:])
            sheet = json.loads(path.with_suffix(".json").read_text())
            self.assertEqual(list(sheet["answers"]), answers.columns[5:])
        typed = self.file(f"{folder}-typed.csv", answers.text())
        (found,) = json.loads(self.course("grade-quiz", typed, "--json")[0])
        self.assertEqual([each["points"] for each in found["grades"]], [len(quiz.questions)] * 2)
        told = [(each["number"], each["question"]) for each in found["questions"]]
        self.assertEqual(told, [(number, name) for number, name, _ in asked])


class TestEveryLesson(PaperCase):
    def test_a_perfect_paper_typed_as_it_is_printed_gets_all_points(self):
        self.root, course = REAL, Course(REAL)
        for lesson in course.lessons:
            with self.subTest(lesson.id):
                self.assert_paper_is_graded(lesson.id, Bank(course).quiz(lesson.id), lesson.id)


class TestMixedFile(PaperCase):
    """A file whose stages are mixed is asked, printed, typed, counted and exported in the one order."""

    ORDER = ("w1", "w3", "w2", "w5", "w4", "w0")  # w0 is of stage pre, w1 to w3 of check, w4 and w5 of post
    SHOWN = ("w0", "w1", "w3", "w2", "w5", "w4")

    def setUp(self) -> None:
        super().setUp()
        path = f"{self.WHEELS}/quiz.json"
        value = json.loads(self.text(path))
        by_id = {each["id"]: each for each in value["questions"]}
        value["questions"] = [by_id[name] for name in self.ORDER]
        self.put_json(path, value)
        self.quiz = Bank(self.bank.course).quiz("1")

    def test_paper(self):
        self.assertEqual(tuple(self.quiz.numbers.items()), tuple((name, n) for n, name in enumerate(self.SHOWN, 1)))
        self.assert_paper_is_graded("1", self.quiz, "f")

    def test_terminal(self):
        out, _ = self.course("quiz", "1", stdin="\n" * 6)
        asked = re.findall(r"^ *(\d+)\. (.+)$", out, re.MULTILINE)
        self.assertEqual(asked, [(str(n), self.quiz.by_id[name].text) for n, name in enumerate(self.SHOWN, 1)])
        out, _ = self.course("quiz", "1", "--stage", "post", stdin="\n" * 2)
        self.assertEqual(re.findall(r"^ *(\d+)\. ", out, re.MULTILINE), ["5", "6"])  # as on the form

    def test_exports(self):
        for form, pattern in (("json", r'"id": "(w\d)"'), ("moodle", r"<idnumber>01-(w\d)"), ("qti", r'title="(w\d)"')):
            path = self.work / f"quiz.{form}"
            self.course("export-quiz", "1", "--format", form, path)
            found = re.findall(pattern, path.read_bytes().decode("utf-8", "ignore"))
            self.assertEqual(tuple(found), self.SHOWN, form)

    def test_tables(self):
        self.file("in/s1.json", self.sheet("s1", "4", **self.letters("4")))
        out, _ = self.course("grade-quiz", self.work / "in", "--out", self.work / "g")
        self.assertEqual(
            re.findall(r"^ (\d) (w\d) ", out, re.MULTILINE), [(str(self.quiz.numbers[n]), n) for n in self.SHOWN]
        )
        table = read_table(self.work / "g" / "01-questions.csv")
        self.assertEqual(table.columns[:3], ["lesson", "number", "question"])
        self.assertEqual(
            [row.values()[1:3] for row in table.rows], [[str(self.quiz.numbers[n]), n] for n in self.SHOWN]
        )
        out, _ = self.course("grade-quiz", self.work / "in", "--stage", "post")
        self.assertEqual(re.findall(r"^ (\d) (w\d) ", out, re.MULTILINE), [("5", "w5"), ("6", "w4")])

    def test_the_check_wants_the_files_order_to_be_the_one_shown(self):
        path = f"{self.WHEELS}/quiz.json"
        lines = self.text(path).splitlines()
        line = next(n for n, text in enumerate(lines, 1) if '"stage": "pre"' in text)
        message = "question 'w0' of stage 'pre' stands behind 'post'; pre, then check, then post is expected"
        self.assert_fault(path, line, message)
