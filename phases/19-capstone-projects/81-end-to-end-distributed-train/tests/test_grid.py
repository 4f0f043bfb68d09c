import sys
import unittest
from itertools import product
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from comm import TorchComm
from grid import AXES, Grid
from mesh_comm import MeshComm
from ranks import run_ranks
from virtual import VirtualCluster

SHAPES = [s for s in product(range(1, 9), repeat=3) if s[0] * s[1] * s[2] in (1, 2, 3, 4, 6, 8)]


def look(comm, dp, pp, tp):
    """What a rank's grid says of it, and who really answers in each of its groups."""
    grid = Grid(comm, dp, pp, tp)
    members = {axis: getattr(grid, axis).agree(grid.rank) for axis in AXES}
    inside = {axis: (getattr(grid, axis).rank, getattr(grid, axis).world_size) for axis in AXES}
    total = {}
    for axis in AXES:
        x = torch.tensor([2**grid.rank])
        getattr(grid, axis).all_reduce(x)
        total[axis] = x.item()
    return {"rank": grid.rank, "place": grid.place, "members": members, "inside": inside, "total": total}


def look_in_a_process(rank, world_size, dp, pp, tp):
    return look(TorchComm(), dp, pp, tp)


class TestGrid(unittest.TestCase):
    def check(self, found, dp, pp, tp):
        for rank, seen in enumerate(found):
            d, p, t = rank // (pp * tp), rank // tp % pp, rank % tp  # tensor parallel ranks are neighbours
            self.assertEqual(seen["place"], {"dp": d, "pp": p, "tp": t})
            expected = {
                "dp": [(i * pp + p) * tp + t for i in range(dp)],
                "pp": [(d * pp + i) * tp + t for i in range(pp)],
                "tp": [(d * pp + p) * tp + i for i in range(tp)],
            }
            self.assertEqual(seen["members"], expected)
            self.assertEqual(seen["inside"], {"dp": (d, dp), "pp": (p, pp), "tp": (t, tp)})
            self.assertEqual(seen["total"], {axis: sum(2**r for r in ranks) for axis, ranks in expected.items()})

    def test_every_shape_of_up_to_8_ranks(self):
        for shape in SHAPES:
            with self.subTest(shape=shape):
                cluster = VirtualCluster(shape[0] * shape[1] * shape[2], seed=sum(shape))
                self.check(cluster.run(lambda mesh, shape=shape: look(MeshComm(mesh), *shape)), *shape)

    def test_processes(self):
        self.check(run_ranks(look_in_a_process, 8, 2, 2, 2, timeout=120), 2, 2, 2)

    def test_a_grid_of_one_axis(self):
        def run(mesh):
            grid = Grid(MeshComm(mesh), dp=3)
            return grid.dp.world_size, grid.pp.world_size, grid.tp.world_size

        self.assertEqual(VirtualCluster(3).run(run), [(3, 1, 1)] * 3)


def split_rows(rank, world_size):
    """In a grid of 2 x 3 x 1: who is with this rank when the ends of each pipeline split from its middle?"""
    grid = Grid(TorchComm(), 2, 3, 1)
    return grid.split_row("pp", int(grid.place["pp"] == 1)).agree(rank)


class TestSplitRow(unittest.TestCase):
    def test_rows_that_are_split_at_the_same_time_do_not_wait_for_each_other(self):
        expected = [[0, 2], [1], [0, 2], [3, 5], [4], [3, 5]]
        self.assertEqual(run_ranks(split_rows, 6, timeout=120), expected)

    def test_color(self):
        def run(mesh):
            with self.assertRaisesRegex(ValueError, "color must be a whole number of at least 0"):
                Grid(MeshComm(mesh), 2).split_row("dp", -1)

        VirtualCluster(2).run(run)


class TestRefusals(unittest.TestCase):
    def refused(self, message, world_size, *sizes):
        def run(mesh):
            comm = MeshComm(mesh)
            with self.assertRaisesRegex(ValueError, message):
                Grid(comm, *sizes)
            return comm.counters.control_calls

        self.assertEqual(VirtualCluster(world_size).run(run), [0] * world_size)  # a local fault: nobody was asked

    def test_the_product_is_not_the_number_of_ranks(self):
        self.refused("dp 2 x pp 2 x tp 1 is 4 ranks, but there are 3", 3, 2, 2, 1)
        self.refused("dp 1 x pp 1 x tp 1 is 1 ranks, but there are 2", 2)

    def test_sizes_that_are_none(self):
        for axis, sizes in (("dp", (0, 1, 1)), ("pp", (1, -1, 1)), ("tp", (1, 1, True)), ("dp", (1.0, 1, 1))):
            self.refused(f"{axis} must be a whole number of at least 1", 1, *sizes)


if __name__ == "__main__":
    unittest.main()
