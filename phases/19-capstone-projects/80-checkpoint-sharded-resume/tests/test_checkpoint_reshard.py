"""Saved by N ranks, loaded by M: the concatenation is identical, and every rank reads what it needs and no more."""

import copy
import dataclasses
import itertools
import sys
import tempfile
import threading
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from bitwise import same, small_states
from checkpoint import save_shard, save_sharded
from layout import check_coverage
from manifest import CheckpointError, read_manifest
from mesh_comm import MeshComm
from reshard import Move, check_plan, even_layout, make_plan
from reshard_load import load_resharded, load_resharded_all
from restore import load_into
from storage import CrashingStorage, Storage
from torch import nn
from virtual import VirtualCluster
from zero import ZeroOptimizer

SIZES = (1, 2, 3, 4, 8)
TOTALS = {"a": 1003, "b": 10, "c/d": 1, "e": 7}  # no world size from 2 to 8 divides any of them


def uneven(total, ranks, rank):
    """A cut that is not the usual one: rank r gets r + 1 parts of all."""
    parts = ranks * (ranks + 1) // 2
    bounds = [total * (r * (r + 1) // 2) // parts for r in range(ranks + 1)]
    return bounds[rank], bounds[rank + 1]


def states_of(ranks):
    """Per rank: ranges of four flat buffers, in four dtypes and at several depths, and what all ranks have alike."""
    tied, states = torch.arange(12.0).view(3, 4), []
    for rank in range(ranks):
        ranges = {unit: uneven(total, ranks, rank) for unit, total in TOTALS.items()}

        def part(unit, dtype, scale, ranges=ranges):
            return (torch.arange(TOTALS[unit]) * scale + 1).to(dtype)[slice(*ranges[unit])]

        own = part("e", torch.float32, 1)
        states.append(
            {
                "a": {"master": part("a", torch.float32, 0.001), "exp_avg": part("a", torch.float64, 3)},
                "b": part("b", torch.bfloat16, 2),
                "c": {"d": [part("c/d", torch.int64, 5), {"deep": part("c/d", torch.uint8, 7)}]},
                "e": {"one": own, "same": own},
                "model": {"embed": tied, "head": tied, "flat": tied.view(-1), "empty": torch.empty(0, 3)},
                "steps": torch.tensor(17),
                "betas": (0.9, 0.999),
                "loss": float("nan"),
                "random": {"cpu": torch.arange(4) + 100 * rank, "seed": rank},
                "layout": [
                    {"unit": unit, "start": start, "end": end, "total": TOTALS[unit]}
                    for unit, (start, end) in ranges.items()
                ],
            }
        )
    return states


def concatenated(states):
    """The states' ranges end to end, and the rest of the first."""
    whole = copy.copy(states[0])
    del whole["layout"], whole["random"]
    whole["a"] = {key: torch.cat([s["a"][key] for s in states]) for key in ("master", "exp_avg")}
    whole["b"] = torch.cat([s["b"] for s in states])
    whole["c"] = {
        "d": [
            torch.cat([s["c"]["d"][0] for s in states]),
            {"deep": torch.cat([s["c"]["d"][1]["deep"] for s in states])},
        ]
    }
    whole["e"] = {key: torch.cat([s["e"][key] for s in states]) for key in ("one", "same")}
    return whole


class CountingStorage(Storage):
    """Counts the bytes read, by the thread that reads."""

    def __init__(self):
        self.read_bytes, self.lock_ = {}, threading.Lock()

    def read_into(self, file, target):
        with self.lock_:
            name = threading.current_thread().name
            self.read_bytes[name] = self.read_bytes.get(name, 0) + len(target)
        return super().read_into(file, target)


class Saved(unittest.TestCase):
    """A checkpoint of each number of ranks, made once."""

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.root = Path(temporary.name)
        cls.folders = {n: cls.root / f"of_{n}" for n in SIZES}
        for n, folder in cls.folders.items():
            save_sharded(states_of(n), folder, 10, storage=CrashingStorage())

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name) / "step_10"

    def save(self, states):
        save_sharded(states, self.folder, 10, storage=CrashingStorage())

    def refuse(self, *messages, world_size=3, **options):
        with self.assertRaises(CheckpointError) as caught:
            load_resharded_all(self.folder, world_size, **options)
        for message in messages:
            self.assertIn(message, str(caught.exception))
        return str(caught.exception)


class Matrix(Saved):
    def check(self, n, m, states, layouts):
        self.assertTrue(same(concatenated(states), concatenated(states_of(n))), "the concatenation differs")
        for rank, state in enumerate(states):
            with self.subTest(rank=rank):
                self.assertEqual(state["layout"], layouts[rank])
                expected = states_of(m)[0].keys()
                self.assertEqual(list(state), list(expected))
                self.assertTrue(same(state["random"], [s["random"] for s in states_of(n)]))
                self.assert_tied(state["model"]["embed"], state["model"]["head"], state["model"]["flat"])
                if state["e"]["one"].numel():
                    self.assert_tied(state["e"]["one"], state["e"]["same"])
                for unit in ("a", "b", "e"):
                    for tensor in state[unit].values() if isinstance(state[unit], dict) else [state[unit]]:
                        held = tensor.numel() * tensor.element_size()
                        self.assertEqual(tensor.untyped_storage().nbytes(), held, "a view of something larger")

    def assert_tied(self, *tensors):
        self.assertEqual(len({tensor.data_ptr() for tensor in tensors}), 1, "not tied")

    def test_every_n_and_m_in_one_process(self):
        for n, m in itertools.product(SIZES, SIZES):
            with self.subTest(n=n, m=m):
                layouts = [even_layout([s["layout"] for s in states_of(n)], m, rank) for rank in range(m)]
                self.check(n, m, load_resharded_all(self.folders[n], m, per_rank=["random"]), layouts)

    def test_every_n_and_m_on_virtual_ranks_with_layouts_of_their_own(self):
        for n, m in itertools.product(SIZES, SIZES):
            with self.subTest(n=n, m=m):
                layouts = [state["layout"] for state in states_of(m)]

                def rank_main(mesh, n=n, layouts=layouts):
                    comm = MeshComm(mesh)
                    options = {"layout": layouts[mesh.rank], "per_rank": ["random"]}
                    return load_resharded(self.folders[n], comm, **options), comm.counters

                states, counters = zip(*VirtualCluster(m).run(rank_main), strict=True)
                self.check(n, m, list(states), layouts)
                self.assertEqual({count.control_calls for count in counters}, {3})
                self.assertEqual({sum(count.bytes.values()) for count in counters}, {0}, "tensors crossed the network")

    def test_there_and_back_are_the_same_files(self):
        """8 -> 3 -> 8: with the layouts of the first, the second checkpoint has the first one's bytes."""
        first, via, back = (self.folder / name for name in ("first", "via", "back"))
        states = small_states(8)
        for state in states:
            state["own"], state["steps"] = torch.tensor([4.5]), 9
        save_sharded(states, first, 10, storage=CrashingStorage())
        save_sharded(load_resharded_all(first, 3), via, 10, storage=CrashingStorage())
        layouts = [state["layout"] for state in states]
        save_sharded(load_resharded_all(via, 8, layouts=layouts), back, 10, storage=CrashingStorage())
        self.assertEqual(read_manifest(back), read_manifest(first))


class Cost(Saved):
    def test_each_rank_reads_its_share_of_the_hashing_and_its_own_ranges(self):
        for n, m in [(4, 8), (8, 4), (3, 2), (1, 8)]:
            with self.subTest(n=n, m=m):
                disk = CountingStorage()

                def rank_main(mesh, n=n, disk=disk):
                    state = load_resharded(self.folders[n], MeshComm(mesh), per_rank=["random"], storage=disk)
                    distinct = {t.data_ptr(): t.numel() * t.element_size() for t in tensors(state)}
                    return sum(distinct.values())

                held = VirtualCluster(m).run(rank_main)
                shards = read_manifest(self.folders[n]).shards
                headers = sum(header_bytes(self.folders[n] / shard.path) for shard in shards)
                for rank in range(m):
                    hashed = sum(shards[source].size for source in range(rank, n, m))
                    self.assertEqual(disk.read_bytes[f"rank {rank}"], hashed + headers + held[rank])

    def test_what_is_alike_is_not_read_from_one_file_by_all(self):
        class ByFile(CountingStorage):
            def read_into(self, file, target):
                self.read_bytes[Path(file.name).name] = self.read_bytes.get(Path(file.name).name, 0) + len(target)
                return super().read_into(file, target)

        folder, disk = self.folder / "alike", ByFile()
        save_sharded([{"w": torch.arange(1000.0)}] * 2, folder, 10, storage=CrashingStorage())
        self.assertTrue(same(load_resharded_all(folder, 4, storage=disk), [{"w": torch.arange(1000.0)}] * 4))
        self.assertEqual(disk.read_bytes["rank0.bin"], disk.read_bytes["rank1.bin"])


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def header_bytes(path):
    return 16 + int.from_bytes(path.read_bytes()[8:16], "little")


class Refused(Saved):
    def test_what_is_not_the_same_on_all_ranks_is_named_each(self):
        states = small_states(3)
        for rank, state in enumerate(states):
            state["own"] = torch.tensor([1.0])
            state["steps"] = 5 if rank < 2 else True
            state["settings"] = {"lr": 0.1, "name": "x"} if rank != 1 else {"lr": 0.2, "extra": 1, "name": "x"}
            state["weight"] = torch.full((2,), float(rank == 2))
            state["shape"] = torch.zeros(2, 2) if rank else torch.zeros(4)
            state["kind"] = [1] if rank else {"a": 1}
            state["flat"] = state["flat"].double() if rank == 2 else state["flat"]
            state["zero"] = -0.0 if rank else 0.0
        self.save(states)
        message = self.refuse("steps: rank 0 has int, rank 2 has bool")
        for part in [
            "settings/lr: rank 0 has 0.1, rank 1 has 0.2 (name it in per_rank)",
            "missing key settings/extra on rank 0, 2",
            "weight: rank 0 has values with hash",
            "shape: rank 0 is [4], rank 1 is [2, 2]",
            "kind: rank 0 has dict, rank 1 has list",
            "flat: rank 0 is torch.float32, rank 2 is torch.float64",
            "zero: rank 0 has 0.0, rank 1 has -0.0",
        ]:
            self.assertIn(part, message)
        self.refuse("per_rank: there is no 'nothing'", per_rank=["nothing", "own"])

    def test_long_values_are_compared_to_their_end(self):
        for long in ("x" * 80, 10**80, ["y" * 80]):
            different = [[*long[:-1], "z"] if isinstance(long, list) else long, long + long]
            self.save([{"setting": value} for value in different])
            message = self.refuse("setting", "(name it in per_rank)")
            self.assertLess(len(message), 250)
        for first, second in [("x" * 80 + "1", "x" * 80 + "2"), (10**80, 10**80 + 1)]:
            self.save([{"setting": first}, {"setting": second}])
            self.refuse("setting: rank 0 has ", "(name it in per_rank)")

    def test_arguments(self):
        self.save([{"own": rank} for rank in range(2)])
        for world_size in (0, -1, "2", 2.0, True):
            self.refuse("world_size: expected a whole number of at least 1", world_size=world_size)
        for layouts in ([], [[]], 3):
            self.refuse("layouts: expected a list of 3, one a new rank", layouts=layouts)
        for per_rank in ("own", None, 3, ["own", 3], [None]):
            self.refuse("per_rank: expected a list of strings, found ", per_rank=per_rank)
        loaded = load_resharded_all(self.folder, 3, per_rank=(key for key in ["own"]))
        self.assertEqual([state["own"] for state in loaded], [[0, 1]] * 3)

    def test_layouts_that_do_not_fit(self):
        states = small_states(2)
        for state in states:
            state["own"], state["steps"] = torch.ones(1), 3
        self.save(states)

        def item(**changes):
            return {"unit": "flat", "start": 0, "end": 10, "total": 10, **changes}

        for layout, message in [
            ([], "missing unit 'flat'"),
            ([item(unit="x"), item()], "unexpected unit 'x'"),
            ([item(total=11)], "'flat' has 10 elements in the checkpoint, 11 here"),
            ([item(end=9, total=9)], "'flat' has 10 elements in the checkpoint, 9 here"),
            ([item(end=9)], "layout of 'flat': no rank holds elements [9, 10)"),
            ([item(start=1)], "layout of 'flat': gap at element 0"),
            ([item(start=0, end=5), item(start=5)], "a unit twice"),
            ([item(start=True)], "layout[0].start"),
            (3, "layout: expected a list"),
        ]:
            with self.subTest(message):
                self.refuse(message, world_size=1, layouts=[layout])

    def test_a_range_must_have_one_dimension(self):
        layout = [{"unit": "w", "start": 0, "end": 4, "total": 4}]
        self.save([{"w": torch.ones(2, 2), "layout": layout}])
        self.refuse("w: a range must have one dimension, rank 0's is (2, 2)")

    def test_one_damaged_file_is_refused_on_every_rank_before_anything_is_read(self):
        states = small_states(4)
        for state in states:
            state["own"], state["steps"] = torch.ones(1), 3
        self.save(states)
        for name, at in [("rank2.bin", -1), ("rank3.bin", 20)]:
            data = bytearray((self.folder / name).read_bytes())
            data[at] ^= 1
            (self.folder / name).write_bytes(data)

        def rank_main(mesh):
            try:
                return load_resharded(self.folder, MeshComm(mesh))
            except CheckpointError as error:
                return str(error)

        for m in (1, 2, 3, 8):
            errors = VirtualCluster(m).run(rank_main)
            self.assertEqual(len(set(errors)), 1)
            self.assertRegex(errors[0], "rank[23].bin: sha256 mismatch")

    def test_missing_files_other_folders_and_disagreement(self):
        states = small_states(2)
        for state in states:
            state["own"], state["steps"] = torch.ones(1), 3
        self.save(states)
        other = self.folder.parent / "other"
        save_sharded(states, other, 11, storage=CrashingStorage())

        def rank_main(mesh, folders, keys):
            try:
                return load_resharded(folders[mesh.rank], MeshComm(mesh), per_rank=keys[mesh.rank])
            except CheckpointError as error:
                return str(error)

        for folders, keys, message in [
            ([self.folder, other], [[], []], "the ranks read different manifests"),
            ([self.folder] * 2, [[], ["own"]], "per_rank: the ranks disagree: [[], ['own']]"),
            ([self.folder] * 2, [[], "own"], "rank 1 failed: per_rank: expected a list of strings, found 'own'"),
            ([self.folder, self.folder / "nowhere"], [[], []], "rank 1 failed: "),
        ]:
            errors = VirtualCluster(2).run(rank_main, folders, keys)
            self.assertEqual(len(set(errors)), 1, errors)
            self.assertIn(message, errors[0])
        (self.folder / "rank1.bin").unlink()
        self.refuse("rank1.bin: missing", world_size=1)

    def test_what_does_not_fit_the_live_state_is_listed(self):
        states = small_states(2)
        for state in states:
            state["own"], state["steps"] = torch.ones(1), 3
        self.save(states)
        loaded = load_resharded_all(self.folder, 1)[0]
        live = {"flat": torch.zeros(9), "steps": 0, "new": 1, "layout": loaded["layout"]}
        with self.assertRaises(CheckpointError) as caught:
            load_into(live, loaded)
        for message in ("flat: expected torch.float32 [9]", "missing key new", "unexpected key own"):
            self.assertIn(message, str(caught.exception))
        self.assertTrue(same(live["flat"], torch.zeros(9)))


class Plans(unittest.TestCase):
    def layouts(self, total, ranks):
        return [[{"unit": "u", "start": s, "end": e, "total": total}] for s, e in
                (uneven(total, ranks, rank) for rank in range(ranks))]  # fmt: skip

    def test_plans_by_hand(self):
        saved = [[{"unit": "u", "start": s, "end": e, "total": 10}] for s, e in ((0, 3), (3, 6), (6, 8), (8, 10))]
        self.assertEqual(
            make_plan(saved, [{"unit": "u", "start": 5, "end": 9, "total": 10}]),
            [Move("u", 1, 2, 3, 0, 1), Move("u", 2, 0, 2, 1, 3), Move("u", 3, 0, 1, 3, 4)],
        )
        self.assertEqual(make_plan(saved, [{"unit": "u", "start": 10, "end": 10, "total": 10}]), [])
        self.assertEqual(Move("u", 1, 2, 3, 0, 1).row(), ("u", 1, "[2, 3)", "[0, 1)", 1))

    def test_every_plan_is_whole_and_has_few_moves(self):
        for total, n, m in itertools.product((0, 1, 7, 10, 1003), SIZES, SIZES):
            saved, moves = self.layouts(total, n), 0
            wanted = [even_layout(saved, m, rank) for rank in range(m)]
            check_coverage(wanted)
            for each in wanted:
                plan = make_plan(saved, each)
                check_plan(plan, saved, each)
                moves += len(plan)
            self.assertLessEqual(moves, max(0, n + m - 1), "at most one move for each cut of either")

    def test_a_wrong_plan_is_refused(self):
        saved = self.layouts(1003, 4)
        wanted = even_layout(saved, 3, 1)
        plan = make_plan(saved, wanted)
        check_plan(plan, saved, wanted)
        self.assertGreater(len(plan), 1)
        first = plan[0]
        for wrong in [
            plan[1:],
            plan[:-1],
            [*plan, first],
            [dataclasses.replace(first, source=(first.source + 1) % 4), *plan[1:]],
            [dataclasses.replace(first, source_start=first.source_start - 1), *plan[1:]],
            [dataclasses.replace(first, end=first.end - 1, source_end=first.source_end - 1), *plan[1:]],
            [dataclasses.replace(first, start=first.start + 1), *plan[1:]],
            [dataclasses.replace(first, source_end=first.source_end + 10**6, end=first.end + 10**6), *plan[1:]],
            [],
        ]:
            with self.assertRaises(CheckpointError):
                check_plan(wrong, saved, wanted)


class Model(nn.Module):
    """A tied pair, a frozen layer and a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm, self.head = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)) * self.scale)


def train(mesh, folder, steps, resume):
    """Train on data that does not depend on the number of ranks; save, or go on from what was saved."""
    comm, model = MeshComm(mesh), Model()
    optimizer = ZeroOptimizer(model, mesh.world_size, mesh.rank, 0.01, comm=comm)
    prefix = "optimizer/state/"
    layout = [item | {"unit": prefix + item["unit"]} for item in optimizer.layout()]
    if resume:
        loaded = load_resharded(folder, comm, layout=layout, per_rank=["optimizer/layout"])
        loaded["optimizer"]["layout"] = optimizer.layout()
        optimizer.load_state_dict(loaded["optimizer"])
    for _ in range(steps):
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        save_shard({"optimizer": optimizer.state_dict(), "layout": layout}, folder, steps, comm)
    return [p.detach().clone() for p in model.parameters()]


class Zero(unittest.TestCase):
    def test_training_goes_on_with_another_number_of_ranks(self):
        """All ranks see the same data, so that their mean gradient, and with it every step, is that of one rank."""
        with tempfile.TemporaryDirectory() as parent:
            expected = VirtualCluster(1).run(train, Path(parent) / "whole", 5, False)[0]
            for n, m in [(4, 8), (8, 4), (4, 3), (1, 2), (2, 1)]:
                with self.subTest(n=n, m=m):
                    folder = Path(parent) / f"{n}to{m}"
                    VirtualCluster(n).run(train, folder, 3, False)
                    for params in VirtualCluster(m).run(train, folder, 2, True):
                        for found, right in zip(params, expected, strict=True):
                            torch.testing.assert_close(found, right, rtol=0, atol=2e-6)


if __name__ == "__main__":
    unittest.main()
