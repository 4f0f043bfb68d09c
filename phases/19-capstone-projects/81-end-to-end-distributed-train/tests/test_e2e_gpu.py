import contextlib
import importlib.util
import io
import shutil
import sys
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import e2e_gpu_bench
import e2e_options
import gpt2_bench
import torch
from comm import TorchComm
from ddp import DistributedDataParallel
from e2e_gpu_bench import DDP, WHOLE
from ranks import run_ranks
from zero import ZeroOptimizer

LESSON = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("main_81_gpu", LESSON / "code" / "main.py")
main_81 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_81)

STEPS = 3


def counting(backend: str, graphs: list):
    """A backend of torch.compile that notes each graph it gets, and hands it on to another."""
    from torch._dynamo.backends.registry import lookup_backend

    def compiler(graph, inputs, **options):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs, **options)

    return compiler


class Watched:
    """A communicator that notes, for each collective, whether backward was at work when it was launched."""

    def __init__(self, comm, during_backward: list):
        self._comm, self._during_backward = comm, during_backward

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name == "unchecked":
            return lambda: Watched(found(), self._during_backward)
        if name in ("all_reduce", "reduce_scatter"):
            return partial(self._noted, found)
        return found

    def _noted(self, collective, *args, **options):
        self._during_backward.append(torch._C._current_graph_task_id() != -1)
        return collective(*args, **options)


def our_ddp(size: str, comm) -> tuple:
    """Return our wrapper, of buckets of a few KiB, and an optimizer; in fp32, whose losses show small differences."""
    module = gpt2_bench.gpt(size, comm.device)
    return DistributedDataParallel(module, 0.02, comm), torch.optim.Adam(module.parameters(), 1e-2), False


def our_zero(size: str, comm) -> tuple:
    """Return the same of our sharded Adam."""
    module = gpt2_bench.gpt(size, comm.device)
    return module, ZeroOptimizer(module, 2, comm.rank, 1e-2, bucket_cap_mb=0.02, overlap=True, comm=comm), False


def train(rank: int, world_size: int, backend: str | None) -> dict:
    """Be one rank: let both of ours take a few steps, plain or one block compiled at a time."""
    found = {}
    for build in (our_ddp, our_zero):
        graphs, launched = [], []
        if backend is not None:
            compiled = partial(e2e_gpu_bench.by_parts, build=build, backend=counting(backend, graphs))
        each = gpt2_bench.Contender(compiled if backend is not None else build, "fp32")
        step = gpt2_bench.build(each, Watched(TorchComm(), launched), "tiny", 2)
        losses = [step().item() for _ in range(STEPS)]
        found[build.__name__] = {"losses": losses, "graphs": len(graphs), "launched": launched}
    return found


class TestCompiled(unittest.TestCase):
    """Our hooks see the gradients of compiled blocks: the same losses, and buckets that leave during backward."""

    @classmethod
    def setUpClass(cls):
        cls.plain = run_ranks(train, 2, None, collective_timeout=300)

    def check(self, backend: str) -> None:
        for plain, compiled in zip(self.plain, run_ranks(train, 2, backend, collective_timeout=300), strict=True):
            for name in plain:
                one, other = plain[name], compiled[name]
                self.assertEqual((one["graphs"], other["graphs"]), (0, 2), name)  # of all blocks, and of the head
                self.assertEqual(one["launched"], other["launched"], name)
                self.assertGreater(sum(other["launched"]), 2 * STEPS, name)  # buckets that left during backward
                self.assertLess(other["losses"][-1], other["losses"][0] - 0.1, name)
                for a, b in zip(one["losses"], other["losses"], strict=True):
                    self.assertLessEqual(abs(a - b), 1e-5 * a, name)

    def test_by_autograd_alone(self):
        self.check("aot_eager")

    @unittest.skipUnless(shutil.which("g++") or shutil.which("clang++"), "there is no C++ compiler for inductor")
    def test_by_inductor(self):
        self.check("inductor")

    def test_ranks_differ(self):
        for name in self.plain[0]:
            self.assertNotEqual(*(each[name]["losses"][0] for each in self.plain))  # each rank has rows of its own


class TestCommand(unittest.TestCase):
    def run_main(self, *more: str) -> tuple[int, str]:
        command = ["main.py", "--bench", "--world-size", "2", "--size", "tiny", "--batch", "1", *more]
        few = mock.patch.multiple(gpt2_bench, PAIRS=6, REPEATS=1)
        with few, mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(io.StringIO()) as out:
            return main_81.main(), out.getvalue()

    def test_all_rows_are_built_and_lose_alike(self):
        """On CPU ranks no number means anything, so there are no targets."""
        code, text = self.run_main("--compile", "aot_eager", "--whole")
        self.assertEqual(code, 0, text)
        for name in e2e_gpu_bench.contenders(1, "aot_eager", whole=True):
            self.assertRegex(text, rf"(?m)^{name} +bf16|^{name} +fp32")
        self.assertRegex(text, rf"(?m)^{DDP} +{WHOLE} +[\d,]+ +[\d,]+ +- +- +\d")
        self.assertIn("blocks and head compiled by aot_eager", text)
        self.assertIn("-- 2 of 2 claims hold", text)
        for line in ("card: 2 x CPU", f"torch: {torch.__version__}", r"date: \d{4}-\d\d-\d\d", "command: python code/"):
            self.assertRegex(text, rf"(?m)^# {line.replace('+', '[+]')}")

    def test_options_that_need_others(self):
        for wrong in (["--size", "tiny"], ["--bench", "--compile"], ["--bench", "--size", "tiny", "--whole"]):
            with (
                mock.patch.object(sys, "argv", ["main.py", *wrong]),
                contextlib.redirect_stderr(io.StringIO()),
                self.assertRaises(SystemExit) as caught,
            ):
                e2e_options.parse_arguments("")
            self.assertEqual(caught.exception.code, 2)


class TestUtilisation(unittest.TestCase):
    def test_flops_of_a_token_by_hand(self):
        """GPT-2 774M: 6 x 774M, and 12 x 36 blocks x 1,280 x 1,024 for attention."""
        with torch.device("meta"):
            parameters = sum(param.numel() for param in gpt2_bench.gpt("774M", torch.device("meta")).parameters())
        self.assertEqual(parameters, 774_030_080)
        self.assertEqual(e2e_gpu_bench.flops_per_token(parameters, 36, 1280, 1024), 4_644_180_480 + 566_231_040)

    def test_linear_layers_need_what_torch_counts(self):
        """torch counts what its kernels multiply: 6 FLOPs a weight; what attention needs depends on the kernel."""
        from torch.utils.flop_counter import FlopCounterMode

        module, tokens = torch.nn.Linear(32, 48, bias=False), torch.randn(10, 32, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            module(tokens).sum().backward()
        needed = e2e_gpu_bench.flops_per_token(sum(param.numel() for param in module.parameters()), 0, 0, 0)
        self.assertEqual(counter.get_total_flops(), 10 * needed)

    def test_only_listed_cards_have_a_peak(self):
        for card, peak in (("2 x NVIDIA H200", 989e12), ("4 x NVIDIA H100 80GB HBM3", 989e12)):
            self.assertEqual(e2e_gpu_bench.peak_flops(card), peak)
        for card in ("2 x NVIDIA H100 PCIe", "2 x CPU"):
            self.assertIsNone(e2e_gpu_bench.peak_flops(card))

    def test_shares_of_the_peak(self):
        """A rank reads 2,000 tokens a second on a card that could compute 8,000: a quarter of its peak."""
        needed = e2e_gpu_bench.flops_per_token(28_032, 2, 32, 16)
        row = gpt2_bench.sidebyside.Row("ours", 16 / 2000, 1.0, 1.0, 1.0)
        args = mock.Mock(size="tiny", batch=1, world_size=2, compile=None)
        with (
            mock.patch.object(e2e_gpu_bench, "PEAK_FLOPS", {"CPU": needed * 8000}),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            e2e_gpu_bench.show_pairs({("ours", "theirs"): [row, row]}, args, "2 x CPU")
        self.assertRegex(out.getvalue(), r"(?m)^ours +theirs +4,000 +4,000 +25\.0% +25\.0% +1\.000")


if __name__ == "__main__":
    unittest.main()
