"""The texts' lists of exercises are those of exercises.json."""

import unittest

from fake_course import FakeCourse


class TestSection(FakeCourse):
    def section(self, old: str, new: str) -> int:
        """Replace something in the list, and return the line of the section's heading."""
        self.docs(old, new)
        return self.text(f"{self.WHEELS}/docs/en.md").splitlines().index("## Exercises") + 1

    def test_good(self):
        self.assert_good()

    def test_the_commands_and_the_sum_come_first(self):
        for old, new, wanted in [
            ("course start 01\n", "course start 02\n", "start 01"),
            ("try learn/01-wheels", "try learn/02-carts", "try learn/01-wheels"),
            ("5 points in all", "6 points in all", "5 points"),
        ]:
            with self.subTest(wanted):
                line = self.section(old, new)
                self.assert_docs_fault(line, f"the section must say {wanted!r} before its list")
                self.section(new, old)

    def test_each_exercise_as_it_is(self):
        for old, new in [
            ("**Turn a ring**", "**Turn**"),
            ("(build, 2", "(extend, 2"),
            ("2 points, `rings", "3 points, `rings"),
            ("`rings.turn`): by", "`rings.Wheel.roll`): by"),
        ]:
            with self.subTest(new):
                line = self.section(old, new) + 9
                self.assert_docs_fault(line, "go on with '1. **Turn a ring** (build, 2 points, `rings.turn`)'")
                self.section(new, old)

    def test_as_many(self):
        line = self.section("2. **Roll**", "Roll")
        self.assert_docs_fault(line, "go on with '2. **Roll** (extend, 3 points, `rings.Wheel.roll` and `rings.turn`)'")
        self.section("Roll (extend", "2. **Roll** (extend")
        line = self.section("`rings.turn`).", "`rings.turn`).\n3. **Fly**: too.")
        self.assert_docs_fault(line, "the list has 3 exercises, exercises.json 2")

    def test_nothing_is_asked_of_a_lesson_without_exercises(self):
        (self.root / self.WHEELS / "exercises.json").unlink()
        self.assertFalse([fault for fault in self.faults() if "docs/en.md" in fault and "list" in fault])


if __name__ == "__main__":
    unittest.main()
