"""Classroom 50's result.json (`classroom50/result/v1`): written, and checked strictly.

An autograder exits with 0 even if tests fail; another exit code says that grading itself broke.
"""

from typing import Any

from shapes import (
    COUNT,
    FILLED,
    FLAG,
    LIST,
    MOMENT,
    TEXT,
    Faults,
    Rule,
    is_count,
    list_faults,
    object_faults,
    raise_faults,
)

SCHEMA = "classroom50/result/v1"


RESULT_RULES = {
    "schema": Rule(repr(SCHEMA), lambda value: value == SCHEMA),
    "classroom": FILLED,
    "assignment": FILLED,
    "submission": TEXT,
    "commit": TEXT,
    "release": TEXT,
    "review": TEXT,
    "datetime": MOMENT,
    "score": COUNT,
    "max-score": COUNT,
    "tests": LIST,
}
TEST_RULES = {"test-name": FILLED, "passed": FLAG, "score": COUNT, "max-score": COUNT}


def test(name: str, score: int, max_score: int) -> dict[str, Any]:
    """One test of `result`, points as integers: passed if it earns all of them."""
    return {"test-name": name, "passed": score == max_score, "score": score, "max-score": max_score}


def result(classroom: str, assignment: str, tests: list[dict], moment: str, **more: str) -> dict[str, Any]:
    """The whole result.json; score and max-score are sums over the tests. `moment` is ISO 8601 with an offset.

    `more`: submission, commit, release, review, each "" if not given. Raises ValueError for what the schema refuses.
    """
    value: dict[str, Any] = {"schema": SCHEMA, "classroom": classroom, "assignment": assignment}
    value.update({"submission": "", "commit": "", "release": "", "review": "", **more, "datetime": moment})
    raise_faults("result.json", list_faults(tests, TEST_RULES, tuple(TEST_RULES), ("tests",)))
    value.update({key: sum(item[key] for item in tests) for key in ("score", "max-score")}, tests=tests)
    check_result(value)
    return value


def result_faults(value: Any) -> Faults:
    """Everything in which `value` is no result.json: keys, types, and sums that do not hold."""
    faults = object_faults(value, RESULT_RULES, tuple(RESULT_RULES))
    if not isinstance(value, dict):
        return faults
    faults += list_faults(value.get("tests"), TEST_RULES, tuple(TEST_RULES), ("tests",))
    if faults:
        return faults
    for index, item in enumerate(value["tests"]):
        if item["score"] > item["max-score"]:
            faults.append((("tests", index, "score"), f"{item['score']} points of {item['max-score']}"))
    for key in ("score", "max-score"):
        total = sum(item[key] for item in value["tests"])
        if is_count(value[key]) and value[key] != total:
            faults.append(((key,), f"{key} is {value[key]}, the tests add up to {total}"))
    return faults


def check_result(value: Any) -> None:
    """ValueError that names each place at which `value` is no result.json."""
    raise_faults("result.json", result_faults(value))
