"""Recorded traffic: what the lines add up to is what the counters and the formulas say; bad lines are refused."""

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
import unittest
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import demo
import torch
import traffic_demo
from collectives import broadcast, ring_allreduce
from mesh import QueueMesh
from ranks import run_ranks, start_method
from traffic import Message, Recorder, read_traffic, totals
from tree import reduce
from virtual import VirtualCluster

GOOD = {"round": 1, "src": 0, "dst": 1, "bytes": 4, "collective": "all_reduce"}


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class TestRecorder(Folder):
    def record(self, n: int, call, numel: int, seed: int = 0):
        """Return (recorded messages, each rank's counters) of one call in a virtual cluster; all ranks share a file."""
        recorder = Recorder(self.folder / "all.jsonl")

        def work(mesh):
            mesh.observer = partial(recorder, collective="it")
            call(mesh, torch.ones(numel), check=False)
            return mesh.counters

        counters = VirtualCluster(n, seed).run(work)
        return read_traffic([recorder.path]), counters

    def test_sums_are_the_counters_of_every_rank_and_link(self):
        for n in (1, 2, 3, 5, 8, 9):
            for name, (call, _) in traffic_demo.every_collective(n, 4, node_size=min(n, 2)).items():
                with self.subTest(name=name, n=n):
                    messages, counters = self.record(n, call, 2 * n if name in ("reduce_scatter", "alltoall") else 7, n)
                    sent, links, rounds = totals(messages)
                    for rank, each in enumerate(counters):
                        self.assertEqual(sent[rank], each.bytes_sent)
                        self.assertEqual({d: links[rank, d] for d in each.bytes_to}, dict(each.bytes_to))
                    self.assertEqual(len(messages), sum(each.messages_sent for each in counters))
                    self.assertEqual(rounds, max(each.rounds for each in counters))

    def test_a_line_is_what_was_sent(self):
        messages, _ = self.record(2, broadcast, 3)
        self.assertEqual(messages, [Message(1, 0, 1, 12, "it")])
        self.assertEqual(
            json.loads((self.folder / "all.jsonl").read_text()),
            {"round": 1, "src": 0, "dst": 1, "bytes": 12, "collective": "it"},
        )

    def test_an_older_file_is_replaced(self):
        self.record(3, ring_allreduce, 5)
        self.assertEqual(len(self.record(2, broadcast, 3)[0]), 1)

    def test_ranks_of_a_sub_mesh_are_those_of_the_whole(self):
        recorder = Recorder(self.folder / "all.jsonl")

        def work(mesh):
            mesh.observer = partial(recorder, collective="it")
            broadcast(mesh.split(mesh.rank % 2), torch.ones(1), src=1, check=False)

        VirtualCluster(4).run(work)
        links = totals(read_traffic([recorder.path]))[1]
        self.assertEqual(links, {(2, 0): 4, (3, 1): 4})

    def test_processes_write_a_file_each_with_the_name_of_what_they_are_in(self):
        boxes = QueueMesh.inboxes(3, start_method(None))
        run_ranks(be_recorded, 3, boxes, self.folder, backend=None, timeout=60)
        messages = read_traffic(sorted(self.folder.glob("*.jsonl")))
        by_name = {name: totals(m for m in messages if m.collective == name) for name in ("all_reduce", "reduce", "")}
        self.assertEqual(by_name["all_reduce"][0], {0: 16, 1: 16, 2: 16})
        self.assertEqual(by_name["reduce"][0], {1: 8, 2: 8})
        self.assertEqual(by_name[""][1], {(0, 1): 1})
        self.assertEqual(sum(path.read_text().count("\n") for path in self.folder.glob("*.jsonl")), len(messages))


def be_recorded(rank: int, world_size: int, boxes: list, folder: Path) -> None:
    """Be a rank of two collectives and a lone message."""
    mesh = QueueMesh(rank, world_size, boxes)
    mesh.observer = Recorder(folder / f"{rank}.jsonl")
    ring_allreduce(mesh, torch.ones(3))
    reduce(mesh, torch.ones(2))
    if rank == 0:
        mesh.send(1, torch.ones(1, dtype=torch.uint8))
    if rank == 1:
        mesh.recv(0)


class TestTotals(unittest.TestCase):
    def test_sums(self):
        messages = [
            Message(1, 0, 1, 5, "a"),
            Message(2, 0, 1, 7, "a"),
            Message(2, 1, 2, 1, "b"),
            Message(1, 0, 2, 2, ""),
        ]
        sent, links, rounds = totals(messages)
        self.assertEqual(sent, {0: 14, 1: 1})
        self.assertEqual(links, {(0, 1): 12, (1, 2): 1, (0, 2): 2})
        self.assertEqual(rounds, 2)

    def test_a_rank_takes_in_one_message_a_round(self):
        self.assertEqual(totals([Message(1, 1, 0, 4, "a"), Message(1, 2, 0, 4, "a")])[2], 2)
        self.assertEqual(totals([Message(1, 1, 0, 4, "a"), Message(3, 2, 0, 4, "a")])[2], 3)

    def test_nothing(self):
        self.assertEqual(totals([]), (Counter(), Counter(), 0))


class TestReading(Folder):
    def refused(self, line: bytes, *words: str):
        """A bad third line is refused with file, line number and what the error behind it says."""
        path = self.folder / "bad.jsonl"
        good = json.dumps(GOOD).encode() + b"\n"
        path.write_bytes(good + good + line + b"\n" + good)
        with self.assertRaises(ValueError) as caught:
            read_traffic([path])
        before, _, after = str(caught.exception).partition(str(path))
        self.assertRegex(before + after, r"\b3\b")
        for word in (str(path), *words):
            self.assertIn(word, str(caught.exception))

    def test_lines_that_are_no_messages(self):
        for line in (b"", b"{", b"[1, 2]", b"3", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"round": 1', b"1 2"):
            self.refused(line)

    def test_keys(self):
        for key in GOOD:
            self.refused(json.dumps({k: v for k, v in GOOD.items() if k != key}).encode(), "each once")
        self.refused(json.dumps(GOOD | {"seconds": 1}).encode(), "each once")
        self.refused(json.dumps(GOOD).replace('{"round": 1', '{"round": 1, "round": 2').encode(), "each once")
        self.refused(b'{"round": {"a": 1}}', "each once")

    def test_values(self):
        for key, least in (("round", 1), ("src", 0), ("dst", 0), ("bytes", 0)):
            for value in (least - 1, 1.0, True, "1", None, float("nan"), [1]):
                words = f"{key}: expected a whole number of at least {least}, found "
                self.refused(json.dumps(GOOD | {key: value}).encode(), words)
        self.refused(json.dumps(GOOD | {"collective": 7}).encode(), "a text")
        self.refused(json.dumps(GOOD | {"dst": 0}).encode(), "two different ranks")
        self.refused(json.dumps(GOOD).replace("4", "4" * 5000).encode())

    def test_files_one_after_the_other(self):
        for name in "ab":
            (self.folder / name).write_text(json.dumps(GOOD | {"collective": name}) + "\n")
        found = read_traffic([self.folder / "b", self.folder / "a"])
        self.assertEqual([each.collective for each in found], ["b", "a"])
        self.assertEqual(read_traffic([]), [])


class TestBill(Folder):
    def bill(self, n: int):
        claims, out = demo.Claims(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            traffic_demo.bill(claims, self.folder, n, nbytes=4 * 48 * n, node_size=2)
            return claims.verdict("x"), out.getvalue()

    def test_it_holds(self):
        for n in (2, 6):
            code, out = self.bill(n)
            self.assertEqual(code, 0, out)
        self.assertRegex(out, "ring +10 = 10 ")
        self.assertGreater(len(read_traffic([self.folder / "traffic.jsonl"])), 100)

    def test_a_message_that_is_not_recorded_shows(self):
        honest, count = Recorder.__call__, Counter()

        def forgetful(self, *args, collective):
            count[collective] += 1
            if (collective, count[collective]) != ("tree", 1):
                honest(self, *args, collective=collective)

        with mock.patch.object(Recorder, "__call__", forgetful):
            code, out = self.bill(4)
        self.assertEqual(code, 1, out)
        self.assertIn("FAIL", out)

    def test_a_formula_that_is_wrong_shows(self):
        honest = traffic_demo.every_collective

        def wrong(*args):
            found = honest(*args)
            call, formula = found["reduce"]
            return found | {"reduce": (call, dataclasses.replace(formula, **{field: getattr(formula, field) + 4}))}

        for field in ("rounds", "sent", "link"):
            with mock.patch.object(traffic_demo, "every_collective", wrong):
                self.assertEqual(self.bill(4)[0], 1, field)


if __name__ == "__main__":
    unittest.main()
