"""Wrong answers that other tests let pass: what a sweep deletes, ranges in any order, what an error changes."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from checkpoint import CheckpointError, save_sharded
from layout import check_coverage
from manifest import MANIFEST
from publish import sweep
from restore import load_into
from storage import DISK


def saved(folder: Path) -> set[str]:
    """Save a checkpoint of two ranks; return the names of its files."""
    save_sharded([{"x": torch.arange(4) + rank} for rank in range(2)], folder, 3)
    return {path.name for path in folder.iterdir()}


class Sweeping(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name) / "step_3"

    def left(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def test_what_is_not_ours_stays(self):
        names = saved(self.folder)
        for name in ("notes.txt", "rank0.bin.bak", "manifest.json.old", "rankx.bin"):
            (self.folder / name).write_text("somebody's")
        (self.folder / "rank7.bin").write_bytes(b"left over from a save that died")
        sweep(self.folder, DISK)
        self.assertEqual(self.left(), names | {"notes.txt", "rank0.bin.bak", "manifest.json.old", "rankx.bin"})

    def test_beside_a_damaged_manifest_nothing_is_deleted(self):
        names = saved(self.folder)
        text = (self.folder / MANIFEST).read_text()
        (self.folder / MANIFEST).write_text(text[:-3])
        sweep(self.folder, DISK)
        self.assertEqual(self.left(), names)


class Coverage(unittest.TestCase):
    def test_ranks_may_hold_ranges_in_any_order(self):
        def layout(start, end):
            return [{"unit": "u", "start": start, "end": end, "total": 9}]

        check_coverage([layout(6, 9), layout(0, 2), layout(2, 6)])
        with self.assertRaisesRegex(CheckpointError, "layout of 'u': gap at element 2"):
            check_coverage([layout(6, 9), layout(0, 2), layout(3, 6)])

    def test_an_overlap_is_named_by_the_first_element_held_twice(self):
        for first, *ranges in [
            (500, (0, 501), (500, 1003)),
            (0, (0, 4), (0, 4)),
            (3, (0, 9), (3, 5)),  # one within the other
            (6, (6, 9), (2, 7), (0, 2)),
        ]:
            total = max(end for _, end in ranges)
            layouts = [[{"unit": "u", "start": start, "end": end, "total": total}] for start, end in ranges]
            with self.assertRaisesRegex(CheckpointError, f"layout of 'u': overlap at element {first}\\b"):
                check_coverage(layouts)


class AllOrNothing(unittest.TestCase):
    def test_what_fits_is_not_copied_where_something_else_does_not(self):
        target = {"a": torch.zeros(2), "b": torch.zeros(3), "c": {"d": torch.zeros(1), "e": 1}}
        loaded = {"a": torch.ones(2), "b": torch.ones(4), "c": {"d": torch.ones(1), "e": 2}}
        with self.assertRaisesRegex(CheckpointError, "^b: expected"):
            load_into(target, loaded)
        self.assertEqual([target["a"].tolist(), target["c"]["d"].tolist(), target["c"]["e"]], [[0.0] * 2, [0.0], 1])


if __name__ == "__main__":
    unittest.main()
