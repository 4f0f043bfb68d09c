import hashlib
import io
import json
import re
import sys
import unittest
import xml.etree.ElementTree as ET
import zipfile
from dataclasses import replace
from html import unescape
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import REAL, QuizCase
from quiz_schemas import PACKAGE, QTI, html_faults, moodle_faults, qti_faults

from faults import UserError
from lessons import Course
from quizzes.bank import Bank, Quiz
from quizzes.markup import to_html
from quizzes.moodle import moodle_xml
from quizzes.qti import qti_zip


def qti_item_texts(data: bytes) -> list[dict]:
    """Question, options, the right one, explanation and feedback, read back from a package."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        manifest = ET.fromstring(package.read("imsmanifest.xml"))
        href = manifest.find(f".//{PACKAGE}resource[@type='imsqti_xmlv1p2']/{PACKAGE}file").get("href")
        root = ET.fromstring(package.read(href))
    found = []
    for item in root.iter(f"{QTI}item"):
        labels = list(item.iter(f"{QTI}response_label"))
        names = [label.get("ident") for label in labels]
        texts = {each.get("ident"): each.find(f".//{QTI}mattext").text for each in item.iter(f"{QTI}itemfeedback")}
        links = {
            each.find(f".//{QTI}varequal").text: each.find(f"{QTI}displayfeedback").get("linkrefid")
            for each in item.iter(f"{QTI}respcondition")
            if each.find(f".//{QTI}varequal") is not None and each.find(f"{QTI}displayfeedback") is not None
        }
        scored = next(each for each in item.iter(f"{QTI}respcondition") if each.find(f"{QTI}setvar") is not None)
        found.append(
            {
                "question": item.find(f"{QTI}presentation/{QTI}material/{QTI}mattext").text,
                "options": [label.find(f".//{QTI}mattext").text for label in labels],
                "correct": names.index(scored.find(f".//{QTI}varequal").text),
                "explanation": texts["general_fb"],
                "feedback": [texts[links[name]] for name in names],
            }
        )
    return found


def moodle_texts(data: bytes) -> list[dict]:
    """The same, read back from Moodle XML."""
    found = []
    for question in ET.fromstring(data):
        if question.get("type") == "multichoice":
            answers = question.findall("answer")
            found.append(
                {
                    "question": question.findtext("questiontext/text"),
                    "options": [answer.findtext("text") for answer in answers],
                    "correct": [answer.get("fraction") for answer in answers].index("100"),
                    "explanation": question.findtext("generalfeedback/text"),
                    "feedback": [answer.findtext("feedback/text") for answer in answers],
                }
            )
    return found


def wanted(quiz: Quiz, stages: bool) -> list[dict]:
    """What must be read back; in the order of the stages if asked for."""
    questions = quiz.of(("pre", "check", "post")) if stages else quiz.questions
    return [
        {
            "question": to_html(each.text),
            "options": [to_html(text) for text in each.options],
            "correct": each.correct,
            "explanation": to_html(each.explanation),
            "feedback": [to_html(text) for text in each.feedback],
        }
        for each in questions
    ]


def nasty(quiz: Quiz) -> Quiz:
    """The quiz with everything that could break XML or HTML in its texts."""
    text = "<script>alert(1)</script> & `a < b && \"c\"` ]]> <!-- * 2 * 3 *so* 'x' \u00e9\U0001f600 &lt;"
    first = replace(quiz.questions[0], text=text, explanation=text, options=(text, "<b>", "&amp;", "`x`"))
    return replace(quiz, title="A/B & <C>", questions=(first, *quiz.questions[1:]))


class TestMarkup(unittest.TestCase):
    def test_by_hand(self):
        for text, html in [
            ("a < b & c > d", "<p>a &lt; b &amp; c &gt; d</p>"),
            ("call `f(a < b)` now", "<p>call <code>f(a &lt; b)</code> now</p>"),
            ("two *sends* first", "<p>two <em>sends</em> first</p>"),
            ("2 * 10 * 3/4 = 3 * 5", "<p>2 * 10 * 3/4 = 3 * 5</p>"),
            ("`a * b * c` *and* `*x*`", "<p><code>a * b * c</code> <em>and</em> <code>*x*</code></p>"),
            ("``a ` b``", "<p><code>a ` b</code></p>"),
            ("a lone ` stays", "<p>a lone ` stays</p>"),
            ("step_9 and step_10", "<p>step_9 and step_10</p>"),
            ("one\ntwo", "<p>one<br>two</p>"),
            ("<p>", "<p>&lt;p&gt;</p>"),
        ]:
            self.assertEqual(to_html(text), html)
            self.assertEqual(html_faults(html), [])

    def test_what_xml_cannot_hold(self):
        for bad in ("\0", "\x0b", "\ud800", "\uffff"):
            with self.assertRaisesRegex(UserError, "cannot be exported"):
                to_html(f"a{bad}b")

    def test_no_text_of_the_course_is_lost(self):
        for quiz in Bank(Course(REAL)).sound():
            for question in quiz.questions:
                for text in (question.text, question.explanation, *question.options, *question.feedback):
                    bare = unescape(re.sub(r"</?(?:p|em|code)>", "", to_html(text)))
                    self.assertEqual(re.sub("[`*]", "", bare), re.sub("[`*]", "", text))
                    self.assertEqual(to_html(text).count("<code>"), text.count("`") // 2)


class TestFormats(QuizCase):
    def all_quizzes(self) -> list[Quiz]:
        return [*Bank(Course(REAL)).sound(), self.quiz, nasty(self.quiz)]

    def test_moodle(self):
        for quiz in self.all_quizzes():
            data = moodle_xml(quiz)
            self.assertEqual(moodle_faults(data), [])
            self.assertEqual(moodle_texts(data), wanted(quiz, stages=True))
            self.assertEqual(moodle_xml(quiz), data)
        category = ET.fromstring(moodle_xml(nasty(self.quiz))).findtext("question/category/text")
        self.assertEqual(category, "$course$/Distributed Training From Scratch/01 A//B & <C>/pre")

    def test_qti(self):
        for quiz in self.all_quizzes():
            data = qti_zip(quiz)
            self.assertEqual(qti_faults(data), [])
            self.assertEqual(qti_item_texts(data), wanted(quiz, stages=False))
            self.assertEqual(qti_zip(quiz), data)

    def test_qti_holds_nothing_of_today(self):
        with zipfile.ZipFile(io.BytesIO(qti_zip(self.quiz))) as package:
            for info in package.infolist():
                self.assertEqual((info.date_time, info.compress_type), ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_STORED))

    def test_idents_are_unique_over_the_course(self):
        idents: list[str] = []
        for quiz in self.all_quizzes()[:-1]:
            idents += re.findall(rb'<(?:item|response_label|assessment) ident="([^"]+)"', qti_zip(quiz))
        self.assertEqual(len(set(idents)), len(idents))
        self.assertGreater(len(idents), 500)


class TestTheChecksThemselves(QuizCase):
    """A check that accepts everything proves nothing."""

    def test_moodle(self):
        good = moodle_xml(self.quiz).decode()
        for old, new in [
            ('type="category"', 'type="multichoice"'),
            ('fraction="100"', 'fraction="99"'),
            ('fraction="0"', 'fraction="100"'),
            ("<single>true", "<single>false"),
            ("$course$/", "course/"),
            ("<idnumber>01-w1", "<idnumber>01-w0"),
            ("generalfeedback", "generalFeedback"),
            (' format="html"', ""),
            ("&lt;p&gt;", "&lt;b&gt;"),
            ("Count on.", "a &lt; b"),
            ("Count on.", "a &amp;nbsp b"),
            ("<answernumbering>ABCD", "<answernumbering>I"),
        ]:
            broken = good.replace(old, new, 1) if old != "generalfeedback" else good.replace(old, new)
            self.assertNotEqual(broken, good, old)
            self.assertNotEqual(moodle_faults(broken.encode()), [], old)

    def changed(self, old: str, new: str) -> bytes:
        """The package with one text replaced wherever it first occurs in a file."""
        out = io.BytesIO()
        count = 0
        with zipfile.ZipFile(io.BytesIO(qti_zip(self.quiz))) as package, zipfile.ZipFile(out, "w") as copy:
            for info in package.infolist():
                text = package.read(info).decode()
                count += text.count(old)
                copy.writestr(info, text.replace(old, new, 1))
        self.assertGreater(count, 0, old)
        return out.getvalue()

    def test_qti(self):
        item = "item-" + hashlib.sha256(b"01-wheels\0w0").hexdigest()[:32]
        other = "item-" + hashlib.sha256(b"01-wheels\0w1").hexdigest()[:32]
        choice = "choice-" + hashlib.sha256(b"01-wheels\0w0\0" + b"0").hexdigest()[:32]
        for old, new in [
            ("IMS Content", "IMS"),
            ("assessment_meta.xml", "meta.xml"),
            ('type="imsqti_xmlv1p2"', 'type="imsqti"'),
            (f'ident="{other}"', f'ident="{item}"'),
            ("multiple_choice_question", "essay_question"),
            (
                "<fieldentry>1</fieldentry>\n            </qtimetadatafield>",
                "<fieldentry>0.3</fieldentry></qtimetadatafield>",
            ),
            ('rcardinality="Single"', 'rcardinality="Multiple"'),
            (f'respident="response1">{choice}', f'respident="response1">{choice}x'),
            ('respident="response1"', 'respident="response2"'),
            ('linkrefid="general_fb"', 'linkrefid="no_fb"'),
            ('<setvar action="Set" varname="SCORE">100', '<setvar action="Set" varname="SCORE">0'),
            ('maxvalue="100"', 'maxvalue="1"'),
            ("&lt;p&gt;it is", "it is"),
            ('texttype="text/html"', 'texttype="text/plain"'),
            ("<points_possible>6.0", "<points_possible>six"),
            ("identifierref=", "ref="),
        ]:
            with self.subTest(old=old):
                self.assertNotEqual(qti_faults(self.changed(old, new)), [])
        self.assertEqual(qti_faults(self.changed("Count on.", "Count up.")), [])


class TestCommand(QuizCase):
    def test_each_format(self):
        for name, suffix in (("qti", "zip"), ("moodle", "xml"), ("json", "json")):
            path = self.work / f"q.{suffix}"
            out, _ = self.course("export-quiz", "1", path, "--format", name, "--json")
            self.assertEqual(json.loads(out)["questions"], 6)
            self.refused(f"q.{suffix}: exists already", "export-quiz", "1", path, "--format", name)
            before = path.read_bytes()
            self.course("export-quiz", "1", path, "--format", name, "--force")
            self.assertEqual(path.read_bytes(), before)
        self.assertEqual(qti_faults((self.work / "q.zip").read_bytes()), [])
        self.assertEqual(moodle_faults((self.work / "q.xml").read_bytes()), [])
        value = json.loads((self.work / "q.json").read_text())
        source = json.loads(self.text(f"{self.WHEELS}/quiz.json"))
        self.assertEqual({key: value[key] for key in source}, source)
        self.assertEqual(value["quiz"], self.quiz.sha256)

    def test_a_character_that_cannot_be_exported(self):
        self.replace(f"{self.WHEELS}/quiz.json", "Count on.", "Count\\u0000on.")
        self.refused("the character '\\x00'", "export-quiz", "1", self.work / "q.xml", "--format", "moodle")
        self.assertFalse((self.work / "q.xml").exists())

    def test_bad_arguments(self):
        self.refused("no lesson '99'", "export-quiz", "99", self.work / "q", "--format", "qti")
        self.refused("a folder", "export-quiz", "1", self.work, "--format", "qti")
        self.refused("does not exist", "export-quiz", "1", self.work / "no" / "q", "--format", "qti")
