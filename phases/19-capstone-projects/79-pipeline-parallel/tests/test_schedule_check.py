import dataclasses
import re
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from lone_messages import add_lone_messages, pass_messages
from pipeline import receive_early
from instructions import Compute, Exchange, Message, ScheduleError
from schedule import SCHEDULES, add_messages, make_orders, make_schedule
from schedule_check import check_schedule
from virtual import DeadlockError, VirtualCluster

SIZES = [(n, m) for n in range(1, 9) for m in range(1, 9)]


def lone(name, n, m):
    return add_lone_messages(make_orders(name, n, m))


def looped(n, m, chunks=2):
    """GPipe with `chunks` stages a rank: stage s on rank s mod N."""
    forward = {r: [Compute("F", c * n + r, i) for c in range(chunks) for i in range(m)] for r in range(n)}
    return {r: f + [dataclasses.replace(c, kind="B") for c in f[::-1]] for r, f in forward.items()}


def peak_live(name, n, m, rank):
    """The most activations that may be alive on a rank."""
    largest_group = -(-m // max(1, m // n))
    return {
        "gpipe": m,
        "1f1b": min(m, n - rank),
        "interleaved": min(2 * m, largest_group + 2 * (n - 1 - rank) + 1),
        "zb-h1": min(m, n),
    }[name]


class TestSoundSchedules(unittest.TestCase):
    def test_every_schedule_of_every_size(self):
        for name in SCHEDULES:
            for n, m in SIZES:
                facts = check_schedule(make_schedule(name, n, m))
                stages = 2 * n if name == "interleaved" else n
                self.assertEqual((facts.num_ranks, facts.num_stages, facts.num_microbatches), (n, stages, m))
                limit = {r: peak_live(name, n, m, r) for r in range(n)}
                self.assertEqual(facts.peak_live, limit, (name, n, m))

    def test_interleaved_with_any_number_of_stages_a_rank(self):
        for v in (1, 3, 4):
            for n, m in SIZES:
                facts = check_schedule(make_schedule("interleaved", n, m, v))
                self.assertEqual(facts.num_stages, v * n)
                self.assertLessEqual(facts.peak_live[0], (v - 1) * (2 * n - 1) + 2 * n - 1)  # whatever M is

    def test_1f1b_memory_does_not_grow_with_the_batch(self):
        for m in (4, 8, 32):
            self.assertEqual(check_schedule(make_schedule("1f1b", 4, m)).peak_live, {0: 4, 1: 3, 2: 2, 3: 1})

    def test_a_limit_names_the_instruction_that_breaks_it(self):
        schedule = make_schedule("gpipe", 2, 3)
        with self.assertRaisesRegex(ScheduleError, r"rank 1, instruction \d+ \(F2 of stage 1\): 3 activations .* is 2"):
            check_schedule(schedule, max_live={1: 2})
        check_schedule(make_schedule("1f1b", 2, 3), max_live={0: 2, 1: 1})

    def test_several_stages_on_a_rank(self):
        for n in (1, 2, 3):
            facts = check_schedule(add_messages(looped(n, 4)))
            self.assertEqual((facts.num_ranks, facts.num_stages, facts.peak_live[0]), (n, 2 * n, 8))


class TestDeadlocks(unittest.TestCase):
    def test_1f1b_with_lone_sends_deadlocks_at_every_size_from_two(self):
        for n in range(2, 9):
            for m in range(2, 9):
                with self.assertRaisesRegex(ScheduleError, r"(?=.*deadlock).*rank (\d).*rank (?!\1)\d") as caught:
                    check_schedule(lone("1f1b", n, m))
                error = caught.exception
                self.assertEqual(lone("1f1b", n, m)[error.rank][error.index], error.instruction)

    def test_a_single_microbatch_and_gpipe_do_not(self):
        for n in range(1, 9):
            check_schedule(lone("1f1b", n, 1))
            check_schedule(lone("gpipe", n, 5))

    def test_the_virtual_cluster_agrees(self):
        """The proof and a run with sends that block say the same, for paired and for lone messages."""
        for name in SCHEDULES:
            for n, m in ((2, 1), (2, 2), (3, 4), (4, 2), (5, 6)):
                for program in (make_schedule(name, n, m), lone(name, n, m)):
                    expected = self.deadlocks(check_schedule, program)
                    cluster = VirtualCluster(n, seed=n + m, buffered=False)
                    self.assertEqual(self.deadlocks(cluster.run, pass_messages, program), expected, (name, n, m))

    def deadlocks(self, function, *args):
        try:
            function(*args)
        except (DeadlockError, ScheduleError) as error:
            self.assertIn("deadlock", str(error))
            return True
        return False

    def test_both_ranks_send_first(self):
        """The smallest deadlock: two ranks, each about to send. In one exchange the same two messages pass."""
        activation, gradient = Compute("F", 1, 1), Compute("B", 0, 0)
        ends = {
            0: ((Message(1, activation),), (Message(1, gradient),)),
            1: ((Message(0, gradient),), (Message(0, activation),)),
        }
        schedule = lone("1f1b", 2, 2)
        for rank, (sends, recvs) in ends.items():
            at = schedule[rank].index(Exchange(sends=sends))
            self.assertEqual(schedule[rank][at + 1], Exchange(recvs=recvs))
        with self.assertRaisesRegex(ScheduleError, r"(?=.*deadlock)(?=.*\b0\b)(?=.*\b1\b)") as caught:
            check_schedule(schedule)
        self.assertEqual((caught.exception.rank, caught.exception.instruction), (0, Exchange(sends=ends[0][0])))
        for rank, (sends, recvs) in ends.items():
            at = schedule[rank].index(Exchange(sends=sends))
            schedule[rank][at : at + 2] = [Exchange(sends, recvs)]
        check_schedule(schedule)


class TestReceivingEarly(unittest.TestCase):
    def test_bad_distances_are_refused(self):
        for bad in (-1, True, 1.0, "2", None):
            with self.assertRaisesRegex(ValueError, re.escape(repr(bad))):
                receive_early([], bad)

    def test_sends_and_computations_stay_where_they_are(self):
        for name in SCHEDULES:
            program = make_schedule(name, 3, 5)[1]
            for by in (0, 1, 2, 100):
                early = receive_early(program, by)
                for part in ("sends", "recvs"):
                    before, after = (
                        [m for i in p if isinstance(i, Exchange) for m in getattr(i, part)] for p in (program, early)
                    )
                    self.assertEqual(before, after)
                still = [[i for i in p if isinstance(i, Compute) or i.sends] for p in (program, early)]
                self.assertEqual([getattr(i, "sends", i) for i in still[0]], [getattr(i, "sends", i) for i in still[1]])
                self.assertTrue(
                    all(len(i.recvs) < 2 and not (i.sends and i.recvs) for i in early if isinstance(i, Exchange))
                )

    def test_no_receive_is_posted_earlier_than_asked_for(self):
        program = make_schedule("gpipe", 2, 6)[1]  # receives, computes, ...: an exchange a microbatch
        for by in (0, 1, 2, 4):
            posted, computed = 0, 0
            for item in receive_early(program, by):
                posted += len(item.recvs) if isinstance(item, Exchange) else 0
                self.assertLessEqual(posted, max(by, computed + 1 + by))
                computed += isinstance(item, Compute) and item.kind == "F"

    def test_by_hand(self):
        """Rank 1 of 2, GPipe, M = 2: receives for F0 and F1, sends for B0 and B1."""
        program = make_schedule("gpipe", 2, 2)[1]
        f0, f1 = (Exchange(recvs=(Message(0, Compute("F", 1, m)),)) for m in range(2))
        b0, b1 = (Exchange(sends=(Message(0, Compute("B", 0, m)),)) for m in range(2))
        work = {str(c)[:2]: c for c in program if isinstance(c, Compute)}
        self.assertEqual(program, [f0, work["F0"], f1, work["F1"], work["B0"], b0, work["B1"], b1])
        late = [work["F0"], work["F1"], work["B0"], b0, work["B1"], b1]
        self.assertEqual(receive_early(program, 2), [f0, f1, *late])
        self.assertEqual(receive_early(program, 1), [f0, f1, *late])


class TestWrongSchedules(unittest.TestCase):
    """A sound schedule, edited in one place: the error names rank, index and instruction."""

    def setUp(self):
        self.schedule = make_schedule("1f1b", 3, 4)

    def index(self, rank, wanted):
        """The index of a computation, or of the exchange that sends or receives what feeds it."""
        for index, item in enumerate(self.schedule[rank]):
            if item == wanted or wanted in [("send", m.feeds) for m in getattr(item, "sends", ())]:
                return index
            if wanted in [("recv", m.feeds) for m in getattr(item, "recvs", ())]:
                return index
        raise AssertionError(wanted)

    def assert_refused(self, rank, index, problem):
        with self.assertRaisesRegex(ScheduleError, problem) as caught:
            check_schedule(self.schedule)
        error = caught.exception
        self.assertIsInstance(error, ValueError)
        self.assertEqual((error.rank, error.index), (rank, index))
        self.assertIn(f"rank {rank}" if index is None else f"rank {rank}, instruction {index}", str(error))
        self.assertIn(str(error.instruction), str(error))

    def test_a_missing_computation(self):
        for kind in "FB":
            self.setUp()
            self.schedule[1].remove(Compute(kind, 1, 2))
            self.assert_refused(1, None, f"{kind}2 of stage 1.*is missing")

    def test_a_repeated_computation(self):
        at = self.index(1, Compute("F", 1, 2))
        self.schedule[1].append(Compute("F", 1, 2))
        self.assert_refused(1, len(self.schedule[1]) - 1, f"repeats instruction {at}")

    def test_backward_before_forward(self):
        a, b = self.index(2, Compute("F", 2, 3)), self.index(2, Compute("B", 2, 3))
        self.schedule[2][a], self.schedule[2][b] = self.schedule[2][b], self.schedule[2][a]
        self.assert_refused(2, a, "comes before F3 of stage 2")

    def test_forward_before_its_input_has_come(self):
        a, b = self.index(1, ("recv", Compute("F", 1, 2))), self.index(1, Compute("F", 1, 2))
        self.schedule[1].insert(a, self.schedule[1].pop(b))
        self.assert_refused(1, a, f"comes before instruction {a + 1}, which receives for it")

    def test_sent_before_computed(self):
        a, b = self.index(0, Compute("F", 0, 1)), self.index(0, ("send", Compute("F", 1, 1)))
        self.schedule[0].insert(a, self.schedule[0].pop(b))
        self.assert_refused(0, a, "comes before F1 of stage 0, which it sends")

    def test_a_send_is_missing(self):
        at = self.index(0, ("send", Compute("F", 1, 2)))
        self.schedule[0][at] = Exchange(recvs=self.schedule[0][at].recvs)
        self.assert_refused(0, self.index(0, Compute("F", 0, 2)), "its result is not sent to rank 1")

    def test_a_receive_is_missing(self):
        at = self.index(1, ("recv", Compute("B", 1, 2)))
        self.schedule[1][at] = Exchange(sends=self.schedule[1][at].sends)
        self.assert_refused(1, self.index(1, Compute("B", 1, 2)), "what it needs is not received from rank 2")

    def test_a_message_that_nobody_needs(self):
        extra = Exchange(sends=(Message(2, Compute("F", 1, 0)),))
        self.schedule[0].append(extra)
        self.assert_refused(0, len(self.schedule[0]) - 1, "no result for F0 of stage 1 flies this way")

    def test_a_message_sent_twice(self):
        at = self.index(0, ("send", Compute("F", 1, 0)))
        self.schedule[0].insert(at + 1, self.schedule[0][at])
        self.assert_refused(0, at + 1, f"repeats instruction {at}")

    def test_a_wrong_peer(self):
        at = self.index(1, ("send", Compute("F", 2, 0)))
        for peer, problem in (
            (0, "is not sent to rank 2"),
            (1, "has no peer 1"),
            (3, "has no peer 3"),
            (None, "no peer None"),
        ):
            self.setUp()
            item = self.schedule[1][at]
            sends = tuple(dataclasses.replace(m, peer=peer) if m.feeds.kind == "F" else m for m in item.sends)
            self.schedule[1][at] = dataclasses.replace(item, sends=sends)
            self.assert_refused(1, self.index(1, Compute("F", 1, 0)) if peer == 0 else at, problem)

    def test_two_messages_change_places(self):
        """Rank 0 sends microbatch 1 before 0, rank 1 still expects 0 first: without tags they would be mixed up."""
        self.schedule = make_schedule("gpipe", 2, 3)
        first = self.schedule[0][:4]
        self.assertEqual([str(i)[:2] for i in first], ["F0", "se", "F1", "se"])
        self.schedule[0][:4] = first[2:] + first[:2]
        self.assert_refused(0, 1, "out of order: rank 1 first expects the message for F0 of stage 1")

    def test_a_computation_on_the_wrong_rank(self):
        self.schedule[1].append(Compute("F", 2, 0))
        self.assert_refused(1, len(self.schedule[1]) - 1, "stage 2 is on rank 2")

    def test_instructions_that_make_no_sense(self):
        for bad in (
            Compute("X", 0, 0),
            Compute("F", -3, 0),
            Compute("F", 0, True),
            Compute("F", 0, 1.0),
            Compute("F", "0", 1),
        ):
            self.setUp()
            self.schedule[0].insert(2, bad)
            self.assert_refused(0, 2, "kind must be F, B or W; stage and microbatch whole numbers from 0")
        for bad in ("F0", None, ("F", 0, 0)):
            self.setUp()
            self.schedule[0].insert(2, bad)
            self.assert_refused(0, 2, "neither a Compute nor an Exchange")
        work = Compute("F", 1, 0)
        for bad in (
            Exchange(3),
            Exchange((3,)),
            Exchange((), (Message(1, None),)),
            Exchange(None, (Message(1, work),)),
        ):
            self.setUp()
            self.schedule[0].insert(2, bad)
            self.assert_refused(0, 2, "sends and recvs must be tuples of Messages that feed a Compute")
        for peer in ([1], "1", None, True):
            self.setUp()
            self.schedule[0].insert(2, Exchange((Message(peer, work),)))
            self.assert_refused(0, 2, "has no peer")

    def test_limits_that_make_no_sense(self):
        for bad in ({5: 1}, {"0": 3}, {0: 0}, {0: True}, {0: 1.5}, {0: "a"}, 3):
            with self.assertRaisesRegex(ValueError, "max_live"):
                check_schedule(self.schedule, bad)

    def test_no_schedule_at_all(self):
        for bad in ({}, [], None, {1: []}, {0: [], 2: []}):
            with self.assertRaisesRegex(ValueError, "ranks from 0 to N - 1"):
                check_schedule(bad)
        for bad in ({0: None}, {0: "F0"}, {0.0: []}, {False: []}):
            with self.assertRaisesRegex(ValueError, "a schedule is {rank: "):
                check_schedule(bad)
        with self.assertRaisesRegex(ValueError, "the schedule is empty"):
            check_schedule({0: [], 1: []})

    def test_weight_gradients_that_are_missing_or_too_early(self):
        """Backward is split everywhere or nowhere: a forgotten W would be a gradient that nobody misses."""
        self.schedule = make_schedule("zb-h1", 3, 4)
        self.schedule[1].remove(Compute("W", 1, 2))
        self.assert_refused(1, None, "W2 of stage 1.*is missing")
        self.setUp()
        self.schedule[1].append(Compute("W", 1, 3))
        self.assert_refused(0, None, "W0 of stage 0.*is missing")
        self.schedule = make_schedule("zb-h1", 3, 4)
        a, b = self.index(2, Compute("B", 2, 3)), self.index(2, Compute("W", 2, 3))
        self.schedule[2][a], self.schedule[2][b] = self.schedule[2][b], self.schedule[2][a]
        self.assert_refused(2, a, "comes before B3 of stage 2, whose result it needs")

    def test_a_message_for_weight_gradients(self):
        self.schedule = make_schedule("zb-h1", 3, 4)
        self.schedule[0].append(Exchange(sends=(Message(1, Compute("W", 1, 0)),)))
        self.assert_refused(0, len(self.schedule[0]) - 1, "no result for W0 of stage 1 flies this way")

    def test_an_activation_lives_until_its_weight_gradient(self):
        with self.assertRaisesRegex(ScheduleError, r"F1 of stage 1\): 2 activations are alive; the limit is 1"):
            check_schedule(make_schedule("zb-h1", 2, 3), max_live={1: 1})
        check_schedule(make_schedule("zb-h1", 2, 3), max_live={0: 2, 1: 2})

    def test_a_rank_without_work(self):
        self.schedule[3] = []
        with self.assertRaisesRegex(ScheduleError, "is on rank|is missing"):
            check_schedule(self.schedule)


if __name__ == "__main__":
    unittest.main()
