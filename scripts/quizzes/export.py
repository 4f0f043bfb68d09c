"""The formats of `export-quiz`, each a function from a quiz to a file's bytes."""

from inputs import json_text
from quizzes.bank import Quiz
from quizzes.moodle import moodle_xml
from quizzes.qti import qti_zip


def quiz_json(quiz: Quiz) -> bytes:
    """The quiz as data, with the hash that answer sheets name."""
    questions = [
        {
            "id": each.id,
            "stage": each.stage,
            "question": each.text,
            "options": list(each.options),
            "correct": each.correct,
            "explanation": each.explanation,
            "feedback": list(each.feedback),
        }
        for each in quiz.questions
    ]
    value = {"lesson": quiz.lesson, "title": quiz.title, "quiz": quiz.sha256, "questions": questions}
    return json_text(value).encode()


FORMATS = {"qti": qti_zip, "moodle": moodle_xml, "json": quiz_json}
