"""mutants.json is looked at: the schema, and that what it names exists and can be put in."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from fake_course import MUTANTS, FakeCourse, mutant

FILE = f"{FakeCourse.WHEELS}/mutants.json"


class TestSchema(FakeCourse):
    def setUp(self):
        super().setUp()
        self.assertEqual(json.loads(self.text(FILE)), MUTANTS)

    def broken(self, key: str, value: object, message: str, number: int = 2) -> None:
        """One key of the third mutant has another value; the fault points at its line."""
        entries = [dict(each) for each in MUTANTS]
        entries[number][key] = value
        self.put_json(FILE, entries)
        lines = self.text(FILE).splitlines()
        at = [i for i, line in enumerate(lines, 1) if line.strip().startswith(f'"{key}":')][number]
        self.assert_fault(FILE, at, f"mutant {number + 1}: {message}")

    def test_a_good_file_and_none(self):
        self.assert_good()
        (self.root / FILE).unlink()
        self.assert_fault(FILE, 1, "missing: wrong answers that the exercises' tests reject")

    def test_what_is_no_list_or_no_json(self):
        self.put(FILE, "{}")
        self.assert_fault(FILE, 1, "a list of mutants is expected")
        self.put(FILE, "[\n{},,]")
        self.assert_fault(FILE, 2, "no valid JSON")
        self.put_json(FILE, ["turn", *MUTANTS])
        self.assert_fault(FILE, 2, "mutant 1: a mutant must be an object, not str")

    def test_too_few(self):
        self.put_json(FILE, MUTANTS[:7])
        self.assert_fault(FILE, 1, "7 mutants; at least 8 are expected")

    def test_keys(self):
        entries = [dict(each) for each in MUTANTS]
        del entries[0]["what"]
        entries[1]["why"] = "because"
        self.put_json(FILE, entries)
        self.assert_fault(FILE, 2, "mutant 1: the key 'what' is missing")
        self.assert_fault(FILE, 22, "mutant 2: unknown key 'why'")

    def test_values(self):
        self.broken("id", "Turn It", "the id 'Turn It' must be words of small letters")
        self.broken("id", MUTANTS[0]["id"], "the id 'one-way-0' is taken by an earlier mutant")
        self.broken("what", " ", "what is empty")
        self.broken("symptom", 3, "symptom is 3; a text is expected")
        self.broken("source", "D07", "source 'D07' must be course, public lesson or owner/project#1")

    def test_options(self):
        for key, value, kind in (("hangs", 1, "bool"), ("raises", True, "str")):
            entries = [dict(each) for each in MUTANTS]
            entries[0][key] = value
            self.put_json(FILE, entries)
            self.assert_fault(FILE, 12, f"mutant 1: {key} is {value!r}; a {kind} is expected")

    def test_names(self):
        self.broken("exercise", "hop", "no exercise 'hop' in")
        self.broken("function", "rings.hop", "there is no function hop")
        self.broken("function", "carts.Cart.move", "no module 'carts' in")
        hop = "test_wheel.TestWheel.test_hop"
        self.broken("caught_by", hop, f"{hop} is no test of the exercise turn")
        self.broken("caught_by", "test_wheel.TestWheel", "no test 'test_wheel.TestWheel' in")

    def test_what_cannot_be_put_in(self):
        self.broken("old", "ring", "old must occur exactly once in rings.turn, it occurs 4 times")
        self.broken("old", "distance", "old must occur exactly once in rings.turn, it occurs 0 times")
        self.broken("new", "ring[shift:] +", "with new in its place the module is no Python")

    def test_a_fault_elsewhere_in_the_module_does_not_matter(self):
        self.put_json(
            FILE,
            [mutant("a-spoke-less", function="rings.Wheel.__init__", old="= spokes\n", new="= spokes - 1\n"), *MUTANTS],
        )
        self.assert_good()
