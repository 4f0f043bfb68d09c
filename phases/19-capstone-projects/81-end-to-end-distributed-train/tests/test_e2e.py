import contextlib
import copy
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import damage
import e2e_bench
import e2e_options
import shard
import torch
import train
import zero
from mesh_comm import MeshComm
from corpus import synthetic
from e2e_runs import outcomes, virtual
from manifest import CheckpointError
from ranks import RankError, run_ranks
from virtual import VirtualCluster

MAIN = Path(__file__).resolve().parents[1] / "code" / "main.py"
SPEC = importlib.util.spec_from_file_location("main_81", MAIN)
main_81 = importlib.util.module_from_spec(SPEC)
sys.modules["main_81"] = main_81
SPEC.loader.exec_module(main_81)
DEADLINE = 600  # seconds, for a run of the demonstration: a hang is a failure
TEXT = "".join(f"{n} green bottles hanging on the wall, and if one should fall, then {n - 1}.\r\n" for n in range(300))

IMPORTS = """
import sys

from corpus import synthetic
from ranks import run_ranks
from train import Job, train


def worker(rank, world_size, job):
    train(rank, world_size, job)
    return [name for name in ("torch._dynamo", "torch._inductor", "matplotlib") if name in sys.modules]


if __name__ == "__main__":
    print(run_ranks(worker, 2, Job(synthetic(7), steps=2)))
"""


class TestTheLadder(unittest.TestCase):
    def test_the_chosen_dozen(self):
        with mock.patch("ladder.main", return_value=7) as climbed:
            with mock.patch.object(sys, "argv", ["main.py", "--ladder"]):
                self.assertEqual(main_81.main(), 7)
        climbed.assert_called_once_with(["--quick"])

    def test_not_under_torchrun(self):
        told = io.StringIO()
        with (
            mock.patch.object(e2e_options, "under_torchrun", lambda: True),
            mock.patch.object(sys, "argv", ["main.py", "--ladder"]),
            contextlib.redirect_stderr(told),
            self.assertRaises(SystemExit),
        ):
            main_81.main()
        self.assertIn("run it without torchrun", told.getvalue())


class TestRunE2E(unittest.TestCase):
    """On processes: the run that everyone can call."""

    @classmethod
    def setUpClass(cls):
        cls.run_of_two = main_81.run_e2e(2, 12)
        cls.addClassCleanup(shutil.rmtree, cls.run_of_two["workdir"])

    def masters(self) -> list[torch.Tensor]:
        return [self.run_of_two["results"][rank]["master_at_ckpt"].clone() for rank in range(2)]

    def verify(self, masters, folder=None, world_size: int = 2) -> bool:
        return main_81.verify_resume(folder or self.run_of_two["ckpt_dir"], world_size, masters)

    @contextlib.contextmanager
    def copy(self):
        with tempfile.TemporaryDirectory() as parent:
            yield Path(shutil.copytree(self.run_of_two["ckpt_dir"], Path(parent) / "step_10"))

    def test_what_it_returns(self):
        self.assertEqual(set(self.run_of_two), {"results", "ckpt_dir", "workdir"})
        self.assertEqual(sorted(self.run_of_two["results"]), [0, 1])
        for result in self.run_of_two["results"].values():
            self.assertEqual(set(result), {"losses", "norm", "shard_bytes", "master_at_ckpt"})
            self.assertEqual([type(loss) for loss in result["losses"]], [float] * 12)
            self.assertIs(type(result["norm"]), float)
            self.assertEqual(result["shard_bytes"], 12 * 30_080 // 2)
            self.assertEqual((result["master_at_ckpt"].dtype, len(result["master_at_ckpt"])), (torch.float32, 15_040))
            self.assertEqual(result["losses"], self.run_of_two["results"][0]["losses"])
            self.assertEqual(result["norm"], self.run_of_two["results"][0]["norm"])
        self.assertLess(result["losses"][-1], result["losses"][0] - 0.2)

    def test_the_checkpoint_is_complete_and_whole(self):
        self.assertEqual(self.run_of_two["ckpt_dir"].parent, self.run_of_two["workdir"])
        manifest, states = main_81.load_sharded(self.run_of_two["ckpt_dir"], 2)
        self.assertEqual((manifest.step, manifest.world_size, len(states)), (main_81.CHECKPOINT_STEP, 2, 2))

    def test_the_same_as_in_the_virtual_cluster(self):
        """A ring of two sums a + b as gloo does: the transport leaves no trace."""
        job = train.Job(synthetic(7), steps=3, exam_every=9)
        losses = [row["loss"] for row in virtual(2, job)[0]["rows"]]
        self.assertEqual(losses, self.run_of_two["results"][0]["losses"][:3])

    def test_verify_resume(self):
        self.assertIs(self.verify(self.masters()), True)
        self.assertIs(self.verify(dict(enumerate(self.masters()))), True)

    def test_verify_resume_sees_one_bit(self):
        for rank in range(2):
            for bit in (0, 31):  # the last of the fraction; the sign
                masters = self.masters()
                masters[rank].view(torch.int32)[123] ^= -(2**31) if bit == 31 else 1
                self.assertIs(self.verify(masters), False, (rank, bit))

    def test_verify_resume_sees_another_length_dtype_or_order(self):
        masters = self.masters()
        self.assertIs(self.verify([masters[0], masters[1][:-1]]), False)
        self.assertIs(self.verify([masters[0], torch.cat([masters[1], torch.zeros(1)])]), False)
        self.assertIs(self.verify([masters[0], masters[1].double()]), False)
        self.assertIs(self.verify(masters[::-1]), False)
        self.assertIs(self.verify({1: masters[1], 0: masters[0]}), True)

    def test_verify_resume_needs_a_master_of_each_rank(self):
        masters = self.masters()
        for wrong in (masters[:1], [], [masters[0], None], {0: masters[0]}, [*masters, masters[0]]):
            with self.assertRaisesRegex(ValueError, r"\b2\b"):
                self.verify(wrong)

    def test_verify_resume_refuses_another_number_of_ranks(self):
        for n in (1, 3):
            with self.assertRaisesRegex(CheckpointError, "world_size mismatch"):
                self.verify([torch.zeros(1)] * n, world_size=n)

    def test_every_way_of_being_wrong_is_one_kind_of_error(self):
        """Lesson 80's ways, on this lesson's checkpoint, through both of this lesson's doors."""

        def shard_1(**changes):
            return damage.edit_manifest(lambda manifest: manifest["shards"][1].update(changes))

        wrong = [(what, ruin) for what, ruin, _ in damage.WRONG_CHECKPOINTS]
        wrong += [
            ("a path outside", shard_1(path="../outside")),
            ("an absolute path", shard_1(path=str(self.run_of_two["ckpt_dir"] / "rank1.bin"))),
            ("a rank twice", shard_1(rank=0)),
            ("rank -1", shard_1(rank=-1)),
            ("rank 5", shard_1(rank=5)),
            ("no shard", lambda folder: [path.unlink() for path in folder.glob("rank*")]),
            ("nothing", shutil.rmtree),
        ]
        self.assertGreaterEqual(len(wrong), 20)
        for what, ruin in wrong:
            with self.subTest(what), self.copy() as folder:
                ruin(folder)
                with self.assertRaises(CheckpointError):
                    main_81.load_sharded(folder, 2)
                with self.assertRaises(CheckpointError):
                    self.verify(self.masters(), folder)
        self.assertEqual(damage.CODE_RAN, [])

    def test_steps_that_are_too_few_or_none(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            for steps in (9, 5, 0, -1, True, 12.0, "12", None):
                with self.assertRaisesRegex(ValueError, "steps must be a whole number of at least 10"):
                    main_81.run_e2e(2, steps)
            for world_size in (0, True, "2"):
                with self.assertRaisesRegex(ValueError, "world_size must be a whole number of at least 1"):
                    main_81.run_e2e(world_size, 12)
            self.assertEqual(list(Path(folder).iterdir()), [], "nothing is left behind")

    def test_a_run_that_fails_leaves_no_folder(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            broken = replace(train.Job(synthetic(7)), inject_nan=(11, 1))
            with mock.patch.object(main_81, "Job", lambda corpus, **given: replace(broken, **given)):
                with self.assertRaisesRegex(RankError, r"(?=.*\b11\b)(?=.*\b1\b)(?=.*gradient)"):
                    main_81.run_e2e(2, 12)
            self.assertEqual(list(Path(folder).iterdir()), [])

    def test_a_folder_of_the_callers_stays(self):
        with tempfile.TemporaryDirectory() as folder:
            found = main_81.run_e2e(1, 10, folder)
            self.assertEqual(found["workdir"], Path(folder))
            self.assertIs(
                main_81.verify_resume(Path(folder) / "step_10", 1, [found["results"][0]["master_at_ckpt"]]), True
            )


def command(*arguments, torchrun: int = 0) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    return [sys.executable, *launcher, str(MAIN), *map(str, arguments)]


def run(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command to its end, in a folder that is not the repository's."""
    return subprocess.run(
        words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


class TestTheCommand(unittest.TestCase):
    """`python code/main.py`, as a user would call it. Each run happens once."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        (cls.folder / "bottles.txt").write_bytes(TEXT.encode())
        (cls.folder / "other.txt").write_text(TEXT.replace("green", "brown"))
        (cls.folder / "latin.txt").write_bytes("Käse und Öl ".encode("latin-1") * 50)
        text = command("--text", "bottles.txt", "--world-size", 2, "--steps", 150, "--out", "text")
        runs = {  # two at a time, in this order; each writes to a folder of its own
            "default": (command(), {}),
            "spawn": (command("--world-size", 2, "--out", "spawn"), {"RANKS_START_METHOD": "spawn"}),
            "torchrun": (command("--out", "torchrun", torchrun=2), {}),
            "text": (text, {}),
            "1": (command("--world-size", 1, "--out", "one"), {}),
            "2": (command("--world-size", 2, "--out", "two"), {}),
            "3": (command("--world-size", 3, "--seed", 11, "--out", "three"), {}),
            "nan": (command("--world-size", 2, "--inject-nan", 12, "--out", "nan"), {}),
            "few steps": (command("--steps", 5, "--out", "few"), {}),
            "nan too late": (command("--inject-nan", 21, "--out", "late"), {}),
            "latin": (command("--text", "latin.txt", "--out", "latin"), {}),
        }
        after = {
            "again": (command("--world-size", 2, "--out", "two"), {}),
            "resume": (command("--resume", "outputs/81/checkpoints/step_10"), {}),
            "resume text": ([*text, "--resume", "text/checkpoints/step_75"], {}),
            "resume other text": (
                command(
                    "--text", "other.txt", "--world-size", 2, "--out", "text", "--resume", "text/checkpoints/step_75"
                ),
                {},
            ),
            "resume nothing": (command("--resume", ".", "--world-size", 2), {}),
            "resume by two": (command("--resume", "outputs/81/checkpoints/step_10", "--world-size", 2), {}),
            "resume all rows by two": (
                command("--resume", "outputs/81/checkpoints/step_10", "--world-size", 2, "--rows", 16, "--out", "by2"),
                {},
            ),
            "resume after the drill": (
                command("--resume", "outputs/81/checkpoints/step_10", "--inject-nan", 5),
                {},
            ),
            "resume when over": (command("--resume", "outputs/81/checkpoints/step_20"), {}),
        }
        with ThreadPoolExecutor(2) as pool:
            cls.done = cls.run_all(pool, runs)
            cls.tables = {path: path.read_text() for path in cls.folder.glob("**/metrics.jsonl")}
            cls.done |= cls.run_all(pool, after)

    @classmethod
    def run_all(cls, pool: ThreadPoolExecutor, runs: dict) -> dict[str, subprocess.CompletedProcess]:
        started = {name: pool.submit(run, words, cls.folder, **env) for name, (words, env) in runs.items()}
        return {name: future.result() for name, future in started.items()}

    def good(self, name: str) -> str:
        """The output of a run that must have succeeded."""
        done = self.done[name]
        self.assertEqual(done.returncode, 0, f"{name}:\n{done.stdout}\n{done.stderr}")
        self.assertNotIn("FAIL", done.stdout)
        return done.stdout

    def stopped(self, name: str, message: str) -> None:
        """A run must have refused, in one line, without a claim."""
        done = self.done[name]
        self.assertEqual(done.returncode, 1, f"{name}:\n{done.stdout}\n{done.stderr}")
        self.assertRegex(done.stderr, rf"(?m)^stopped: .*{message}.*$")
        self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(done.stdout, "")

    def losses(self, out: str, name: str = "exam") -> list:
        return [json.loads(line)[name] for line in self.tables[self.folder / out / "metrics.jsonl"].splitlines()]

    def test_default(self):
        out = self.good("default")
        rows = re.findall(r"(?m)^ +(\d+) +(\d\.\d{4}) +(\d\.\d{4}) +\d+\.\d{4} +\d+$", out)
        self.assertEqual([int(step) for step, _, _ in rows], list(range(1, 21)))
        exams = [float(exam) for _, _, exam in rows]
        self.assertEqual(exams, sorted(exams, reverse=True))
        self.assertIn("\nRESUME VERIFIED\n", out)
        self.assertIn("entropy floor of the language: 1.3331", out)
        self.assertRegex(out, r"(?m)^max +120,320 +120,320 +60,160\nmean +120,320 +120,320 +60,160\npredicted +120,320")
        self.assertEqual(len(re.findall(r"(?m)^ +\d  rank\d\.bin +[\d,]+  [0-9a-f]{16}\.\.\.$", out)), 4)
        for letter in "abcde":
            self.assertRegex(out, rf"(?m)^ok    \({letter}\) ")
        self.assertIn(f"trained on {main_81.WORLD_SIZE} ranks -- 7 of 7 claims hold", out)

    def test_where_files_go(self):
        self.assertEqual(
            sorted(path.name for path in (self.folder / "outputs" / "81").iterdir()), ["checkpoints", "metrics.jsonl"]
        )
        self.assertEqual([line["step"] for line in map(json.loads, self.tables_of("outputs/81"))], list(range(1, 21)))

    def tables_of(self, out: str) -> list[str]:
        return self.tables[self.folder / out / "metrics.jsonl"].splitlines()

    def test_other_numbers_of_ranks(self):
        for name, out in (("1", "one"), ("2", "two"), ("3", "three")):
            self.assertIn("\nRESUME VERIFIED\n", self.good(name))
            self.assertEqual(len(self.losses(out)), 20)

    def test_the_start_method_changes_no_bit(self):
        self.assertIn("\nRESUME VERIFIED\n", self.good("spawn"))
        for name in ("loss", "norm", "digest", "exam"):
            self.assertEqual(self.losses("spawn", name), self.losses("two", name))

    def test_under_torchrun_it_is_the_same_run_and_one_rank_prints(self):
        out = self.good("torchrun")
        self.assertEqual(out.count("RESUME VERIFIED"), 1)
        self.assertEqual(out.count("(b) all ranks hold"), 1)
        self.assertIn("new objects in torchrun's processes", out)
        for name in ("loss", "norm", "digest", "exam"):
            self.assertEqual(self.losses("torchrun", name), self.losses("two", name))

    def test_run_again_over_what_is_there(self):
        out = self.good("again")
        self.assertIn("\nRESUME VERIFIED\n", out)
        names = sorted(path.name for path in (self.folder / "two" / "checkpoints").iterdir())
        self.assertEqual(names, ["step_10", "step_20"])
        files = list((self.folder / "two" / "checkpoints" / "step_10").iterdir())
        self.assertEqual(len(files), 3, "one manifest and two shards: no file of the first run is left")
        self.assertEqual(len((self.folder / "two" / "metrics.jsonl").read_text().splitlines()), 20)

    def test_resume(self):
        out = self.good("resume")
        rows = re.findall(r"(?m)^ +(\d+) +\d\.\d{4} +\d\.\d{4} +\d+\.\d{4} +\d+$", out)
        self.assertEqual(rows, [str(step) for step in range(11, 21)])
        lines = [json.loads(line) for line in (self.folder / "outputs/81/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], list(range(1, 21)), "no step twice")
        before = [json.loads(line) for line in self.tables_of("outputs/81")]
        self.assertEqual(lines[:10], before[:10])
        self.assertNotEqual([line["seconds"] for line in lines[10:]], [line["seconds"] for line in before[10:]])
        self.assertEqual(*(outcomes({"rows": rows}) for rows in (lines, before)))

    def test_resume_by_other_ranks(self):
        self.assertIn("(e) saved by 4 ranks, continued by 2 and by 3: the same losses", self.done["default"].stdout)
        self.assertIn("(e) saved by 2 ranks, continued by 1: the same losses", self.done["2"].stdout)
        self.assertNotIn("(e)", self.done["1"].stdout + self.done["torchrun"].stdout)
        out = self.good("resume all rows by two")
        self.assertIn("trained on 2 ranks -- 4 of 4 claims hold", out)
        lines = [json.loads(line) for line in (self.folder / "by2/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], list(range(11, 21)))

    def test_text(self):
        out = self.good("text")
        self.assertIn("\nRESUME VERIFIED\n", out)
        entropy = float(re.search(r"unigram entropy of the text: (\d\.\d{4})", out)[1])
        self.assertLess(self.losses("text")[-1], entropy)
        self.assertIn("steps 76-150 are bit-identical", out)
        self.good("resume text")

    def test_what_is_refused(self):
        self.stopped("latin", r"latin\.txt: cannot be read as UTF-8 text")
        self.stopped("nan", r"(?=.*\b12\b)(?=.*\b1\b)(?=.*gradient)")
        self.stopped("resume nothing", "manifest.json: missing")
        self.stopped("resume by two", r"saved by another job: rows was 16, is 8 \(--rows 16\)$")
        self.stopped("resume other text", "saved by another job: corpus was")
        self.stopped("resume after the drill", r"(?=.*\b10\b)(?=.*\b5\b)")
        self.stopped("resume when over", "saved after 20 steps, and the run has only 20")

    def test_steps_that_make_no_sense(self):
        for name, message in [
            ("few steps", "--steps must be more than 10, the step of the checkpoint, got 5"),
            ("nan too late", "--inject-nan 21: there are only 20 steps"),
        ]:
            self.assertEqual(self.done[name].returncode, 2)
            self.assertIn(message, self.done[name].stderr)
        self.assertFalse((self.folder / "few").exists() or (self.folder / "late").exists())

    def test_a_stopped_run_leaves_the_last_checkpoint(self):
        self.assertTrue((self.folder / "nan/checkpoints/step_10/manifest.json").exists())
        self.assertFalse((self.folder / "nan/checkpoints/step_20").exists())

    def test_nothing_is_imported_that_only_comparisons_need(self):
        script = self.folder / "imports.py"
        script.write_text(IMPORTS)
        modules = map(str, MAIN.parents[3].glob("*/*/code"))
        done = run([sys.executable, str(script)], self.folder, PYTHONPATH=os.pathsep.join(modules))
        self.assertEqual(done.stdout, "[[], []]\n", done.stderr)


class TestEachClaimCanFail(unittest.TestCase):
    """Wrong versions of the code: the demonstration must notice, say which claim fails, and exit with 1."""

    def demonstrate(self, *arguments: str) -> tuple[int, str, list[str]]:
        """Run main() on virtual ranks; return (exit code, output, claims that fail)."""

        def run_virtual(worker, world_size, *args, backend):
            cluster = VirtualCluster(world_size)
            return cluster.run(lambda mesh: worker(mesh.rank, world_size, *args, comm=MeshComm(mesh)))

        torch.set_num_threads(1)
        out = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(main_81, "run_ranks", run_virtual),
            mock.patch.object(sys, "argv", ["main.py", "--world-size", "2", "--out", folder, *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            code = main_81.main()
        text = out.getvalue()
        return code, text, re.findall(r"(?m)^FAIL  (.*)$", text)

    def assert_noticed(self, claim: str):
        code, text, failed = self.demonstrate()
        self.assertEqual(code, 1)
        self.assertNotIn("RESUME VERIFIED", text)
        self.assertEqual(len(failed), 1, text)
        self.assertRegex(failed[0], claim)

    def test_the_right_version(self):
        code, text, failed = self.demonstrate()
        self.assertEqual((code, failed), (0, []))
        self.assertIn("RESUME VERIFIED", text)

    def test_what_is_not_promised_is_not_checked_and_that_is_said(self):
        for flags, checked in (
            (["--steps", "11"], False),
            (["--steps", "11", "--world-size", "1"], False),
            (["--rows", "1"], False),
            (["--rows", "4"], True),
            (["--steps", "24"], True),
        ):
            code, text, failed = self.demonstrate(*flags)
            self.assertEqual((code, failed), (0, []), text)
            self.assertEqual(
                [line[:8] for line in text.splitlines() if "(a)" in line], ["ok    (a"] * checked or ["--    (a"]
            )
        self.assertNotIn("not checked", text)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bottles.txt")
            path.write_text(TEXT)
            code, text, failed = self.demonstrate("--text", str(path), "--steps", "11")
        self.assertEqual((code, failed), (0, []), text)
        self.assertIn("(a) is not checked, for it is promised of 200 steps of 4 sequences: ", text)

    def test_more_steps_end_half_a_nat_lower(self):
        with mock.patch.object(train.Job, "learning_rate", lambda job, step: 0.0):
            code, _, failed = self.demonstrate("--steps", "24")
        self.assertEqual((code, len(failed)), (1, 1))
        self.assertRegex(failed[0], r"^\(a\) the held-out loss ends 0.5 nats or more below that of guessing: 4")

    def test_metrics_of_something_else_are_kept(self):
        """And refused before the work."""
        for resume in ([], ["--resume", "nowhere"]):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "metrics.jsonl")
                path.write_text("notes\n")
                errors = io.StringIO()
                with (
                    mock.patch.object(main_81, "run_ranks", side_effect=AssertionError("too late")),
                    mock.patch.object(sys, "argv", ["main.py", "--out", folder, *resume]),
                    contextlib.redirect_stderr(errors),
                ):
                    self.assertEqual(main_81.main(), 1)
                self.assertEqual(path.read_text(), "notes\n")
                self.assertRegex(errors.getvalue(), f"^stopped: {path}:1: not a line of metrics: .*move the file away")

    def test_a_learning_rate_of_zero(self):
        with mock.patch.object(train.Job, "learning_rate", lambda job, step: 0.0):
            self.assert_noticed(r"^\(a\) the held-out loss falls at every step.*: 4\.1\d\d -> 4\.1\d\d nats")

    def test_one_step_in_the_wrong_direction(self):
        right = train.Job.learning_rate
        with mock.patch.object(
            train.Job, "learning_rate", lambda job, step: right(job, step) * (20 if step == 18 else 1)
        ):
            self.assert_noticed(r"^\(a\) the held-out loss falls at every step")

    def test_a_rank_whose_parameters_are_its_own(self):
        def step_and_drift(optimizer):
            step(optimizer)
            if optimizer.comm.rank == 1:
                optimizer.units[0].data[5] += 1e-6

        step = zero.ZeroOptimizer.step
        with mock.patch.object(zero.ZeroOptimizer, "step", step_and_drift):
            self.assert_noticed(r"^\(b\) all ranks hold bit-identical parameters")

    def test_shards_that_keep_the_whole_alive(self):
        class Unsharded(shard.Shard):
            def __init__(self, unit, *args):
                super().__init__(unit, *args)
                self.exp_avg = torch.zeros(unit.padded)[self.start : self.end]  # a view: the rest is held, too
                self.exp_avg_sq = torch.zeros(unit.padded)[self.start : self.end]

        with mock.patch.object(shard, "Shard", Unsharded):
            self.assert_noticed(r"^\(c\) optimizer state is 12 ceil\(P/N\) bytes a rank")

    def test_noise_that_is_not_restored(self):
        with mock.patch.object(train, "set_random_state", lambda saved: None):
            self.assert_noticed(r"^\(d\) .* resumes after step 10; steps 11-20 are bit-identical")

    def test_moments_that_are_not_restored(self):
        def forgetful(optimizer, saved):
            load(optimizer, saved)
            optimizer.shards[0].exp_avg.zero_()

        load = zero.ZeroOptimizer.load_state_dict
        with mock.patch.object(zero.ZeroOptimizer, "load_state_dict", forgetful):
            self.assert_noticed(r"^\(d\) .* resumes after step 10; steps 11-20 are bit-identical")

    def test_data_that_begin_again_after_a_resume(self):
        def load_and_forget(trainer, folder):
            position = load(trainer, folder)
            trainer.drawn = 0
            return position

        load = train.Trainer.load
        with mock.patch.object(train.Trainer, "load", load_and_forget):
            self.assert_noticed(r"^\(d\) .* resumes after step 10; steps 11-20 are bit-identical")

    def test_a_checkpoint_that_holds_something_else(self):
        def save(state, *args):
            return right({**state, "optimizer": older(state["optimizer"])}, *args)

        def older(optimizer):
            state = {
                unit: {**tensors, "master": tensors["master"] * 0.999} for unit, tensors in optimizer["state"].items()
            }
            return {**optimizer, "state": state}

        right = train.save_shard
        with mock.patch.object(train, "save_shard", save):
            code, _, failed = self.demonstrate()
        self.assertEqual(code, 1)
        self.assertRegex(" ".join(failed), r"the checkpoint holds each rank's masters.*\(d\)")

    def test_ranks_that_count_alike_however_few_rows_they_have(self):
        """16 rows over 3 ranks are 6, 5 and 5."""

        def unweighted(model, sequences, microbatches, weight, *args):
            return backward(model, sequences, microbatches, None, *args)

        backward = train.backward
        with mock.patch.object(train, "backward", unweighted):
            code, _, failed = self.demonstrate("--world-size", "4")
        self.assertEqual((code, len(failed)), (1, 1))
        self.assertRegex(failed[0], r"^\(e\) saved by 4 ranks, continued by 2 and by 3: the same losses")

    def test_one_message_too_many(self):
        def guard_and_more(comm, *args):
            comm.all_reduce(torch.zeros(1))
            return guard(comm, *args)

        guard = train.guard
        with mock.patch.object(train, "guard", guard_and_more):
            self.assert_noticed("^each rank's steps cost the predicted collectives and bytes")


class TestBench(unittest.TestCase):
    """The comparison compares the same training, and says so if it does not."""

    @classmethod
    def setUpClass(cls):
        tiny = train.Job(synthetic(7, 2_000), dropout=0.0, model={"dim": 8, "heads": 2, "blocks": 1})
        cls.jobs = {"a tiny GPT": (tiny, 6)}
        with mock.patch.object(e2e_bench, "JOBS", cls.jobs):
            arenas = e2e_bench.arenas_for(SimpleNamespace(world_size=2, backend="gloo"))
        cls.shared = arenas["a tiny GPT"] is not None
        cls.found = run_ranks(e2e_bench.measure, 2, cls.jobs, arenas)

    def bench(self, found: list) -> tuple[int, str]:
        out = io.StringIO()
        with (
            mock.patch.object(e2e_bench, "JOBS", self.jobs),
            mock.patch.object(e2e_bench, "run_ranks", return_value=found),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            return e2e_bench.bench(SimpleNamespace(world_size=2, backend="gloo")), out.getvalue()

    def test_rows_and_verdict(self):
        code, text = self.bench(self.found)
        self.assertEqual(code, 0, text)
        row = r"(?m)^(?:ours|DDP \+).* [\d,]+ +\d+\.\d+ +\d+\.\d+  \d+\.\d+ to \d+\.\d+$"
        self.assertEqual(len(re.findall(row, text)), 6 + self.shared)
        self.assertIn("128 tokens a step, 2 ranks, gloo", text)

    def test_it_fails_when_a_row_trains_another_model(self):
        for wrong in (2e-4, float("nan")):
            found = copy.deepcopy(self.found)
            found[0]["a tiny GPT"]["losses"]["DDP + Adam, default"][3] += wrong
            code, text = self.bench(found)
            self.assertEqual(code, 1)
            self.assertIn("FAIL  a tiny GPT: in all rows the losses of 5 steps are the same", text)

    def test_a_target_is_missed_only_below_the_whole_interval(self):
        for low, high, code, words in ((1.4, 1.6, 0, "met"), (1.2, 1.35, 0, "open"), (1.1, 1.2, 1, "missed")):
            found = copy.deepcopy(self.found)
            if not self.shared:
                self.skipTest("ranks have no shared memory here")
            rows = found[0]["a tiny GPT"]["rows"]
            place = [row.name for row in rows].index(e2e_bench.DEFAULT)
            rows[place] = replace(rows[place], ratio=(low + high) / 2, low=low, high=high)
            with mock.patch.object(e2e_bench, "TARGETS", {"a tiny GPT": {e2e_bench.DEFAULT: 1.3}}):
                self.assertEqual(self.bench(found)[0], code)
                self.assertRegex(self.bench(found)[1], rf"target: row 'ours, shared .* at least 1.3 .*, {words}")

    def test_the_targets_are_for_ten_million_parameters(self):
        job, pairs = e2e_bench.JOBS[e2e_bench.TEN_MILLION]
        size = sum(param.numel() for param in job.build().parameters())
        self.assertTrue(9.9e6 < size < 10.2e6 and pairs >= 9, (size, pairs))
        self.assertEqual(e2e_bench.TARGETS, {e2e_bench.TEN_MILLION: {e2e_bench.DEFAULT: 1.3, e2e_bench.TUNED: 1.1}})


class TestFlags(unittest.TestCase):
    """A flag that would be left out is an error, which says what it needs."""

    def refusal(self, *flags) -> str:
        out = io.StringIO()
        with mock.patch.object(sys, "argv", ["main.py", *flags]), mock.patch("sys.stderr", out):
            with self.assertRaises(SystemExit) as ended:
                e2e_options.parse_arguments("A test.")
        self.assertEqual(ended.exception.code, 2)
        return out.getvalue()

    def test_what_does_not_go_together(self):
        for flags, message in {
            ("--operate", "--resume", "x"): "an operated run finds its checkpoints itself: --resume auto",
            ("--inject", "nan@3", "--inject-nan", "4"): "the drill of an operated run is --inject nan@4",
            ("--real", "--inject-nan", "4"): "the drill of an operated run is --inject nan@4",
            ("--bench", "--inject", "nan@3"): "--operate, --inject and --real are not for --bench or --ladder",
            ("--ladder", "--operate"): "--operate, --inject and --real are not for --bench or --ladder",
            ("--resume", "auto"): "--resume auto needs --operate; the core run needs the folder of a checkpoint",
            ("--every", "3"): "--every and --minutes need --operate",
            ("--minutes", "3"): "--every and --minutes need --operate",
            ("--fresh",): "--fresh needs --operate",
            ("--operate", "--fresh", "--resume", "auto"): "--resume auto goes on with an earlier run, --fresh deletes",
            ("--bench", "--fresh"): "--fresh needs --operate",
            ("--out", ""): "argument --out: expected a path, got ''",
            ("--resume", ""): "argument --resume: expected a path, got ''",
            ("--text", ""): "argument --text: expected a path, got ''",
            ("--real", "--text", "x"): "--real has a text of its own",
            ("--size", "tiny"): "--size needs --bench",
            ("--ladder", "--text", "x", "--inject-nan", "3"): "--text, --inject-nan: not used by --ladder, which has",
            ("--ladder", "--world-size", "4", "--out", "x", "--seed", "7"): "--world-size, --out, --seed: not used by",
            ("--ladder", "--backend", "gloo", "--steps", "20"): "--backend, --steps: not used by --ladder",
            ("--bench", "--steps", "50", "--rows", "3"): "--steps, --rows: not used by --bench, which has jobs of its",
            ("--bench", "--seed", "7", "--out", "x"): "--out, --seed: not used by --bench,",
            ("--bench", "--batch", "16"): "--batch: not used by --bench,",
            ("--bench", "--size", "tiny", "--steps", "5", "--seed", "7"): "--seed, --steps: not used by --bench --size",
            ("--batch", "16"): "--batch: not used by a run without --bench --size",
            ("--operate", "--bucket-mb", "7"): "--bucket-mb: not used by a run without --bench --size",
            ("--real", "--batch", "7"): "--batch: not used by a run without --bench --size",
            ("--bench", "--ladder"): "--ladder and --bench are two commands",
        }.items():
            self.assertIn(f"error: {message}", self.refusal(*flags))

    def test_every_flag_is_of_some_use(self):
        """A flag that is new must be said to be used, or be refused by the programs with jobs of their own."""
        for flags in (
            "--bench --size tiny --batch 2 --bucket-mb 3 --compile eager --whole --world-size 3 --backend nccl",
            "--bench --world-size 3 --backend nccl",
            "--ladder",
            "--world-size 3 --backend nccl --out x --seed 3 --steps 30 --rows 9 --text x --resume x --inject-nan 12",
            "--operate --every 3 --minutes 2 --inject nan@4 --resume auto --rows 9 --text x --seed 3 --out x",
            "--operate --fresh --every 3 --minutes 2 --inject nan@4",
            "--real --steps 30 --rows 9 --every 3 --minutes 2 --inject nan@4 --resume auto --seed 3 --out x",
        ):
            with mock.patch.object(sys, "argv", ["main.py", *flags.split()]):
                self.assertTrue(e2e_options.parse_arguments("A test."))

    def test_minutes(self):
        for minutes in ("0", "-1", "nan", "inf", "soon"):
            message = f"error: argument --minutes: expected a number of minutes above 0, got {minutes!r}"
            self.assertIn(message, self.refusal("--operate", "--minutes", minutes))

    def test_what_ends_it_is_one_line(self):
        for error, code, message in [
            (IsADirectoryError(21, "Is a directory", "metrics.jsonl"), 1, "stopped: metrics.jsonl: Is a directory\n"),
            (OSError("no room"), 1, "stopped: no room\n"),
            (KeyboardInterrupt(), 130, "stopped: by Ctrl-C\n"),
        ]:
            out = io.StringIO()
            with mock.patch.object(main_81, "demonstrate", side_effect=error), mock.patch("sys.stderr", out):
                with mock.patch.object(sys, "argv", ["main.py"]):
                    self.assertEqual(main_81.main(), code)
            self.assertEqual(out.getvalue(), message)

    def test_what_is_meant_where_nothing_is_said(self):
        for flags, expected in {
            (): (20, 5, 10.0),
            ("--operate", "--every", "3", "--minutes", "0.5"): (20, 3, 0.5),
            ("--real",): (300, 100, 10.0),
            ("--text", "x"): (200, 5, 10.0),
        }.items():
            with mock.patch.object(sys, "argv", ["main.py", *flags]):
                args = e2e_options.parse_arguments("A test.")
            self.assertEqual((args.steps, args.every, args.minutes), expected)


if __name__ == "__main__":
    unittest.main()
