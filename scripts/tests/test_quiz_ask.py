import json
import os
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from interrupts import HEARING
from quiz_case import QuizCase

from quizzes.layout import WIDTH, question_text
from quizzes.sheet import read_sheet

COURSE = Path(__file__).resolve().parents[1] / "course.py"


class TestQuiz(QuizCase):
    def typed(self, letters: dict[str, str]) -> str:
        return "".join(f"{letter}\n" for letter in letters.values())

    def test_right_answers_and_the_sheet(self):
        sheet = self.work / "s.json"
        letters = self.letters("5")
        out, _ = self.course(
            *("quiz", "1", "--seed", 5, "--student", "s1", "--answers", sheet), stdin=self.typed(letters)
        )
        self.assertIn("Score: 6 of 6 (pre 1/1, check 3/3, post 2/2), 0 left blank", out)
        self.assertEqual(out.count("Correct. Right."), 6)
        self.assertEqual(out.count("Count on."), 6)  # the explanations
        stages = [out.index(f"({stage}): ") for stage in ("pre", "check", "post")]
        self.assertEqual(stages, sorted(stages))
        value = json.loads(sheet.read_text())
        self.assertEqual(value["answers"], letters)
        self.assertEqual(
            [value[key] for key in ("lesson", "quiz", "seed", "student")],
            [self.quiz.lesson, self.quiz.sha256, "5", "s1"],
        )
        self.assertIn("time", value)

    def test_wrong_and_blank_answers(self):
        letters = self.letters("0", wrong=4) | {"w5": ""}
        out, _ = self.course("quiz", "1", stdin=self.typed(letters))
        self.assertIn("Score: 1 of 6 (pre 0/1, check 0/3, post 1/2), 1 left blank", out)
        self.assertEqual(out.count("Not correct. Count again."), 4)
        self.assertEqual(out.count("Left blank."), 1)
        right = self.quiz.by_id["w1"]
        self.assertIn(f"The answer is {right.letter(right.correct, '0')}  {right.options[right.correct]}", out)

    def test_options_stand_in_the_order_of_the_seed(self):
        for seed in ("0", "1"):
            out, _ = self.course("quiz", "1", "--seed", seed, stdin="\n" * 6)
            for number, question in enumerate(self.quiz.questions, 1):
                self.assertIn(question_text(number, question, seed), out)
                places = [
                    out.index(f"    {letter}  {question.options[place]}", out.index(question.text))
                    for letter, place in zip("ABCD", question.order(seed), strict=True)
                ]
                self.assertEqual(places, sorted(places))

    def test_one_stage(self):
        sheet = self.work / "s.json"
        out, _ = self.course("quiz", "1", "--stage", "post", "--answers", sheet, stdin="A\nA\n")
        self.assertIn("(post ", out)
        self.assertNotIn("(pre)", out)
        self.assertEqual(list(json.loads(sheet.read_text())["answers"]), ["w4", "w5"])

    def test_what_is_no_answer_is_asked_again(self):
        out, _ = self.course("quiz", "1", "--stage", "pre", stdin=f"x\n5\n{self.letters('0')['w0'].lower()}\n")
        self.assertEqual(out.count("is no option of 'w0'"), 2)
        self.assertIn("Score: 1 of 1", out)

    def test_the_end_of_the_input_keeps_what_was_answered(self):
        sheet = self.work / "s.json"
        letters = self.letters("0")
        out, _ = self.course("quiz", "1", "--answers", sheet, stdin=f"{letters['w0']}\n{letters['w1']}\n", code=1)
        self.assertIn("Stopped", out)
        self.assertIn("Score: 2 of 6 (pre 1/1, check 1/3, post 0/2), 4 left blank", out)
        expected = {**dict.fromkeys(letters), "w0": letters["w0"], "w1": letters["w1"]}
        self.assertEqual(json.loads(sheet.read_text())["answers"], expected)

    def test_the_input_ends_at_once(self):
        sheet = self.work / "s.json"
        self.course("quiz", "1", "--answers", sheet, code=1)
        self.assertEqual(set(read_sheet(sheet, self.bank).answers.values()), {None})

    def test_going_on_with_a_sheet(self):
        first, second = self.work / "1.json", self.work / "2.json"
        letters = self.letters("9")
        self.course("quiz", "1", "--seed", 9, "--answers", first, stdin=f"{letters['w0']}\n", code=1)
        rest = self.typed({name: letter for name, letter in letters.items() if name != "w0"})
        out, _ = self.course("quiz", "1", "--from", first, "--student", "s1", "--answers", second, stdin=rest)
        self.assertIn("Score: 6 of 6", out)
        value = json.loads(second.read_text())
        self.assertEqual((value["seed"], value["student"], value["answers"]), ("9", "s1", letters))
        self.refused("its seed is '9', not '8'", "quiz", "1", "--from", first, "--seed", "8")
        self.refused("its student is 's1', not 's2'", "quiz", "1", "--from", second, "--student", "s2")
        self.refused("its lesson is '01-wheels', not '02-carts'", "quiz", "2", "--from", first)

    def test_json_goes_to_output_alone(self):
        letters = self.letters("0", wrong=1) | {"w5": ""}
        out, err = self.course("quiz", "1", "--json", stdin=self.typed(letters))
        value = json.loads(out)
        self.assertEqual((value["points"], value["of"], value["finished"]), (4, 6, True))
        self.assertEqual([answer["right"] for answer in value["answers"]], [False, True, True, True, True, False])
        self.assertEqual([answer["letter"] for answer in value["answers"]], [*list(letters.values())[:5], None])
        self.assertIn("Score: 4 of 6", err)

    def test_what_cannot_be_written_is_said_before_the_first_question(self):
        sheet = self.file("s.json", "mine")
        for message, path in [
            ("s.json: exists already; --force overwrites it", sheet),
            ("outputs: a folder", self.work),
            ("does not exist", self.work / "none" / "s.json"),
        ]:
            out, err = self.course("quiz", "1", "--answers", path, stdin="A\n", code=2)
            self.assertEqual(out, "")
            self.assertIn(message, err)
        self.assertEqual(sheet.read_text(), "mine")
        self.course("quiz", "1", "--answers", sheet, "--force", stdin="A\n" * 6)
        self.assertEqual(len(read_sheet(sheet, self.bank).answers), 6)

    def test_bad_arguments(self):
        self.refused("no lesson '99'", "quiz", "99")
        self.refused("--student ' '", "quiz", "1", "--student", " ")
        self.refused("--seed '\\udcff'", "quiz", "1", "--seed", "\udcff")  # a byte that is no UTF-8
        self.refused("--seed ''", "quiz-forms", "1", "--seed", "", "--roster", "r", "--out", "o")
        self.refused("No such file", "quiz", "1", "--from", self.work / "none.json")

    def test_lines_fit_and_code_is_not_split(self):
        question = self.quiz.questions[0]
        long = "word " * 40 + "`a-long-expression(that, must, not) - be + split`" + "x" * 90
        text = question_text(12, type(question)("q", "pre", long, question.options, 0, "", ()), None)
        lines = text.splitlines()
        self.assertTrue(all(len(line) <= WIDTH or len(line.split()) == 1 for line in lines))
        self.assertTrue(lines[0].startswith("12. word"))


@unittest.skipUnless(os.name == "posix", "sends SIGINT to a process")
class TestInterrupt(QuizCase):
    def test_ctrl_c_keeps_what_was_answered(self):
        sheet = self.work / "s.json"
        letters = self.letters("0")
        command = [sys.executable, "-u", str(COURSE), "--root", str(self.root), "quiz", "1", "--answers", str(sheet)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **HEARING) as process:
            deadline = threading.Timer(120, process.kill)
            deadline.start()
            process.stdin.write(f"{letters['w0']}\n{letters['w1']}\n")
            process.stdin.flush()
            seen = ""
            while seen.count("Your answer") < 3:  # the third question is asked
                seen += process.stdout.read(1) or self.fail(seen + process.stderr.read())
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            deadline.cancel()
        self.assertEqual(process.wait(), 1)
        self.assertIn("Stopped", rest)
        self.assertIn("Score: 2 of 6", rest)
        kept = json.loads(sheet.read_text())["answers"]
        self.assertEqual(kept, {**dict.fromkeys(letters), "w0": letters["w0"], "w1": letters["w1"]})

    def test_a_terminal_that_lacks_a_letter(self):
        self.file("in/a.json", self.sheet("\u017dofie", **self.letters(None)))
        command = [sys.executable, str(COURSE), "--root", str(self.root), "grade-quiz", str(self.work / "in")]
        with mock.patch.dict(os.environ, {"PYTHONIOENCODING": "ascii"}):
            found = subprocess.run(command, capture_output=True, timeout=120)
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertIn(b"\\u017dofie", found.stdout)

    def test_what_is_no_text(self):
        command = [sys.executable, str(COURSE), "--root", str(self.root), "quiz", "1"]
        with mock.patch.dict(os.environ, {"PYTHONIOENCODING": "utf-8:strict"}):
            found = subprocess.run(command, input=b"\xff\xfe\n", capture_output=True, timeout=120)
        self.assertEqual(found.returncode, 2, found.stderr)
        self.assertIn(b"course: standard input: invalid start byte", found.stderr)
