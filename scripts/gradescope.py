"""Gradescope's results.json: what an autograder leaves in /autograder/results. Written, and checked strictly."""

from typing import Any

from shapes import FILLED, LIST, NUMBER, OBJECT, TEXT, TEXTS, Faults, Rule, list_faults, object_faults, one_of
from shapes import is_number, raise_faults

FORMATS = ("text", "html", "simple_format", "md", "ansi")
VISIBILITIES = ("hidden", "after_due_date", "after_published", "visible")
STATUSES = ("passed", "failed")

_SECONDS = Rule("seconds, not negative", lambda value: is_number(value) and value >= 0)
_RANKING = Rule("a number or a text", lambda value: is_number(value) or isinstance(value, str))

RESULT_RULES = {
    "score": NUMBER,
    "execution_time": _SECONDS,
    "output": TEXT,
    "output_format": one_of(*FORMATS),
    "test_output_format": one_of(*FORMATS),
    "test_name_format": one_of(*FORMATS),
    "visibility": one_of(*VISIBILITIES),
    "stdout_visibility": one_of(*VISIBILITIES),
    "extra_data": OBJECT,
    "tests": LIST,
    "leaderboard": LIST,
}
TEST_RULES = {
    "score": NUMBER,
    "max_score": NUMBER,
    "status": one_of(*STATUSES),
    "name": FILLED,
    "name_format": one_of(*FORMATS),
    "number": FILLED,  # a text such as "1.2", not a number
    "output": TEXT,
    "output_format": one_of(*FORMATS),
    "tags": TEXTS,
    "visibility": one_of(*VISIBILITIES),
    "extra_data": OBJECT,
}
LEADERBOARD_RULES = {"name": FILLED, "value": _RANKING, "order": one_of("asc", "desc")}


def test(name: str, score: float, max_score: float, output: str = "", **more: Any) -> dict[str, Any]:
    """One test of `results`: passed if it earns all its points. `more` are further keys of TEST_RULES.

    `score` and `max_score` are points, 0 <= score <= max_score. Raises ValueError for other points.
    """
    if not (is_number(score) and is_number(max_score) and 0 <= score <= max_score):
        raise ValueError(f"test {name!r}: {score!r} points of {max_score!r}; 0 <= score <= max_score is expected")
    status = "passed" if score == max_score else "failed"
    return {"name": name, "score": score, "max_score": max_score, "status": status, "output": output, **more}


def results(tests: list[dict], *, output: str = "", execution_time: float | None = None, **more: Any) -> dict[str, Any]:
    """The whole results.json. `score` is the sum of the tests' unless it is among `more` (keys of RESULT_RULES).

    `execution_time` in seconds. Raises ValueError for what Gradescope would not take.
    """
    value: dict[str, Any] = {"output": output, "output_format": "text", "stdout_visibility": "hidden", "tests": tests}
    value["score"] = sum(item["score"] for item in tests if isinstance(item, dict) and is_number(item.get("score")))
    if execution_time is not None:
        value["execution_time"] = execution_time
    value.update(more)
    check_results(value)
    return value


def result_faults(value: Any) -> Faults:
    """Everything in which `value` is no results.json."""
    faults = object_faults(value, RESULT_RULES, ())
    if not isinstance(value, dict):
        return faults
    faults += list_faults(value.get("tests"), TEST_RULES, (), ("tests",))
    faults += list_faults(value.get("leaderboard"), LEADERBOARD_RULES, ("name", "value"), ("leaderboard",))
    tests = value.get("tests")
    scored = isinstance(tests, list) and tests and all(isinstance(item, dict) and "score" in item for item in tests)
    if "score" not in value and not scored:
        faults.append(((), "a score is missing: at the top, or in each of the tests"))
    return faults


def check_results(value: Any) -> None:
    """ValueError that names each place at which `value` is no results.json."""
    raise_faults("results.json", result_faults(value))
