import math
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import REAL

from lessons import Course
from quizzes.bank import Bank, Question
from quizzes.grade import grade
from quizzes.sheet import Sheet
from quizzes.stats import correlation, items

STAGES = ("pre", "check", "post")
OPTIONS = ("a a", "b b", "c c", "d d")


class TestEveryQuiz(unittest.TestCase):
    """Q09: a grader that never failed anyone. Every wrong option of every question of the course is tried."""

    @classmethod
    def setUpClass(cls):
        cls.quizzes = Bank(Course(REAL)).sound()
        if len(cls.quizzes) != len(Course(REAL).lessons):
            raise AssertionError("a quiz of the course cannot be used")

    def points(self, quiz, answers) -> int:
        (found,) = grade([Sheet(quiz, None, "s", answers=answers)], STAGES, None, False)
        return found.grades[0].points

    def test_each_wrong_option_costs_exactly_its_point(self):
        for quiz in self.quizzes:
            right = {question.id: question.correct for question in quiz.questions}
            self.assertEqual(self.points(quiz, right), len(quiz.questions))
            for question in quiz.questions:
                for wrong in {0, 1, 2, 3, None} - {question.correct}:
                    self.assertEqual(self.points(quiz, right | {question.id: wrong}), len(quiz.questions) - 1)
                self.assertEqual(self.points(quiz, {question.id: question.correct}), 1)

    def test_every_all_wrong_sheet_scores_0(self):
        for quiz in self.quizzes:
            for step in (1, 2, 3):
                wrong = {question.id: (question.correct + step) % 4 for question in quiz.questions}
                self.assertEqual(self.points(quiz, wrong), 0)
            self.assertEqual(self.points(quiz, {}), 0)
            self.assertEqual(self.points(quiz, {question.id: None for question in quiz.questions}), 0)

    def test_whatever_the_seed_a_letter_means_what_was_shown(self):
        for quiz in self.quizzes:
            for seed in (None, "0", "1", "2#s1"):
                for question in quiz.questions:
                    shown = [question.options[place] for place in question.order(seed)]
                    for letter, text in zip("ABCD", shown, strict=True):
                        self.assertEqual(question.position(letter, seed), question.options.index(text))
                        self.assertEqual(question.position(text, seed), question.options.index(text))


class TestStatistics(unittest.TestCase):
    """Worked by hand. Rows are students, columns questions q0, q1, q2; option 0 is right.

        student   q0  q1  q2   rest of q0   of q1   of q2
        s1         1   1   1            2       2       2
        s2         1   1   0            1       1       2
        s3         1   0   0            0       1       1
        s4         0   0   1            1       1       0

    q0: share 3/4; mean rest of the right 1, of the wrong 1: r = 0.
    q1: share 1/2; means 3/2 and 1; sd of rest (2,1,1,1) = sqrt(3)/4: r = (1/2) / (sqrt(3)/4) * 1/2 = 1/sqrt(3).
    q2: share 1/2; means 1 and 3/2; sd of rest (2,2,1,0) = sqrt(11)/4: r = -(1/2) / (sqrt(11)/4) * 1/2 = -1/sqrt(11).
    """

    QUESTIONS = tuple(Question(f"q{n}", "check", "?", OPTIONS, 0, "", OPTIONS) for n in range(3))
    CHOSEN = ((0, 0, 0), (0, 0, 2), (0, 3, 2), (1, None, 0))

    def test_by_hand(self):
        found = items(self.QUESTIONS, [dict(zip(("q0", "q1", "q2"), row, strict=True)) for row in self.CHOSEN])
        self.assertEqual([item.share for item in found], [0.75, 0.5, 0.5])
        self.assertEqual([item.blank for item in found], [0, 1, 0])
        self.assertEqual([item.chosen for item in found], [(3, 1, 0, 0), (2, 0, 0, 1), (2, 0, 2, 0)])
        self.assertEqual([item.wrong_most for item in found], [1, 3, 2])
        for item, r in zip(found, (0, 1 / math.sqrt(3), -1 / math.sqrt(11)), strict=True):
            self.assertAlmostEqual(item.discrimination, r, places=14)

    def test_it_is_the_point_biserial_formula(self):
        item, rest = [1, 0, 1, 1, 0, 0, 1], [5, 2, 3, 6, 4, 1, 1]
        count, p = len(item), sum(item) / len(item)
        mean = sum(rest) / count
        sd = math.sqrt(sum((value - mean) ** 2 for value in rest) / count)
        means = [sum(r for r, i in zip(rest, item, strict=True) if i == mark) / item.count(mark) for mark in (1, 0)]
        wanted = (means[0] - means[1]) / sd * math.sqrt(p * (1 - p))
        self.assertAlmostEqual(correlation(item, rest), wanted, places=14)
        self.assertAlmostEqual(correlation([1, 1, 0, 0], [3, 3, 1, 1]), 1, places=14)
        self.assertAlmostEqual(correlation([1, 1, 0, 0], [1, 1, 3, 3]), -1, places=14)

    def test_where_nothing_can_be_said(self):
        for sheets in ([{"q0": 0}], [{"q0": 0, "q1": 0}, {"q0": 0}], [{}, {}]):
            self.assertIsNone(items(self.QUESTIONS, sheets)[0].discrimination)
        self.assertIsNone(items(self.QUESTIONS, [{}])[0].wrong_most)
        tie = items(self.QUESTIONS, [{"q0": 3}, {"q0": 1}])[0]
        self.assertEqual(tie.wrong_most, 1)
