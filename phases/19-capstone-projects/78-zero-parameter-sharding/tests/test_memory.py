import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from memory import live_bytes, logical_bytes, memory_table, model_state_bytes, shard_bounds

NOT_WHOLE = (True, False, 2.0, 2.5, "4", None, float("nan"))


class TestShardBounds(unittest.TestCase):
    def test_every_element_belongs_to_exactly_one_rank(self):
        for total in (*range(40), 676, 10_007):
            for n in (*range(1, 12), 64):
                covered, chunks = [], set()
                for rank in range(n):
                    start, end, chunk = shard_bounds(total, n, rank)
                    self.assertTrue(0 <= start <= end <= total and end - start <= chunk)
                    covered += range(start, end)
                    chunks.add(chunk)
                with self.subTest(total=total, n=n):
                    self.assertEqual(covered, list(range(total)))
                    self.assertEqual(chunks, {-(-total // n)})

    def test_the_last_ranks_may_hold_less_or_nothing(self):
        self.assertEqual(
            [shard_bounds(10, 4, rank) for rank in range(4)], [(0, 3, 3), (3, 6, 3), (6, 9, 3), (9, 10, 3)]
        )
        self.assertEqual([shard_bounds(2, 3, rank)[:2] for rank in range(3)], [(0, 1), (1, 2), (2, 2)])
        self.assertEqual([shard_bounds(9, 6, rank)[:2] for rank in range(4, 6)], [(8, 9), (9, 9)])

    def test_refusals(self):
        for arguments in ((-1, 2, 0), (10, 0, 0), (10, -2, 0), (10, 2, 2), (10, 2, -1)):
            self.assertRaises(ValueError, shard_bounds, *arguments)
        for position in range(3):
            for value in NOT_WHOLE:
                arguments = [10, 4, 1]
                arguments[position] = value
                with self.subTest(arguments=arguments), self.assertRaisesRegex(ValueError, "whole number"):
                    shard_bounds(*arguments)


class TestModelStateBytes(unittest.TestCase):
    def test_each_stage_shards_one_thing_more(self):
        whole = {"parameters": 40, "gradients": 40, "optimizer": 120}
        self.assertEqual(model_state_bytes(10, 4, 0), whole)
        self.assertEqual(model_state_bytes(10, 4, 1), whole | {"optimizer": 36})  # ceil(10 / 4) = 3 elements
        self.assertEqual(model_state_bytes(10, 4, 2), whole | {"optimizer": 36, "gradients": 12})
        self.assertEqual(model_state_bytes(10, 4, 3), {"optimizer": 36, "gradients": 12, "parameters": 12})

    def test_one_rank_saves_nothing_and_many_ranks_round_up(self):
        for stage in range(4):
            self.assertEqual(model_state_bytes(10, 1, stage), model_state_bytes(10, 1, 0))
        self.assertEqual(model_state_bytes(3, 1000, 3), {"parameters": 4, "gradients": 4, "optimizer": 12})

    def test_the_papers_example(self):
        """Rajbhandari et al. 2020, figure 1: 7.5B parameters in 16 bits on 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
        sums = [sum(model_state_bytes(7_500_000_000, 64, stage, param_bytes=2).values()) / 1e9 for stage in range(4)]
        self.assertEqual([round(gigabytes, 1) for gigabytes in sums], [120.0, 31.4, 16.6, 1.9])

    def test_refusals(self):
        for stage in (-1, 4, True, 1.0, "1"):
            with self.assertRaisesRegex(ValueError, repr(stage)):
                model_state_bytes(10, 2, stage)
        for size in (0, -2, True, 2.0):
            with self.assertRaisesRegex(ValueError, repr(size)):
                model_state_bytes(10, 2, 0, size)


class TestMemoryTable(unittest.TestCase):
    def test_rows(self):
        header, *rows, last = memory_table(1000, 3).splitlines()
        self.assertEqual(header.split(), "bytes a rank parameters gradients optimizer sum drop".split())
        cells = [line.replace(",", "").rsplit(maxsplit=5) for line in rows]
        self.assertEqual([row[0] for row in cells], ["vanilla DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
        self.assertEqual([int(n) for n in cells[0][1:5]], [4000, 4000, 12000, 20000])
        self.assertEqual([int(n) for n in cells[1][1:5]], [4000, 4000, 12 * 334, 8000 + 12 * 334])
        self.assertEqual([int(n) for n in cells[2][1:5]], [4000, 4 * 334, 12 * 334, 4000 + 16 * 334])
        self.assertEqual([int(n) for n in cells[3][1:5]], [4 * 334, 4 * 334, 12 * 334, 20 * 334])
        self.assertEqual([row[5] for row in cells], ["0.0%", "40.0%", "53.3%", "66.6%"])
        self.assertEqual(last, "drop: 40.0%")
        self.assertEqual(len({len(line) for line in [header, *rows]}), 1)  # aligned
        lasts = [memory_table(1000, 3, stage).splitlines()[-1] for stage in range(4)]
        self.assertEqual(lasts, ["drop: 0.0%", "drop: 40.0%", "drop: 53.3%", "drop: 66.6%"])

    def test_columns_stay_aligned_for_large_models(self):
        lines = memory_table(70_000_000_000, 1024).splitlines()
        self.assertEqual(len({len(line) for line in lines[:-1]}), 1)
        self.assertIn("1,400,000,000,000", lines[1])

    def test_refusals(self):
        for arguments in ((0, 4), (10, 0), (10, -1), (-5, 4)):
            self.assertRaises(ValueError, memory_table, *arguments)
        for stage in (-1, 4, True, 1.0):
            self.assertRaisesRegex(ValueError, repr(stage), memory_table, 10, 2, stage)
        for value in NOT_WHOLE:
            self.assertRaises(ValueError, memory_table, value, 4)
            self.assertRaises(ValueError, memory_table, 10, value)


class TestCounting(unittest.TestCase):
    def test_logical_counts_elements_and_live_counts_storages_once(self):
        base = torch.zeros(100)
        views = [base[:10], base[50:], torch.zeros(3, dtype=torch.bfloat16)]
        self.assertEqual(logical_bytes(views), 40 + 200 + 6)
        self.assertEqual(live_bytes(views), 400 + 6)
        self.assertEqual(live_bytes([]), 0)


if __name__ == "__main__":
    unittest.main()
