"""Who handed in nearly the same: found whatever the names, not found for what all were given."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import json

from grading.fingerprints import WINDOW, K, grams, tokens, winnow
from grading_course import RIGHT, RINGS
from grading_course import Grading

OWN = """size = len(ring)
    moved = []
    for position in range(size):
        source = position + steps
        while source >= size:
            source = source - size
        while source < 0:
            source = source + size
        moved.append(ring[source])
    return moved"""
RENAMED = OWN
for old, new in (("size", "n"), ("moved", "out"), ("position", "i"), ("source", "j")):
    RENAMED = RENAMED.replace(old, new)
RENAMED = RENAMED.replace("out = []", "out = []  # here it goes").replace(
    "j = j - n", "j = (\n                j - n\n            )"
)
OTHER = """if not ring:
        return ring
    result = list(ring)
    steps %= len(result)
    while steps > 0:
        first = result.pop(0)
        result.append(first)
        steps -= 1
    return result if isinstance(ring, list) else type(ring)(result)"""


class TestSimilar(Grading):
    def setUp(self):
        super().setUp()
        for name, text in (("s1", OWN), ("s2", RENAMED), ("s3", OTHER), ("s4", RIGHT), ("x9", RIGHT)):
            self.put(f"in/{name}/code/rings.py", RINGS.replace(RIGHT, text))

    def similar(self, *options: str) -> dict:
        self.assertEqual(self.course("similar", str(self.root / "in"), "1", "--json", *options), 0)
        return json.loads(self.out)

    def test_the_copy_is_found_under_other_names(self):
        found = self.similar()
        self.assertEqual([(pair["first"], pair["second"]) for pair in found["pairs"]], [("s1", "s2")])
        self.assertGreater(found["pairs"][0]["of_first"], 0.7)
        self.assertIn("no proof", found["note"])

    def test_what_all_were_given_does_not_count(self):
        everyone = {name for pair in self.similar("--least", "0")["pairs"] for name in (pair["first"], pair["second"])}
        self.assertFalse(everyone & {"s4", "x9"})

    def test_the_table(self):
        self.assertEqual(self.course("similar", str(self.root / "in"), "1"), 0)
        self.assertRegex(
            self.out.splitlines()[1], r"s1 +s2 +\d+ +\d+% +\d+% +s1/code/rings.py:\d+ s2/code/rings.py:\d+"
        )
        self.assertEqual(self.course("similar", str(self.root / "in"), "1", "--least", "101"), 2)

    def test_who_handed_in_no_python_is_not_counted(self):
        self.put("in/s2/code/rings.py", RINGS)
        self.put("in/s5/notes.txt", "")
        self.assertEqual(self.course("similar", str(self.root / "in"), "1"), 0)
        self.assertIn("no two of 5 share 50% of their own code\n", self.out)


class TestWinnowing(unittest.TestCase):
    def test_any_shared_run_that_is_long_enough_is_found(self):
        """The paper's guarantee."""
        shared = "\n".join(f"a{n} = b[{n}] + c({n}, d)" for n in range(9))
        sequence = tokens(shared)[: WINDOW + K - 1]
        self.assertEqual(len(sequence), WINDOW + K - 1)
        one = winnow(grams(tokens("x = 1\nfor y in z: print(y)\n" + shared)))
        other = winnow(grams(tokens(shared + "\nif q: del r\nwhile 1: pass")))
        self.assertTrue(one.keys() & other.keys())

    def test_names_comments_and_layout_do_not_count(self):
        plain = [token.text for token in tokens("def f(a):\n    return a + 1\n")]
        self.assertEqual(plain, [token.text for token in tokens("def g( b ):  # x\n\n        return b+22")])
        self.assertNotEqual(plain, [token.text for token in tokens("def f(a):\n    return a - 1\n")])

    def test_what_is_no_python_has_tokens_up_to_there(self):
        self.assertEqual([token.text for token in tokens("a = (1")], ["n", "=", "(", "0"])

    def test_short_texts(self):
        self.assertEqual((winnow([]), winnow([5, 3])), ({}, {3: 1}))


if __name__ == "__main__":
    unittest.main()
