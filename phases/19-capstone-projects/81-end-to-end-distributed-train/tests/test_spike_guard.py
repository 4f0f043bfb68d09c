import math
import random
import statistics
import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from spike_guard import Recovery, SpikeError, SpikeGuard, older_than_the_fault


class TestSpikeGuard(unittest.TestCase):
    def test_the_rule(self):
        draw = random.Random(3)
        guard, passed = SpikeGuard(factor=1.5, window=5), []
        for step in range(1, 400):
            loss = draw.lognormvariate(1.0, 0.5)
            spike = bool(passed) and loss > 1.5 * statistics.median(passed[-5:])
            try:
                guard.check(step, loss)
            except SpikeError as error:
                self.assertTrue(spike, step)
                self.assertRegex(str(error), rf"(?=.*\b{step}\b)(?=.*\b{loss:.4f}\b)(?=.*\b1\.5\b)")
            else:
                self.assertFalse(spike, step)
                passed.append(loss)
            self.assertEqual(list(guard.losses), passed[-5:], "a spike is not remembered")
        self.assertLess(100, len(passed))
        self.assertLess(len(passed), 380)

    def test_exactly_the_limit_passes(self):
        guard = SpikeGuard(factor=2.0)
        for loss in (3.0, 1.0, 2.0, 4.0):  # medians: none, 3, 2, 2
            guard.check(1, loss)
        with self.assertRaisesRegex(SpikeError, r"(?=.*\b5\b)(?=.*\b5\.1000\b)(?=.*\b2\b)(?=.*\b2\.5000\b)"):
            guard.check(5, 5.1)

    def test_one_high_loss_does_not_move_the_median_far(self):
        guard = SpikeGuard(factor=2.0, window=3)
        for loss in (1.0, 1.0, 1.9):
            guard.check(1, loss)
        with self.assertRaises(SpikeError):
            guard.check(4, 2.5)  # the mean is 1.3: twice that is more

    def test_the_first_loss_may_be_anything_but_must_be_a_number(self):
        SpikeGuard().check(1, 1e30)
        for loss in (math.nan, math.inf, -math.inf):
            with self.assertRaisesRegex(SpikeError, rf"(?=.*\b1\b)(?=.*{loss})"):
                SpikeGuard().check(1, loss)

    def test_forgetting(self):
        guard = SpikeGuard(window=3)
        for loss in (9.0, 9.0, 9.0):
            guard.check(1, loss)
        guard.forget([7.0, 1.0, 1.0, 1.0])
        self.assertEqual(list(guard.losses), [1.0, 1.0, 1.0])
        with self.assertRaises(SpikeError):
            guard.check(4, 2.5)
        guard.forget([])
        guard.check(1, 100.0)

    def test_settings_that_make_no_sense(self):
        for factor in (1, 1.0, 0, -2.0, math.nan, True, "2"):
            with self.assertRaisesRegex(ValueError, "factor must be a number above 1"):
                SpikeGuard(factor=factor)
        for window in (0, -1, 2.0, True):
            with self.assertRaisesRegex(ValueError, "window must be a whole number of at least 1"):
                SpikeGuard(window=window)
        with self.assertRaisesRegex(ValueError, "most must be a whole number of at least 0"):
            Recovery(most=-1)


class TestOlderThanTheFault(unittest.TestCase):
    def test_the_parameters_that_gave_the_loss_are_not_trusted(self):
        self.assertEqual(older_than_the_fault(13, [0, 4, 8, 12]), 8)
        self.assertEqual(older_than_the_fault(14, [0, 4, 8, 12]), 12)
        self.assertEqual(older_than_the_fault(13, [0, 4, 8, 10]), 10)

    def test_if_there_is_none_the_oldest(self):
        self.assertEqual(older_than_the_fault(1, [0]), 0)
        self.assertEqual(older_than_the_fault(13, [12]), 12)


class Run:
    """A run whose steps cost nothing. `faults(step, taken)` says whether a step fails, of those taken so far."""

    def __init__(self, faults, every: int, steps: int = 30, most: int = 5):
        self.recovery, self.faults = Recovery(most), faults
        self.taken, self.rollbacks, self.saved = [], [], {0: []}
        position = 0
        while (step := self.recovery.next_step(position)) <= steps:
            if self.faults(step, self.taken):
                back = self.recovery.back_to(step, sorted(self.saved), SpikeError(f"step {step}: too high"))
                self.rollbacks.append((step, back))
                self.saved = {each: taken for each, taken in self.saved.items() if each <= back}
                self.taken, position = list(self.saved[back]), back
                continue
            self.taken.append(step)
            position = step
            if step % every == 0:
                self.saved[step] = list(self.taken)
                self.recovery.saved(step)


def once(*steps: int):
    """Steps that fail the first time."""
    left = list(steps)

    def faults(step, taken):
        return step in left and left.remove(step) is None

    return faults


class TestRecovery(unittest.TestCase):
    def test_a_fault_that_does_not_come_again_costs_no_step(self):
        run = Run(once(13), every=5)
        self.assertEqual(run.rollbacks, [(13, 10)])
        self.assertEqual(run.taken, list(range(1, 31)))
        self.assertEqual(run.recovery.failed, [])

    def test_a_step_that_fails_twice_is_left_out_with_those_since_the_checkpoint(self):
        run = Run(lambda step, taken: step == 13, every=5)
        self.assertEqual(run.rollbacks, [(13, 10), (13, 10)])
        self.assertEqual(run.taken, [*range(1, 11), *range(14, 31)])

    def test_data_that_spoil_the_parameters_show_a_step_later(self):
        """Every rule for what is left out must cover the step before: also when it was the last before a save."""
        for every in (1, 3, 4, 5, 12):
            run = Run(lambda step, taken: 12 in taken, every=every)
            self.assertNotIn(12, run.taken)
            self.assertEqual(run.taken[-17:], list(range(14, 31)))
            self.assertLessEqual(len(run.rollbacks), 2)

    def test_two_bad_batches_one_after_the_other(self):
        for every in (1, 5, 30):
            run = Run(lambda step, taken: step in (13, 14), every=every)
            self.assertEqual(run.taken[-16:], list(range(15, 31)))

    def test_two_faults_far_from_each_other_are_two_rows(self):
        run = Run(once(7, 13, 22), every=5, most=1)
        self.assertEqual(run.rollbacks, [(7, 5), (13, 10), (22, 20)])
        self.assertEqual(run.taken, list(range(1, 31)))

    def test_a_row_ends_only_beyond_the_fault(self):
        """With a save every step, the steps before the fault are saved again and again: no reason to start anew."""
        run = Run(lambda step, taken: step == 13, every=1)
        self.assertEqual(run.rollbacks, [(13, 11), (13, 11)])
        self.assertEqual(run.taken, [*range(1, 12), *range(14, 31)])

    def test_the_row_of_several_faults_ends_beyond_the_last_of_them(self):
        recovery = Recovery()
        self.assertEqual(recovery.back_to(17, [0, 10], SpikeError()), 10)
        self.assertEqual(recovery.back_to(12, [0, 10], SpikeError()), 10)
        for position, failed in ((11, [17, 12]), (12, [17, 12]), (16, [17, 12]), (17, [])):
            recovery.saved(position)
            self.assertEqual(recovery.failed, failed)

    def test_what_never_ends_is_an_error(self):
        for most in (0, 1, 4):
            seen = []

            def faults(step, taken, seen=seen):
                return step >= 13 and seen.append(step) is None

            with self.assertRaisesRegex(SpikeError, rf"(?=.*too high)(?=.*\b{most}\b)"):
                Run(faults, every=5, most=most)
            self.assertEqual(len(seen), most + 1)


if __name__ == "__main__":
    unittest.main()
