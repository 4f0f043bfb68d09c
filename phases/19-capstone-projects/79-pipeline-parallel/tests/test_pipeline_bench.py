import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from pipeline_bench import judge
from schedule import SCHEDULES
from simulator import bubble_formula

N, M = 2, 8
FORMULA = bubble_formula("gpipe", N, M)  # 1F1B's, too
NEAR = [0.5, FORMULA + 0.01, FORMULA - 0.01, FORMULA + 0.02]  # simulated, measured, low, high
FAR = [FORMULA, FORMULA + 0.08, FORMULA + 0.0601, FORMULA + 0.09]


def results(bubbles: dict | None = None, speed: dict | None = None) -> dict:
    """Make what a rank of the bench returns: all well, but for the bubbles {width: ...} and the speed given by name."""
    speed, good = speed or {}, {512: NEAR, 1024: NEAR}
    return {
        name: {"times": [2.0, 2.0, *speed.get(name, (1.1, 1.05, 1.2))], "bubbles": (bubbles or {}).get(name, good)}
        for name in SCHEDULES
    }


class TestBubbles(unittest.TestCase):
    def holds(self, bubbles: dict, m: int = M, backend: str = "gloo", cores: int = 2) -> dict[str, bool]:
        judged = judge(results(bubbles), N, m, backend, cores)
        return {claim: holds for claim, holds, _ in judged if "bubble" in claim}

    def test_gpipe_and_1f1b_are_judged_at_the_larger_width(self):
        claims = [f"width 1024: {name}'s bubble is within 0.06 of the formula" for name in ("gpipe", "1f1b")]
        self.assertEqual(self.holds({}), dict.fromkeys(claims, True))

    def test_the_larger_width_decides_and_the_smaller_one_does_not(self):
        for name in ("gpipe", "1f1b"):
            for bubbles, expected in [({512: NEAR, 1024: FAR}, False), ({512: FAR, 1024: NEAR}, True)]:
                for ordered in (bubbles, dict(reversed(bubbles.items()))):
                    found = self.holds({name: ordered})
                    wrong = [claim for claim, holds in found.items() if not holds]
                    self.assertEqual(len(wrong), 0 if expected else 1)
                    self.assertTrue(all(f"width 1024: {name}'s" in claim for claim in wrong))

    def test_only_an_interval_that_is_wholly_outside_is_a_miss(self):
        for low, high, expected in [
            (0.05, 0.2, True),
            (0.0601, 0.2, False),
            (-0.2, -0.05, True),
            (-0.2, -0.0601, False),
            (-0.2, 0.2, True),
        ]:
            far = [0.0, FORMULA + (low + high) / 2, FORMULA + low, FORMULA + high]
            self.assertEqual(list(self.holds({"1f1b": {1024: far}}).values()), [True, expected], (low, high))

    def test_the_simulated_bubble_is_not_judged(self):
        self.assertTrue(all(self.holds({"gpipe": {1024: [0.9, *NEAR[1:]]}}).values()))

    def test_the_formula_is_that_of_this_n_and_m(self):
        self.assertFalse(any(self.holds({}, m=1).values()))  # (N - 1) / N = 0.5, and these are 0.11

    def test_no_claim_where_ranks_share_a_core(self):
        self.assertEqual(self.holds({}, cores=1), {})
        self.assertEqual(len(self.holds({}, backend="nccl", cores=1)), 2)  # a GPU each

    def test_the_detail_says_by_how_much(self):
        *_, (_, holds, detail) = judge(results({"1f1b": {1024: FAR}}), N, M, "gloo", 2)
        self.assertEqual((holds, detail), (False, "+0.080 (+0.060 to +0.090)"))


class TestSpeed(unittest.TestCase):
    def judged(self, speed: dict, backend: str = "gloo", n: int = N, m: int = M) -> dict[str, tuple[bool, str]]:
        rows = judge(results(speed=speed), n, m, backend, cores=8)
        return {claim.split()[1]: (holds, detail) for claim, holds, detail in rows if claim.startswith("target")}

    def test_targets_of_each_backend(self):
        self.assertEqual(list(self.judged({})), ["gpipe", "1f1b"])
        self.assertEqual(list(self.judged({}, "nccl")), ["gpipe", "1f1b", "interleaved"])

    def test_met_open_and_missed(self):
        for times, expected in [
            ((1.1, 1.0, 1.2), (True, "1.10 (1.00 to 1.20), met")),
            ((0.98, 0.9, 1.0), (True, "0.98 (0.90 to 1.00), open: the interval holds it")),
            ((0.9, 0.8, 0.999), (False, "0.90 (0.80 to 1.00), missed")),
        ]:
            for backend, name in (("gloo", "gpipe"), ("nccl", "gpipe"), ("nccl", "1f1b"), ("nccl", "interleaved")):
                found = self.judged({name: times}, backend)
                self.assertEqual(found.pop(name), expected)
                self.assertTrue(all(holds for holds, _ in found.values()))

    def test_each_has_a_target_of_its_own(self):
        slow = (0.96, 0.955, 0.965)  # 1F1B over gloo may be 0.95 times as fast
        self.assertEqual(self.judged({"gpipe": slow, "1f1b": slow})["gpipe"][0], False)
        self.assertEqual(self.judged({"gpipe": slow, "1f1b": slow})["1f1b"][0], True)
        self.assertEqual(self.judged({"1f1b": slow}, "nccl")["1f1b"][0], False)

    def test_zb_h1_has_none(self):
        self.assertNotIn("zb-h1", self.judged({"zb-h1": (0.1, 0.1, 0.1)}, "nccl"))

    def test_none_for_one_rank_or_few_microbatches(self):
        for n, m in ((1, 8), (2, 2), (3, 3)):
            self.assertEqual(self.judged({}, n=n, m=m), {})
        self.assertEqual(len(self.judged({}, m=4)), 2)


if __name__ == "__main__":
    unittest.main()
