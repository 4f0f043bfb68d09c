"""The bench's targets: what counts as missed, and where none can be met."""

import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import bench_checkpoint as bench
import demo
from sidebyside import Row


class TestTargets(unittest.TestCase):
    def checked(self, disk: Row, theirs: Row) -> tuple[list[bool], list[str]]:
        """Return (which claims hold, what was said) of a table of saves: ours, the disk, and torch's."""
        claims, said = mock.Mock(spec=demo.Claims), []
        with mock.patch.object(demo, "say", said.append):
            bench.check_targets(claims, bench.SAVE, [Row("ours", 1.0, 1.0, 1.0, 1.0), disk, theirs])
        return [call.args[1] for call in claims.check.call_args_list], said

    def test_a_target_is_missed_if_all_of_the_interval_is_below(self):
        fast = Row(bench.DISK, 0.8, 0.8, 0.7, 0.9)
        self.assertEqual(self.checked(fast, Row(bench.DCP, 1.2, 1.2, 1.1, 1.3)), ([True, True], []))
        self.assertEqual(self.checked(fast, Row(bench.DCP, 1.0, 1.0, 0.9, 1.09)), ([True, False], []))
        slow = Row(bench.DISK, 0.7, 0.7, 0.6, 0.74)
        self.assertEqual(self.checked(slow, Row(bench.DCP, 1.2, 1.2, 1.1, 1.3)), ([False, True], []))

    def test_nothing_is_faster_than_the_disk(self):
        """Torch's save at the speed of the disk alone: to beat it by a tenth, one would have to leave bytes out."""
        held, said = self.checked(Row(bench.DISK, 0.96, 0.9, 0.8, 1.0), Row(bench.DCP, 1.0, 0.94, 0.92, 1.04))
        self.assertEqual(held, [True])
        self.assertEqual(said, [f"no target beside {bench.DCP}: the disk alone takes 0.96 of its time"])


if __name__ == "__main__":
    unittest.main()
