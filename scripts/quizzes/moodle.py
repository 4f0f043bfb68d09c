"""A quiz as Moodle XML: multiple choice, one right answer, in a category for each stage."""

import xml.etree.ElementTree as ET

from catalog import STAGES
from quizzes.bank import Question, Quiz
from quizzes.markup import to_html

CATEGORY = "$course$/Distributed Training From Scratch"


def moodle_xml(quiz: Quiz) -> bytes:
    """The file to import as "Moodle XML format": a point a question, feedback for each option."""
    root = ET.Element("quiz")
    for stage in STAGES:
        questions = quiz.of((stage,))
        if not questions:
            continue
        name = f"{quiz.lesson[:2]} {quiz.title}".replace("/", "//")  # a lone slash begins a category below
        category = ET.SubElement(root, "question", type="category")
        _text(category, "category", f"{CATEGORY}/{name}/{stage}")
        for question in questions:
            _question(root, quiz, question)
    ET.indent(root)
    return ET.tostring(root, encoding="UTF-8", xml_declaration=True) + b"\n"


def _question(root: ET.Element, quiz: Quiz, question: Question) -> None:
    element = ET.SubElement(root, "question", type="multichoice")
    idnumber = f"{quiz.lesson[:2]}-{question.id}"
    _text(element, "name", idnumber)
    _text(element, "questiontext", to_html(question.text), format="html")
    _text(element, "generalfeedback", to_html(question.explanation), format="html")
    for tag, text in (
        *(("defaultgrade", "1.0"), ("penalty", "0.3333333"), ("hidden", "0"), ("idnumber", idnumber)),
        *(("single", "true"), ("shuffleanswers", "true"), ("answernumbering", "ABCD")),
    ):
        ET.SubElement(element, tag).text = text
    for position, option in enumerate(question.options):
        fraction = "100" if position == question.correct else "0"
        answer = ET.SubElement(element, "answer", fraction=fraction, format="html")
        ET.SubElement(answer, "text").text = to_html(option)
        _text(answer, "feedback", to_html(question.feedback[position]), format="html")


def _text(parent: ET.Element, tag: str, text: str, **attributes: str) -> None:
    """`<tag><text>...</text></tag>`, as Moodle wraps its texts."""
    ET.SubElement(ET.SubElement(parent, tag, attributes), "text").text = text
