import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import contextlib
import gc
import io

import memory_calculator
import memory_demo
import torch
from comm import TorchComm
from memory import STAGES, model_state_bytes, unit_bytes
from memory_demo import chain_of, gpt, predicted
from peak import Chain, PeakMeter, peak_bytes, step_moments
from ranks import run_ranks
from torch import nn
from zero_cases import optimizer_for, virtual


class TestUnitBytes(unittest.TestCase):
    def test_one_unit_is_the_formula(self):
        for numel in (1, 7, 1000):
            for n in (1, 2, 3, 8, 64):
                for stage in range(4):
                    chunk = -(-numel // n)
                    whole = numel if stage == 0 else n * chunk  # DDP pads nothing
                    fp32 = unit_bytes([(numel, 4)], n, stage)
                    expected = model_state_bytes(numel, n, stage, 4, master=False)
                    for name, shared_from in (("parameters", 3), ("gradients", 2)):
                        padded = 4 * whole if stage < shared_from else expected[name]
                        self.assertEqual(fp32[name], padded)
                    self.assertEqual(fp32["optimizer"], expected["optimizer"])

    def test_masters_of_bf16_are_the_parameters_in_stage_3(self):
        self.assertEqual(unit_bytes([(10, 2)], 4, 0), {"parameters": 20, "gradients": 20, "optimizer": 120})
        self.assertEqual(unit_bytes([(10, 2)], 4, 1), {"parameters": 24, "gradients": 24, "optimizer": 36})
        self.assertEqual(unit_bytes([(10, 2)], 4, 2), {"parameters": 24, "gradients": 6, "optimizer": 36})
        self.assertEqual(unit_bytes([(10, 2)], 4, 3), {"parameters": 12, "gradients": 6, "optimizer": 24})

    def test_units_add_up_and_float64_keeps_its_width(self):
        one, two = unit_bytes([(10, 4)], 4, 3), unit_bytes([(7, 8)], 4, 3)
        self.assertEqual(unit_bytes([(10, 4), (7, 8)], 4, 3), {name: one[name] + two[name] for name in one})
        self.assertEqual(two, {"parameters": 16, "gradients": 16, "optimizer": 32})


class TestPrediction(unittest.TestCase):
    def test_moments_of_a_small_chain(self):
        """Blocks of 8 and 4 elements, a root of 2, on 2 ranks: chunks of 4, 2 and 1 elements, 4 bytes each."""
        chain = Chain([8, 4], 2, 1)
        shards = 4 * (4 + 2 + 1)
        self.assertEqual(
            step_moments(chain, 2, 3),
            [
                ("F0", shards + 8 + 32 + 16, 0),
                ("F1", shards + 8 + 16, 0),
                ("B1", shards + 8 + 16 + 32, 4 + 16),
                ("L1", shards + 8 + 32, 4 + 16 + 16),
                ("B0", shards + 8 + 32, 4 + 8 + 32 + 16),  # a shard of block 1, own gradients, flat memory of block 1
                ("B root", shards + 8 + 32, 8 + 8 + 32 + 16),
                ("L0", shards, 8 + 8 + 32 + 32),
                ("L root", shards, 8 + 16 + 8 + 8),
            ],
        )
        moments = step_moments(chain, 2, 2)  # whole parameters; the first block leaves with its backward
        self.assertEqual({params for _, params, _ in moments}, {4 * 14})
        self.assertEqual(
            [(moment, grads) for moment, _, grads in moments if grads],
            [
                ("B1", 4 + 16),
                ("L1", 4 + 16 + 16),
                ("B0", 4 + 8 + 32 + 16),
                ("L0", 4 + 8 + 32 + 32),
                ("B root", 8 + 16 + 8 + 32),
                ("L root", 8 + 16 + 8 + 8),
            ],
        )
        self.assertEqual(peak_bytes(chain, 2, 3), 8 * 7 + (28 + 40) + 64)  # at "B root"

    def test_without_blocks_or_without_a_root(self):
        for chain in (Chain([], 10, 10), Chain([4, 4], 0, 0), Chain([4], 0, 0)):
            for stage in range(4):
                self.assertGreaterEqual(peak_bytes(chain, 3, stage), sum(unit_bytes(chain.units(), 3, stage).values()))


class TestMeter(unittest.TestCase):
    def test_it_sees_what_comes_and_goes(self):
        kept = {"things": []}
        with PeakMeter(lambda: kept, []) as meter:
            kept["things"].append(torch.ones(100))
            torch.ones(1)
            kept["things"].append(kept["things"][0][:50])  # a view holds nothing
            torch.ones(1)
            kept["things"].append(torch.ones(25))
            torch.ones(1)
            kept["things"].clear()
            torch.ones(1)
        self.assertEqual((meter.peak, meter.parts), (500, {"things": 500}))

    def test_it_sees_gradients_when_they_come_and_leaves_no_hooks(self):
        param = nn.Parameter(torch.ones(10))
        held = lambda: {"gradients": [param.grad] if param.grad is not None else []}  # noqa: E731
        with PeakMeter(held, [param]) as meter:
            (param * 2).sum().backward()
            param.grad = None
        self.assertEqual(meter.peak, 40)
        self.assertFalse(param._post_accumulate_grad_hooks)


class TestMeasured(unittest.TestCase):
    """Predicted is measured, to the byte, for each stage and dtype: on three ranks, which divide nothing."""

    @classmethod
    def setUpClass(cls):
        cls.logs = run_ranks(memory_demo.measure, 3, [torch.float32, torch.bfloat16], timeout=120)

    def test_held_and_peak(self):
        self.assertEqual(len(self.logs[0]), 4 + 3)
        for log in self.logs:
            for (dtype, stage), (after_backward, after_step, peak) in log.items():
                module = gpt(getattr(torch, dtype))
                said, top = predicted(chain_of(module), 3, stage, 4 * sum(1 for _ in module.parameters()))
                with self.subTest(dtype=dtype, stage=STAGES[stage]):
                    self.assertEqual(after_backward, {name: (size, size) for name, size in said.items()})
                    self.assertEqual(peak, top)
                    if stage > 1:
                        self.assertEqual(after_step["gradients"][1], 0)

    def test_each_stage_needs_less_than_the_one_before(self):
        peaks = [self.logs[0]["float32", stage][2] for stage in range(4)]
        self.assertEqual(peaks, sorted(peaks, reverse=True))
        self.assertEqual(len(set(peaks)), 4)


class TestCalculator(unittest.TestCase):
    def test_bad_input(self):
        cases = {
            "--params": ("0", "-7e9", "1.5", "seven", "nan", "inf", "1e999", "", "B"),
            "--ranks": ("0", "-1", "2.5", "many", "1e3", ""),
            "--dtype": ("int8",),
        }
        for option, values in cases.items():
            for value in values:
                said = io.StringIO()
                with self.subTest(option=option, value=value), contextlib.redirect_stderr(said):
                    with self.assertRaises(SystemExit) as caught:
                        memory_calculator.main([f"{option}={value}"])
                    self.assertEqual(caught.exception.code, 2)
                    self.assertIn(option, said.getvalue())

    def test_ways_to_write_a_number(self):
        for text in ("7000000000", "7e9", "7B", "7b", "7000M", "0.007T"):
            self.assertEqual(memory_calculator.count(text), 7_000_000_000)


class TestFreedNotZeroed(unittest.TestCase):
    def test_gradients_that_were_only_zeroed_would_show(self):
        """A stage 2 that zeroes gradients outside the shard holds them all the same: live bytes tell, norms do not."""

        def worker(comm, zeroed):
            module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            optimizer = optimizer_for(module, comm, stage=2)
            module(torch.ones(2, 8) * (1 + comm.rank)).square().sum().backward()
            if zeroed:
                for unit in optimizer.units:
                    unit.memory.untyped_storage().resize_(4 * unit.padded)
                    unit.memory.zero_()
            logical, live = optimizer.memory()["gradients"]
            return logical, live

        share = 4 * (72 // 2) * 2
        self.assertEqual(virtual(2, worker, False), [(share, share)] * 2)
        self.assertEqual(virtual(2, worker, True), [(share, share + 4 * 72 * 2)] * 2)


def on_gpus(rank: int, world_size: int) -> dict:
    """Train each stage on a GPU; return {stage: (allocated after backward beyond the first, peak)} of its allocator."""
    found, comm = {}, TorchComm()
    for stage in (1, 2, 3):
        gc.collect()  # a module with hooks is a cycle: the last stage's would be freed in the midst of this one
        torch.cuda.empty_cache()
        began = torch.cuda.memory_allocated()
        module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).to(comm.device)
        optimizer = optimizer_for(module, comm, stage=stage, overlap=True)
        x = torch.ones(1, 1024, device=comm.device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            module(x).square().sum().backward()
            held = torch.cuda.memory_allocated() - began
            optimizer.step()
            optimizer.zero_grad()
        found[stage] = held, torch.cuda.max_memory_allocated() - began, optimizer.memory()
        del module, optimizer
    return found


@unittest.skipUnless(torch.cuda.device_count() >= 2, "needs two GPUs")
class TestOnGpus(unittest.TestCase):
    def test_the_allocator_agrees(self):
        """Within the allocator's rounding, activations of one row, and a MiB for the kernels' own workspaces."""
        for found in run_ranks(on_gpus, 2, backend="nccl", timeout=120):
            numel = 1024 * 1025
            for stage in (2, 3):
                held, peak, _ = found[stage]
                said = sum(unit_bytes([(numel, 4)] * 6, 2, stage).values())
                self.assertLess(abs(held - said), 16 << 20)  # cuBLAS keeps a workspace
                top = peak_bytes(Chain([numel] * 6, 0, 0), 2, stage)
                self.assertLess(peak, top + (16 << 20))
            self.assertLess(found[3][1], found[2][1])
            self.assertLess(found[2][1], found[1][1])


if __name__ == "__main__":
    unittest.main()
