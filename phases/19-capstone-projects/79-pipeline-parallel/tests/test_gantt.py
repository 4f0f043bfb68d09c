import json
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from chrome_trace import save_trace
from gantt import render_gantt, render_timeline, save_gantt, save_memory
from schedule import SCHEDULES, gpipe_schedule, make_orders
from simulator import simulate, timeline

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
                slots = timeline(schedule)
                self.assertEqual(len(column), max(slot.end for slot in slots))
                for slot in slots:
                    found = rows[slot.rank][column[slot.start] :].split(" ")[0]
                    letter = "ab"[slot.compute.stage // n] if name == "interleaved" else ""
                    self.assertEqual(found, f"{slot.compute.kind}{slot.compute.microbatch}{letter}", (name, n, m))
                self.assertEqual(sum(len(re.findall(r"[FBW]\d+", row)) for row in rows), len(slots))

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

    def test_to_scale(self):
        slots = timeline(make_orders("zb-h1", 2, 2), forward=1, backward=2, weight=3)
        rows = ["F0F1....B0BBW0WWWWB1BBW1WWWW", "..F0B0BBF1B1BBW0WWWWW1WWWW.."]  # two columns a unit of time
        for bad in (0, -1, True, 1.5, "2"):
            with self.assertRaisesRegex(ValueError, "columns must be a whole number of at least 1"):
                render_timeline(slots, bad)
        self.assertEqual(render_timeline(slots, 28).splitlines(), [f"rank {i}  {row}" for i, row in enumerate(rows)])


class TestPng(unittest.TestCase):
    def check(self, path):
        data = path.read_bytes()
        self.assertEqual(data[:8], b"\x89PNG\r\n\x1a\n")
        self.assertGreater(len(data), 5000)

    def test_one_chart_a_schedule_or_timeline(self):
        schedules = {name: make_orders(name, 2, 3) for name in SCHEDULES}
        with tempfile.TemporaryDirectory() as folder:
            self.check(save_gantt(schedules, Path(folder) / "schedules.png"))
            measured = timeline(schedules["zb-h1"], [1.5, 2], [1, 2])
            self.check(save_gantt({"predicted": schedules["zb-h1"], "measured": measured}, Path(folder) / "two.png"))
            self.check(save_memory({name: simulate(s) for name, s in schedules.items()}, Path(folder) / "memory.png"))


class TestChromeTrace(unittest.TestCase):
    def load(self, timelines, unit=1e6):
        with tempfile.TemporaryDirectory() as folder:
            return json.loads(save_trace(timelines, Path(folder) / "trace.json", unit).read_text())["traceEvents"]

    def test_each_computation_is_a_slice_of_its_ranks_thread(self):
        slots = timeline(make_orders("1f1b", 2, 3), backward=2)
        events = [e for e in self.load({"first": slots, "second": slots}, 1000) if e["ph"] == "X"]
        self.assertEqual(len(events), 2 * len(slots))
        for event, slot in zip(events, slots + slots, strict=True):
            self.assertEqual(
                (event["name"], event["cat"], event["tid"]), (str(slot.compute), slot.compute.kind, slot.rank)
            )
            self.assertEqual((event["ts"], event["dur"]), (1000 * slot.start, 1000 * (slot.end - slot.start)))
        self.assertEqual([e["pid"] for e in events], [0] * len(slots) + [1] * len(slots))

    def test_each_message_is_an_arrow_from_its_sender_to_its_receiver(self):
        slots = timeline(make_orders("interleaved", 2, 2), backward=2)
        events = self.load({"": slots})
        starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
        self.assertEqual(len(starts), 2 * 3 * 2)  # both ways, 3 borders, 2 microbatches
        self.assertEqual(set(starts), set(ends))
        boxes = [e for e in events if e["ph"] == "X"]
        for name, start in starts.items():
            end = ends[name]
            self.assertEqual((start["name"], {start["tid"], end["tid"]}, end["bp"]), (end["name"], {0, 1}, "e"))
            for arrow in (start, end):  # a viewer binds an arrow to the slice around it
                inside = [b for b in boxes if b["tid"] == arrow["tid"] and b["ts"] < arrow["ts"] < b["ts"] + b["dur"]]
                self.assertEqual(len(inside), 1)
            self.assertIn(inside[0]["name"], end["name"])

    def test_names_and_counters(self):
        events = self.load({"ours": timeline(make_orders("gpipe", 2, 3))})
        names = [(e["name"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
        self.assertEqual(
            names, [("process_name", 0, "ours"), ("thread_name", 0, "rank 0"), ("thread_name", 1, "rank 1")]
        )
        counters = [e["args"]["alive"] for e in events if e["ph"] == "C" and e["name"] == "activations, rank 1"]
        self.assertEqual(counters, [1, 2, 3, 2, 1, 0])


if __name__ == "__main__":
    unittest.main()
