import contextlib
import copy
import importlib.util
import io
import itertools
import math
import random
import sys
import tempfile
import unittest
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo
import e2e_options
import loss_curve
import operate as operating
import operate_demo
import real_text
import real_work
import torch
from corpus import synthetic
from e2e_runs import virtual
from mesh_comm import MeshComm
from metrics import read_metrics
from train import Job
from virtual import VirtualCluster

LESSON = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("main_81_real", LESSON / "code" / "main.py")
main_81 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_81)


def twins(pairs: int) -> bytes:
    """A text of letters drawn at random, each written twice: where one is in it says more than any table of pairs."""
    draw = random.Random(3)
    return "".join(2 * draw.choice("abcdefgh") for _ in range(pairs)).encode()


class TestRealText(unittest.TestCase):
    def test_modules_in_the_order_of_their_names(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, source in {"ast": b"second\r\n", "abc": b"first\n", "mine": b"no", "zipfile": b"third"}.items():
                Path(folder, f"{name}.py").write_bytes(source)
            Path(folder, "json").mkdir()
            self.assertEqual(real_text.standard_library(Path(folder)), b"first\nsecond\nthird")

    def test_a_folder_without_source_is_named(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, f"^{folder}: expected the s"):
            real_text.standard_library(Path(folder))

    def test_megabytes_wherever_python_is(self):
        text = real_text.standard_library()
        self.assertGreater(len(text), 2_000_000)
        self.assertNotIn(b"\r\n", text)
        self.assertIn(b"class ArgumentParser", text)
        self.assertRegex(real_text.describe(text), rf": {len(text):,} bytes, sha256 [0-9a-f]{{64}}$")

    def test_entropies_by_hand(self):
        for text, single, pair in ((b"aaaa", 0.0, 0.0), (b"abababab", math.log(2), 0.0)):
            found = real_text.entropies(torch.tensor(list(text)), 256)
            for value, expected in zip(found, (single, pair), strict=True):
                self.assertAlmostEqual(value, expected, places=12)
        text = twins(50) + b"\xff\xfe"
        pairs, firsts = Counter(itertools.pairwise(text)), Counter(text[:-1])
        by_hand = -sum(n * math.log(n / firsts[pair[0]]) for pair, n in pairs.items()) / (len(text) - 1)
        self.assertAlmostEqual(real_text.entropies(torch.tensor(list(text)), 256)[1], by_hand, places=12)

    def test_the_yardstick_is_of_the_held_out_text(self):
        """The first nine tenths are of one letter: a table of the whole text would promise far less."""
        corpus = real_text.bytes_corpus(b"z" * 9 * 400 + twins(200))
        self.assertEqual((len(corpus.train), len(corpus.held_out), corpus.vocab), (3600, 400, 256))
        self.assertEqual(bytes(corpus.held_out.tolist()), twins(200))
        self.assertEqual(corpus.yardstick, real_text.entropies(corpus.held_out, 256)[1])
        self.assertGreater(corpus.yardstick, 1.3)


class TestExams(unittest.TestCase):
    """An operated run that looks at held-out text is the same run."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.job = Job(synthetic(7, 2_000), steps=8, batch=2, seq=8, model={"dim": 8, "heads": 2, "blocks": 1})
        cls.job = replace(cls.job, exam_every=3, dropout=0.1)
        cls.plain = virtual(2, cls.job)
        cls.logs = {name: cls.operate(Path(folder.name, str(name)), exams=name) for name in (True, False)}

    @classmethod
    def operate(cls, folder: Path, **more) -> list[dict]:
        job, operations = replace(cls.job, folder=folder), operating.Operations(**more)
        cluster = VirtualCluster(2)
        return cluster.run(lambda mesh: operating.operate(mesh.rank, 2, job, operations, MeshComm(mesh)))

    def test_exams_and_hashes_are_those_of_the_core_loop(self):
        for plain, log in zip(self.plain, self.logs[True], strict=True):
            looks = {row["step"]: (row["exam"], row["digest"]) for row in log["rows"] if "exam" in row}
            self.assertEqual(sorted(looks), [3, 6, 8])
            for row in plain["rows"]:
                if row["step"] in looks:
                    self.assertEqual(looks[row["step"]], (row["exam"], row["digest"]))

    def test_they_change_and_cost_nothing_else(self):
        kept = ("step", "loss", "norm", "learning_rate", "bytes")
        for one, other in zip(self.logs[True], self.logs[False], strict=True):
            self.assertFalse(any("exam" in row or "digest" in row for row in other["rows"]))
            self.assertEqual(*([[row[name] for name in kept] for row in log["rows"]] for log in (one, other)))

    def test_ranks_must_agree_on_them(self):
        def worker(mesh):
            with tempfile.TemporaryDirectory() as folder:
                job, operations = replace(self.job, folder=Path(folder)), operating.Operations(exams=mesh.rank == 1)
                with self.assertRaisesRegex(ValueError, "exams"):
                    operating.operate(mesh.rank, 2, job, operations, MeshComm(mesh))
                return True

        self.assertEqual(VirtualCluster(2).run(worker), [True, True])


class TestRealWork(unittest.TestCase):
    """`--real`, with a smaller text and a smaller model."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.out, cls.kept = Path(folder.name), {}
        sizes = {"rows": 16, "seq": 16, "model": {"dim": 32, "heads": 2, "blocks": 1}, "dropout": 0.0}
        cls.job = Job(real_text.bytes_corpus(twins(8_000)), steps=60, exam_every=6, lr=2e-2, decay=60, **sizes)
        cls.code, cls.text = cls.main(cls.job)
        cls.logs = cls.kept["logs"]

    @classmethod
    def main(cls, job: Job, *more: str) -> tuple[int, str]:
        def run_ranks(*args, **options):
            cls.kept["logs"] = whole(*args, **options)
            return cls.kept["logs"]

        whole, out = operate_demo.run_ranks, io.StringIO()
        command = ["main.py", "--real", "--world-size", "2", "--every", "25", "--out", str(cls.out), *more]
        with (
            mock.patch.object(real_work, "make_job", return_value=job),
            mock.patch.object(real_work, "REAL_STEPS", 60),
            mock.patch.object(operate_demo, "run_ranks", run_ranks),
            mock.patch.object(sys, "argv", command),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            return main_81.main(), out.getvalue()

    def claims(self, check, *args) -> list[bool]:
        claims = demo.Claims()
        with contextlib.redirect_stdout(io.StringIO()):
            check(claims, *args)
        return [holds for _, holds in claims.checked]

    def test_all_claims_hold(self):
        self.assertEqual(self.code, 0, self.text)
        self.assertIn("-- 5 of 5 claims hold", self.text)
        self.assertRegex(self.text, r"15,360 tokens read in \d+\.\d minutes of steps; median [\d,]+ tokens/s")

    def test_metrics_checkpoints_and_picture(self):
        rows = read_metrics(self.out / "real" / "metrics.jsonl")
        self.assertEqual([row["step"] for row in rows], list(range(1, 61)))
        self.assertEqual([row["step"] for row in rows if "exam" in row], list(range(6, 61, 6)))
        folders = sorted(folder.name for folder in (self.out / "real" / "checkpoints").iterdir())
        self.assertEqual(folders, ["step_50", "step_60"])
        if importlib.util.find_spec("matplotlib"):
            self.assertEqual((self.out / "loss.png").read_bytes()[:4], b"\x89PNG")

    def test_a_run_that_is_over(self):
        code, text = self.main(self.job, "--resume", "auto")
        self.assertEqual((code, "nothing is left to do" in text), (0, True))

    def test_a_loss_that_no_table_needs_is_noticed(self):
        unigram, bigram = real_work.levels(self.job).values()
        self.assertLess(bigram, unigram)
        for loss, holds in ((bigram - 0.01, [True, True]), (bigram + 0.01, [True, False]), (9.0, [False, False])):
            log = {"rows": [{"step": 60, "exam": loss}]}
            with mock.patch.object(real_work, "REAL_STEPS", 60):
                self.assertEqual(self.claims(real_work.check_losses, log, self.job), holds)
        self.assertEqual(self.claims(real_work.check_losses, log, self.job), [], "too few steps: nothing is promised")
        few = replace(self.job, steps=300, rows=15)
        self.assertEqual(self.claims(real_work.check_losses, log, few), [], "too few rows")

    def test_ranks_that_differ_are_noticed(self):
        self.assertEqual(self.claims(real_work.check_ranks, self.logs), [True])
        for name in ("loss", "norm", "exam", "digest"):
            logs = copy.deepcopy(self.logs)
            logs[1]["rows"][-1][name] = "another"
            self.assertEqual(self.claims(real_work.check_ranks, logs), [False], name)

    def test_a_checkpoint_of_other_parameters_is_noticed(self):
        job, (early, late) = replace(self.job, folder=self.out / "real" / "checkpoints"), self.logs[0]["rows"][-7::6]
        self.assertEqual(self.claims(real_work.check_checkpoint, {"rows": [late]}, job, 2), [True])
        self.assertEqual(self.claims(real_work.check_checkpoint, {"rows": [early]}, job, 2), [False])

    def test_the_job_is_one_of_ten_million_parameters(self):
        args = Namespace(steps=300, rows=None, seed=7, world_size=4)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            job = real_work.make_job(args)
        self.assertIn("standard library of Python", out.getvalue())
        self.assertTrue(10e6 < real_work.parameters(job) < 11e6)
        rates = [job.learning_rate(step) for step in (1, 30, 300)]
        for rate, expected in zip(rates, (1e-3 / 30, 1e-3, 1e-4), strict=True):
            self.assertAlmostEqual(rate, expected, places=12)
        self.assertGreaterEqual(job.seq, 128)

    def test_options_that_say_two_things(self):
        for more in (["--text", "a.txt"], ["--inject-nan", "3"], ["--resume", "folder"], ["--steps", "10"]):
            command = ["main.py", "--real", *more]
            with (
                mock.patch.object(sys, "argv", command),
                contextlib.redirect_stderr(io.StringIO()),
                self.assertRaises(SystemExit) as caught,
            ):
                e2e_options.parse_arguments("")
            self.assertEqual(caught.exception.code, 2)

    def test_without_matplotlib_there_is_no_picture(self):
        with mock.patch.dict(sys.modules, matplotlib=None), contextlib.redirect_stdout(io.StringIO()) as out:
            drawn = loss_curve.draw([], {}, self.out / "none.png", "")
        self.assertFalse(drawn or (self.out / "none.png").exists())
        self.assertIn("matplotlib is not installed", out.getvalue())


if __name__ == "__main__":
    unittest.main()
