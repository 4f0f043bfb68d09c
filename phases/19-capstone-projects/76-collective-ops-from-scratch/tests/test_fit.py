"""The fit of alpha and beta, on made-up times; the measurement, without a look at the clock's values."""

import math
import random
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from cost import Link
from fit import SIZES, fit_link, load_link, measure_link, measured_crossover, save_link
from mesh import QueueMesh
from ranks import run_ranks, start_method
from virtual import VirtualCluster


class TestFit(unittest.TestCase):
    def test_exact_times_give_the_exact_link(self):
        for link in (Link(1e-4, 1e-9), Link(2e-6, 3e-11), Link(0.0, 1e-9), Link(5e-5, 0.0), Link(1e-3, 1e-8)):
            found = fit_link(SIZES, [link.seconds(size) for size in SIZES])
            self.assertAlmostEqual(found.alpha, link.alpha, delta=1e-9 * link.alpha + 1e-15)
            self.assertAlmostEqual(found.beta, link.beta, delta=1e-9 * link.beta + 1e-20)

    def test_noise_of_some_percent_moves_it_by_some_percent(self):
        rng = random.Random(3)
        for _ in range(20):
            times = [Link(1e-4, 1e-9).seconds(size) * rng.uniform(0.95, 1.05) for size in SIZES]
            found = fit_link(SIZES, times)
            self.assertAlmostEqual(found.alpha, 1e-4, delta=0.05e-4)
            self.assertAlmostEqual(found.beta, 1e-9, delta=0.05e-9)

    def test_errors_count_in_proportion(self):
        times = [Link(1e-4, 1e-9).seconds(size) for size in SIZES]
        times[-1] *= 1.3  # 5 ms too many at 16 MB: 50 times alpha, but one of eight points
        found = fit_link(SIZES, times)
        self.assertLess(abs(found.alpha / 1e-4 - 1), 0.1)

    def test_no_other_line_is_closer(self):
        rng = random.Random(5)
        for _ in range(20):
            times = [rng.uniform(1, 10) * Link(1e-4, 1e-9).seconds(size) for size in SIZES]
            found = fit_link(SIZES, times)

            def error(link, times=times):
                return sum((link.seconds(size) / t - 1) ** 2 for size, t in zip(SIZES, times, strict=True))

            for x in (0.97, 1.0, 1.03):
                for y in (0.97, 1.0, 1.03):
                    other = Link(found.alpha * x + (x > 1) * 1e-7, found.beta * y + (y > 1) * 1e-13)
                    self.assertLessEqual(error(found), error(other) * (1 + 1e-12))

    def test_neither_number_becomes_negative(self):
        falling = fit_link((1000, 2000, 4000), (3.0, 2.0, 1.0))
        self.assertEqual(falling.beta, 0.0)
        self.assertTrue(1.0 < falling.alpha < 3.0)
        steep = fit_link((1000, 2000, 4000), (1.0, 4.0, 16.0))
        self.assertEqual(steep.alpha, 0.0)
        self.assertTrue(1e-3 < steep.beta < 4e-3)

    def test_bad_data(self):
        for sizes, seconds in (((), ()), ((1,), (1.0,)), ((5, 5), (1.0, 2.0)), ((1, 2), (1.0,))):
            with self.assertRaisesRegex(ValueError, "a line needs a time for each of two sizes or more, got"):
                fit_link(sizes, seconds)
        for bad in (0.0, -1.0, math.nan, math.inf):
            with self.assertRaisesRegex(ValueError, "sizes and seconds must be positive, got"):
                fit_link((1, 2), (1.0, bad))


class TestCrossover(unittest.TestCase):
    def test_where_two_power_laws_cross(self):
        sizes = [10, 100, 1000, 10000]
        ring, tree = [50.0] * 4, [0.5 * size for size in sizes]  # equal at 100: between no two points, on one
        self.assertAlmostEqual(measured_crossover(sizes, ring, tree), 100)
        ring = [200.0] * 4  # equal at 400
        self.assertAlmostEqual(measured_crossover(sizes, ring, tree), 400)

    def test_a_flat_and_a_rising_line(self):
        link, n = Link(1e-4, 1e-9), 8
        sizes = [1 << k for k in range(10, 27)]
        ring = [14 * link.alpha + 1.75 * size * link.beta for size in sizes]
        tree = [6 * link.alpha + 6 * size * link.beta for size in sizes]
        exact = 8 * link.alpha / (4.25 * link.beta)
        self.assertAlmostEqual(measured_crossover(sizes, ring, tree) / exact, 1.0, delta=0.05, msg=f"N={n}")

    def test_the_last_crossing_counts(self):
        self.assertAlmostEqual(measured_crossover([1, 10, 100, 1000], [1, 2, 2, 1], [2, 1, 1, 2]), math.sqrt(100_000))
        self.assertAlmostEqual(measured_crossover([1, 10, 100, 1000], [2, 1, 2, 1], [1, 2, 1, 2]), math.sqrt(100_000))

    def test_no_crossing(self):
        self.assertIsNone(measured_crossover([1, 2], [1.0, 1.0], [2.0, 2.0]))
        self.assertIsNone(measured_crossover([1, 2], [2.0, 2.0], [1.0, 1.0]))
        self.assertIsNone(measured_crossover([1, 2], [1.0, 2.0], [2.0, 1.0]))  # the tree wins at the end
        self.assertIsNone(measured_crossover([], [], []))
        with self.assertRaisesRegex(ValueError, r"(?=.*\b1\b)(?=.*\b2\b)"):
            measured_crossover([1], [1.0, 2.0], [2.0, 1.0])


def measure(rank, world_size, boxes):
    mesh = QueueMesh(rank, world_size, boxes)
    seconds = measure_link(mesh, (1 << 10, 1 << 14, 1 << 17), repeats=2)
    return seconds, mesh.counters.bytes_sent


class TestMeasurement(unittest.TestCase):
    def test_all_ranks_get_the_same_positive_times(self):
        results = run_ranks(measure, 3, QueueMesh.inboxes(3, start_method(None)), backend=None, timeout=60)
        self.assertEqual(len({str(result) for result in results}), 1)
        seconds, sent = results[0]
        self.assertTrue(len(seconds) == 3 and all(t > 0 for t in seconds))
        self.assertEqual(sent, 3 * (16 * (1 << 10) + 16 * (1 << 14) + 2 * (1 << 17)))  # a warm-up and two repeats

    def test_in_the_virtual_cluster_every_rank_sends_left_in_every_round(self):
        def work(mesh):
            measure_link(mesh, (1 << 18, 1 << 20), repeats=1)
            return mesh.counters

        for rank, counters in enumerate(VirtualCluster(4).run(work)):
            self.assertEqual(counters.rounds, 4)
            self.assertEqual([*counters.bytes_to], [(rank - 1) % 4])

    def refused(self, n: int, call) -> set:
        def work(mesh):
            try:
                call(mesh)
            except ValueError as error:
                return str(error)

        return set(VirtualCluster(n).run(work))

    def test_bad_calls(self):
        words = "one rank alone has nobody to send to: a link is measured with at least 2"
        self.assertEqual(self.refused(1, measure_link), {words})
        for sizes in ((), (0,), (True,), (1.5,)):
            found = self.refused(2, lambda mesh, s=sizes: measure_link(mesh, s))
            self.assertEqual(found, {f"sizes must be whole numbers of at least 1, got {sizes!r}"})
        self.assertIn("repeats must be", self.refused(2, lambda mesh: measure_link(mesh, (1,), 0)).pop())
        (words,) = self.refused(2, lambda mesh: measure_link(mesh, (1 + mesh.rank,)))
        self.assertIn("ranks disagree on what to measure: sizes: rank 0 has [1]; rank 1 has [2]", words)


class TestFile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "link.json"

    def test_what_is_saved_is_loaded(self):
        save_link(self.path, Link(1.5e-5, 3e-10), "4 ranks over queues")
        self.assertEqual(load_link(self.path), (Link(1.5e-5, 3e-10), "4 ranks over queues"))

    def test_anything_else_is_refused(self):
        with self.assertRaisesRegex(ValueError, r"link\.json: cannot be read"):
            load_link(self.path)
        good = '{"alpha": %s, "beta": 1e-9, "about": ""}'
        for text in ("", "[]", "{}", good % "-1", good % "NaN", good % '"1"', good % "true", "[" * 100_000):
            self.path.write_text(text)
            with self.assertRaisesRegex(ValueError, r"link\.json: not a saved link"):
                load_link(self.path)
        self.path.write_text(good % "1")
        self.assertEqual(load_link(self.path)[0].alpha, 1)


if __name__ == "__main__":
    unittest.main()
