import contextlib
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import earlier_run
from earlier_run import make_room, written
from manifest import CheckpointError
from metrics import to_line
from saving import alone_in
from team import Team

OURS = {
    "metrics.jsonl": to_line({"step": 1, "loss": 2.5}),
    "tensorboard/events.out.tfevents.1234567890.host.7.0": "events",
    "checkpoints/step_0/manifest.json": "manifest",
    "checkpoints/step_0/rank0.bin": "zero",
    "checkpoints/step_10/manifest.deleted": "half deleted",
    "checkpoints/step_10/rank1.g3.bin": "one",
    f"checkpoints/step_10/manifest.json.{'a' * 32}.tmp": "half written",
}
FOREIGN = {
    "thesis.txt": "thesis",
    "notes/rank0.bin": "notes",
    "tensorboard/notes.txt": "seen",
    "tensorboard/events.out.tfevents.mine": "mine",
    "checkpoints/rank0.bin": "too high",
    "checkpoints/step_10/thesis.txt": "too near",
    "checkpoints/step_10/rank0.bin.old": "kept",
    "checkpoints/step_10/more/rank0.bin": "too deep",
    "checkpoints/step_x/rank0.bin": "no step",
    "checkpoints/best/rank0.bin": "the best",
}


class FolderCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name, "operated")

    def put(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def found(self) -> dict[str, str]:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path.read_text() for path in files}


class TestMakeRoom(FolderCase):
    def test_nothing_is_there(self):
        for resume, fresh in ((False, False), (True, False), (False, True)):
            self.assertFalse(make_room(self.folder, resume, fresh))
        self.assertFalse(self.folder.exists())

    def test_a_run_is_kept(self):
        self.put(OURS | FOREIGN)
        message = f"^{self.folder}: an earlier run is here: --resume auto goes on with it, --fresh deletes it$"
        with self.assertRaisesRegex(ValueError, message):
            make_room(self.folder, resume=False, fresh=False)
        self.assertFalse(make_room(self.folder, resume=True, fresh=False))
        self.assertEqual(self.found(), OURS | FOREIGN)

    def test_any_file_of_a_run_is_a_run(self):
        for name, text in OURS.items():
            self.put({name: text})
            with self.assertRaisesRegex(ValueError, "an earlier run is here"):
                make_room(self.folder, resume=False, fresh=False)
            (self.folder / name).unlink()

    def test_a_run_may_begin_beside_files_of_others(self):
        self.put(FOREIGN)
        for fresh in (False, True):
            self.assertFalse(make_room(self.folder, resume=False, fresh=fresh))
        self.assertEqual(self.found(), FOREIGN)

    def test_a_run_is_deleted_and_nothing_else(self):
        self.put(OURS | FOREIGN)
        self.assertTrue(make_room(self.folder, resume=False, fresh=True))
        self.assertEqual(self.found(), FOREIGN)

    def test_empty_folders_of_a_run_go_too(self):
        self.put(OURS)
        self.put({"notes/a.txt": "a"})
        (self.folder / "empty").mkdir()
        make_room(self.folder, resume=False, fresh=True)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["empty", "notes"])

    def test_metrics_of_something_else_are_refused_and_kept(self):
        for text in ("notes\n", to_line({"step": 1}) + "notes\n"):
            files = OURS | {"metrics.jsonl": text}
            self.put(files)
            for resume, fresh in ((False, False), (True, False), (False, True)):
                with self.assertRaisesRegex(ValueError, r"metrics.jsonl:\d: not a line of metrics"):
                    make_room(self.folder, resume, fresh)
            self.assertEqual(self.found(), files)
        (self.folder / "metrics.jsonl").unlink()
        (self.folder / "metrics.jsonl").mkdir()
        with self.assertRaisesRegex(ValueError, "metrics.jsonl: expected a file of metrics, found something else"):
            make_room(self.folder, resume=False, fresh=True)

    @unittest.skipUnless(hasattr(os, "mkfifo"), "needs named pipes")
    def test_pipes_are_not_read(self):
        self.folder.mkdir()
        os.mkfifo(self.folder / "metrics.jsonl")
        with self.assertRaisesRegex(ValueError, "found something else"):
            make_room(self.folder, resume=False, fresh=False)

    @unittest.skipUnless(os.name == "posix", "links need rights elsewhere")
    def test_what_links_point_to_stays(self):
        self.put({"elsewhere/rank0.bin": "zero"})
        (self.folder / "checkpoints" / "step_3").mkdir(parents=True)
        (self.folder / "checkpoints" / "step_3" / "rank0.bin").symlink_to(self.folder / "elsewhere" / "rank0.bin")
        (self.folder / "checkpoints" / "step_4").symlink_to(self.folder / "elsewhere")
        self.assertEqual(written(self.folder), [])

    @unittest.skipUnless(os.name == "posix", "elsewhere folders have no locks")
    def test_nothing_is_deleted_under_a_run_that_is_going_on(self):
        self.put(OURS)
        with alone_in(self.folder / "checkpoints", Team.of_one_process(1)):
            with mock.patch.object(earlier_run, "alone_in", lambda *args: alone_in(*args, seconds=0.1)):
                with self.assertRaisesRegex(CheckpointError, "checkpoints: another run is going on here"):
                    make_room(self.folder, resume=False, fresh=True)
        self.assertEqual(self.found(), OURS)

    def test_what_cannot_be_deleted_is_named(self):
        self.put(OURS)
        error = PermissionError(1, "Not permitted", str(self.folder / "metrics.jsonl"))
        with mock.patch.object(Path, "unlink", side_effect=error):
            with self.assertRaises(CheckpointError) as caught:
                make_room(self.folder, resume=False, fresh=True)
        message = f"{self.folder / 'metrics.jsonl'}: an earlier run cannot be deleted: Not permitted"
        self.assertEqual(str(caught.exception), message)

    def test_a_file_in_the_place_of_the_folder(self):
        self.folder.write_text("thesis")
        with contextlib.suppress(OSError):
            make_room(self.folder, resume=False, fresh=True)
        self.assertEqual(self.folder.read_text(), "thesis")


if __name__ == "__main__":
    unittest.main()
