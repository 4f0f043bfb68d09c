import json
import os
import re
import signal
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from real_processes import MAIN, TORCHRUN, finish, process_of_rank, processes_in, run, start
from saving import alone_in
from team import Team

TWO = ["--world-size", 2]
TORCHRUN_TWO = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
KEPT = ("step", "loss", "norm", "digest")


class TestOperatedCommand(unittest.TestCase):
    """`python code/main.py --inject ...` and torchrun, as a user would call them. Each run happens once.

    All runs are of one job, so all that finish must have the numbers of the one to which nothing happens.
    """

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        main = [sys.executable, MAIN, *TWO]
        restarts = [*TORCHRUN_TWO, "--max-restarts=1", MAIN]
        first = {  # each in a folder of its own
            "whole": [*main, "--operate"],
            "spike": [*main, "--inject", "spike@12"],
            "kill": [*main, "--inject", "kill@12:1"],
            "kill under torchrun": [*restarts, "--inject", "kill@12:1"],
            "sigterm": [*TORCHRUN_TWO, MAIN, "--inject", "sigterm@12:1"],
            "both": [*main, "--inject", "nan@7:0", "--inject", "sigterm@9:0"],
            "at the end": [*main, "--inject", "sigterm@20"],
            "bad drill": [*main, "--inject", "fire@3"],
            "too late": [*main, "--inject", "nan@21"],
            "bad resume": [*main, "--operate", "--resume", "some/folder"],
            "too many rows": [*main, "--rows", "3000"],
            "too many bytes": [*main, "--real", "--rows", "100000"],
            "bad minutes": [*main, "--operate", "--minutes", "0"],
        }
        second = {
            "kill": [*main, "--operate", "--resume", "auto"],
            "sigterm": [*TORCHRUN_TWO, MAIN, "--operate", "--resume", "auto"],
            "both": [*main, "--operate", "--resume", "auto"],
            "spike": [*main, "--operate", "--resume", "auto"],
            "at the end": [*main[:-1], 1, "--rows", 8, "--steps", 22, "--operate", "--resume", "auto"],
        }
        refused = {  # in the folder of "whole", whose run is to be kept
            "again": ["--operate"],
            "a drill": ["--inject", "spike@12"],
            "rows": ["--operate", "--fresh", "--rows", "3000"],
            "drill": ["--operate", "--fresh", "--inject", "nan@21"],
            "both flags": ["--operate", "--fresh", "--resume", "auto"],
            "interface": ["--operate", "--fresh"],
            "GPUs": ["--operate", "--fresh", "--backend", "nccl", "--world-size", 65],
        }
        with ThreadPoolExecutor(2) as pool:
            cls.first = cls.run_all(pool, first)
            cls.rows = {name: cls.rows_of(name) for name in first}
            cls.second = cls.run_all(pool, second)
            cls.kept = {"before": cls.files_of("whole")}
            (cls.folder / "spike/outputs/81/operated/thesis.txt").write_text("thesis")
            third = {"spike": [*main, "--inject", "sigterm@9:0", "--fresh"]}
            cls.third = cls.run_all(pool, third)
            bad = {"interface": {"GLOO_SOCKET_IFNAME": "nosuch0"}}
            cls.refused = {
                name: run([*main, *flags], cls.folder / "whole", **bad.get(name, {})) for name, flags in refused.items()
            }
            cls.kept["after"] = cls.files_of("whole")

    @classmethod
    def run_all(cls, pool: ThreadPoolExecutor, runs: dict) -> dict[str, tuple[int, str]]:
        for name in runs:
            (cls.folder / name).mkdir(exist_ok=True)
        started = {name: pool.submit(run, words, cls.folder / name) for name, words in runs.items()}
        return {name: future.result() for name, future in started.items()}

    @classmethod
    def rows_of(cls, name: str) -> list:
        path = cls.folder / name / "outputs" / "81" / "operated" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[json.loads(line)[name] for name in KEPT] for line in lines]

    @classmethod
    def files_of(cls, name: str) -> dict[Path, tuple[int, bytes]]:
        files = [path for path in (cls.folder / name).rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    def good(self, done: tuple[int, str]) -> str:
        code, out = done
        self.assertEqual(code, 0, out)
        self.assertNotIn("FAIL", out)
        self.assertEqual(
            len(re.findall(r"(?m)^a run of \d+ steps on 2 ranks, operated -- (\d) of \1 claims hold$", out)), 1
        )
        return out

    def assert_whole(self, name: str) -> None:
        """In the end, the metrics are those of the run to which nothing happened."""
        self.assertEqual([row[0] for row in self.rows["whole"]], list(range(1, 21)))
        self.assertEqual(self.rows_of(name), self.rows["whole"])

    def test_nothing_happens(self):
        out = self.good(self.first["whole"])
        self.assertIn("those of an uninterrupted run, bit for bit: steps 1-20", out)
        names = {path.name for path in (self.folder / "whole/outputs/81/operated").iterdir()}
        self.assertEqual(names, {"checkpoints", "metrics.jsonl", "tensorboard"})
        kept = {path.name for path in (self.folder / "whole/outputs/81/operated/checkpoints").iterdir()}
        self.assertEqual(kept, {"step_10", "step_15", "step_20"})

    def test_a_spike(self):
        out = self.good(self.first["spike"])
        self.assertRegex(out, r"(?m)^ +13 +10  step 13: a loss of \d+\.\d+ is more than 2 times \d\.\d{4}$")
        self.assertRegex(
            out, r"(?m)^ok    step 13: after the rollback the parameters are those of step 10: [0-9a-f]{16}$"
        )
        self.assertIn("all ranks go back to step 10", out)
        self.assertEqual(self.rows["spike"], self.rows["whole"])
        code, out = self.second["spike"]
        self.assertEqual(code, 0, out)
        self.assertIn("the run had done its 20 steps before: nothing is left to do", out)

    def test_a_killed_rank_and_a_resume_by_hand(self):
        code, out = self.first["kill"]
        self.assertEqual(code, 1, out)
        self.assertRegex(out, r"(?m)^stopped: rank 1 was killed by SIGKILL")
        self.assertEqual(self.rows["kill"], self.rows["whole"][:11])
        self.assertRegex(self.good(self.second["kill"]), "those of an uninterrupted run, bit for bit: steps (6|11)-20")
        self.assert_whole("kill")

    def test_a_killed_rank_is_restarted_by_torchrun(self):
        out = self.good(self.first["kill under torchrun"])
        self.assertIn("exitcode: -9", out.replace("(exitcode", "exitcode"))
        self.assertRegex(out, "those of an uninterrupted run, bit for bit: steps (6|11)-20")
        self.assert_whole("kill under torchrun")

    def test_sigterm_to_one_rank(self):
        out = self.good(self.first["sigterm"])
        self.assertIn("asked to stop: saved after step 12", out)
        self.assertEqual(self.rows["sigterm"], self.rows["whole"][:12])
        self.assertIn("bit for bit: steps 13-20", self.good(self.second["sigterm"]))
        self.assert_whole("sigterm")

    def test_one_thing_after_another(self):
        out = self.good(self.first["both"])
        self.assertIn("step 7: after the rollback the parameters are those of step 5", out)
        self.assertIn("asked to stop: saved after step 9", out)
        self.assertIn("bit for bit: steps 10-20", self.good(self.second["both"]))
        self.assert_whole("both")

    def test_a_signal_in_the_last_step_then_other_ranks(self):
        out = self.good(self.first["at the end"])
        self.assertIn("bit for bit: steps 1-20", out)
        self.assertNotIn("goes on", out)
        code, out = self.second["at the end"]
        self.assertEqual(code, 0, out)
        self.assertIn("another number of ranks took some of the steps", out)
        self.assertIn("a run of 22 steps on 1 ranks, operated -- 2 of 2 claims hold", out)

    def test_what_is_refused(self):
        for name, code, message in [
            ("bad drill", 2, "expected spike, nan, kill or sigterm, @STEP, and a :RANK if one, got 'fire@3'"),
            ("too late", 1, "stopped: nan@21: there are only 20 steps"),
            ("bad resume", 2, "an operated run finds its checkpoints itself: --resume auto"),
            ("bad minutes", 2, "argument --minutes: expected a number of minutes above 0, got '0'"),
            ("too many rows", 1, "stopped: --rows 3000: 36000 tokens hold 2249 windows of 16: a batch needs 3000"),
            ("too many bytes", 1, " windows of 128: a batch needs 100000"),
        ]:
            self.assertEqual(self.first[name][0], code, self.first[name][1])
            self.assertIn(message, self.first[name][1])
            self.assertNotIn("Traceback", self.first[name][1])

    def test_a_run_is_kept_by_whatever_is_refused(self):
        kept = "stopped: outputs/81/operated: an earlier run is here: --resume auto goes on with it, --fresh deletes it"
        for name, code, message in [
            ("again", 1, kept),
            ("a drill", 1, kept),
            ("rows", 1, "stopped: --rows 3000: 36000 tokens hold 2249 windows of 16: a batch needs 3000"),
            ("drill", 1, "stopped: nan@21: there are only 20 steps"),
            ("both flags", 2, "error: --resume auto goes on with an earlier run, --fresh deletes it"),
            ("interface", 1, "stopped: GLOO_SOCKET_IFNAME='nosuch0': no such interface"),
            ("GPUs", 1, "stopped: backend 'nccl' needs a GPU for each rank: 65 ranks"),
        ]:
            self.assertEqual(self.refused[name][0], code, self.refused[name][1])
            self.assertRegex(self.refused[name][1], f"(?m)^(main.py: )?{re.escape(message)}")
            self.assertNotRegex(self.refused[name][1], "Traceback|deleted$")
        self.assertEqual(self.kept["before"], self.kept["after"])
        self.assertGreater(len(self.kept["before"]), 8)

    def test_a_fresh_run_deletes_an_earlier_one_and_nothing_else(self):
        out = self.good(self.third["spike"])
        self.assertRegex(out, "(?m)^the earlier run in outputs/81/operated was deleted$")
        self.assertEqual(self.rows_of("spike"), self.rows["whole"][:9])
        folder = self.folder / "spike/outputs/81/operated"
        self.assertEqual((folder / "thesis.txt").read_text(), "thesis")
        self.assertEqual(
            sorted(path.name for path in (folder / "checkpoints").iterdir()), ["step_0", "step_5", "step_9"]
        )
        self.assertEqual(len(list((folder / "tensorboard").iterdir())), 1)

    @unittest.skipUnless(os.name == "posix", "elsewhere folders have no locks")
    def test_nothing_is_deleted_under_a_run_that_is_going_on(self):
        (self.folder / "busy").mkdir()
        checkpoints = self.folder / "busy" / "outputs" / "81" / "operated" / "checkpoints"
        with alone_in(checkpoints, Team.of_one_process(1)):
            (checkpoints / "step_5").mkdir()
            for flags in (), ("--resume", "auto"):
                code, out = run([sys.executable, MAIN, *TWO, "--operate", *flags], self.folder / "busy")
                self.assertEqual(code, 1, out)
                self.assertRegex(out, "(?m)^stopped: .*checkpoints: another run is going on here; end it, or use")
                self.assertNotIn("Traceback", out)
            self.assertTrue((checkpoints / "step_5").exists())

    def saved(self, out: str, folder: Path) -> int:
        """Return the step after which a run says that it saved; look whether it did, where it says."""
        where = r"asked to stop: saved after step (\d+), in (\S+step_\1); --operate --resume auto goes on\n"
        step, name = re.search(where, out).groups()
        self.assertTrue((folder / name / "manifest.json").is_file())
        return int(step)

    def begin(self, words: list, folder: Path):
        """Start a command in a new folder; return it when it has done its first step."""
        folder.mkdir()
        process = start([*words, "--operate", "--steps", 100_000], folder)
        try:
            line = ""
            while not line.startswith("step 1/"):
                line = process.stdout.readline()
                self.assertNotEqual(line, "", "it ended before its first step")
        except BaseException:
            finish(process, folder)
            raise
        return process

    @unittest.skipUnless(os.name == "posix", "signals of POSIX")
    def test_a_signal_to_the_launcher_is_passed_on(self):
        for name in ("SIGTERM", "SIGINT"):
            with self.subTest(signal=name):
                folder = self.folder / f"launcher {name}"
                process = self.begin([sys.executable, MAIN, *TWO], folder)
                process.send_signal(getattr(signal, name))
                saved = self.saved(self.good(finish(process, folder)), folder)
                self.assertEqual([row[0] for row in self.rows_of(folder.name)], list(range(1, saved + 1)))

    @unittest.skipUnless(sys.platform == "linux", "finds the processes of ranks in /proc")
    def test_ctrl_c_once_more_ends_ranks_that_do_not_answer(self):
        folder = self.folder / "twice"
        process = self.begin([sys.executable, MAIN, *TWO, "--every", 50_000], folder)
        try:
            ranks = [each for each in processes_in(folder) if each != process.pid]
            self.assertEqual(len(ranks), 2)
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
            while not all(is_pending(signal.SIGTERM, rank) for rank in ranks):
                self.assertIsNone(process.poll())
            os.killpg(process.pid, signal.SIGINT)
        finally:
            code, out = finish(process, folder)
        self.assertEqual(code, 130, out)
        self.assertTrue(out.endswith("stopped: by Ctrl-C\n"), out)

    @unittest.skipUnless(sys.platform == "linux", "finds the process of a rank in /proc")
    def test_sigterm_from_outside_to_one_rank(self):
        folder = self.folder / "outside"
        process = self.begin([*TORCHRUN_TWO, MAIN], folder)
        try:
            os.kill(process_of_rank(1, folder), signal.SIGTERM)
        finally:
            done = finish(process, folder)
        saved = self.saved(self.good(done), folder)
        self.assertLess(saved, 100_000)
        self.assertEqual([row[0] for row in self.rows_of("outside")], list(range(1, saved + 1)))
        again = [sys.executable, MAIN, *TWO, "--operate", "--resume", "auto", "--steps", saved + 3]
        self.assertIn(f"bit for bit: steps {saved + 1}-{saved + 3}", self.good(run(again, folder)))


def is_pending(number: int, process: int) -> bool:
    """Say whether a process has a signal before it (Linux)."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.search(r"(?m)^ShdPnd:\s+(\w+)$", status)[1], 16) & 1 << (number - 1))


if __name__ == "__main__":
    unittest.main()
