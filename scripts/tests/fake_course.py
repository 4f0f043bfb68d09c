"""A tiny course in a temporary folder that every check accepts; each test then breaks one thing."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import catalog
from check_all import check_course
from course import build_parser, options_of
from lessons import Course

IDIOM = 'sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson\'s code\n'

RINGS = '''"""Rings."""


def turn(ring, steps=1, *, reverse=False):
    """Turn a ring."""
    shift = -steps if reverse else steps
    return ring[shift:] + ring[:shift]


class Wheel:
    """A wheel."""

    def __init__(self, spokes, size=1):
        self.spokes = spokes
        self.size = size

    def roll(self, distance):
        """Roll on."""
        return distance / self.size
'''

CARTS = '''"""Carts."""

from dataclasses import dataclass

from rings import Wheel


@dataclass
class Cart:
    """A cart."""

    wheels: int
    load: float = 0.0

    def move(self, distance, wheel: Wheel):
        """Move on."""
        return wheel.roll(distance) * self.wheels
'''

MAIN = '''"""The story of lesson {number}."""

import sys
from pathlib import Path

{idiom}
from {module} import {name}  # the piece this lesson builds

__all__ = ["{name}"]


def main():
    """Tell it."""
    if "--fail" in sys.argv:
        return 3
    print("told:", {name}.__name__, *sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''

TESTS = """import sys
import unittest
from pathlib import Path

{idiom}
from {module} import {name}


class Test{name}(unittest.TestCase):
    def test_name(self):
        self.assertEqual({name}.__name__, "{name}")
"""

DOCS = """# The {name}

> A {name} in one sitting.

**Type:** Build
**Languages:** Python
**Prerequisites:** {needs}
**Time:** ~{minutes} minutes

## Learning Objectives

- Build a `{name}`; see [The Problem](#the-problem) and [the code](../code/{module}.py).

## The Problem

Nothing rolls.

## The Concept

```mermaid
graph LR
```

## Build It

`{module}.py` holds it:

{quote}

Call `{module}.{name}` as `{call}`; a row has `ceil(P / N)` parts.

## Prove It

```bash
python code/main.py
```

```text
told: {name}
```

## Production patterns in the wild

Wheels everywhere.

## Use It

```python
from {module} import {name}
from torch import nn

thing = {call}
nn.Linear(2, 2)
```

## Ship It

Ship it.

## Exercises

{exercises}

## Key Terms

| term | what people say | what it means |
|---|---|---|

## Further Reading

- [A page](https://example.org/page)
"""

RING_QUOTE = """```python
# rings.py
def turn(ring, steps=1, *, reverse=False):
    ...
    return ring[shift:] + ring[:shift]
```"""

CART_QUOTE = """```python
# carts.py
def move(self, distance, wheel: Wheel):
    \"\"\"Move on.\"\"\"
```"""

EXERCISES_SECTION = """```bash
course start 01
course try learn/01-wheels
```

5 points in all.

1. **Turn a ring** (build, 2 points, `rings.turn`): by any number of places.
2. **Roll** (extend, 3 points, `rings.Wheel.roll` and
   `rings.turn`)."""

README = """# Rolling from scratch

| lesson | time |
|---|---|
| [The Wheel](phases/01-basics/01-wheels) | 30 min |
| [The Cart](phases/01-basics/02-carts) | 45 min |
"""

EXERCISES = [
    {
        "id": "turn",
        "title": "Turn a ring",
        "kind": "build",
        "function": "rings.turn",
        "points": 2,
        "tests": "test_wheel.TestWheel.test_name",
        "depends_on": [],
        "hint": "Cut it in two.",
    },
    {
        "id": "roll",
        "title": "Roll",
        "kind": "extend",
        "function": ["rings.Wheel.roll", "rings.turn"],
        "points": 3,
        "tests": ["test_wheel"],
        "depends_on": ["turn"],
        "hint": "Distance over size.",
    },
]


def mutant(name: str, **other: object) -> dict:
    """A wrong answer to the exercise `turn`, which its test notices."""
    return {
        "id": name,
        "exercise": "turn",
        "function": "rings.turn",
        "old": "-steps if reverse else steps",
        "new": "steps",
        "what": "A ring turns one way.",
        "symptom": "It never turns back.",
        "caught_by": "test_wheel.TestWheel.test_name",
        "source": "course",
        **other,
    }


MUTANTS = [mutant(f"one-way-{number}") for number in range(8)]


def question(number: int, stage: str, correct: int) -> dict:
    """A sound question; its options are equally long."""
    return {
        "id": f"w{number}",
        "stage": stage,
        "question": f"What is {number} + {correct}?",
        "options": [f"it is {number + position:03d}" for position in range(4)],
        "correct": correct,
        "explanation": "Count on.",
        "feedback": ["Right." if position == correct else "Count again." for position in range(4)],
    }


def quiz(lesson: str, title: str, first: int = 0) -> dict:
    """One question before, three to check, two after; the right answers go round the positions."""
    stages = ("pre", "check", "check", "check", "post", "post")
    questions = [question(number, stage, (number + first) % 4) for number, stage in enumerate(stages)]
    return {"lesson": lesson, "title": title, "questions": questions}


class FakeCourse(unittest.TestCase):
    """Gives each test a good course at `self.root`, and ways to break it and look at the report."""

    maxDiff = None
    WHEELS = "phases/01-basics/01-wheels"
    CARTS = "phases/01-basics/02-carts"

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = Path(holder.name).resolve()
        self.put("README.md", README)
        self.put("LICENSE", "Do as you like.\n")
        paths = f'"{self.WHEELS}/code", "{self.CARTS}/code"'
        self.put("pyproject.toml", f"[tool.pyright]\nextraPaths = [{paths}]\n")
        self.put(".gitignore", "__pycache__/\noutputs/\n")
        self.put("scripts/helper.py", '"""Help."""\n')
        call, exercises = "Wheel(3, size=2)", EXERCISES_SECTION
        self._lesson(
            self.WHEELS, "test_wheel.py", "01", "rings", "Wheel", "Python basics", 30, RING_QUOTE, call, exercises
        )
        self._lesson(
            self.CARTS, "test_cart.py", "02", "carts", "Cart", "1; patience", 45, CART_QUOTE, "Cart(4)", "1. Another."
        )
        self.put(f"{self.WHEELS}/code/rings.py", RINGS)
        self.put(f"{self.CARTS}/code/carts.py", CARTS)
        self.put_json(f"{self.WHEELS}/quiz.json", quiz("01-wheels", "The Wheel"))
        self.put_json(f"{self.CARTS}/quiz.json", quiz("02-carts", "The Cart", first=2))
        self.put_json(f"{self.WHEELS}/exercises.json", EXERCISES)
        self.put_json(f"{self.WHEELS}/mutants.json", MUTANTS)
        catalog.write(Course(self.root))

    def _lesson(self, path, test, number, module, name, needs, minutes, quote, call, exercises) -> None:
        values = dict(number=number, module=module, name=name, needs=needs, minutes=minutes, quote=quote, call=call)
        values["exercises"] = exercises
        self.put(f"{path}/code/main.py", MAIN.format(idiom=IDIOM, **values))
        self.put(f"{path}/tests/{test}", TESTS.format(idiom=IDIOM, **values))
        self.put(f"{path}/docs/en.md", DOCS.format(**values))

    def put(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def put_json(self, name: str, value: object) -> None:
        """Write a JSON file, indented."""
        self.put(name, json.dumps(value, indent=2))

    def text(self, name: str) -> str:
        """Read a file."""
        return (self.root / name).read_text(encoding="utf-8")

    def replace(self, name: str, old: str, new: str) -> int:
        """Replace a text that must be there, and return the line it stood on."""
        text = self.text(name)
        self.assertIn(old, text)
        self.put(name, text.replace(old, new, 1))
        return text[: text.index(old)].count("\n") + 1

    def docs(self, old: str, new: str) -> int:
        """Replace something in the first lesson's docs."""
        return self.replace(f"{self.WHEELS}/docs/en.md", old, new)

    def faults(self) -> list[str]:
        """The whole report."""
        return [str(fault) for fault in check_course(Course(self.root), options_of(build_parser()))]

    def assert_good(self) -> None:
        """No fault at all."""
        self.assertEqual(self.faults(), [])

    def assert_fault(self, path: str, line: int, message: str) -> None:
        """The report holds a fault at this place with this text in it."""
        found = self.faults()
        hits = [fault for fault in found if fault.startswith(f"{path}:{line}: ") and message in fault]
        self.assertTrue(hits, f"no fault {path}:{line}: ...{message}... in\n" + "\n".join(found))

    def assert_docs_fault(self, line: int, message: str) -> None:
        """The same for the first lesson's docs."""
        self.assert_fault(f"{self.WHEELS}/docs/en.md", line, message)
