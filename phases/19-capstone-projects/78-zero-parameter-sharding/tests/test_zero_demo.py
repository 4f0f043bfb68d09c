import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from arena import why_not
from mesh_comm import MeshComm
from virtual import VirtualCluster

LESSON = Path(__file__).resolve().parents[1]
MAIN = LESSON / "code" / "main.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_RANK = f"""if True:
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("main_78", {str(MAIN)!r})
    main = sys.modules["main_78"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    sys.argv = ["main.py", "--world-size", "1"]
    code = main.main()

    import torch
    from mesh_comm import MeshComm
    from virtual import VirtualCluster

    def with_a_schedule(mesh):
        optimizer = main.ZeroOptimizer(torch.nn.Linear(3, 2), 1, 0, 0.1, comm=MeshComm(mesh))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())

    VirtualCluster(1).run(with_a_schedule)
    print([name for name in sys.modules if name.startswith("torch._dynamo")])  # importing it takes 1.2 s
    sys.exit(code)
"""

spec = importlib.util.spec_from_file_location("main_78", MAIN)
main_78 = sys.modules["main_78"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_78)


def python(*arguments) -> subprocess.CompletedProcess:
    """Run Python on these arguments, from a folder that is not the repository's."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=tempfile.gettempdir(), env=environment, check=False
    )


def changed(text: str, changes: dict[str, str]) -> str:
    """Replace what must be there exactly once."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"there {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def changed_copy(folder: str, file: str, changes: dict[str, str]) -> Path:
    """Copy the code of lessons 76 to 78 and 81, with changes of one file of ours; returns the copy's main.py."""
    for code in [*LESSON.parent.glob("7[678]-*/code"), *LESSON.parent.glob("81-*/code")]:
        shutil.copytree(code, Path(folder, *code.relative_to(LESSON.parents[2]).parts))
    ours = Path(folder, *(LESSON / "code").relative_to(LESSON.parents[2]).parts)
    (ours / file).write_text(changed((ours / file).read_text(), changes))
    return ours / "main.py"


def run_virtually(optimizer, *arguments) -> tuple[int, str]:
    """Run main() with another ZeroOptimizer, on virtual ranks: (exit code, output) in milliseconds."""
    rank = threading.local()

    def run_ranks(worker, world_size, *args, backend):
        def be_rank(mesh):
            rank.comm = MeshComm(mesh)
            return worker(mesh.rank, world_size, *args)

        return VirtualCluster(world_size).run(be_rank)

    replaced = {"run_ranks": run_ranks, "TorchComm": lambda: rank.comm, "ZeroOptimizer": optimizer}
    output = io.StringIO()
    with mock.patch.multiple(main_78, **replaced), mock.patch.object(sys, "argv", ["main.py", *arguments]):
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            return main_78.main(), output.getvalue()


class TestDemo(unittest.TestCase):
    """The demonstration for each number of ranks, under torchrun, and with an optimizer that sums."""

    @classmethod
    def setUpClass(cls):
        commands = {n: [MAIN, "--world-size", n] for n in (2, 3, 4)}
        commands[1] = ["-c", ONE_RANK]
        commands["torchrun"] = [*TORCHRUN, MAIN, "--steps", 3]
        commands |= {f"stage {stage}": [MAIN, "--stage", stage, "--steps", 3] for stage in (2, 3)}
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            commands["sums"] = [changed_copy(folder, *MUTANTS["sum instead of mean"][:2]), "--steps", 2]
            runs = pool.map(lambda command: python(*command), commands.values())
            cls.runs = dict(zip(commands, runs, strict=True))

    def test_every_claim_holds(self):
        for name, claims in {1: 8, 2: 8, 3: 8, 4: 8, "torchrun": 8, "stage 2": 9, "stage 3": 9}.items():
            with self.subTest(name):
                run = self.runs[name]
                self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
                self.assertIn(f"-- {claims} of {claims} claims hold", run.stdout)
                self.assertEqual((run.stdout.count("\nok "), run.stdout.count("FAIL")), (claims, 0))

    def test_a_claim_that_fails_ends_with_1(self):
        self.assertEqual(self.runs["sums"].returncode, 1)
        self.assertIn("FAIL  gradients are the mean over ranks", self.runs["sums"].stdout)
        self.assertIn("failed: gradients are the mean over ranks", self.runs["sums"].stderr)

    def test_nothing_imports_dynamo(self):
        self.assertEqual(self.runs[1].stdout.splitlines()[-1], "[]")

    def test_the_memory_table_is_for_this_model(self):
        row = next(line for line in self.runs[4].stdout.splitlines() if line.startswith("ZeRO-1 "))
        self.assertEqual(row.split(), ["ZeRO-1", "2,704", "2,704", "2,028", "7,436", "45.0%"])
        for run, drop in ((4, "45.0%"), ("stage 2", "60.0%"), ("stage 3", "75.0%")):
            self.assertIn(f"\ndrop: {drop}\n", self.runs[run].stdout)


GATHER = "comm.all_gather(unit.data, shard.params, async_op=True)"
MUTANTS = {  # what a wrong optimizer would do: changes of a file, and the claim that must fail
    "sum instead of mean": (
        "routes.py",
        {'unit.grad, op="avg"': 'unit.grad, op="sum"'},
        "gradients are the mean over ranks",
    ),
    "no all-gather": (
        "zero.py",
        {"works += self._gather(shard)": "pass"},
        "all ranks hold the same bits",
    ),
    "models not made equal": ("zero.py", {"        sync_module(module, comm)\n": ""}, "all ranks hold the same bits"),
    "moments for the whole model": (
        "shard.py",
        {"torch.zeros_like(self.master), torch": "torch.zeros(unit.padded)[:size], torch"},
        "8 of them beside the parameters",
    ),
    "moments swapped": ("shard.py", {'"exp_avg": self.exp_avg,': '"exp_avg": self.exp_avg_sq,'}, "moments too"),
    "moments forgotten": (
        "shard.py",
        {"            self.refresh_master(block)\n": "            self.exp_avg.zero_()\n"},
        "torch's Adam on the",
    ),
    "steps not counted": (
        "shard.py",
        {"adam_step(*row, counter.steps": "adam_step(*row, 1"},
        "torch's Adam on the same gradients",
    ),
    "a shard of another rank": (
        "shard.py",
        {
            "comm.rank * size, (comm.rank + 1) * size": "(comm.world_size - 1 - comm.rank) * size, "
            "(comm.world_size - comm.rank) * size"
        },
        "torch's Adam on the same gradients",
    ),
    "gathered twice": (
        "routes.py",
        {f"[{GATHER}]": f"[{GATHER}, {GATHER}]"},
        "one reduce-scatter and one all-gather a step",
    ),
}


IMPORTERS = ("shard.py", "routes.py", "gradients.py", "gathering.py", "zero.py")
SETTLED = "            work.wait()\n            release(unit.memory)\n"
LEFT = "            self.trail.append(call)\n        for number in"
STAGE_MUTANTS = {  # of stages 2 and 3: stage, file, changes, the claim that must fail
    "gradients zeroed, not freed": (
        2,
        "gradients.py",
        {SETTLED: SETTLED.replace("release(unit.memory)", "unit.memory.zero_()")},
        "parameters, gradients and state are the formulas'",
    ),
    "shards kept after the step": (
        2,
        "gradients.py",
        {"                release(shard.unit.memory)\n                release(shard.grad)\n": "                pass\n"},
        "gradients are freed, not zeroed",
    ),
    "the first parameter of a unit forgotten": (
        2,
        "gradients.py",
        {"for index, slot in enumerate(unit.slots):": "for index, slot in enumerate(unit.slots[1:], 1):"},
        "gradients are the mean over ranks",
    ),
    "blocks kept between forward and backward": (
        3,
        "gathering.py",
        {LEFT: LEFT + " () and"},
        "two all-gathers a block and step",
    ),
    "parameters kept after backward": (
        3,
        "gathering.py",
        {"        self.at_work.clear()\n        self.free_all()\n": "        self.at_work.clear()\n"},
        "parameters, gradients and state are the formulas'",
    ),
    "parameters not gathered anew after the step": (
        3,
        "gathering.py",
        {"        if self.open:\n            return\n        for work": "        return\n        for work"},
        "torch's Adam on the same gradients",
    ),
}


def mutant(file: str, changes: dict[str, str]):
    """Return the ZeroOptimizer of code in which one file is changed."""
    modules = {}
    for name in dict.fromkeys((file, *IMPORTERS)):  # who imports comes later
        source = (LESSON / "code" / name).read_text()
        modules[name] = types.ModuleType(name[:-3])
        with mock.patch.dict(sys.modules, {each[:-3]: module for each, module in modules.items()}):
            exec(changed(source, changes) if name == file else source, modules[name].__dict__)
    return modules["zero.py"].ZeroOptimizer


class TestMutants(unittest.TestCase):
    """Wrong optimizers fail the demonstration's claims: these are checked, not only printed."""

    def test_the_right_one_passes(self):
        code, output = run_virtually(main_78.ZeroOptimizer, "--steps", "3")
        self.assertEqual((code, output.count("FAIL")), (0, 0), output)

    def test_each_is_caught_by_its_claim(self):
        for name, (file, changes, claim) in MUTANTS.items():
            code, output = run_virtually(mutant(file, changes), "--steps", "3")
            failed = [line for line in output.splitlines() if line.startswith("FAIL")]
            with self.subTest(name):
                self.assertEqual(code, 1, output)
                self.assertTrue(any(claim in line for line in failed), failed)

    def test_those_of_stages_2_and_3_too(self):
        for stage in ("2", "3"):
            code, output = run_virtually(main_78.ZeroOptimizer, "--steps", "3", "--stage", stage)
            self.assertEqual((code, output.count("FAIL")), (0, 0), output)
        for name, (stage, file, changes, claim) in STAGE_MUTANTS.items():
            code, output = run_virtually(mutant(file, changes), "--steps", "3", "--stage", str(stage))
            failed = [line for line in output.splitlines() if line.startswith("FAIL")]
            with self.subTest(name):
                self.assertEqual(code, 1, output)
                self.assertTrue(any(claim in line for line in failed), failed)


class TestMemoryReport(unittest.TestCase):
    def test_every_claim_holds(self):
        with tempfile.TemporaryDirectory() as folder:
            run = python(MAIN, "--memory", "--world-size", 2, "--out", folder)
            self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
            self.assertIn("-- 4 of 4 claims hold", run.stdout)
            self.assertGreater(Path(folder, "memory.png").stat().st_size, 1000)


class TestStagesBench(unittest.TestCase):
    def test_it_compares_with_fsdp2(self):
        """With a model small enough for a test; the numbers mean nothing then."""
        small = {"PAIRS = 11": "PAIRS = 6", "TARGET = 1.6": "TARGET = 0"}
        with tempfile.TemporaryDirectory() as folder:
            main = changed_copy(folder, "zero_stages_bench.py", small)
            bench = main.parent / "zero_bench.py"
            changes = {'"dim": 288': '"dim": 24', '"blocks": 10': '"blocks": 1'}
            bench.write_text(changed(bench.read_text(), changes))
            run = python(main, "--bench", "--stages", "--world-size", 2)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("-- 5 of 5 claims" if why_not() is None else "-- 1 of 1 claims", run.stdout)
        for name in ("ours, stage 2, gloo", "ours, stage 3, gloo", "FSDP2, default", "FSDP2, keeps parameters, tuned"):
            self.assertIn(f"\n{name} ", run.stdout)


class TestBench(unittest.TestCase):
    def test_it_compares_with_torchs_own(self):
        """With a model small enough for a test; the numbers mean nothing then."""
        small = {"PAIRS = 1e-3, 3, 15": "PAIRS = 1e-3, 3, 6", '"dim": 288': '"dim": 24', '"blocks": 10': '"blocks": 1'}
        small |= {"1.3, (SHARED, TUNED): 1.1, (OURS, DEFAULT): 1.1": "0, (SHARED, TUNED): 0, (OURS, DEFAULT): 0"}
        with tempfile.TemporaryDirectory() as folder:
            run = python(changed_copy(folder, "zero_bench.py", small), "--bench", "--world-size", 2)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("-- 6 of 6 claims" if why_not() is None else "-- 4 of 4 claims", run.stdout)
        self.assertEqual("\nours, shared memory, fused " in run.stdout, why_not() is None)
        for name in ("ours", "DDP + ZeroRedundancyOptimizer, tuned", "DDP + Adam, default"):
            self.assertIn(f"\n{name} ", run.stdout)


class TestFlags(unittest.TestCase):
    def test_one_that_would_do_nothing_is_refused(self):
        for flags, words in {
            "--stages": "--stages: not used by this lesson without --bench",
            "--size tiny": "--size: not used by this lesson without --bench",
            "--bench --stage 3": "--stage: not used by --bench without --size",
            "--bench --stages --batch 4": "--batch: not used by --bench --stages without --size",
            "--bench --size tiny --steps 2": "--steps: not used by --bench --size",
            "--memory --steps 10": "--steps: not used by --memory",
            "--memory --bench": "programs of their own: one at a time",
            "--memory --backend nccl": "leave --backend nccl out",
            "--bench --stages --backend nccl": "leave --backend nccl out",
        }.items():
            with self.subTest(flags), contextlib.redirect_stderr(io.StringIO()) as said:
                with mock.patch.object(sys, "argv", ["main.py", *flags.split()]), self.assertRaises(SystemExit) as end:
                    main_78.main()
                self.assertEqual(end.exception.code, 2)
                self.assertIn(words, said.getvalue())


class TestGpuBench(unittest.TestCase):
    def test_it_runs_on_cpu_ranks_too(self):
        """No number means anything there: it shows that all rows are built, take steps and lose alike."""
        with tempfile.TemporaryDirectory() as folder:
            main = changed_copy(
                folder,
                "zero_gpu_bench.py",
                {"from zero import": "import gpt2_bench\n\ngpt2_bench.PAIRS = 6\nfrom zero import"},
            )
            run = python(main, "--bench", "--world-size", 2, "--size", "tiny", "--batch", 1)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("-- 2 of 2 claims hold", run.stdout)
        self.assertIn("bf16 / bf16 / bf16 / fp32 master, moments", run.stdout)
        self.assertEqual(run.stdout.count("\nours, bf16  "), 5)  # once alone, then beside four of torch's


class TestPublicNames(unittest.TestCase):
    def test_run_zero_returns_losses_norm_and_bytes_by_rank(self):
        results = main_78.run_zero(2, 4)
        self.assertEqual(sorted(results), [0, 1])
        self.assertEqual([len(losses) for losses, _, _ in results.values()], [4, 4])
        self.assertNotEqual(results[0][0], results[1][0])  # each rank's own rows
        self.assertEqual(results[0][1], results[1][1])
        self.assertEqual([held for _, _, held in results.values()], [12 * 338] * 2)
        one = main_78.run_zero(1, 4)[0]
        self.assertEqual(one[2], 12 * 676)

    def test_all_names_are_there(self):
        for name in main_78.__all__:
            self.assertTrue(hasattr(main_78, name), name)


if __name__ == "__main__":
    unittest.main()
