"""quiz.json: the schema, question by question, and over the course where the right answers stand."""

import json
import math
from collections import Counter
from typing import Any

from catalog import STAGES
from faults import Fault, read_text
from jsonpos import Located
from lessons import Course, Lesson

OPTIONS = 4
MINIMUM = {"pre": 1, "check": 3, "post": 2}
QUIZ_KEYS = ("lesson", "title", "questions")
QUESTION_KEYS = ("id", "stage", "question", "options", "correct", "explanation", "feedback")
OLD_KEYS = {"q": "question", "choices": "options", "answer": "correct"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _key_faults(found: dict, wanted: tuple[str, ...]) -> list[tuple[str | None, str]]:
    faults: list[tuple[str | None, str]] = []
    for key in found:
        if key in OLD_KEYS and key not in wanted:
            faults.append((key, f"old key {key!r}: the schema calls it {OLD_KEYS[key]!r}"))
        elif key not in wanted:
            faults.append((key, f"unknown key {key!r}; known are {', '.join(wanted)}"))
    faults += [(None, f"the key {key!r} is missing") for key in wanted if key not in found]
    return faults


def correct_faults(value: Any) -> list[str]:
    """What is wrong with `correct`, which must be an integer from 0 to 3. True is no integer here, nor is 1.0."""
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"correct is {value!r} ({type(value).__name__}); an integer from 0 to {OPTIONS - 1} is expected"]
    if not 0 <= value < OPTIONS:
        return [f"correct is {value}, out of range; an integer from 0 to {OPTIONS - 1} is expected"]
    return []


def text_list_faults(key: str, value: Any) -> list[str]:
    """What is wrong with `options` or `feedback`: four texts, no spaces around them."""
    if not isinstance(value, list):
        return [f"{key} must be a list of {OPTIONS} texts"]
    faults = [] if len(value) == OPTIONS else [f"{key} has {len(value)} entries; {OPTIONS} are expected"]
    for position, text in enumerate(value):
        if not _is_text(text):
            faults.append(f"{key}[{position}] is {text!r}; a text that is not empty is expected")
        elif text != text.strip():
            faults.append(f"{key}[{position}] has spaces around it: {text!r}")
        elif key == "feedback" and "\n" in text:
            faults.append(f"{key}[{position}] must be one line")
    return faults


def duplicate_faults(options: Any) -> list[str]:
    """Two options that read the same, capitals and spaces aside."""
    if not isinstance(options, list):
        return []
    seen: dict[str, int] = {}
    faults = []
    for position, text in enumerate(options):
        key = " ".join(str(text).split()).casefold()
        if key in seen:
            faults.append(f"options[{position}] is the same as options[{seen[key]}]: {text!r}")
        seen.setdefault(key, position)
    return faults


def question_faults(question: Any) -> list[tuple[str | None, str]]:
    """All faults of one question as (key or None, message)."""
    if not isinstance(question, dict):
        return [(None, f"a question must be an object, not {type(question).__name__}")]
    faults = _key_faults(question, QUESTION_KEYS)
    for key in ("id", "question", "explanation"):
        if key in question and not _is_text(question[key]):
            faults.append((key, f"{key} is {question[key]!r}; a text that is not empty is expected"))
    if "stage" in question and question["stage"] not in STAGES:
        faults.append(("stage", f"unknown stage {question['stage']!r}; known are {', '.join(STAGES)}"))
    if "correct" in question:
        faults += [("correct", message) for message in correct_faults(question["correct"])]
    for key in ("options", "feedback"):
        if key in question:
            faults += [(key, message) for message in text_list_faults(key, question[key])]
    return faults + [("options", message) for message in duplicate_faults(question.get("options"))]


def check_quiz(lesson: Lesson) -> list[Fault]:
    """The schema of one quiz.json; each fault carries the line of the offending part."""
    path = lesson.rel("quiz.json")
    text = read_text(lesson.folder / "quiz.json")
    if text is None:
        return []  # check_shape reports it
    try:
        located = Located(text)
    except json.JSONDecodeError as error:
        return [Fault(path, error.lineno, f"no valid JSON: {error.msg}")]
    quiz = located.value
    if not isinstance(quiz, dict):
        return [Fault(path, 1, "an object with the keys lesson, title, questions is expected")]
    faults = [Fault(path, located.line(key) if key else 1, message) for key, message in _key_faults(quiz, QUIZ_KEYS)]
    for key, wanted in (("lesson", lesson.id), ("title", lesson.header.title)):
        if key in quiz and quiz[key] != wanted:
            faults.append(Fault(path, located.line(key), f"{key} is {quiz[key]!r}; {wanted!r} is expected"))
    questions = quiz.get("questions", [])
    if not isinstance(questions, list):
        return [*faults, Fault(path, located.line("questions"), "questions must be a list")]
    for index, question in enumerate(questions):
        for key, message in question_faults(question):
            place = ("questions", index, key) if key else ("questions", index)
            faults.append(Fault(path, located.line(*place), f"question {index + 1}: {message}"))
    return faults + _whole_quiz_faults(path, located, questions)


def _whole_quiz_faults(path: str, located: Located, questions: list) -> list[Fault]:
    faults = []
    seen: dict[str, int] = {}
    good = [(index, question) for index, question in enumerate(questions) if isinstance(question, dict)]
    for index, question in good:
        name = str(question.get("id"))
        if "id" in question and name in seen:
            message = f"question {index + 1}: the id {name!r} is question {seen[name] + 1}'s already"
            faults.append(Fault(path, located.line("questions", index, "id"), message))
        seen.setdefault(name, index)
    stages = Counter(str(question.get("stage")) for _, question in good)
    for stage, least in MINIMUM.items():
        if stages[stage] < least:
            message = f"{stages[stage]} questions of stage {stage!r}; at least {least} expected"
            faults.append(Fault(path, located.line("questions"), message))
    return faults


def check_order(lesson: Lesson) -> list[Fault]:
    """The file's order is the one in which the questions are shown and numbered: stage after stage."""
    faults = []
    latest = 0
    for line, question in _sound_questions(lesson, "stage"):
        stage = STAGES.index(question["stage"])
        if stage < latest:
            message = f"question {question['id']!r} of stage {question['stage']!r} stands behind {STAGES[latest]!r}"
            faults.append(Fault(lesson.rel("quiz.json"), line, f"{message}; {', then '.join(STAGES)} is expected"))
        latest = max(latest, stage)
    return faults


def _sound_questions(lesson: Lesson, key: str = "correct") -> list[tuple[int, dict]]:
    """(line of a key, question) of the questions without a fault; the others are reported by check_quiz."""
    try:
        located = Located(read_text(lesson.folder / "quiz.json") or "{}")
    except json.JSONDecodeError:
        return []
    questions = located.value.get("questions") if isinstance(located.value, dict) else None
    if not isinstance(questions, list):
        return []
    return [(located.line("questions", i, key), q) for i, q in enumerate(questions) if not question_faults(q)]


def position_band(count: int) -> tuple[int, int]:
    """How many of `count` right answers may stand at one position: a quarter, give or take 5 % and one question."""
    margin = 1 + count / 20
    return max(0, math.ceil(count / 4 - margin)), math.floor(count / 4 + margin)


def longest_limit(count: int) -> float:
    """How many of `count` questions "choose the longest option" may win: chance plus one standard deviation."""
    return count / 4 + math.sqrt(count * 3 / 16)


def longest_score(question: dict) -> float:
    """What choosing the longest option wins here: 1, 0, or a share if several are equally long."""
    lengths = [len(option) for option in question["options"]]
    if lengths[question["correct"]] < max(lengths):
        return 0.0
    return 1 / lengths.count(max(lengths))


def check_answers(course: Course) -> list[Fault]:
    """Over the course: no position and no length gives the answer away. In a quiz: no position holds more than half."""
    faults = []
    found: list[tuple[str, int, dict]] = []
    for lesson in course.lessons:
        sound = _sound_questions(lesson)
        found += [(lesson.rel("quiz.json"), line, question) for line, question in sound]
        for position, count in Counter(question["correct"] for _, question in sound).items():
            if len(sound) >= OPTIONS and count > len(sound) / 2:
                line = next(line for line, question in sound if question["correct"] == position)
                message = f"position {position} is right in {count} of this quiz's {len(sound)} questions; at most half"
                faults.append(Fault(lesson.rel("quiz.json"), line, message))
    return faults + _position_faults(found) + _length_faults(found)


def _position_faults(found: list[tuple[str, int, dict]]) -> list[Fault]:
    counts = Counter(question["correct"] for _, _, question in found)
    low, high = position_band(len(found))
    faults = []
    for position in range(OPTIONS):
        if found and not low <= counts[position] <= high:
            message = f"over the course position {position} is right in {counts[position]} of {len(found)} questions"
            # Too many: the first of them; too few: the first question that could move there.
            path, line, _ = next(
                (item for item in found if (item[2]["correct"] == position) == (counts[position] > high)), found[0]
            )
            faults.append(Fault(path, line, f"{message}; {low} to {high} expected"))
    return faults


def _length_faults(found: list[tuple[str, int, dict]]) -> list[Fault]:
    wins = [item for item in found if longest_score(item[2]) > 0]
    score = sum(longest_score(question) for _, _, question in wins)
    if score <= longest_limit(len(found)):
        return []
    path, line, _ = max(wins, key=lambda item: len(item[2]["options"][item[2]["correct"]]))
    message = f'over the course "choose the longest option" wins {score:.1f} of {len(found)} questions'
    return [Fault(path, line, f"{message}; at most {longest_limit(len(found)):.1f} expected (this is one of them)")]
