"""A plan saves and goes on, bit for bit; another dp goes on within the ladder's bound; any other plan is refused."""

import shutil
import sys
import tempfile
import unittest
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import damage
import grid_checkpoint
import torch
from checkpoint import load_sharded, save_sharded
from comm import TorchComm
from corpus import synthetic
from grid import Grid
from grid_checkpoint import GridCheckpoints
from grid_train import train_on_grid
from ladder import bounds
from manifest import CheckpointError, read_manifest
from mesh_comm import MeshComm
from part import Part
from plan import Plan, parse_plan
from ranks import run_ranks
from recipe import Reader, Recipe
from train import Job, train
from virtual import VirtualCluster

SAVED = 3
QUIET = Recipe(steps=6, warmup=2)
NOISY = replace(QUIET, dropout=0.2)
TIED = replace(NOISY, tied=True)


def setUpModule():
    torch.set_num_threads(1)


def run(plan: Plan, recipe: Recipe, **options) -> list[dict]:
    """Each rank's log, from virtual ranks."""
    return VirtualCluster(plan.world_size).run(lambda mesh: train_on_grid(MeshComm(mesh), plan, recipe, **options))


def outcomes(log: dict) -> list[tuple]:
    return [(row["loss"], row["squares"]) for row in log["rows"]]


def be_a_rank(rank: int, world_size: int, plan: Plan, recipe: Recipe, options: dict) -> dict:
    return train_on_grid(TorchComm(), plan, recipe, **options)


class Saved(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder, cls.logs = Path(folder.name), {}

    def saved(self, plan: Plan, recipe: Recipe) -> Path:
        """A checkpoint of the plan's run, made once; its logs are those of the uninterrupted run."""
        key = str(plan), recipe
        folder = self.folder / f"{len(self.logs)}"
        if key not in self.logs:
            self.logs[key] = run(plan, recipe, save_at=(SAVED,), folder=folder), folder / f"step_{SAVED}"
        return self.logs[key][1]


class TestSamePlan(Saved):
    """With dropout: the noise that tp ranks share, and that of their own heads, go on as well."""

    def check(self, text: str, recipe: Recipe):
        with self.subTest(text):
            plan = parse_plan(text)
            folder = self.saved(plan, recipe)
            for log, whole in zip(run(plan, recipe, resume=folder), self.logs[str(plan), recipe][0], strict=True):
                self.assertEqual(outcomes(log), outcomes(whole)[SAVED:])
                self.assertEqual(log["place"], whole["place"])

    def test_each_axis_and_stage_alone(self):
        for text in ("m4", "dp3", "dp2 zero1 m2", "dp2 zero2", "dp3 zero3", "pp2 m4", "tp2"):
            self.check(text, NOISY)

    def test_all_axes_together(self):
        for text in ("pp2 tp2 m2", "dp2 pp2 tp2 zero1 m2", "dp2 pp2 tp2 zero3 m2", "dp2 pp2 tp2 m2"):
            self.check(text, NOISY)

    def test_masters_of_bfloat16(self):
        self.check("dp2 pp2 zero1 m2 bfloat16", NOISY)
        self.check("dp2 zero3 bfloat16", NOISY)

    def test_a_tied_matrix(self):
        for text in ("pp2 m2", "dp2 pp2 tp2 zero2 m2"):
            self.check(text, TIED)

    def test_noise_matters(self):
        """Without either stream it would be another run."""
        plan = parse_plan("dp1 pp2 tp2 m2")
        whole = [outcomes(log) for log in (self.saved(plan, NOISY), self.logs[str(plan), NOISY][0])[1]]
        with mock.patch.object(grid_checkpoint, "set_random_state", lambda saved: None):
            self.assertNotEqual(outcomes(run(plan, NOISY, resume=self.saved(plan, NOISY))[0])[0], whole[0][SAVED])

        def forget_own(checkpoints, position):
            state = right(checkpoints, position)
            state["random"]["own"] = torch.Generator().manual_seed(5).get_state()
            return state

        right = GridCheckpoints.state
        with mock.patch.object(GridCheckpoints, "state", forget_own):
            logs = run(plan, NOISY, save_at=(SAVED,), folder=self.folder / "forgetful")
        self.assertEqual([outcomes(log) for log in logs], whole)
        again = run(plan, NOISY, resume=self.folder / "forgetful" / f"step_{SAVED}")
        self.assertNotEqual(outcomes(again[0])[0], whole[0][SAVED])

    def test_in_processes(self):
        plan, folder = parse_plan("dp2 pp2 zero1 m2"), self.folder / "processes"
        whole = run_ranks(be_a_rank, 4, plan, NOISY, {"save_at": (SAVED,), "folder": folder})
        again = run_ranks(be_a_rank, 4, plan, NOISY, {"resume": folder / f"step_{SAVED}"})
        for log, before in zip(again, whole, strict=True):
            self.assertEqual(outcomes(log), outcomes(before)[SAVED:])


class TestAnotherDp(Saved):
    def held(self, plan: Plan, recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
        """All units after a load, their ranges end to end."""

        def load(mesh):
            reader = Reader(recipe)
            checkpoints = GridCheckpoints(Part(Grid(MeshComm(mesh), plan.dp, plan.pp, plan.tp), plan, recipe), reader)
            self.assertEqual(checkpoints.load(folder), SAVED)
            return {
                key: {n: t.clone() for n, t in own.items()} for key, own in checkpoints.state(SAVED)["units"].items()
            }

        return joined(VirtualCluster(plan.world_size).run(load))

    def check(self, before: str, after: str, recipe: Recipe = QUIET):
        with self.subTest(f"{before} -> {after}"):
            before, after = parse_plan(before), parse_plan(after)
            folder = self.saved(before, recipe)
            _, states = load_sharded(folder, before.world_size)
            saved, found = joined([state["units"] for state in states]), self.held(after, recipe, folder)
            self.assertEqual(found.keys(), saved.keys())
            for name, tensor in saved.items():
                self.assertEqual((found[name].dtype, found[name].tolist()), (tensor.dtype, tensor.tolist()), name)
            losses, first_norm, norms = bounds(before, recipe)
            rows, whole = run(after, recipe, resume=folder)[0]["rows"], self.logs[str(before), recipe][0][0]["rows"]
            self.assertEqual(len(rows), recipe.steps - SAVED)
            for number, (row, want) in enumerate(zip(rows, whole[SAVED:], strict=True)):
                self.assertAlmostEqual(row["loss"], want["loss"], delta=losses * want["loss"])
                bound = (norms if number else first_norm) * max(1, want["norm"])
                self.assertAlmostEqual(row["norm"], want["norm"], delta=bound)

    def test_replicas(self):
        self.check("dp2", "dp3")
        self.check("dp2 m2", "m1")

    def test_every_stage_of_zero(self):
        self.check("dp3 zero1", "dp2 zero1 m2")
        self.check("zero2", "dp4 zero2")
        self.check("dp4 zero3", "dp3 zero3")

    def test_grids(self):
        self.check("dp2 pp2 tp2 zero1 m2", "pp2 tp2 zero1 m2")
        self.check("pp2 tp2 zero3 m2", "dp2 pp2 tp2 zero3 m2")
        self.check("dp3 pp2 m2", "dp4 pp2 m2")

    def test_in_fp64_it_is_2_to_the_29_closer(self):
        self.check("dp2 pp2 tp2 zero1 m2 float64", "pp2 tp2 zero1 m2 float64")

    def test_noise_of_other_ranks_is_a_function_of_seed_step_and_rank(self):
        folder = self.saved(parse_plan("dp2 tp2"), NOISY)
        first, second = (run(parse_plan("dp1 tp2"), NOISY, resume=folder) for _ in range(2))
        self.assertEqual(outcomes(first[1]), outcomes(second[1]))


def joined(states: list[dict]) -> dict[str, torch.Tensor]:
    return {
        f"{unit} {name}": torch.cat([state[unit][name] for state in states])
        for unit in states[0]
        for name in states[0][unit]
    }


class TestRefused(Saved):
    def errors(self, plan: Plan, recipe: Recipe, folder: Path) -> list[str]:
        """What each rank says; none may have changed anything."""

        def fail(mesh):
            part = Part(Grid(MeshComm(mesh), plan.dp, plan.pp, plan.tp), plan, recipe)
            checkpoints = GridCheckpoints(part, Reader(recipe))
            before, noise = digest(part), torch.get_rng_state()
            with self.assertRaises(CheckpointError) as caught:
                checkpoints.load(folder)
            self.assertEqual(digest(part), before)
            self.assertTrue(torch.equal(torch.get_rng_state(), noise))
            return str(caught.exception)

        return VirtualCluster(plan.world_size).run(fail)

    def assert_refused(self, plan: Plan, recipe: Recipe, folder: Path, message: str):
        errors = self.errors(plan, recipe, folder)
        self.assertEqual(len(set(errors)), 1)
        self.assertRegex(errors[0], message)

    def test_other_plans_are_both_named(self):
        folder = self.saved(parse_plan("dp2 pp2 zero1 m2"), QUIET)
        for text in ("pp4 zero1 m2", "pp2 tp2 zero1 m2", "dp2 pp2 zero2 m2", "dp2 pp2 m2", "dp2 pp2 zero1 m2 float64"):
            plan = parse_plan(text)
            message = f"saved under the plan dp2 pp2 tp1 zero1 m2, cannot go on under {plan}: only dp and m may differ"
            self.assert_refused(plan, QUIET, folder, message)

    def test_another_recipe(self):
        plan = parse_plan("dp2")
        folder = self.saved(plan, QUIET)
        for changed, message in [
            ({"lr": 1.0}, "saved by another job: lr was 0.01, is 1.0"),
            ({"rows": 12}, "saved by another job: rows was 24, is 12"),
            ({"steps": 9}, "saved by another job: steps was 6, is 9"),
        ]:
            self.assert_refused(plan, replace(QUIET, **changed), folder, message)

    def test_what_does_not_fit(self):
        plan = parse_plan("pp2 zero1 m2")
        for change, message in [
            (lambda state: state.update(position=0), "position must be a whole number of at least 1"),
            (lambda state: state.update(position=6), "saved after 6 steps, and the run has only 6"),
            (lambda state: state.update(position=2), "saved after 2 steps, but 72 samples"),
            (lambda state: state["data"].update(seed=8), "the data's position: seed was 8, is 7"),
            (lambda state: state["counts"].update(steps=-1), "steps must be a whole number"),
            (lambda state: state["names"]["pp0 tp0 unit0"].reverse(), "names: expected .*, found"),
            (lambda state: state.pop("data"), "not a checkpoint of a grid: KeyError"),
            (lambda state: state["random"].pop("own"), "random state: expected"),
            (lambda state: state["random"]["own"].zero_(), "random state .+own.+ is none that a generator can have"),
            (lambda state: state["random"]["cpu"].zero_(), "random state .+cpu.+ is none that a generator can have"),
            (lambda state: state["counts"].update(steps=10**400), "the optimizer has counted 10+ . 0 of 3 steps"),
            (lambda state: state["counts"].pop("steps"), "not a checkpoint of a grid: KeyError.'steps'"),
            (lambda state: state["job"].update(plan=7), "'int' object has no attribute 'replace'"),
            (lambda state: state["job"].update(plan="fast"), "a plan is written like"),
        ]:
            with self.subTest(message), self.copy(plan) as folder:
                manifest, states = load_sharded(folder, plan.world_size)
                for state in states:
                    change(state)
                save_sharded(states, folder, manifest.step)
                self.assert_refused(plan, QUIET, folder, message)

    def test_a_damaged_one(self):
        plan = parse_plan("pp2 zero1 m2")
        with self.copy(plan) as folder:
            damage.flip_a_bit(folder)
            self.assert_refused(plan, QUIET, folder, "sha256 mismatch")
        self.assert_refused(plan, QUIET, self.folder / "nowhere", "manifest.json: missing")

    @contextmanager
    def copy(self, plan: Plan):
        with tempfile.TemporaryDirectory() as parent:
            yield Path(shutil.copytree(self.saved(plan, QUIET), Path(parent) / "copy"))

    def test_a_checkpoint_of_the_core_loop(self):
        with self.copy(parse_plan("dp2")) as folder:
            save_sharded([{"job": {"seed": 7}}] * 2, folder, 3)
            message = f"{folder}: saved by another training loop, whose job is {{'seed': 7}}: KeyError\\('plan'\\)"
            self.assert_refused(parse_plan("dp2"), QUIET, folder, message)
            save_sharded([{"weights": 7}] * 2, folder, 3)
            self.assert_refused(parse_plan("dp2"), QUIET, folder, "does not say of which job")

    def test_the_core_loop_and_the_grid_know_each_other(self):
        folder, job = self.saved(parse_plan("dp2 zero1"), QUIET), Job(synthetic(7, 2_000), steps=2)

        def fail(mesh):
            with self.assertRaises(CheckpointError) as caught:
                train(mesh.rank, 2, replace(job, resume=folder), MeshComm(mesh))
            return str(caught.exception)

        how = "train_on_grid(..., resume=...) goes on with it, under this plan or one that has another dp and m"
        expected = f"{folder}: saved by a run over a grid, under the plan dp2 pp1 tp1 zero1 m1: {how}"
        self.assertEqual(VirtualCluster(2).run(fail), [expected] * 2)
        with tempfile.TemporaryDirectory() as parent:
            job = replace(job, save_at=(1,), folder=Path(parent))
            VirtualCluster(2).run(lambda mesh: train(mesh.rank, 2, job, MeshComm(mesh)))
            message = "step_1: saved by a run without a plan: it goes on without one .main.py --resume."
            self.assert_refused(parse_plan("dp2 zero1"), QUIET, job.folder / "step_1", message)

    def test_ranks_that_were_told_different_checkpoints(self):
        def fail(mesh):
            with self.assertRaises(ValueError) as caught:
                train_on_grid(MeshComm(mesh), Plan(2), QUIET, resume=f"folder{mesh.rank}")
            return str(caught.exception)

        self.assertEqual(len(set(VirtualCluster(2).run(fail))), 1)


def digest(part: Part) -> list:
    return [unit.data.tolist() for unit in part.optimizer.units] + [
        t.tolist() for own in part.optimizer.state_dict()["state"].values() for t in own.values()
    ]


class TestCosts(Saved):
    def test_no_element_is_saved_twice(self):
        """12 bytes a parameter over all ranks, replicas or not: what several dp ranks hold alike is saved once."""
        for text in ("dp3", "dp2 pp2 zero1 m2"):
            plan = parse_plan(text)
            _, states = load_sharded(self.saved(plan, QUIET), plan.world_size)
            held = sum(t.numel() for state in states for own in state["units"].values() for t in own.values())
            self.assertEqual(held, 3 * 15_328)

    def test_saving_is_not_counted_as_training(self):
        plan = parse_plan("dp2 pp2 zero1 m2")
        self.saved(plan, QUIET)
        plain = run(plan, QUIET)
        for log, other in zip(self.logs[str(plan), QUIET][0], plain, strict=True):
            self.assertEqual([row["sent"] for row in log["rows"]], [row["sent"] for row in other["rows"]])
        self.assertEqual(read_manifest(self.saved(plan, QUIET)).step, SAVED)


if __name__ == "__main__":
    unittest.main()
