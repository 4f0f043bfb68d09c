import contextlib
import importlib.util
import io
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import gpt2_bench
import gpu_timeline
import torch

LESSON = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("main_77_gpu", LESSON / "code" / "main.py")
main_77 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_77)

TIMELINE = {"computing": [(0.0, 4.0), (5.0, 8.0)], "communicating": [(3.0, 6.0), (9.0, 10.0)]}


class TestTimeline(unittest.TestCase):
    def test_spans_that_touch_are_one(self):
        spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (1.5, 1.6)]
        self.assertEqual(gpu_timeline.merged(spans), [(0.0, 4.0), (5.0, 6.0)])
        self.assertEqual(gpu_timeline.merged([]), [])

    def test_shares(self):
        whole, sent, hidden = gpu_timeline.shares(TIMELINE)
        self.assertEqual((whole, sent), (10.0, 0.4))
        self.assertAlmostEqual(hidden, 0.5)  # of 3 to 6 and 9 to 10, one ms before 4 and one after 5
        self.assertEqual(gpu_timeline.shares({"computing": [(0.0, 2.0)], "communicating": []}), (2.0, 0.0, 0.0))

    def test_report_prints_and_draws(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
            gpu_timeline.report({"ours": TIMELINE, "theirs": TIMELINE}, Path(folder, "a.png"), "two steps")
            gpu_timeline.report({"ours": TIMELINE}, Path(folder, "b.png"), "one step")
            sizes = [Path(folder, name).stat().st_size for name in ("a.png", "b.png")]
        self.assertTrue(all(size > 1000 for size in sizes), sizes)
        self.assertRegex(out.getvalue(), r"(?m)^ours +10\.0+ +40% +50%$")

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU to be watched")
    def test_a_gpu_computes(self):
        x, comm = torch.randn(512, 512, device="cuda"), mock.Mock()
        timeline = gpu_timeline.record(lambda: x @ x, comm)
        self.assertGreaterEqual(len(timeline["computing"]), 1)
        self.assertEqual(timeline["communicating"], [])


class TestGpt2Bench(unittest.TestCase):
    def test_it_runs_on_cpu_ranks_too(self):
        """No number means anything there: it shows that all rows are built, take steps and lose alike."""
        command = ["main.py", "--bench", "--world-size", "2", "--size", "tiny", "--batch", "1"]
        few = mock.patch.multiple(gpt2_bench, PAIRS=6, REPEATS=1)
        with few, mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(io.StringIO()) as out:
            code = main_77.main()
        self.assertEqual(code, 0, out.getvalue())
        self.assertIn("all rows begin with the same loss, within 0.4%: 0.00%", out.getvalue())
        self.assertRegex(out.getvalue(), r"(?m)^ours +torch DDP, default +\d")
        self.assertIn("-- 2 of 2 claims hold", out.getvalue())

    def test_losses_that_differ_are_noticed(self):
        for losses, failed in (([4.0, 3.0], 0), ([4.1, 3.0], 1), ([4.0, 3.1], 1)):
            claims = gpt2_bench.demo.Claims()
            with contextlib.redirect_stdout(io.StringIO()) as out:
                gpt2_bench.check_losses(claims, {"ours": [4.0, 3.0], "theirs": losses})
            self.assertEqual(out.getvalue().count("FAIL"), failed)

    def test_more_memory_is_noticed(self):
        """(asked for, set aside): the little that the allocator rounds up is forgiven, what was asked for is not."""
        for own, failed in (
            ((100_000, 100_400), 0),
            ((100_020, 100_400), 1),
            ((99_000, 100_600), 1),
            ((101_000, 101_000), 2),
        ):
            claims, peaks = (
                gpt2_bench.demo.Claims(),
                {"a": gpt2_bench.Peak(*own), "b": gpt2_bench.Peak(100_000, 100_000)},
            )
            with contextlib.redirect_stdout(io.StringIO()) as out:
                gpt2_bench.check_peak(claims, "a", "b", peaks)
            self.assertEqual(out.getvalue().count("FAIL"), failed, own)

    @unittest.skipUnless(torch.cuda.is_available(), "there is no GPU whose memory could be asked")
    def test_a_peak_is_read_off_a_gpu(self):
        torch.cuda.reset_peak_memory_stats()
        before = gpt2_bench.peak_of_gpu()
        torch.empty(10_000_001, dtype=torch.uint8, device="cuda")
        asked, given = (after - was for after, was in zip(gpt2_bench.peak_of_gpu(), before, strict=True))
        self.assertEqual(asked, 10_000_001)
        self.assertGreaterEqual(given, asked)


if __name__ == "__main__":
    unittest.main()
