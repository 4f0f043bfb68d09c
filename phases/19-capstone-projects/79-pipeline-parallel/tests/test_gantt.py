import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from gantt import render_gantt, save_gantt
from schedule import SCHEDULES, gpipe_schedule, make_orders, timeline

CHART = """\
cycle    0   1   2   3   4   5   6   7
stage 0  F0  F1  ..  B0  F2  B1  ..  B2
stage 1  ..  F0  B0  F1  B1  F2  B2  .."""


class TestText(unittest.TestCase):
    def test_by_hand(self):
        found = render_gantt(make_orders("1f1b", 2, 3), 2, 3)
        self.assertEqual([line.rstrip() for line in found.splitlines()], CHART.splitlines())

    def test_every_cell_stands_under_its_cycle(self):
        """Also from 10 microbatches and 10 cycles on, where cells get wider."""
        for name in SCHEDULES:
            for n, m in ((1, 1), (2, 10), (4, 12), (12, 3), (3, 101)):
                schedule = make_orders(name, n, m)
                header, *rows = render_gantt(schedule, n, m).splitlines()
                self.assertEqual({len(row) for row in rows}, {len(header)}, (name, n, m))
                column = {int(x.group()): x.start() for x in re.finditer(r"\d+", header)}
                self.assertEqual(len(column), 2 * (m + n - 1))
                for slot in timeline(schedule):
                    found = rows[slot.rank][column[slot.start] :].split(" ")[0]
                    self.assertEqual(found, f"{slot.compute.kind}{slot.compute.microbatch}", (name, n, m))
                cells = sum(len(re.findall(r"[FB]\d+", row)) for row in rows)
                self.assertEqual(cells, 2 * n * m)

    def test_both_forms_of_a_schedule_draw_the_same(self):
        self.assertEqual(render_gantt(gpipe_schedule(3, 4), 3, 4), render_gantt(make_orders("gpipe", 3, 4), 3, 4))

    def test_sizes_that_are_not_the_schedules_own(self):
        schedule = make_orders("gpipe", 3, 4)
        for sizes, message in (
            ((4, 4), "num_stages is 4, but the schedule has 3"),
            ((3, 5), "num_microbatches is 5, but the schedule has 4"),
            ((0, 4), "num_stages must be"),
            ((3, True), "num_microbatches must be"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                render_gantt(schedule, *sizes)
        with self.assertRaisesRegex(ValueError, "empty"):
            render_gantt([], 1, 1)


class TestPng(unittest.TestCase):
    def test_one_chart_a_schedule(self):
        with tempfile.TemporaryDirectory() as folder:
            path = save_gantt({name: make_orders(name, 2, 3) for name in SCHEDULES}, Path(folder) / "gantt.png")
            data = path.read_bytes()
        self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
        self.assertGreater(len(data), 5000)


if __name__ == "__main__":
    unittest.main()
