import itertools
import random
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from instructions import Compute, ScheduleError, count_stages, needs
from optimum import fastest_span
from schedule import SCHEDULES, gpipe_schedule, make_orders
from schedule_check import check_schedule
from schedule import make_schedule
from simulator import bubble_formula, bubble_fraction, measure_bubble, simulate, summarise, timeline

SIZES = [(n, m) for n in range(1, 9) for m in range(1, 9)]
NOT_SIZES = (0, -1, True, False, 1.0, 2.5, "2", None)


def span(slots):
    return max(slot.end for slot in slots)


class TestBubble(unittest.TestCase):
    def test_the_measured_bubble_is_the_formula_whatever_f_and_b_cost(self):
        for name in ("gpipe", "1f1b"):
            for n, m in SIZES:
                schedule = make_orders(name, n, m)
                for forward, backward in ((1, 1), (1, 2), (3, 1), (0.7, 1.9)):
                    measured = measure_bubble(schedule, forward=forward, backward=backward)
                    self.assertAlmostEqual(measured, bubble_fraction(n, m), 12, (name, n, m, forward, backward))

    def test_it_is_measured_not_restated(self):
        """One microbatch at a time: one of N stages works at any moment, so the bubble is 1 - 1/N."""
        for n in (1, 2, 3, 4):
            orders = {r: [Compute(kind, r, m) for m in range(5) for kind in "FB"] for r in range(n)}
            self.assertAlmostEqual(measure_bubble(orders, backward=2), 1 - 1 / n)

    def test_costs_are_used(self):
        """N = 2, M = 1 and F of the second stage delayed: F0 F0 B0 B0 takes 2F + 2B."""
        slots = timeline(make_orders("gpipe", 2, 1), forward=3, backward=5)
        self.assertEqual([(s.start, s.end, s.rank) for s in slots], [(0, 3, 0), (3, 6, 1), (6, 11, 1), (11, 16, 0)])

    def test_known_values(self):
        self.assertEqual(bubble_fraction(4, 4), 3 / 7)
        self.assertEqual(bubble_fraction(1, 5), 0)
        self.assertAlmostEqual(measure_bubble(gpipe_schedule(4, 4), 4, 4), 3 / 7)

    def test_bad_sizes_and_costs_are_refused(self):
        for sizes in (
            (0, 4),
            (4, 0),
            (4, -1),
            (1, 0),
            *((bad, 2) for bad in NOT_SIZES),
            *((2, bad) for bad in NOT_SIZES),
        ):
            for function in (bubble_fraction, gpipe_schedule):
                with self.assertRaisesRegex(ValueError, "whole number of at least 1"):
                    function(*sizes)
        schedule = make_orders("gpipe", 2, 3)
        for cost in (-1, True, float("nan")):
            with self.assertRaisesRegex(ValueError, "must cost at least 0"):
                measure_bubble(schedule, backward=cost)
        with self.assertRaisesRegex(ValueError, "must cost more than 0"):
            measure_bubble(schedule, forward=0)
        for sizes, message in (((3, 3), "num_stages is 3, but the schedule has 2"), ((2, 2), "num_microbatches is 2")):
            with self.assertRaisesRegex(ValueError, message):
                measure_bubble(schedule, *sizes)
        for empty in ({}, [], {0: []}):
            with self.assertRaisesRegex(ValueError, "empty"):
                measure_bubble(empty)

    def test_an_order_that_can_never_run_names_the_instruction(self):
        orders = make_orders("gpipe", 2, 2)
        orders[1].reverse()
        with self.assertRaisesRegex(ScheduleError, r"rank 0, instruction 2 \(B0 of stage 0\).*B0 of stage 1"):
            timeline(orders)


class TestClosedForms(unittest.TestCase):
    """Each formula against the simulator, for all N and M from 1 to 8."""

    def test_equal_times(self):
        for n, m in SIZES:
            for name in SCHEDULES:
                self.assertAlmostEqual(
                    measure_bubble(make_orders(name, n, m)), bubble_formula(name, n, m), 12, (name, n, m)
                )
            for v in (1, 3, 4):
                found = measure_bubble(make_orders("interleaved", n, m, v))
                self.assertAlmostEqual(found, bubble_formula("interleaved", n, m, v), 12, (n, m, v))

    def test_interleaved_also_where_backward_takes_longer(self):
        """As in the source: any F and B, where N divides M."""
        for n, m in SIZES:
            if m % n == 0:
                found = measure_bubble(make_orders("interleaved", n, m), forward=1, backward=2)
                self.assertAlmostEqual(found, bubble_formula("interleaved", n, m), 12, (n, m))

    def test_zero_bubble_waits_for_f_plus_b_minus_w(self):
        """The source's form, (N - 1)(F + B - W), holds as long as W is not longer than F or B."""
        for n, m in ((2, 4), (3, 6), (4, 8), (4, 4)):
            for f, b, w in ((1, 1, 1), (2, 2, 1), (3, 3, 2)):
                found = simulate(make_orders("zb-h1", n, m), f, b, w)
                self.assertAlmostEqual(found.step - m * (f + b + w), (n - 1) * (f + b - w), 9, (n, m, f, b, w))

    def test_gpipe_in_two_halves(self):
        """If the last stage is the slowest, backward begins when forward is over everywhere: the two add up."""
        for f, b, links in (([1, 2, 5], [2, 3, 7], [4, 0]), ([3, 3], [1, 6], [2])):
            n, m = len(f), 4
            expected = sum(f) + 3 * max(f) + sum(b) + 3 * max(b) + 2 * sum(links)
            self.assertEqual(span(timeline(make_orders("gpipe", n, m), f, b, link=links)), expected)

    def test_unknown_names_and_sizes(self):
        with self.assertRaisesRegex(ValueError, "no formula for a schedule named 'zb'"):
            bubble_formula("zb", 2, 2)
        for sizes in ((0, 2), (2, 0), (2, 2, 0)):
            with self.assertRaisesRegex(ValueError, "whole number of at least 1"):
                bubble_formula("1f1b", *sizes)


def tick_by_tick(orders, costs, links):
    """Another simulator, by brute force: a clock that ticks; at each tick every idle rank looks what it can do."""
    n, stages = len(orders), count_stages(orders)
    todo, running, end, start, now = {r: list(o) for r, o in orders.items()}, {}, {}, {}, 0
    while any(todo.values()) or running:
        for rank in [r for r, (_, left) in running.items() if left == now]:
            end[running.pop(rank)[0]] = now
        for rank in orders:
            if rank in running or not todo[rank]:
                continue
            work = todo[rank][0]
            there = [
                c in end and now >= end[c] + (links[min(c.stage, work.stage)] if c.stage % n != rank else 0)
                for c in needs(work, stages)
            ]
            if all(there):
                start[work] = now
                running[rank] = (todo[rank].pop(0), now + costs[work.kind][work.stage])
        now += 1
    return start, end


class TestBruteForce(unittest.TestCase):
    def test_uneven_times_agree_with_a_clock_that_ticks(self):
        generator = random.Random(7)
        for name, n, m in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 5)):
            stages = 2 * n if name == "interleaved" else n
            costs = {kind: [generator.randint(1, 6) for _ in range(stages)] for kind in "FBW"}
            links = [generator.randint(0, 4) for _ in range(stages - 1)]
            orders = make_orders(name, n, m)
            start, end = tick_by_tick(orders, costs, links)
            slots = timeline(orders, costs["F"], costs["B"], costs["W"], links)
            self.assertEqual({s.compute: s.start for s in slots}, start, (name, n, m))
            self.assertEqual({s.compute: s.end for s in slots}, end, (name, n, m))

    def test_no_schedule_of_f_and_b_is_faster_than_gpipe_and_1f1b(self):
        for n, m in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5)):
            best = fastest_span(n, m)
            self.assertEqual(best, 2 * (m + n - 1))
            for name in ("gpipe", "1f1b"):
                self.assertEqual(span(timeline(make_orders(name, n, m))), best)

    def test_none_with_a_split_backward_and_n_activations_is_faster_than_zb_h1(self):
        for n, m in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5)):
            if n * m <= 16:
                found = simulate(make_orders("zb-h1", n, m))
                self.assertEqual(found.step, fastest_span(n, m, "FBW", n), (n, m))

    def test_none_with_two_stages_a_rank_is_faster_than_interleaved(self):
        for n, m in itertools.product((1, 2, 3), (1, 2, 3, 4, 5, 6)):
            found = span(timeline(make_orders("interleaved", n, m)))
            self.assertEqual(found, fastest_span(n, m, virtual_stages=2), (n, m))

    def test_less_memory_than_1f1bs_costs_time(self):
        self.assertEqual([fastest_span(3, 6, most_alive=k) for k in (1, 2, 3, 6)], [36, 20, 16, 16])

    def test_the_search_refuses(self):
        for bad in (True, 1.0, "2"):
            with self.assertRaisesRegex(ValueError, "most_alive must be a whole number"):
                fastest_span(2, 2, most_alive=bad)
        for arguments, message in (
            ((0, 2), "num_stages"),
            ((2, 2, "FW"), "kinds must be FB or FBW"),
            ((2, 2, "FB", 0), "impossible"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                fastest_span(*arguments)


class TestSimulation(unittest.TestCase):
    def test_bubbles_of_uneven_stages(self):
        """N = 2, M = 2: stage 1 takes twice as long. F: 1, 2; B: 2, 4. Rank 1 works all but the first cycle."""
        found = simulate(make_orders("1f1b", 2, 2), [1, 2], [1, 2], [1, 2])
        self.assertEqual(found.step, 1 + 2 * 6 + 2)
        self.assertAlmostEqual(found.bubbles[1], 3 / 15)
        self.assertAlmostEqual(found.bubbles[0], 1 - 6 / 15)
        self.assertAlmostEqual(found.bubble, (3 / 15 + 9 / 15) / 2)

    def test_without_a_split_b_takes_both_gradients_time(self):
        slots = simulate(make_orders("gpipe", 1, 2), 1, 2, 4).slots
        self.assertEqual([slot.end - slot.start for slot in slots], [1, 1, 6, 6])
        slots = simulate(make_orders("zb-h1", 1, 1), 1, 2, 4).slots
        self.assertEqual([slot.end - slot.start for slot in slots], [1, 2, 4])

    def test_memory_over_time(self):
        found = simulate(make_orders("1f1b", 2, 3), activation=[10, 1])
        self.assertEqual(found.memory[1], [(1, 1), (4, 1), (7, 1), (10, 0)])  # at 4 one goes and one comes
        self.assertEqual(found.memory[0], [(0, 10), (1, 20), (6, 20), (9, 10), (12, 0)])

    def test_peaks_are_those_of_the_proof(self):
        for name in SCHEDULES:
            for n, m in SIZES:
                schedule = make_schedule(name, n, m)
                self.assertEqual(simulate(schedule).peaks, check_schedule(schedule).peak_live, (name, n, m))

    def test_everything_is_given_back(self):
        for name in SCHEDULES:
            found = simulate(make_orders(name, 3, 5), activation=2)
            self.assertTrue(all(steps[-1][1] == 0 and min(steps)[1] >= 0 for steps in found.memory.values()))

    def test_a_measured_timeline_is_summarised_alike(self):
        slots = timeline(make_orders("gpipe", 2, 3), 1, 2)
        shifted = [type(s)(s.start + 5, s.end + 5, s.rank, s.compute) for s in slots]
        self.assertAlmostEqual(summarise(shifted).bubble, bubble_fraction(2, 3))
        self.assertEqual(summarise(shifted).step, 12)

    def test_gradients_that_take_no_time(self):
        """A frozen stage has no weight gradient, the first stage no input gradient: steps by hand, M = 1, N = 2."""
        for name, step in (("gpipe", 5), ("1f1b", 5), ("zb-h1", 4)):  # F0 F1 B1 and W1, W0; W1 beside W0
            orders = make_orders(name, 2, 1)
            self.assertEqual(simulate(orders, 1, [0, 1], 1).step, step)
            self.assertEqual(simulate(orders, 1, 1, [0, 0]).step, 4)
            self.assertEqual(simulate(orders, 1, 0, 0).step, 2)

    def test_bad_times_are_refused(self):
        orders = make_orders("zb-h1", 3, 2)
        for options, message in (
            ({"forward": [1, 2]}, "forward needs 3 times, one for each, got 2"),
            ({"link": [1, 2, 3]}, "link needs 2 times"),
            ({"link": -1}, "link must cost at least 0, got -1"),
            ({"link": float("nan")}, "link must cost"),
            ({"link": "2"}, "link must cost at least 0, got '2'"),
            ({"forward": None}, "forward must cost more than 0, got None"),
            ({"forward": 0}, "forward must cost more than 0, got 0"),
            ({"weight_gradient": -1}, "weight_gradient must cost at least 0, got -1"),
            ({"input_gradient": float("inf")}, "input_gradient must cost"),
            ({"activation": [1, -2, 3]}, "activation must cost at least 0"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                simulate(orders, **options)


if __name__ == "__main__":
    unittest.main()
