import json

from fake_course import FakeCourse, question, quiz  # first: it puts scripts/ on the path

from catalog import entries
from check_quiz import correct_faults, longest_limit, longest_score, position_band, question_faults
from lessons import Course

QUIZ = f"{FakeCourse.WHEELS}/quiz.json"


class TestQuizSchema(FakeCourse):
    def quiz_line(self, number: int, key: str) -> int:
        """The line on which a key of a question stands, found by reading the text downwards."""
        lines = self.text(QUIZ).splitlines()
        starts = [index for index, line in enumerate(lines) if line == "    {"]
        return next(i + 1 for i in range(starts[number], len(lines)) if lines[i].strip().startswith(f'"{key}"'))

    def set_question(self, number: int, **changes: object) -> None:
        """Change keys of one question; a value of None removes the key."""
        value = json.loads(self.text(QUIZ))
        for key, new in changes.items():
            value["questions"][number].pop(key) if new is None else value["questions"][number].update({key: new})
        self.put_json(QUIZ, value)

    def test_a_good_course_has_no_fault(self):
        self.assert_good()

    def test_correct_must_be_an_integer_in_range(self):
        for value, message in [
            (True, "bool"),
            (False, "bool"),
            (-1, "out of range"),
            (4, "out of range"),
            (1.0, "float"),
            ("1", "str"),
            ([1], "list"),
        ]:
            with self.subTest(value):
                self.set_question(4, correct=value)
                self.assert_fault(QUIZ, self.quiz_line(4, "correct"), message)

    def test_q03_old_keys_are_named_and_the_lesson_is_still_listed(self):
        self.set_question(
            2, question=None, options=None, correct=None, q="What?", choices=["a", "b", "c", "d"], answer="a"
        )
        for old, new in (("q", "question"), ("choices", "options"), ("answer", "correct")):
            self.assert_fault(QUIZ, self.quiz_line(2, old), f"old key {old!r}: the schema calls it {new!r}")
        self.assertEqual([entry["id"] for entry in entries(Course(self.root))], ["01-wheels", "02-carts"])

    def test_q04_stage_counts_follow_the_rule(self):
        for number in (3, 4):
            self.set_question(number, stage="pre")
        line = self.text(QUIZ).splitlines().index('  "questions": [') + 1
        self.assert_fault(QUIZ, line, "2 questions of stage 'check'; at least 3 expected")
        self.assert_fault(QUIZ, line, "1 questions of stage 'post'; at least 2 expected")

    def test_q04_a_quiz_of_two_two_two_is_refused(self):
        for number, stage in enumerate(("pre", "pre", "check", "check", "post", "post")):
            self.set_question(number, stage=stage)
        self.assertEqual(len([fault for fault in self.faults() if "of stage 'check'; at least 3" in fault]), 1)

    def test_unknown_stage(self):
        self.set_question(1, stage="during")
        self.assert_fault(QUIZ, self.quiz_line(1, "stage"), "unknown stage 'during'")

    def test_q07_an_option_with_a_space_at_its_end_is_refused(self):
        self.set_question(3, options=["it is 003", "it is 004 ", "it is 005", "it is 006"])
        self.assert_fault(QUIZ, self.quiz_line(3, "options"), "options[1] has spaces around it: 'it is 004 '")

    def test_q07_an_answer_given_as_text_is_refused_even_if_it_is_an_option(self):
        self.set_question(3, correct="it is 004")
        self.assert_fault(QUIZ, self.quiz_line(3, "correct"), "an integer from 0 to 3 is expected")

    def test_q09_nothing_but_a_position_counts_as_an_answer(self):
        # A grader that compares with == must not be fooled: True == 1, 1.0 == 1, -1 is an index in Python.
        for value in (True, 1.0, -1, -3, "1", None, [1], 4):
            self.assertTrue(correct_faults(value), value)
        self.assertEqual([correct_faults(value) for value in range(4)], [[], [], [], []])

    def test_duplicate_options(self):
        for first, second in (("a ring", "a ring"), ("a ring", " A  Ring"), ("STRASSE", "straße")):
            with self.subTest(second):
                self.set_question(0, options=[first, "a tree", second, "a star"])
                self.assert_fault(QUIZ, self.quiz_line(0, "options"), "options[2] is the same as options[0]")

    def test_wrong_numbers_of_options_and_feedback(self):
        self.set_question(0, options=["a", "b", "c"], feedback=["a", "b", "c", "d", "e"])
        self.assert_fault(QUIZ, self.quiz_line(0, "options"), "options has 3 entries; 4 are expected")
        self.assert_fault(QUIZ, self.quiz_line(0, "feedback"), "feedback has 5 entries; 4 are expected")

    def test_empty_and_wrong_texts(self):
        self.set_question(0, question=" ", explanation=None, options="abcd", feedback=["a", "b", "", 3], id=7)
        self.assert_fault(QUIZ, self.quiz_line(0, "question"), "question is ' '")
        self.assert_fault(QUIZ, self.quiz_line(0, "id"), "id is 7")
        self.assert_fault(QUIZ, self.quiz_line(0, "options"), "options must be a list of 4 texts")
        self.assert_fault(QUIZ, self.quiz_line(0, "feedback"), "feedback[2] is ''")
        self.assert_fault(QUIZ, self.quiz_line(0, "feedback"), "feedback[3] is 3")
        self.assertTrue([fault for fault in self.faults() if "the key 'explanation' is missing" in fault])

    def test_feedback_is_one_line(self):
        self.set_question(0, feedback=["a", "b\nc", "d", "e"])
        self.assert_fault(QUIZ, self.quiz_line(0, "feedback"), "feedback[1] must be one line")

    def test_duplicate_ids_and_unknown_keys(self):
        self.set_question(5, id="w1", points=2)
        self.assert_fault(QUIZ, self.quiz_line(5, "id"), "the id 'w1' is question 2's already")
        self.assert_fault(QUIZ, self.quiz_line(5, "points"), "unknown key 'points'")

    def test_lesson_and_title_equal_the_folder_and_the_docs(self):
        value = json.loads(self.text(QUIZ)) | {"lesson": "01", "title": "Wheels", "version": 1}
        self.put_json(QUIZ, value)
        self.assert_fault(QUIZ, 2, "lesson is '01'; '01-wheels' is expected")
        self.assert_fault(QUIZ, 3, "title is 'Wheels'; 'The Wheel' is expected")
        self.assertTrue([fault for fault in self.faults() if "unknown key 'version'" in fault])

    def test_text_that_is_no_quiz(self):
        for text, line, message in [
            ('{\n"lesson": }', 2, "no valid JSON"),
            ("[]", 1, "an object with the keys"),
            ('{"lesson": "01-wheels", "title": "The Wheel",\n"questions": {}}', 2, "questions must be a list"),
            ('{"lesson": "01-wheels", "title": "The Wheel",\n"questions": [3]}', 2, "a question must be an object"),
            ('{"lesson": "01-wheels",\n"lesson": "01-wheels"}', 2, "the key 'lesson' is there twice"),
        ]:
            with self.subTest(text):
                self.put(QUIZ, text)
                self.assert_fault(QUIZ, line, message)

    def test_no_questions(self):
        self.put_json(QUIZ, {"lesson": "01-wheels", "title": "The Wheel", "questions": []})
        self.assert_fault(QUIZ, 4, "0 questions of stage 'pre'")


class TestAnswers(FakeCourse):
    def put_both(self, corrects: list[int]) -> None:
        """Two quizzes whose right answers stand at these positions."""
        for path, lesson, title in ((self.WHEELS, "01-wheels", "The Wheel"), (self.CARTS, "02-carts", "The Cart")):
            value = quiz(lesson, title)
            value["questions"] = [
                question(i, q["stage"], c) for i, (q, c) in enumerate(zip(value["questions"], corrects, strict=True))
            ]
            self.put_json(f"{path}/quiz.json", value)

    def test_q01_nearly_always_b(self):
        self.put_both([1, 1, 1, 1, 1, 0])
        line = next(i for i, text in enumerate(self.text(QUIZ).splitlines(), 1) if '"correct": 1' in text)
        self.assert_fault(QUIZ, line, "over the course position 1 is right in 10 of 12 questions; 2 to 4 expected")
        self.assert_fault(QUIZ, line, "position 1 is right in 5 of this quiz's 6 questions; at most half")

    def test_q01_a_position_that_is_never_right(self):
        self.put_both([0, 0, 1, 1, 2, 2])
        self.assertTrue([fault for fault in self.faults() if "position 3 is right in 0 of 12 questions" in fault])
        self.put_both([0, 3, 1, 1, 2, 2])
        self.assert_good()

    def test_the_band(self):
        self.assertEqual(position_band(12), (2, 4))
        self.assertEqual(position_band(36), (7, 11))
        self.assertEqual(position_band(48), (9, 15))

    def test_choosing_the_longest_option_does_not_pay(self):
        value = json.loads(self.text(QUIZ))
        for item in value["questions"]:
            item["options"][item["correct"]] += " because of how wheels are"
        self.put_json(QUIZ, value)
        line = next(i for i, text in enumerate(self.text(QUIZ).splitlines(), 1) if '"correct"' in text)
        self.assert_fault(QUIZ, line, '"choose the longest option" wins 7.5 of 12 questions; at most 4.5 expected')

    def test_the_longest_option_may_be_right_as_often_as_chance(self):
        value = json.loads(self.text(QUIZ))
        item = value["questions"][0]
        item["options"][item["correct"]] += " because of how wheels are"
        self.put_json(QUIZ, value)
        self.assert_good()

    def test_what_the_longest_option_wins(self):
        self.assertEqual(longest_score({"options": ["a", "bb", "cc", "d"], "correct": 1}), 0.5)
        self.assertEqual(longest_score({"options": ["a", "bb", "cc", "d"], "correct": 0}), 0.0)
        self.assertEqual(longest_score({"options": ["a", "bbb", "cc", "d"], "correct": 1}), 1.0)
        self.assertAlmostEqual(longest_limit(48), 15.0)

    def test_a_broken_question_counts_in_neither(self):
        self.assertTrue(question_faults(question(1, "pre", 1) | {"correct": True}))
        value = json.loads(self.text(QUIZ))
        value["questions"][0]["correct"] = True
        self.put_json(QUIZ, value)
        self.assertFalse([fault for fault in self.faults() if "over the course" in fault])
