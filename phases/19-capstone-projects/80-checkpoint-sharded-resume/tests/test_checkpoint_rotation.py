import errno
import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from bitwise import same, small_states
from checkpoint import load_sharded, save_sharded
from manifest import CheckpointError
from rotation import complete_checkpoints, latest_checkpoint, rotate_checkpoints
from storage import Crash, CrashingStorage


class Rotation(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root, self.parent = Path(temporary.name), Path(temporary.name) / "checkpoints"
        self.parent.mkdir()

    def save(self, step, name=None):
        folder = self.parent / (name or f"step_{step}")
        save_sharded(small_states(2, step), folder, step, storage=CrashingStorage())
        return folder

    def names(self):
        return sorted(path.name for path in self.parent.iterdir())

    def steps(self):
        return [step for step, _ in complete_checkpoints(self.parent)]

    def test_by_recorded_step_as_a_number(self):
        for step, name in [(9, "z"), (10, "a"), (100, "m"), (2, "step_500")]:
            self.save(step, name)
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=2), ["step_500", "z"])
        self.assertEqual(self.names(), ["a", "m"])
        self.assertEqual(latest_checkpoint(self.parent).name, "m")

    def test_file_times_do_not_matter(self):
        for i, step in enumerate([1, 2, 3, 4]):
            folder = self.save(step)
            for path in (folder, *folder.iterdir()):
                os.utime(path, (1e9 - i * 1e6, 1e9 - i * 1e6))
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=1), ["step_1", "step_2", "step_3"])
        self.assertTrue(same(load_sharded(self.parent / "step_4", 2)[1], small_states(2, 4)))

    def test_five_are_kept_unless_told_otherwise(self):
        for step in range(7):
            self.save(step)
        self.assertEqual(rotate_checkpoints(str(self.parent)), ["step_0", "step_1"])
        self.assertEqual(rotate_checkpoints(self.parent), [])
        self.assertEqual(self.steps(), [2, 3, 4, 5, 6])

    def test_keep_at_least_one(self):
        self.save(1)
        for keep in (0, -1, True, 1.0, "1", None):
            with self.assertRaisesRegex(CheckpointError, repr(keep)):
                rotate_checkpoints(self.parent, keep)
        self.assertEqual(self.steps(), [1])

    def test_only_complete_checkpoints_count(self):
        for step in (1, 2, 3, 4, 5):
            self.save(step)
        (self.parent / "step_5" / "rank1.bin").unlink()
        (self.parent / "step_4" / "manifest.json").write_text("{}")
        os.truncate(self.parent / "step_3" / "rank0.bin", 10)
        before = self.names()
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=2), [])
        self.assertEqual(self.names(), before)
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=1), ["step_1"])
        self.assertEqual(latest_checkpoint(self.parent).name, "step_2")

    def test_foreign_folders_files_and_links_are_not_touched(self):
        for step in (1, 2, 3):
            self.save(step)
        outside = self.root / "outside"
        shutil.copytree(self.parent / "step_1", outside)
        (self.parent / "step_0").symlink_to(outside)
        (self.parent / "step_final").mkdir()
        (self.parent / "step_").mkdir()
        (self.parent / "step_final" / "rank0.bin").write_text("not ours: there is no manifest")
        (self.parent / "notes.txt").write_text("mine")
        (self.parent / "step_1" / "notes.txt").write_text("mine too")
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=1), ["step_1", "step_2"])
        self.assertEqual(self.names(), ["notes.txt", "step_", "step_0", "step_1", "step_3", "step_final"])
        self.assertEqual([path.name for path in (self.parent / "step_1").iterdir()], ["notes.txt"])
        self.assertEqual(len(list(outside.iterdir())), 3)
        self.assertEqual(len(list((self.parent / "step_final").iterdir())), 1)

    def test_after_a_roll_back_the_one_just_saved_stays(self):
        for step in (10, 20, 30, 15):
            self.save(step)
        deleted = rotate_checkpoints(self.parent, keep_last=1, just_saved=self.parent / "step_15")
        self.assertEqual(deleted, ["step_10", "step_20"])
        self.assertEqual(self.steps(), [15, 30])

    def test_what_cannot_be_deleted_is_reported_and_the_others_are_deleted(self):
        class Stubborn(CrashingStorage):
            def perform(self, operation, path, action):
                if operation == "rename" and path.parent.name == "step_2":
                    raise OSError(errno.EACCES, "Permission denied", str(path))
                return super().perform(operation, path, action)

        for step in (1, 2, 3, 4):
            self.save(step)
        with self.assertRaisesRegex(CheckpointError, "(?=.*step_2)(?=.*denied)(?=.*step_1)(?=.*step_3)"):
            rotate_checkpoints(self.parent, keep_last=1, storage=Stubborn())
        self.assertEqual(self.steps(), [2, 4])
        self.assertEqual(rotate_checkpoints(self.parent, keep_last=1), ["step_2"])

    def test_a_crash_leaves_no_half_checkpoint_and_the_next_rotation_goes_on(self):
        self.fill()
        rehearsal = CrashingStorage()
        rotate_checkpoints(self.parent, keep_last=1, storage=rehearsal)
        for at, operation in enumerate(rehearsal.log):
            for when in ("before", "after"):
                with self.subTest(operation=operation, when=when):
                    self.fill()
                    with self.assertRaises(Crash):
                        rotate_checkpoints(self.parent, keep_last=1, storage=CrashingStorage(at, when))
                    for step, folder in complete_checkpoints(self.parent):
                        self.assertTrue(same(load_sharded(folder, 2)[1], small_states(2, step)))
                    self.assertEqual(latest_checkpoint(self.parent).name, "step_3")
                    rotate_checkpoints(self.parent, keep_last=1)
                    left = {path.name for path in self.parent.iterdir() if list(path.iterdir())}
                    self.assertEqual(left, {"step_3"}, "only an empty folder may stay")

    def fill(self):
        shutil.rmtree(self.parent)
        self.parent.mkdir()
        for step in (1, 2, 3):
            self.save(step)

    def test_the_order_of_operations(self):
        for step in (1, 2):
            self.save(step)
        disk = CrashingStorage()
        rotate_checkpoints(self.parent, keep_last=1, storage=disk)
        unpublish = ["rename manifest.deleted", "fsync folder step_1"]  # durable before a file is gone
        deletions = ["delete rank0.bin", "delete rank1.bin", "delete manifest.deleted", "rmdir step_1"]
        self.assertEqual(disk.log, [*unpublish, *deletions, f"fsync folder {self.parent.name}"])

    def test_saving_into_a_half_deleted_folder(self):
        self.fill()
        with self.assertRaises(Crash):
            rotate_checkpoints(self.parent, keep_last=1, storage=CrashingStorage(2, "after"))
        self.save(1)
        self.assertEqual(len(list((self.parent / "step_1").iterdir())), 3)
        self.assertEqual(self.steps(), [1, 2, 3])

    def test_no_folder_and_no_checkpoint(self):
        self.assertIsNone(latest_checkpoint(self.parent))
        self.assertEqual(rotate_checkpoints(self.parent), [])
        with self.assertRaisesRegex(CheckpointError, "nowhere: No such file"):
            rotate_checkpoints(self.parent / "nowhere")


if __name__ == "__main__":
    unittest.main()
