import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import argparse
import io
from contextlib import redirect_stderr
from unittest import mock

from endings import say_why
from given_flags import allow_only, given
from ranks import RankError


class TestEndsAndFlags(unittest.TestCase):
    def test_what_a_rank_raised_is_said_in_a_line_if_that_is_known_to_be_enough(self):
        error, errors = RankError(1, 1, "raised lesson.LessonError: too late", "in no collective"), io.StringIO()
        with redirect_stderr(errors):
            self.assertEqual(say_why(mock.Mock(side_effect=error), type("LessonError", (Exception,), {})), 1)
            self.assertEqual(say_why(mock.Mock(side_effect=error)), 1)
            self.assertEqual(say_why(mock.Mock(side_effect=KeyboardInterrupt)), 130)
            self.assertEqual(say_why(mock.Mock(return_value=3)), 3)
            with self.assertRaises(KeyError):
                say_why(mock.Mock(side_effect=KeyError("a fault of the program")))
        lines = ["too late", "rank 1 raised lesson.LessonError: too late", "by Ctrl-C"]
        self.assertEqual(
            [line for line in errors.getvalue().splitlines() if line.startswith("stopped")],
            [f"stopped: {line}" for line in lines],
        )

    def test_a_flag_is_given_or_not_whatever_its_value(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--count", type=int, default=3)
        parser.add_argument("--yes", action="store_true")
        parser.add_argument("--more", action="append", default=[])
        parser.add_argument("--way", nargs="?", const="usual")
        for argv, names in {
            "": [],
            "--count 3": ["count"],
            "--count 0 --yes": ["count", "yes"],
            "--way --more a --more b": ["more", "way"],
        }.items():
            self.assertEqual(given(parser, argv.split()), names)
        allow_only(parser, "this", "yes way", ["--yes", "--way"])


if __name__ == "__main__":
    unittest.main()
