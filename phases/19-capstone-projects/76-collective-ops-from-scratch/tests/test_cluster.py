"""Described clusters: predictions against the real algorithms' messages, priced one by one; the file's faults."""

import json
import sys
import tempfile
import unittest
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import cluster_cost
import torch
from choose import ALGORITHMS
from cluster import H100, Cluster, link, read_cluster
from cluster_cost import FLAT, cluster_table, hierarchical, predict
from cost import Link
from hierarchical import hierarchical_allreduce
from virtual import VirtualCluster, VirtualMesh

INSIDE, BETWEEN = Link(3e-6, 2e-10), Link(4e-5, 7e-10)
# nodes, ranks a node, uplinks
SHAPES = [
    (1, 4, 1),
    (4, 1, 1),
    (2, 2, 1),
    (2, 4, 1),
    (4, 2, 2),
    (2, 8, 3),
    (8, 2, 1),
    (4, 4, 2),
]  # nodes, ranks, uplinks
UNEVEN = [(3, 1, 1), (1, 6, 1), (3, 2, 1), (2, 3, 2), (3, 4, 1), (4, 3, 2), (5, 3, 2), (3, 5, 1), (7, 2, 1), (13, 1, 1)]


def shape(nodes: int, ranks: int, uplinks: int) -> Cluster:
    return Cluster("test", nodes, ranks, INSIDE, BETWEEN, uplinks)


@cache
def messages(name: str, n: int, node_size: int) -> tuple[int, dict]:
    """Run an algorithm; return (bytes a rank, round -> [(src, dst, bytes)] of all messages received in it)."""
    call = ALGORITHMS.get(name) or partial(hierarchical_allreduce, node_size=node_size)
    numel, rounds = 16 * n * node_size, defaultdict(list)

    def work(mesh):
        def recv(src, tag=0):
            tensor = VirtualMesh.recv(mesh, src, tag)
            rounds[mesh._port.received].append((src, mesh.rank, tensor.numel() * tensor.element_size()))
            return tensor

        mesh.recv = recv
        call(mesh, torch.ones(numel), check=False)

    VirtualCluster(n).run(work)
    return 4 * numel, dict(rounds)


def priced(cluster: Cluster, rounds: dict) -> float:
    """Add up the slowest message of each round: here each message looks for the others that leave its node with it."""
    node_of = lambda rank: rank // cluster.ranks_per_node  # noqa: E731
    total = 0.0
    for arriving in rounds.values():
        times = []
        for src, dst, nbytes in arriving:
            if node_of(src) == node_of(dst):
                times.append(INSIDE.alpha + nbytes * INSIDE.beta)
            else:
                k = sum(node_of(s) == node_of(src) != node_of(d) for s, d, _ in arriving)
                times.append(BETWEEN.alpha + nbytes * BETWEEN.beta / min(1, cluster.uplinks / k))
        total += max(times)
    return total


class TestPredictions(unittest.TestCase):
    def rounds_of(self, name: str, cluster: Cluster, nbytes: int) -> list:
        n, size = cluster.ranks, cluster.ranks_per_node
        return list(hierarchical(n, nbytes, size) if name == "hierarchical" else FLAT[name](n, nbytes))

    def test_they_are_what_the_real_messages_take(self):
        for described in SHAPES + UNEVEN:
            cluster = shape(*described)
            for name in (*FLAT, "hierarchical"):
                with self.subTest(cluster=described, name=name):
                    nbytes, rounds = messages(name, cluster.ranks, cluster.ranks_per_node)
                    found = predict(cluster, self.rounds_of(name, cluster, nbytes))
                    self.assertEqual(found.rounds, max(rounds, default=0))
                    self.assertAlmostEqual(found.seconds, priced(cluster, rounds), delta=1e-9 * found.seconds)

    def test_every_round_has_the_real_messages(self):
        for described in SHAPES + UNEVEN:
            cluster = shape(*described)
            for name in (*FLAT, "hierarchical"):
                with self.subTest(cluster=described, name=name):
                    nbytes, rounds = messages(name, cluster.ranks, cluster.ranks_per_node)
                    predicted = Counter()
                    for times, sent in self.rounds_of(name, cluster, nbytes):
                        predicted[tuple(sorted(sent))] += times
                    self.assertEqual(predicted, Counter(tuple(sorted(found)) for found in rounds.values()))

    def test_the_docstrings_formulas(self):
        for nodes, size, uplinks in ((2, 8, 8), (16, 8, 1), (64, 4, 2), (8, 1, 1), (1, 8, 4)):
            cluster, n, nbytes = shape(nodes, size, uplinks), nodes * size, 1 << 20
            within = INSIDE.seconds
            out = lambda b, k, u=uplinks: BETWEEN.seconds(b * max(1, k / u))  # noqa: E731
            distances = [1 << k for k in range(n.bit_length() - 1)]
            near, far = [d for d in distances if d < size], [d for d in distances if d >= size]
            hop = max(([within(nbytes / n)] if size > 1 else []) + ([out(nbytes / n, 1)] if nodes > 1 else []))
            expected = {
                "ring": 2 * (n - 1) * hop,
                "tree": 2 * (len(near) * within(nbytes) + len(far) * out(nbytes, size)),
                "halving": 2 * sum(within(nbytes / 2 / d) for d in near)
                + 2 * sum(out(nbytes / 2 / d, size) for d in far),
                "hierarchical": 2 * (size - 1) * within(nbytes / size) + 2 * (nodes - 1) * out(nbytes / n, size),
            }
            for name, found in cluster_table(cluster, nbytes, [n])[n].items():
                self.assertAlmostEqual(found.seconds, expected[name], delta=1e-9 * expected[name], msg=name)


class TestTable(unittest.TestCase):
    def test_up_to_4096_ranks_with_the_fastest_first(self):
        table = cluster_table(H100, 1 << 20)
        self.assertEqual([*table], [8 << k for k in range(10)])
        for n, found in table.items():
            self.assertEqual(set(found), {"ring", "tree", "halving", "hierarchical"})
            seconds = [each.seconds for each in found.values()]
            self.assertEqual(seconds, sorted(seconds))
            depth, nodes = n.bit_length() - 1, n // 8
            rounds = {name: each.rounds for name, each in found.items()}
            self.assertEqual((rounds["ring"], rounds["tree"], rounds["halving"]), (2 * (n - 1), 2 * depth, 2 * depth))
            self.assertEqual(rounds["hierarchical"], 2 * 7 + 2 * (nodes - 1))

    def test_two_levels_beat_the_flat_ring_as_soon_as_there_are_two_nodes(self):
        for nbytes in (1 << 12, 1 << 20, 1 << 30):
            for n, found in cluster_table(H100, nbytes).items():
                ratio = found["ring"].seconds / found["hierarchical"].seconds
                self.assertEqual(ratio > 1, n > 8)

    def test_with_one_uplink_a_node_the_ring_can_win(self):
        fastest = {n: next(iter(found)) for n, found in cluster_table(replace(H100, uplinks=1), 1 << 30).items()}
        self.assertEqual([n for n in fastest if fastest[n] == "ring"], [128, 256])
        self.assertEqual({next(iter(found)) for found in cluster_table(H100, 1 << 30).values()}, {"halving"})

    def test_sizes_follow_the_cluster(self):
        self.assertEqual([*cluster_table(shape(3, 6, 1), 100)], [6, 12])
        self.assertEqual([*cluster_table(shape(10**9, 1, 1), 0)], [1 << k for k in range(13)])
        self.assertEqual(cluster_cost.default_sizes(shape(2, 10**6, 1)), [4096])
        self.assertEqual([*cluster_table(shape(3, 6, 1), 100, [1, 5, 18])], [1, 5, 18])
        self.assertEqual(cluster_table(shape(3, 6, 1), 100, [1])[1]["ring"].seconds, 0.0)

    def test_bad_sizes(self):
        for n in (0, 7, 24, True, 6.0):
            with self.assertRaisesRegex(ValueError, f"expected 1 to 6, or a multiple of it up to 18, got {n!r}"):
                cluster_table(shape(3, 6, 1), 100, [n])
        for nbytes in (-1, 1.5):
            with self.assertRaisesRegex(ValueError, "nbytes must be a whole number of at least 0"):
                cluster_table(H100, nbytes)


GOOD = {
    "name": "4 servers",
    "nodes": 4,
    "ranks_per_node": 8,
    "uplinks": 1,
    "inside": {"latency_us": 2, "gigabytes_per_second": 20},
    "between": {"latency_us": 30, "gigabytes_per_second": 1.25},
}


class TestFile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "cluster.json"

    def read(self, text: str | bytes) -> Cluster:
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_cluster(self.path)

    def test_what_is_written_is_read(self):
        found = self.read(json.dumps(GOOD))
        self.assertEqual(found, Cluster("4 servers", 4, 8, link(2, 20), link(30, 1.25), 1))
        self.assertEqual((found.ranks, found.inside.beta, found.between.alpha), (32, 1e-9 / 20, 30 * 1e-6))
        self.assertIn('"4 servers", "nodes": 4, "ranks_per_node": 8, "uplinks": 1,', sys.modules["cluster"].__doc__)

    def refused(self, words: str, text: str | bytes):
        with self.assertRaises(ValueError) as caught:
            self.read(text)
        self.assertIn(words, str(caught.exception))
        self.assertIn("cluster.json", str(caught.exception))

    def test_no_json(self):
        for text in ("", "{", "nodes: 4", '{"a": }', "[" * 100_000, b"\xff\xfe", "9" * 5000):
            self.refused("not valid JSON", text)
        for text in (
            '{"nodes": 4, "nodes": 5}',
            json.dumps(GOOD).replace('"latency_us": 2', '"latency_us": 1, "latency_us": 2'),
        ):
            self.refused("a key appears twice", text)
        for text in ("null", "[]", "4", '"x"'):
            self.refused("the cluster: expected a JSON object, found", text)

    def test_missing_and_unknown_keys(self):
        for key in GOOD:
            self.refused(f"missing key {key!r}", json.dumps({k: v for k, v in GOOD.items() if k != key}))
        self.refused("unknown key 'color'", json.dumps(GOOD | {"color": 1}))
        for side in ("inside", "between"):
            self.refused(f"{side}: missing key 'latency_us'", json.dumps(GOOD | {side: {"gigabytes_per_second": 1}}))
            self.refused(f"{side}: unknown key 'x'", json.dumps(GOOD | {side: GOOD[side] | {"x": 1}}))
            self.refused(f"{side}: expected a JSON object, found 5", json.dumps(GOOD | {side: 5}))

    def test_bad_values(self):
        for key in ("nodes", "ranks_per_node", "uplinks"):
            for value in (0, -1, 1.0, True, "4", None, [1], 10**10):
                self.refused(f"{key}: expected a whole number from 1 to", json.dumps(GOOD | {key: value}))
        for key in ("latency_us", "gigabytes_per_second"):
            for value in (0, -1, True, "4", None, [], float("nan"), float("inf"), 10**400, 1e-300):
                text = json.dumps(GOOD | {"between": GOOD["between"] | {key: value}})
                self.refused(f"between.{key}: expected a number from 1e-9 to 1e9, found", text)
        self.refused("name: expected text, found 4", json.dumps(GOOD | {"name": 4}))

    def test_no_file(self):
        for path in (self.path, self.path.parent):
            with self.assertRaisesRegex(ValueError, "cannot be read"):
                read_cluster(path)

    def test_bad_values_in_code(self):
        with self.assertRaisesRegex(ValueError, "uplinks: expected a whole number"):
            shape(1, 1, 0)


if __name__ == "__main__":
    unittest.main()
