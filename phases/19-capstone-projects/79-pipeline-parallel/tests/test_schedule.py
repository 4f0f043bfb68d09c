import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from lone_messages import pass_messages
from instructions import Compute, Exchange, compute_orders, consumer, needs
from schedule import SCHEDULES, add_messages, gpipe_schedule, make_orders, make_schedule
from simulator import measure_bubble, timeline
from virtual import VirtualCluster

SIZES = [(n, m) for n in range(1, 9) for m in range(1, 9)]
NOT_SIZES = (0, -1, True, False, 1.0, 2.5, "2", None)


def text(order):
    return " ".join(f"{c.kind}{c.microbatch}" for c in order if isinstance(c, Compute))


class TestOrders(unittest.TestCase):
    def test_gpipe_is_all_forwards_then_all_backwards(self):
        for rank, program in make_orders("gpipe", 3, 4).items():
            self.assertEqual(text(program), "F0 F1 F2 F3 B0 B1 B2 B3")
            self.assertEqual({c.stage for c in program if isinstance(c, Compute)}, {rank})

    def test_1f1b_warms_up_alternates_and_drains(self):
        schedule = make_orders("1f1b", 4, 6)
        self.assertEqual(text(schedule[0]), "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5")
        self.assertEqual(text(schedule[1]), "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5")
        self.assertEqual(text(schedule[2]), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5")
        self.assertEqual(text(schedule[3]), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5")

    def test_1f1b_with_fewer_microbatches_than_stages(self):
        for m, expected in ((1, ["F0 B0"] * 4), (2, ["F0 F1 B0 B1"] * 3 + ["F0 B0 F1 B1"])):
            self.assertEqual([text(program) for program in make_orders("1f1b", 4, m).values()], expected)

    def test_warm_up_is_never_longer_than_the_batch(self):
        for n, m in SIZES:
            for rank, program in make_orders("1f1b", n, m).items():
                warm = text(program).split().index("B0")
                self.assertEqual(warm, min(m, n - rank), (n, m, rank))

    def test_unknown_names_and_bad_sizes_are_refused(self):
        for name in ("GPipe", "", None, "zero-bubble", ["1f1b"]):
            with self.assertRaisesRegex(ValueError, "schedule must be one of gpipe, 1f1b"):
                make_orders(name, 2, 2)
        for bad in NOT_SIZES:
            for sizes in ((bad, 4), (4, bad)):
                with self.assertRaisesRegex(ValueError, "whole number of at least 1"):
                    make_orders("1f1b", *sizes)


class TestMessages(unittest.TestCase):
    def test_each_result_for_another_rank_flies_once(self):
        for name in SCHEDULES:
            for n, m in SIZES:
                schedule = make_schedule(name, n, m)
                sends = [s for p in schedule.values() for i in p if isinstance(i, Exchange) for s in i.sends]
                recvs = [r for p in schedule.values() for i in p if isinstance(i, Exchange) for r in i.recvs]
                borders = n - 1 if name != "interleaved" else 2 * n - 1 if n > 1 else 0  # all between two ranks
                self.assertEqual(len(sends), 2 * borders * m)
                self.assertEqual({s.feeds for s in sends}, {r.feeds for r in recvs})
                self.assertEqual(len({s.feeds for s in sends}), len(sends))
                for message in sends:  # to the rank that computes with it
                    self.assertEqual(message.peer, message.feeds.stage % n)

    def test_tags_tell_direction_stage_and_microbatch_apart(self):
        works = [Compute(kind, stage, m) for kind in "FB" for stage in range(32) for m in range(200)]
        self.assertEqual(len({work.tag for work in works}), len(works))
        self.assertTrue(all(0 <= work.tag < 2**31 for work in works))

    def test_1f1b_pairs_an_activation_with_the_gradient_that_flies_the_other_way(self):
        program = make_schedule("1f1b", 2, 3)[0]
        paired = [i for i in program if isinstance(i, Exchange) and i.sends and i.recvs]
        self.assertEqual(
            [str(i) for i in paired], ["send to rank 1 for F2 of stage 1 + receive from rank 1 for B1 of stage 0"]
        )

    def test_what_a_computation_needs_and_feeds(self):
        self.assertEqual(needs(Compute("F", 0, 5), 3), [])
        self.assertEqual(needs(Compute("F", 2, 5), 3), [Compute("F", 1, 5)])
        self.assertEqual(needs(Compute("B", 2, 5), 3), [Compute("F", 2, 5)])
        self.assertEqual(needs(Compute("B", 1, 5), 3), [Compute("F", 1, 5), Compute("B", 2, 5)])
        self.assertEqual(consumer(Compute("F", 1, 5), 3), Compute("F", 2, 5))
        self.assertEqual(consumer(Compute("B", 1, 5), 3), Compute("B", 0, 5))
        self.assertIsNone(consumer(Compute("F", 2, 5), 3))
        self.assertIsNone(consumer(Compute("B", 0, 5), 3))

    def test_stages_of_one_rank_need_no_message(self):
        order = [Compute("F", 0, 0), Compute("F", 1, 0), Compute("B", 1, 0), Compute("B", 0, 0)]
        self.assertEqual(add_messages({0: order}), {0: order})

    def test_it_runs_where_a_lone_send_waits_for_its_receiver(self):
        for name in SCHEDULES:
            for n, m in ((2, 1), (2, 2), (3, 5), (4, 2), (4, 6), (5, 5)):
                VirtualCluster(n, seed=m, buffered=False).run(pass_messages, make_schedule(name, n, m))

    def test_bad_arguments_are_refused(self):
        for bad in NOT_SIZES:
            for sizes in ((bad, 4), (4, bad), (2, 2, bad)):
                with self.assertRaisesRegex(ValueError, "whole number of at least 1"):
                    make_schedule("1f1b", *sizes)
        with self.assertRaisesRegex(ValueError, "schedule must be one of gpipe, 1f1b, interleaved, zb-h1, got 'zb'"):
            make_schedule("zb", 2, 2)

    def test_both_forms_cost_the_same(self):
        for name in SCHEDULES:
            orders = make_orders(name, 3, 4)
            self.assertEqual(compute_orders(make_schedule(name, 3, 4)), orders)
            self.assertEqual(measure_bubble(make_schedule(name, 3, 4)), measure_bubble(orders))


class TestInterleaved(unittest.TestCase):
    def test_by_hand(self):
        """Two ranks, two stages each: 0 and 2 on rank 0, 1 and 3 on rank 1. Groups of two microbatches."""
        orders = make_orders("interleaved", 2, 4)
        found = [" ".join(f"{c.kind}{c.microbatch}{'ab'[c.stage // 2]}" for c in orders[r]) for r in orders]
        self.assertEqual(found[0], "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a")
        self.assertEqual(found[1], "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a")
        self.assertTrue(all(c.stage % 2 == rank for rank, order in orders.items() for c in order))

    def test_one_stage_a_rank_is_nearly_1f1b(self):
        """With v = 1 it computes what 1F1B does, in 1F1B's time; it only runs further ahead."""
        for n, m in SIZES:
            found = timeline(make_orders("interleaved", n, m, 1))
            self.assertEqual(max(slot.end for slot in found), 2 * (m + n - 1))


class TestZeroBubble(unittest.TestCase):
    def test_by_hand(self):
        orders = make_orders("zb-h1", 3, 4)
        self.assertEqual(
            [" ".join(f"{c.kind}{c.microbatch}" for c in orders[r]) for r in orders],
            [
                "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
                "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
            ],
        )

    def test_without_its_weight_gradients_it_is_1f1b(self):
        for n, m in SIZES:
            orders = make_orders("zb-h1", n, m)
            without = {r: [c for c in order if c.kind != "W"] for r, order in orders.items()}
            self.assertEqual(without, make_orders("1f1b", n, m))


class TestGpipeSchedule(unittest.TestCase):
    def test_by_hand(self):
        self.assertEqual(
            gpipe_schedule(2, 2),
            [
                *[(0, 0, 0, "F"), (1, 0, 1, "F"), (1, 1, 0, "F"), (2, 1, 1, "F")],
                *[(3, 1, 0, "B"), (4, 0, 0, "B"), (4, 1, 1, "B"), (5, 0, 1, "B")],
            ],
        )

    def test_cycles_in_closed_form(self):
        for n, m in SIZES:
            expected = {(stage + i, stage, i, "F") for stage in range(n) for i in range(m)}
            expected |= {(m + n - 1 + n - 1 - stage + i, stage, i, "B") for stage in range(n) for i in range(m)}
            found = gpipe_schedule(n, m)
            self.assertEqual(set(found), expected)
            self.assertEqual(len(found), 2 * n * m)
            self.assertTrue(all(type(value) is int for row in found for value in row[:3]))


if __name__ == "__main__":
    unittest.main()
