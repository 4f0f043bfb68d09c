import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from ranks import RankError

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
PUBLIC = "bubble_fraction gpipe_schedule measure_bubble render_gantt StageMLP run_pipeline SCHEDULES make_schedule"
RUN = """
import json, runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    heavy = [name for name in ("sympy", "torch._dynamo", "torch.distributed.pipelining") if name in sys.modules]
    print(json.dumps({"code": end.code, "heavy": heavy}))
"""


class TestDemo(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            # Three ranks, fewer microbatches than stages, and not the default of anything.
            options = ["--world-size", "3", "--microbatches", "2", "--steps", "2", "--seed", "3", "--out", folder]
            script = f"import sys; sys.argv[:] = {[str(MAIN), *options]!r}\n{RUN}"
            run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
            cls.files = sorted(path.name for path in Path(folder).iterdir())
        cls.lines, cls.errors = run.stdout.splitlines(), run.stderr

    def test_every_claim_holds(self):
        self.assertEqual(json.loads(self.lines[-1])["code"], 0, self.errors)
        claims = [line for line in self.lines if line.startswith("ok  ")]
        self.assertIn(f"{len(claims)} of {len(claims)} claims hold", self.lines[-2])
        self.assertEqual(len(claims), 12)
        self.assertFalse([line for line in self.lines if line.startswith("FAIL")])

    def test_the_charts_are_saved(self):
        self.assertEqual(self.files, ["gantt.png", "measured.json", "measured.png", "memory.png", "predicted.json"])

    def test_nothing_heavy_is_imported(self):
        """Backward through a received gradient would import sympy, an optimizer of torch's its compiler."""
        self.assertEqual(json.loads(self.lines[-1])["heavy"], [])


class TestDeeper(unittest.TestCase):
    def test_every_claim_holds(self):
        run = subprocess.run([sys.executable, str(MAIN), "--deeper"], capture_output=True, text=True, timeout=240)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertEqual(len([line for line in run.stdout.splitlines() if line.startswith("ok  ")]), 7)
        self.assertIn("7 of 7 claims hold", run.stdout)


class TestFlags(unittest.TestCase):
    def test_one_that_would_do_nothing_is_refused(self):
        main = load_main()
        for flags, message in {
            "--bench --batch 4": "--batch: not used by --bench",
            "--bench --steps 5 --out x": "--out, --steps: not used by --bench",
            "--deeper --seed 7": "--seed: not used by --deeper, whose sizes are fixed",
            "--deeper --world-size 2 --backend gloo": "--world-size, --backend: not used by --deeper",
            "--deeper --microbatches 2 --batch 2 --steps 2 --out x": "--out, --microbatches, --batch, --steps: not",
            "--deeper --bench": "--deeper and --bench are two programs: choose one",
            "--bench --world-size 2 --microbatches 3": "need a multiple of 2 microbatches, got 3",
            "--world-size 9": "the model has 8 layers, too few for 9 stages",
        }.items():
            errors, argv = io.StringIO(), ["main.py", *flags.split()]
            with self.subTest(flags), mock.patch.object(sys, "argv", argv), redirect_stderr(errors):
                with self.assertRaises(SystemExit) as ended:
                    main.main()
                self.assertEqual(ended.exception.code, 2)
                self.assertIn(message, errors.getvalue())

    def test_those_that_are_used_are_not(self):
        main = load_main()
        for flags, called in {
            "--bench --world-size 2 --microbatches 4 --seed 3 --backend gloo": "bench",
            "--deeper": "deeper",
        }.items():
            argv, program = ["main.py", *flags.split()], mock.Mock(return_value=0)
            with mock.patch.object(sys, "argv", argv), mock.patch.object(main, called, program):
                self.assertEqual(main.main(), 0)
            program.assert_called_once()

    def test_a_run_that_cannot_go_on_says_why_in_a_line(self):
        main = load_main()
        for flags, error, message in [
            ("--world-size 2 --backend nccl", None, "stopped: backend 'nccl' needs a GPU for each rank: 2 ranks, "),
            ("--out /proc", PermissionError(13, "Permission denied", "gantt.png"), "stopped: gantt.png: Permission d"),
            ("", OSError("no room"), "stopped: no room"),
            ("", RankError(1, -9, "was killed by SIGKILL"), "stopped: rank 1 was killed by SIGKILL"),
        ]:
            errors, argv = io.StringIO(), ["main.py", *flags.split()]
            step = mock.patch.object(main, "draw", side_effect=error)
            few = mock.patch.multiple(main, bubble=mock.DEFAULT, optimum=mock.DEFAULT, deadlock=mock.DEFAULT)
            with mock.patch.object(sys, "argv", argv), redirect_stderr(errors), redirect_stdout(io.StringIO()):
                with self.subTest(message), mock.patch("torch.cuda.device_count", return_value=0), few, step:
                    self.assertEqual(main.main(), 1)
            self.assertTrue(errors.getvalue().startswith(message), errors.getvalue())
            self.assertEqual(errors.getvalue().count("\n"), 1)


def load_main():
    spec = importlib.util.spec_from_file_location("main_79", MAIN)
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    return main


class TestPublicNames(unittest.TestCase):
    def test_main_exposes_them(self):
        main = load_main()
        for name in [*PUBLIC.split(), "check_schedule", "Pipeline"]:
            self.assertIn(name, main.__all__)
        for name in main.__all__:
            self.assertTrue(hasattr(main, name), name)


if __name__ == "__main__":
    unittest.main()
