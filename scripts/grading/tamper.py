"""Notice when what judges a test was replaced: a student's module that sets `unittest.TestCase.assertEqual`, say.

Against accidents and simple tricks only: who replaces this module, too, is not noticed.
"""

import builtins
import contextlib
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MISSING = object()
_UNITTEST = ("unittest", "unittest.case", "unittest.util", "unittest.result", "unittest.suite")
_OWN = ("grading.runner", "grading.records", "grading.tamper", "grading.witness")
_COMPARING = {  # what tests compare with
    "math": ("isclose", "isnan"),
    "operator": ("eq", "ne"),
    "torch": ("equal", "allclose", "isclose", "manual_seed"),
    "torch.testing": ("assert_close", "assert_allclose"),
    "numpy": ("allclose", "array_equal", "isclose"),
    "numpy.testing": ("assert_allclose", "assert_array_equal", "assert_equal"),
}


@dataclass(frozen=True)
class _Kept:
    """One name of a module or class, as it was."""

    label: str
    owner: Any
    name: str
    value: Any
    code: Any

    def replaced(self) -> bool:
        """Whether it is another now, or a function of another text; then it is put back."""
        now = vars(self.owner).get(self.name, _MISSING)
        if now is self.value and _code(now) is self.code:
            return False
        with contextlib.suppress(AttributeError, TypeError):
            setattr(self.owner, self.name, self.value)
            if self.code is not None:
                _function(self.value).__code__ = self.code
        return True


class Guard:
    """Remembers what tests compare with and, once they are loaded, the tests; tells and puts back what was replaced."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._classes: list[tuple[type, set[str]]] = []
        self._objects: list[object] = []
        for name in (*_UNITTEST, *(name for name in _OWN if name in sys.modules)):
            self._keep_module(sys.modules[name], name)
        self._keep("builtins", builtins, [name for name in vars(builtins) if name != "_"])
        for name, names in _COMPARING.items():
            if name in ("math", "operator") or name.partition(".")[0] in sys.modules:
                self._keep(name, importlib.import_module(name), names)

    def watch(self, tests: Iterable[unittest.TestCase], folder: Path) -> None:
        """From now on also these tests, their classes, and the modules that were loaded from the folder of tests."""
        self._objects += tests
        for owner in {each for test in self._objects for each in type(test).__mro__}:
            if owner.__module__.partition(".")[0] not in ("builtins", "unittest"):
                self._keep_class(owner)
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == folder:
                self._keep_module(module, name)

    def watch_object(self, each: object) -> None:
        """From now on also that this object gets no method of its own."""
        self._objects.append(each)

    def mend(self) -> list[str]:
        """The names of what was replaced since then; all of it is put back."""
        replaced = [each.label for each in self._kept if each.replaced()]
        for owner, names in self._classes:
            for name in set(vars(owner)) - names:
                if _is_method(owner.__mro__[1:], name):
                    replaced.append(f"{owner.__name__}.{name}")
                    delattr(owner, name)
        for each in self._objects:
            for name in [name for name in vars(each) if _is_method(type(each).__mro__, name)]:
                replaced.append(f"{type(each).__name__}().{name}")
                del vars(each)[name]
        return replaced

    def _keep(self, label: str, owner: Any, names: Iterable[str]) -> None:
        for name in names:
            value = vars(owner).get(name, _MISSING)
            if not name.startswith(("__", "_abc_")):
                self._kept.append(_Kept(f"{label}.{name}", owner, name, value, _code(value)))

    def _keep_module(self, module: types.ModuleType, label: str) -> None:
        self._keep(label, module, list(vars(module)))
        for value in list(vars(module).values()):
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and (value is unittest.TestCase or not issubclass(value, _Kept | unittest.TestCase)):
                methods = [name for name in vars(value) if _is_method([value], name) or _code(vars(value)[name])]
                self._keep(f"{label}.{value.__name__}", value, methods)  # the rest may count something

    def _keep_class(self, owner: type) -> None:
        """What its own setUpClass sets is no trick: there only methods are kept."""
        sets = any("setUpClass" in vars(each) for each in owner.__mro__ if each is not unittest.TestCase)
        names = [name for name, value in vars(owner).items() if not sets or _is_method([owner], name) or _code(value)]
        self._keep(owner.__name__, owner, names)
        self._classes.append((owner, set(vars(owner))))


def _is_method(classes: Iterable[type], name: str) -> bool:
    """Whether one of the classes has a method, or something else to call, of that name."""
    return any(callable(getattr(vars(each).get(name), "__func__", vars(each).get(name))) for each in classes)


def _function(value: Any) -> Callable | None:
    """The Python function in a method or property, or None."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _code(value: Any) -> types.CodeType | None:
    function = _function(value)
    return None if function is None else function.__code__
