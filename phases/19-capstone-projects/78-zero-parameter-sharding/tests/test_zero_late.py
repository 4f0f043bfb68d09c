"""With a network that takes its time: what was launched is there when it has been waited for, and not before."""

import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from mesh_comm import MeshComm
from stage_cases import train
from virtual import VirtualCluster


class LateComm(MeshComm):
    """Launched work begins when somebody waits for it: the latest that a network may be."""

    def _all_reduce(self, x, op):
        return lambda: MeshComm._all_reduce(self, x, op)

    def _reduce_scatter(self, out, x, op):
        return lambda: MeshComm._reduce_scatter(self, out, x, op)

    def _all_gather(self, out, x):
        return lambda: MeshComm._all_gather(self, out, x)

    def _broadcast(self, x, src):
        return lambda: MeshComm._broadcast(self, x, src)


class TestLate(unittest.TestCase):
    def test_what_was_launched_is_waited_for_before_it_is_used(self):
        def rank(mesh, kind, stage, settings):
            return train(kind(mesh), stage, **settings)["params"]

        for stage, settings in ((1, {"overlap": True, "bucket_cap_mb": 2e-4}), (2, {}), (3, {})):
            with self.subTest(stage=stage):
                late, prompt = (VirtualCluster(3).run(rank, kind, stage, settings) for kind in (LateComm, MeshComm))
                for one, two in zip(late, prompt, strict=True):
                    for before, after in zip(one, two, strict=True):
                        for name in before:
                            self.assertTrue(torch.equal(before[name], after[name]), name)


if __name__ == "__main__":
    unittest.main()
