"""`--cost`, `--explain`, `--cluster`: what they print, save and claim; claims can fail, bad flags are refused."""

import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import cost_demo
from choose import QUEUES
from collectives import broadcast
from cost import Cost

from runs_76 import run


class Folder(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)


class TestCost(Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        options = ("--world-size", "4", "--max-size", "4096", "--transport", "queues", "--out", str(cls.folder))
        cls.code, cls.out = run("--cost", *options)

    def test_all_claims_hold(self):
        self.assertEqual(self.code, 0, self.out)
        self.assertEqual(len(re.findall("^ok  ", self.out, re.M)), 4)
        self.assertIn("LESSON 76, COST -- 4 of 4 claims hold", self.out)

    def test_every_algorithm_at_every_size_and_both_crossovers(self):
        for size in ("1 KB", "4 KB"):
            for name in ("ring", "tree", "halving", "two levels", "broadcast", "pipelined"):
                self.assertRegex(self.out, rf"(?m)^{size} +{name} +\d+ +\S+ +\S+ +\S+$")
        self.assertRegex(self.out, "fitted on 4 ranks over queues: alpha = .* us a message, beta = .* ns a byte")
        self.assertRegex(self.out, "the ring is faster than the tree from .* by the model, .* measured")
        self.assertRegex(self.out, r"the model's choice was the fastest at \d of 2 sizes")

    def test_what_is_saved(self):
        self.assertEqual((self.folder / "cost.png").read_bytes()[:4], b"\x89PNG")
        record = json.loads((self.folder / "cost.json").read_text())
        self.assertEqual([row["bytes"] for row in record["seconds"]["tree"]], [1024, 4096])
        for row in record["seconds"]["ring"]:
            expected = 6 * record["alpha"] + 1.5 * row["bytes"] * record["beta"]
            self.assertAlmostEqual(row["predicted"], expected, delta=1e-9 * expected)
            self.assertGreater(row["measured"], 0)
        self.assertEqual([*record["crossover_bytes"]], ["predicted", "measured"])

    def test_the_fit_is_used_by_explain(self):
        code, out = run("--explain", "--out", str(self.folder), "--size", "4096")
        self.assertEqual(code, 0, out)
        self.assertIn("fitted: 4 ranks over queues", out)
        self.assertIn("all-reduce of 4,096 bytes, N = 4", out)


class TestOtherTransports(unittest.TestCase):
    def test_a_mesh_of_each_kind_carries_it(self):
        for name in cost_demo.TRANSPORTS:
            if name == "shared" and cost_demo.why_not():
                continue
            for n in (2, 3) if name == "queues" else (2,):
                found, make, made = cost_demo.transport(name, n)
                self.assertEqual(found, name)
                link, rows, right = cost_demo.run_ranks(
                    cost_demo.measure, n, make, made, 4096, backend=None, timeout=60
                )[0]
                self.assertTrue(right)
                for nbytes, algorithm, seconds, sent in rows:
                    self.assertEqual(sent, cost_demo.contenders(n, nbytes, link)[algorithm][1].sent)
                    self.assertGreater(seconds, 0)


class TestFailingClaims(Folder):
    def rows(self, wrong_bytes=0):
        found = cost_demo.contenders(4, 1024, QUEUES)
        return [(1024, name, 1e-3, predicted.sent + wrong_bytes) for name, (_, predicted) in found.items()]

    def cost(self, rows, right=True):
        with mock.patch.object(cost_demo, "run_ranks", return_value=[(QUEUES, rows, right)]):
            return run("--cost", "--transport", "queues", "--out", str(self.folder))

    def test_honest_rows_pass(self):
        self.assertEqual(self.cost(self.rows())[0], 0)

    def test_bytes_that_differ(self):
        code, out = self.cost(self.rows(wrong_bytes=4))
        self.assertEqual(code, 1)
        self.assertIn("FAIL  bytes sent by the busiest rank are the formulas'", out)

    def test_results_that_are_wrong(self):
        code, out = self.cost(self.rows(), right=False)
        self.assertEqual(code, 1)
        self.assertIn("FAIL  all results are right", out)

    def test_one_wrong_result_is_seen(self):
        def measured(rank_results):
            work = lambda mesh: cost_demo.measure(mesh.rank, 2, lambda rank, n, made: made, mesh, 4096)[2]  # noqa: E731
            with mock.patch.object(cost_demo, "broadcast", rank_results):
                return cost_demo.VirtualCluster(2).run(work)

        def wrong_on_rank_1(mesh, tensor, check):
            return broadcast(mesh, tensor, check=check) + mesh.rank

        self.assertEqual([measured(broadcast), measured(wrong_on_rank_1)], [[True] * 2, [False] * 2])

    def test_rounds_that_differ(self):
        with mock.patch.dict(cost_demo.ALLREDUCE, ring=lambda n, nbytes: Cost(1, 0, 0, 0)):
            self.assertFalse(cost_demo.rounds_are_counted(4, QUEUES))
            self.assertEqual(run("--explain", "--out", str(self.folder))[0], 1)
        with mock.patch.object(cost_demo, "rounds_of", return_value=[(6, 6), (6, 7)]):
            self.assertEqual(run("--cluster")[0], 1)


class TestExplain(Folder):
    def test_without_a_fit_it_says_so(self):
        code, out = run("--explain", "--world-size", "12", "--size", "1200000", "--out", str(self.folder / "none"))
        self.assertEqual(code, 0, out)
        self.assertIn("run --cost to fit this machine", out)
        self.assertRegex(out, "(?m)^ring .*<- chosen$")
        self.assertFalse((self.folder / "none").exists())

    def test_a_broken_fit_is_refused(self):
        (self.folder / "link.json").write_text("{")
        code, out = run("--explain", "--out", str(self.folder))
        self.assertEqual(code, 2)
        self.assertIn("link.json: not a saved link", out)


class TestCluster(Folder):
    def test_the_built_in_one(self):
        code, out = run("--cluster")
        self.assertEqual(code, 0, out)
        rows = [line for line in out.splitlines() if line.startswith("4,096")]
        self.assertEqual(len(rows), 2)  # a small and a large message
        self.assertRegex(rows[0], r"^4,096 +8,190 +\S+ +24 +\S+ +24 +\S+ \* +1,036 +\S+$")

    def test_one_from_a_file(self):
        path = self.folder / "cluster.json"
        link = {"latency_us": 10, "gigabytes_per_second": 1}
        parts = {"name": "two towers", "nodes": 2, "ranks_per_node": 3, "uplinks": 1, "inside": link, "between": link}
        path.write_text(json.dumps(parts))
        code, out = run("--cluster", str(path), "--size", "6000")
        self.assertEqual(code, 0, out)
        self.assertIn("two towers: 2 nodes of 3 ranks, 1 uplinks", out)
        self.assertRegex(out, r"(?m)^ +6 +10 +0\.11 ")  # ten rounds of 10 us + 1,000 ns

    def test_one_node_of_many_ranks(self):
        path = self.folder / "large.json"
        link = {"latency_us": 10, "gigabytes_per_second": 1}
        path.write_text(
            json.dumps({"name": "x", "nodes": 1, "ranks_per_node": 100, "uplinks": 1, "inside": link, "between": link})
        )
        self.assertEqual(run("--cluster", str(path))[0], 0)

    def test_faults_end_with_a_message(self):
        for path, words in ((self.folder / "none.json", "cannot be read"), (self.folder, "cannot be read")):
            code, out = run("--cluster", str(path))
            self.assertEqual(code, 2)
            self.assertIn(words, out)
        (self.folder / "bad.json").write_text("[]")
        code, out = run("--cluster", str(self.folder / "bad.json"))
        self.assertEqual((code, "expected a JSON object, found []" in out), (2, True))


class TestFlags(unittest.TestCase):
    def test_bad_ones_are_refused(self):
        for argv, words in (
            (("--cost", "--world-size", "1"), "--cost needs at least 2 ranks"),
            (("--cost", "--max-size", "1000"), "a --max-size of 4096, got 4 and 1000"),
            (("--cost", "--max-size", "0"), "expected a whole number of at least 1"),
            (("--explain", "--size", "x"), "expected a whole number of at least 1"),
            (("--cost", "--transport", "pigeons"), "invalid choice"),
        ):
            code, out = run(*argv)
            self.assertEqual(code, 2, out)
            self.assertIn(words, out)

    def test_sizes_in_words(self):
        self.assertEqual([*map(cost_demo.words, cost_demo.sizes_up_to(1 << 20))][::5], ["1 KB", "1 MB"])
        self.assertEqual(cost_demo.sizes_up_to(5000), [1024, 4096])

    def test_shared_memory_that_is_not_there_is_refused(self):
        with mock.patch.object(cost_demo, "why_not", return_value="no fork here"):
            with self.assertRaisesRegex(ValueError, "no fork here"):
                cost_demo.transport("shared", 2)
            self.assertEqual(cost_demo.transport(None, 2)[0], "sockets")


if __name__ == "__main__":
    unittest.main()
