import json
import sys
import unittest
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import REAL, QuizCase

from faults import UserError
from lessons import Course
from quizzes.bank import Bank, Question
from quizzes.sheet import Sheet, read_sheet

TEXTS = ("ring", "tree", "star", "chain")
QUESTION = Question("shape", "check", "Which?", TEXTS, 2, "Why.", ("a", "b", "c", "d"))


class TestOrder(unittest.TestCase):
    def test_the_same_on_every_machine(self):
        # Pinned: sheets that were handed out must be read in the same way for ever.
        found = [QUESTION.order(seed) for seed in (None, "0", "1", "0#s1", "\u00e9")]
        self.assertEqual(found, [[0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 2, 0], [0, 2, 3, 1], [2, 0, 3, 1]])

    def test_every_order_is_as_likely(self):
        counts = Counter(tuple(QUESTION.order(str(seed))) for seed in range(4800))
        self.assertEqual(len(counts), 24)  # 200 of each expected, with a standard deviation of 13.8
        self.assertLess(sum((count - 200) ** 2 / 200 for count in counts.values()), 49.7)  # chi-square, 23, p = 0.001

    def test_questions_of_one_seed_have_different_orders(self):
        found = {tuple(Question(f"q{n}", "pre", "?", TEXTS, 0, "", TEXTS).order("0")) for n in range(40)}
        self.assertGreater(len(found), 12)


class TestAnswers(unittest.TestCase):
    def test_letters_and_texts(self):
        for seed in (None, "0", "7#s1"):
            for position, text in enumerate(TEXTS):
                letter = QUESTION.letter(position, seed)
                self.assertEqual("ABCD".index(letter), QUESTION.order(seed).index(position))
                for answer in (letter, letter.lower(), f" {letter}) ", f"{letter}.", text, f"  {text.upper()}\u00a0"):
                    self.assertEqual(QUESTION.position(answer, seed), position)
        for blank in ("", "  ", "\n"):
            self.assertIsNone(QUESTION.position(blank, "0"))

    def test_what_is_no_answer(self):
        for answer in ("E", "AB", "1", "rin", "A ring", "\u0391", "-"):  # the last but one is a Greek alpha
            with self.assertRaisesRegex(ValueError, "is no option of 'shape'"):
                QUESTION.position(answer, None)

    def test_a_letter_that_is_the_text_of_another_option(self):
        question = Question("q", "pre", "?", ("B", "x", "y", "z"), 0, "", TEXTS)
        with self.assertRaisesRegex(ValueError, "'B' is a letter and also the text of another option"):
            question.position("B", None)
        self.assertEqual(question.position("C", None), 2)


class TestHash(QuizCase):
    def test_it_covers_what_a_student_saw(self):
        path = f"{self.WHEELS}/quiz.json"
        before = self.quiz.sha256
        good = self.text(path)
        for old, new, same in [
            ("What is 1 + 1", "What is 01 + 1", False),
            ("it is 002", "it is 902", False),
            ('"w2"', '"w9"', False),
            ("Count on.", "Count on!", True),
            ("Count again.", "No.", True),
            ('"correct": 1', '"correct": 2', True),  # a corrected key grades the same sheets
        ]:
            self.put(path, good)
            self.replace(path, old, new)
            self.assertEqual(Bank(self.bank.course).quiz("1").sha256 == before, same, old)

    def test_a_quiz_with_a_fault_is_not_used(self):
        line = self.replace(f"{self.WHEELS}/quiz.json", '"correct": 1', '"correct": 4')
        with self.assertRaisesRegex(UserError, rf"^{self.WHEELS}/quiz.json:{line}: question 2: correct is 4"):
            Bank(self.bank.course).quiz("1")
        (self.root / self.WHEELS / "quiz.json").unlink()
        with self.assertRaisesRegex(UserError, "quiz.json: no such file"):
            Bank(self.bank.course).quiz("1")


class TestSheet(QuizCase):
    def read(self, data: str | bytes | dict) -> Sheet:
        return read_sheet(self.file("s.json", data), self.bank)

    def assert_fault(self, line: int, message: str, data: str | bytes | dict) -> None:
        with self.assertRaises(UserError) as caught:
            self.read(data)
        self.assertIn(f"s.json:{line}: ", str(caught.exception))
        self.assertIn(message, str(caught.exception))

    def test_what_is_written_is_read_back(self):
        for seed in (None, "0", "x#1"):
            answers = {question.id: place % 4 for place, question in enumerate(self.quiz.questions)} | {"w1": None}
            wrote = Sheet(self.quiz, seed, "s1", "Ada", "2027-01-02T03:04:05+00:00", answers)
            read = self.read(wrote.to_json())
            wrote.path = read.path
            self.assertEqual(read, wrote)
        self.assertEqual(self.read(wrote.to_json(blank="")).answers, answers)

    def test_letters_are_those_of_the_sheets_own_seed(self):
        found = [self.read(self.sheet(seed=seed, w0="A")).answers["w0"] for seed in (None, "0", "1", "2")]
        self.assertEqual(found, [self.quiz.by_id["w0"].order(seed)[0] for seed in (None, "0", "1", "2")])
        self.assertGreater(len(set(found)), 1)

    def test_windows_files(self):
        text = json.dumps(self.sheet("s1", w0="A"), indent=1).replace("\n", "\r\n")
        self.assertEqual(self.read("\ufeff" + text).student, "s1")

    def test_faults_name_file_and_line(self):
        good = self.sheet("s1", "0", w0="A", w1="B")
        for line, message, change in [
            (2, "no lesson '99'", {"lesson": "99"}),
            (3, "answers to another version of 01-wheels's quiz", {"quiz": "0" * 64}),
            (3, "another version", {"lesson": "02-carts"}),
            (4, "seed is 7; null, or a text", {"seed": 7}),
            (4, "seed is '\\ud800'", {"seed": "\ud800"}),
            (9, "student is 3", {"student": 3}),
            (9, "student is 'a\\nb'", {"student": "a\nb"}),
            (10, "time is 'today'", {"time": "today"}),
            (10, "time is '2027-01-02T03:04:05'", {"time": "2027-01-02T03:04:05"}),
            (10, "unknown key 'score'", {"score": 100}),
            (5, "answers is ['A']", {"answers": ["A"]}),
            (7, "no question 'w9' in 01-wheels's quiz", {"answers": {"w0": "A", "w9": "A"}}),
            (6, "'E' is no option of 'w0'", {"answers": {"w0": "E"}}),
            (6, "the answer is 0; a letter", {"answers": {"w0": 0}}),
            (6, "the answer is True", {"answers": {"w0": True}}),
            (6, "the answer is ['A', 'B']", {"answers": {"w0": ["A", "B"]}}),
        ]:
            with self.subTest(message=message):
                self.assert_fault(line, message, good | change)
        for key in ("lesson", "quiz", "seed", "answers"):
            self.assert_fault(1, f"the key '{key}' is missing", {k: v for k, v in good.items() if k != key})

    def test_what_is_no_sheet(self):
        twice = '{"lesson": "01-wheels",\n"answers": {"w0": "A",\n"w0": "B"}}'
        for line, message, data in [
            (3, "the key 'w0' is there twice", twice),
            (2, "no valid JSON", '{"lesson":\n}'),
            (1, "an object is expected, not list", "[]"),
            (1, "is empty", ""),
            (1, "byte 0xff is no UTF-8", b"{\xff}"),
        ]:
            self.assert_fault(line, message, data)


class TestRealQuizzes(unittest.TestCase):
    def test_all_can_be_used(self):
        course = Course(REAL)
        self.assertEqual([quiz.lesson for quiz in Bank(course).sound()], [lesson.id for lesson in course.lessons])
