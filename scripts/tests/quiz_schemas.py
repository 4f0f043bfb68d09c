"""Strict checks of what platforms import, written from their published structure, apart from the code that writes it.

Each returns the faults as texts; none means that the file is as the platform documents it.
"""

import io
import re
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from html.parser import HTMLParser

MOODLE_FRACTIONS = {
    *("100", "90", "83.33333", "80", "75", "70", "66.66667", "60", "50", "40", "33.33333", "30", "25", "20"),
    *("16.66667", "14.28571", "12.5", "11.11111", "10", "5", "0"),
}
MOODLE_TAGS = Counter(
    "name questiontext generalfeedback defaultgrade penalty hidden idnumber single shuffleanswers answernumbering "
    "answer answer answer answer".split()
)
PACKAGE = "{http://www.imsglobal.org/xsd/imsccv1p1/imscp_v1p1}"
QTI = "{http://www.imsglobal.org/xsd/ims_qtiasiv1p2}"
CANVAS = "{http://canvas.instructure.com/xsd/cccv1p0}"
FIELDS = ("question_type", "points_possible", "original_answer_ids", "assessment_question_identifierref")


class _Html(HTMLParser):
    """Tags that are opened and closed in order, of the four that quizzes use, without attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("p", "code", "em", "br") or attrs:
            self.faults.append(f"tag {tag} {attrs}")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"closes {tag}")


def html_faults(text: str | None) -> list[str]:
    """`<p>...</p>` of known tags, with no < or & that is not markup."""
    parser = _Html()
    parser.feed(text or "")
    parser.close()
    faults = parser.faults + [f"{tag} is left open" for tag in parser.open]
    bare = re.sub(r"</?(?:p|code|em|br)>", "", text or "")
    if "<" in bare or ">" in bare or re.search(r"&(?!(?:amp|lt|gt);)", bare):
        faults.append(f"a bare < or > or &: {bare}")
    return faults if (text or "").startswith("<p>") and (text or "").endswith("</p>") else [*faults, f"no <p>: {text}"]


def moodle_faults(data: bytes) -> list[str]:
    """A Moodle XML file of multichoice questions with one right answer."""
    root = ET.fromstring(data)
    questions = list(root)
    faults = [] if root.tag == "quiz" and not root.attrib else [f"the root is {root.tag}"]
    if not questions or questions[0].get("type") != "category":
        faults.append("the first question must be a category")
    for question in questions:
        if question.tag != "question":
            faults.append(f"unknown element {question.tag}")
        elif question.get("type") == "category":
            text = question.findtext("category/text") or ""
            if [each.tag for each in question] != ["category"] or not re.match(r"^\$course\$/\S", text):
                faults.append(f"category {text!r}")
        else:
            faults += _multichoice_faults(question)
    names = Counter(question.findtext("idnumber") for question in questions if question.get("type") != "category")
    return faults + [f"idnumber {name} {count} times" for name, count in names.items() if count > 1 or not name]


def _multichoice_faults(question: ET.Element) -> list[str]:
    name = question.findtext("name/text") or "?"
    faults = [] if question.get("type") == "multichoice" else [f"type {question.get('type')}"]
    if Counter(each.tag for each in question) != MOODLE_TAGS:
        faults.append(f"elements {[each.tag for each in question]}")
    for tag in ("questiontext", "generalfeedback", "answer", "answer/feedback"):
        for element in question.findall(tag):
            if element.get("format") != "html":
                faults.append(f"{tag} has no format")
            faults += html_faults(element.findtext("text"))
    for tag, pattern in (
        ("single", "true"),
        ("shuffleanswers", "true|false"),
        ("answernumbering", "none|abc|ABCD|123"),
        ("defaultgrade", r"\d+(\.\d+)?"),
        ("hidden", "0|1"),
        ("idnumber", r".{1,100}"),
    ):
        if not re.fullmatch(pattern, question.findtext(tag) or ""):
            faults.append(f"{tag} is {question.findtext(tag)!r}")
    fractions = [answer.get("fraction") for answer in question.findall("answer")]
    if not set(fractions) <= MOODLE_FRACTIONS or sorted(fractions) != ["0", "0", "0", "100"]:
        faults.append(f"fractions {fractions}")
    return [f"{name}: {fault}" for fault in faults]


def qti_faults(data: bytes) -> list[str]:
    """A QTI 1.2 package as Canvas exports and imports it."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        files = {info.filename: package.read(info) for info in package.infolist()}
        if len(files) != len(package.infolist()):
            return ["a name twice in the zip"]
    if "imsmanifest.xml" not in files:
        return ["imsmanifest.xml is not at the root"]
    trees = {name: ET.fromstring(content) for name, content in files.items()}
    manifest = trees.pop("imsmanifest.xml")
    faults = _manifest_faults(manifest, set(trees))
    for resource in manifest.iter(f"{PACKAGE}resource"):
        href = resource.find(f"{PACKAGE}file").get("href")
        if href not in trees:
            continue
        identifier = resource.get("identifier")
        faults += _assessment_faults(trees[href], identifier) if resource.get("type") == "imsqti_xmlv1p2" else []
        faults += _settings_faults(trees[href]) if href.endswith("assessment_meta.xml") else []
    return faults


def _manifest_faults(manifest: ET.Element, present: set[str]) -> list[str]:
    faults = [] if manifest.tag == f"{PACKAGE}manifest" and manifest.get("identifier") else ["no manifest"]
    for tag, text in (("schema", "IMS Content"), ("schemaversion", "1.1.3")):
        if manifest.findtext(f"{PACKAGE}metadata/{PACKAGE}{tag}") != text:
            faults.append(f"metadata {tag}")
    if [each.tag.removeprefix(PACKAGE) for each in manifest] != ["metadata", "organizations", "resources"]:
        faults.append("metadata, organizations, resources are expected")
    resources = list(manifest.iter(f"{PACKAGE}resource"))
    identifiers = [resource.get("identifier") for resource in resources]
    if len(set(identifiers)) != len(identifiers) or None in identifiers:
        faults.append(f"identifiers {identifiers}")
    needed = [each.get("identifierref") for each in manifest.iter(f"{PACKAGE}dependency")]
    faults += [f"no resource {name}" for name in needed if name not in identifiers]
    listed = [each.get("href") for each in manifest.iter(f"{PACKAGE}file")]
    if sorted(listed) != sorted(present):
        faults.append(f"files listed {listed}, present {sorted(present)}")
    for resource in resources:
        own = [each.get("href") for each in resource.iter(f"{PACKAGE}file")]
        if resource.get("href", own[0] if own else "") not in own:
            faults.append(f"resource {resource.get('identifier')}: its href is none of its files")
    kinds = sorted(resource.get("type") for resource in resources)
    if kinds != ["associatedcontent/imscc_xmlv1p1/learning-application-resource", "imsqti_xmlv1p2"]:
        faults.append(f"types {kinds}")
    return faults


def _settings_faults(root: ET.Element) -> list[str]:
    faults = [] if root.tag == f"{CANVAS}quiz" and root.get("identifier") else [f"settings: the root is {root.tag}"]
    for tag, pattern in (
        ("title", ".+"),
        ("quiz_type", "assignment|practice_quiz"),
        ("shuffle_answers", "true|false"),
        ("points_possible", r"\d+\.\d"),
        ("allowed_attempts", r"-1|\d+"),
    ):
        if not re.fullmatch(pattern, root.findtext(f"{CANVAS}{tag}") or ""):
            faults.append(f"settings: {tag} is {root.findtext(f'{CANVAS}{tag}')!r}")
    return faults


def _assessment_faults(root: ET.Element, identifier: str) -> list[str]:
    assessment = root.find(f"{QTI}assessment")
    if root.tag != f"{QTI}questestinterop" or assessment is None or assessment.get("ident") != identifier:
        return ["no assessment with the resource's identifier"]
    items = assessment.findall(f"{QTI}section/{QTI}item")
    faults = [] if items and assessment.get("title") else ["no items, or no title"]
    owned = [each.get("ident") for each in assessment.iter() if each.tag in (f"{QTI}item", f"{QTI}response_label")]
    faults += [f"ident {name} {count} times" for name, count in Counter(owned).items() if count > 1 or not name]
    return faults + [f"{item.get('title')}: {fault}" for item in items for fault in _item_faults(item)]


def _item_faults(item: ET.Element) -> list[str]:
    faults = []
    if [each.tag.removeprefix(QTI) for each in item] != [
        *("itemmetadata", "presentation", "resprocessing"),
        *["itemfeedback"] * 5,
    ]:
        faults.append(f"elements {[each.tag for each in item]}")
    fields = {
        each.findtext(f"{QTI}fieldlabel"): each.findtext(f"{QTI}fieldentry")
        for each in item.iter(f"{QTI}qtimetadatafield")
    }
    choices = [each.get("ident") for each in item.iter(f"{QTI}response_label")]
    if tuple(fields) != FIELDS or fields["question_type"] != "multiple_choice_question":
        faults.append(f"fields {fields}")
    elif fields["original_answer_ids"] != ",".join(choices) or not re.fullmatch(
        r"\d+(\.5)?", fields["points_possible"]
    ):
        faults.append(f"fields {fields}")
    response = item.find(f"{QTI}presentation/{QTI}response_lid")
    if response is None or response.get("rcardinality") != "Single" or len(choices) != 4:
        return [*faults, "one response_lid with four labels is expected"]
    for text in item.iter(f"{QTI}mattext"):
        faults += html_faults(text.text) + ([] if text.get("texttype") == "text/html" else ["texttype"])
    if len(list(item.iter(f"{QTI}mattext"))) != 10:
        faults.append("a question, four options, an explanation and four feedbacks are expected")
    return faults + _processing_faults(item, response.get("ident"), choices)


def _processing_faults(item: ET.Element, response: str, choices: list[str]) -> list[str]:
    feedback = [each.get("ident") for each in item.iter(f"{QTI}itemfeedback")]
    faults = [] if len(set(feedback)) == len(feedback) else [f"feedback {feedback}"]
    decvar = item.find(f"{QTI}resprocessing/{QTI}outcomes/{QTI}decvar")
    wanted = {"maxvalue": "100", "minvalue": "0", "varname": "SCORE", "vartype": "Decimal"}
    faults += [] if decvar is not None and decvar.attrib == wanted else ["outcomes"]
    scored, shown = [], []
    for condition in item.iter(f"{QTI}respcondition"):
        equal = condition.find(f"{QTI}conditionvar/{QTI}varequal")
        if equal is not None and (equal.get("respident") != response or equal.text not in choices):
            faults.append(f"respcondition on {equal.get('respident')}, {equal.text}")
        for link in condition.iter(f"{QTI}displayfeedback"):
            shown.append(link.get("linkrefid"))
        score = condition.find(f"{QTI}setvar")
        if score is not None:
            scored.append((equal.text, score.get("action"), score.get("varname"), score.text))
    if sorted(shown) != sorted(feedback):
        faults.append(f"feedback {feedback}, shown {shown}")
    if [each[1:] for each in scored] != [("Set", "SCORE", "100")]:
        faults.append(f"scores {scored}")
    return faults
