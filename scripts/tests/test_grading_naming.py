"""Which file is a module: where it lies, and what browsers and platforms make of its name."""

import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from faults import UserError
from grading.naming import find_module, names_like
from grading.platforms import Handed

LESSON = SimpleNamespace(id="01-wheels", modules=lambda: [Path("rings.py"), Path("rings_2.py")])


def handed(paths: tuple[str, ...], same: bool = False) -> Handed:
    return Handed("s", [], "folder", {path: b"" if same else str(at).encode() for at, path in enumerate(paths)})


class TestFindModule(unittest.TestCase):
    def find(self, *paths: str) -> str | None:
        return find_module(handed(paths), LESSON, "rings")

    def test_the_nearest_to_the_lesson(self):
        self.assertIsNone(self.find("a.py", "tests/rings.py", "phases/1/02-carts/code/rings.py"))
        self.assertEqual(self.find("rings.py", "code/rings.py"), "code/rings.py")
        self.assertEqual(self.find("code/rings.py", "x/01-wheels/code/rings.py"), "x/01-wheels/code/rings.py")
        self.assertEqual(self.find("a/b/rings.py", "a/rings.py"), "a/rings.py")

    def test_two_that_differ(self):
        with self.assertRaisesRegex(UserError, r"more than once: a/rings.py, b/rings.py"):
            self.find("a/rings.py", "b/rings.py")


class TestChangedNames(unittest.TestCase):
    def test_what_browsers_and_platforms_make_of_a_name(self):
        changed = ("rings (1).py", "rings(12).py", "rings-1.py", "rings_1.py", "rings 2.py", "rings+(1).py")
        changed += ("rings copy.py", "rings copy 2.py", "rings - Copy (2).py", "rings__1_.py", "rings - Kopie.py")
        changed += ("Rings.py", "rings.PY", "rings (1) (1).py", "rings .py", "RINGS-1.PY", "rings.1.py")
        for name in changed:
            with self.subTest(name=name):
                self.assertEqual(find_module(handed((f"code/{name}",)), LESSON, "rings"), f"code/{name}")

    def test_what_is_another_module(self):
        for name in ("rings_2.py", "ringset.py", "my_rings.py", "rings1.py", "rings_old.py", "1.py", "(1).py", "s.py"):
            with self.subTest(name=name):
                self.assertIsNone(find_module(handed((name,)), LESSON, "rings"))

    def test_the_right_name_comes_first(self):
        self.assertEqual(find_module(handed(("rings (1).py", "deep/er/rings.py")), LESSON, "rings"), "deep/er/rings.py")

    def test_of_two_none_is_taken_unless_they_are_the_same(self):
        two = ("a/rings (1).py", "rings (2).py")
        self.assertIsNone(find_module(handed(two), LESSON, "rings"))
        self.assertEqual(names_like(handed(two), LESSON, "rings"), list(two))
        self.assertEqual(find_module(handed(two, same=True), LESSON, "rings"), two[0])

    def test_not_among_tests_or_in_another_lesson(self):
        for path in ("tests/rings (1).py", "phases/02-carts/code/rings (1).py"):
            self.assertIsNone(find_module(handed((path,)), LESSON, "rings"))


if __name__ == "__main__":
    unittest.main()
