"""A quiz as a QTI 1.2 package, as Canvas imports it: a manifest, the assessment, and Canvas's settings for it.

The same quiz always gives the same bytes: identifiers are hashes, and the zip holds no time and is not compressed.
"""

import hashlib
import io
import xml.etree.ElementTree as ET
import zipfile

from quizzes.bank import Question, Quiz
from quizzes.markup import to_html

QTI = "http://www.imsglobal.org/xsd/ims_qtiasiv1p2"
CANVAS = "http://canvas.instructure.com/xsd/cccv1p0"
PACKAGE = "http://www.imsglobal.org/xsd/imsccv1p1/imscp_v1p1"
ASSESSMENT_TYPE = "imsqti_xmlv1p2"
SETTINGS_TYPE = "associatedcontent/imscc_xmlv1p1/learning-application-resource"


def qti_zip(quiz: Quiz) -> bytes:
    """The whole package, a point a question, answers shuffled by the platform."""
    name = _ident("quiz", quiz.lesson)
    files = {
        "imsmanifest.xml": _manifest(quiz, name),
        f"{name}/assessment_meta.xml": _settings(quiz, name),
        f"{name}/{name}.xml": _assessment(quiz, name),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as package:
        for path, root in files.items():
            info = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o644 << 16
            ET.indent(root)
            package.writestr(info, ET.tostring(root, encoding="UTF-8", xml_declaration=True) + b"\n")
    return out.getvalue()


def _ident(what: str, *names: str) -> str:
    """An XML identifier: begins with a letter, unique to these names, the same in every export."""
    return f"{what}-{hashlib.sha256(chr(0).join(names).encode()).hexdigest()[:32]}"


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes)
    element.text = text
    return element


def _manifest(quiz: Quiz, name: str) -> ET.Element:
    root = ET.Element("manifest", {"xmlns": PACKAGE, "identifier": _ident("manifest", quiz.lesson)})
    metadata = _add(root, "metadata")
    _add(metadata, "schema", "IMS Content")
    _add(metadata, "schemaversion", "1.1.3")
    _add(root, "organizations")
    resources = _add(root, "resources")
    settings, path = f"{name}-settings", f"{name}/assessment_meta.xml"
    resource = _add(resources, "resource", identifier=name, type=ASSESSMENT_TYPE)
    _add(resource, "file", href=f"{name}/{name}.xml")
    _add(resource, "dependency", identifierref=settings)
    _add(_add(resources, "resource", identifier=settings, type=SETTINGS_TYPE, href=path), "file", href=path)
    return root


def _settings(quiz: Quiz, name: str) -> ET.Element:
    root = ET.Element("quiz", {"xmlns": CANVAS, "identifier": name})
    _add(root, "title", _title(quiz))
    _add(root, "description", to_html(f"Quiz of lesson {quiz.lesson}."))
    for tag, text in (
        *(("shuffle_answers", "true"), ("scoring_policy", "keep_highest"), ("quiz_type", "assignment")),
        *(("points_possible", f"{len(quiz.questions)}.0"), ("allowed_attempts", "1"), ("available", "false")),
    ):
        _add(root, tag, text)
    return root


def _title(quiz: Quiz) -> str:
    return f"{quiz.lesson[:2]} {quiz.title}"


def _assessment(quiz: Quiz, name: str) -> ET.Element:
    root = ET.Element("questestinterop", {"xmlns": QTI})
    assessment = _add(root, "assessment", ident=name, title=_title(quiz))
    _fields(_add(assessment, "qtimetadata"), {"cc_maxattempts": "1"})
    section = _add(assessment, "section", ident="root_section")
    for question in quiz.questions:
        _item(section, quiz, question)
    return root


def _fields(metadata: ET.Element, fields: dict[str, str]) -> None:
    for label, entry in fields.items():
        field = _add(metadata, "qtimetadatafield")
        _add(field, "fieldlabel", label)
        _add(field, "fieldentry", entry)


def _item(section: ET.Element, quiz: Quiz, question: Question) -> None:
    names = (quiz.lesson, question.id)
    choices = [_ident("choice", *names, str(position)) for position in range(len(question.options))]
    item = _add(section, "item", ident=_ident("item", *names), title=question.id)
    fields = {
        "question_type": "multiple_choice_question",
        "points_possible": "1",
        "original_answer_ids": ",".join(choices),
        "assessment_question_identifierref": _ident("question", *names),
    }
    _fields(_add(_add(item, "itemmetadata"), "qtimetadata"), fields)
    presentation = _add(item, "presentation")
    _material(presentation, question.text)
    response = _add(presentation, "response_lid", ident="response1", rcardinality="Single")
    shown = _add(response, "render_choice")
    for choice, option in zip(choices, question.options, strict=True):
        _material(_add(shown, "response_label", ident=choice), option)
    _processing(item, choices, choices[question.correct])
    feedback = {
        "general_fb": question.explanation,
        **dict(zip(map(_feedback, choices), question.feedback, strict=True)),
    }
    for ident, text in feedback.items():
        _material(_add(_add(item, "itemfeedback", ident=ident), "flow_mat"), text)


def _processing(item: ET.Element, choices: list[str], right: str) -> None:
    """What each answer brings: everybody sees the explanation, each option its feedback, the right one scores 100 %."""
    processing = _add(item, "resprocessing")
    _add(_add(processing, "outcomes"), "decvar", maxvalue="100", minvalue="0", varname="SCORE", vartype="Decimal")
    for choice in (None, *choices):
        condition = _add(processing, "respcondition", **{"continue": "Yes"})
        variable = _add(condition, "conditionvar")
        if choice is None:
            _add(variable, "other")
        else:
            _add(variable, "varequal", choice, respident="response1")
        shown = "general_fb" if choice is None else _feedback(choice)
        _add(condition, "displayfeedback", feedbacktype="Response", linkrefid=shown)
    condition = _add(processing, "respcondition", **{"continue": "No"})
    _add(_add(condition, "conditionvar"), "varequal", right, respident="response1")
    _add(condition, "setvar", "100", action="Set", varname="SCORE")


def _feedback(choice: str) -> str:
    return f"{choice}_fb"


def _material(parent: ET.Element, text: str) -> None:
    _add(_add(parent, "material"), "mattext", to_html(text), texttype="text/html")
