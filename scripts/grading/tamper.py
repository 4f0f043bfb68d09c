"""Notice when what judges a test was replaced: a student's module that sets `unittest.TestCase.assertEqual`, say.

Against accidents and simple tricks only: who replaces this module, too, is not noticed.
"""

import builtins
import importlib
import math
import operator
import sys
import unittest

_MISSING = object()
_TORCH = ("equal", "allclose", "isclose", "manual_seed")
_TESTING = ("assert_close", "assert_allclose")


class Guard:
    """Remembers the functions that tests compare with; later tells, and puts back, what was replaced."""

    def __init__(self) -> None:
        owners: list[tuple[str, object, list[str]]] = [
            ("unittest.TestCase", unittest.TestCase, list(vars(unittest.TestCase))),
            ("unittest.TestResult", unittest.TestResult, list(vars(unittest.TestResult))),
            ("unittest.TestSuite", unittest.TestSuite, list(vars(unittest.TestSuite))),
            ("unittest.BaseTestSuite", unittest.BaseTestSuite, list(vars(unittest.BaseTestSuite))),
            ("unittest", unittest, list(vars(unittest))),
            ("builtins", builtins, [name for name in vars(builtins) if name != "_"]),
            ("math", math, ["isclose", "isnan"]),
            ("operator", operator, ["eq", "ne"]),
        ]
        if "torch" in sys.modules:
            owners.append(("torch", sys.modules["torch"], list(_TORCH)))
            owners.append(("torch.testing", importlib.import_module("torch.testing"), list(_TESTING)))
        self._kept = [
            (f"{label}.{name}", owner, name, vars(owner).get(name, _MISSING))
            for label, owner, names in owners
            for name in names
        ]

    def mend(self) -> list[str]:
        """The names of what was replaced since then; all of it is put back."""
        replaced = []
        for label, owner, name, value in self._kept:
            if vars(owner).get(name, _MISSING) is not value and not name.startswith(("__", "_abc_")):
                replaced.append(label)
                setattr(owner, name, value)
        return replaced
