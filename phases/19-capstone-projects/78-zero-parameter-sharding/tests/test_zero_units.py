import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import gc
import weakref
from functools import partial

import torch
from arena import Arena, why_not
from comm import TorchComm
from flat import gather_flat_params
from groups import decay_groups
from ranks import run_ranks
from shared_comm import SharedComm
from torch import nn
from zero_cases import Odd, copy_of, optimizer_for, put_gradients, refusals, same, virtual

CAP = 64 / 2**20  # 64 bytes, 16 elements: `Odd` is left.weight (25), first.bias, first.weight and scale (21 do not fit)
UNITS = [["left.weight"], ["first.bias"], ["scale", "first.weight"]]


def batch(step, rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train(comm, steps=4, micro=1, resume=False, **settings):
    """Be one rank; returns the parameters after each step and the collectives of each step, in order."""
    module = Odd(seed=comm.rank)
    optimizer = optimizer_for(module, comm, **settings, groups=decay_groups(module, 0.1))
    log = {"params": [], "order": [], "names": [[slot.name for slot in unit.slots] for unit in optimizer.units]}
    for step in range(steps):
        with optimizer.no_sync():
            for part in range(micro - 1):
                module(batch(step + 10 * part, comm.rank)).square().sum().backward()
        module(batch(step, comm.rank)).square().sum().backward()
        log["after backward"] = comm.counters.calls["reduce_scatter"]
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        log["params"].append(gather_flat_params(module))
        if resume and step == 1:
            state = copy_of(optimizer.state_dict())
            module = Odd(seed=5)
            optimizer = optimizer_for(module, comm, **settings, groups=decay_groups(module, 0.1))
            optimizer.load_state_dict(state)
    return log | {"calls": dict(comm.counters.calls), "shard_bytes": optimizer.shard_bytes()}


class TestUnits(unittest.TestCase):
    """Units and overlap change in how many calls gradients travel, and when; not what is trained."""

    def test_units_of_16_elements_train_as_one_does_also_after_a_resume(self):
        """Within rounding: the norm is summed in another order, and so are gradients of more than 2 ranks."""
        for n in (1, 2, 3):
            expected = virtual(n, train)[0]["params"]
            for settings in ({"bucket_cap_mb": CAP}, {"bucket_cap_mb": CAP, "overlap": True}, {"overlap": True}):
                for resume in (False, True):
                    with self.subTest(n=n, resume=resume, **settings):
                        for log in virtual(n, partial(train, resume=resume, **settings)):
                            torch.testing.assert_close(log["params"], expected, rtol=1e-6, atol=1e-7)

    def test_all_ranks_hold_the_same_bits_and_follow_one_rank(self):
        for n in (2, 3, 4, 8):
            logs = virtual(n, lambda comm: train(comm, bucket_cap_mb=CAP, overlap=True))
            late = virtual(n, lambda comm: train(comm, bucket_cap_mb=CAP))
            for log in logs:
                self.assertTrue(same(log["params"], logs[0]["params"]))
                self.assertTrue(same(log["params"], late[0]["params"]))  # when units leave changes nothing at all

    def test_one_collective_a_unit_and_with_overlap_all_leave_during_backward(self):
        for overlap in (False, True):
            for log in virtual(3, lambda comm, o=overlap: train(comm, 4, bucket_cap_mb=CAP, overlap=o)):
                self.assertEqual(log["names"], UNITS)
                self.assertEqual(log["calls"], {"reduce_scatter": 4 * 3, "all_gather": 4 * 3, "all_reduce": 4} | sync())
                self.assertEqual(log["after backward"], 12 if overlap else 9)
                self.assertEqual(log["shard_bytes"], 12 * (9 + 2 + 6))  # a sum over units: ceil of 25, 5, 16 by 3

    def test_accumulation_under_no_sync_communicates_once(self):
        logs = virtual(2, lambda comm: train(comm, micro=3, bucket_cap_mb=CAP, overlap=True))
        plain = virtual(2, lambda comm: train(comm, micro=3, bucket_cap_mb=CAP))
        self.assertEqual(logs[0]["calls"]["reduce_scatter"], 4 * 3)
        self.assertTrue(same(logs[0]["params"], plain[0]["params"]))

    def test_a_second_backward_outside_no_sync_is_refused(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, overlap=True)
            module(batch(0, comm.rank)).sum().backward()
            with self.assertRaisesRegex(RuntimeError, "all backwards but the last go into no_sync"):
                module(batch(1, comm.rank)).sum().backward()
            optimizer.zero_grad()
            module(batch(2, comm.rank)).sum().backward()
            optimizer.step()
            return optimizer.steps

        self.assertEqual(virtual(2, worker), [1, 1])

    def test_a_parameter_without_a_gradient_leaves_with_the_step(self):
        def worker(comm, overlap):
            module = Odd()
            optimizer = optimizer_for(module, comm, bucket_cap_mb=CAP, overlap=overlap)
            counts = []
            for step in range(2):
                loss = module.scale.square() if comm.rank else module(batch(step, 0)).sum()
                loss.backward()
                counts.append(comm.counters.calls["reduce_scatter"])
                optimizer.step()
                optimizer.zero_grad()
            return counts, gather_flat_params(module)

        late, early = virtual(1, worker, False), virtual(1, worker, True)
        self.assertTrue(torch.equal(late[0][1], early[0][1]))
        self.assertEqual((late[0][0], early[0][0]), ([0, 3], [3, 6]))

    def test_frozen_units_are_not_sent(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, bucket_cap_mb=CAP, overlap=True)
            module.left.weight.requires_grad_(False)
            before = comm.counters.bytes.copy()
            put_gradients(module, comm.rank, 0)
            module(batch(0, comm.rank)).sum().backward()
            optimizer.step()
            return dict(comm.counters.bytes - before)

        sent = 4 * (6 + 18)  # first.bias, and scale with first.weight, each padded for 3 ranks
        expected = {"reduce_scatter": sent, "all_reduce": 4 * 4, "all_gather": sent}
        self.assertEqual(virtual(3, worker), [expected] * 3)

    def test_the_optimizer_can_go_before_the_module(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, overlap=True)
            gone = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            module(batch(0, 0)).sum().backward()
            return gone() is None

        self.assertEqual(virtual(1, worker), [True])

    def test_bad_caps(self):
        for cap in (0, -1, float("nan"), "25", True):
            messages = refusals(2, lambda comm, cap=cap: optimizer_for(Odd(), comm, bucket_cap_mb=cap))
            self.assertTrue(all("bucket_cap_mb must be a number above 0" in str(m) for m in messages), messages)


def sync():
    """What making the models equal costs: a broadcast."""
    return {"broadcast": 1}


def everywhere(rank, world_size, arena):
    """Train over gloo and in shared memory; also what the arena's heap holds."""
    gloo = TorchComm()
    shared = SharedComm(arena, gloo)
    logs = [train(gloo, bucket_cap_mb=CAP, overlap=True), train(shared, bucket_cap_mb=CAP, overlap=True)]
    module = nn.Linear(3, 2)
    unit = optimizer_for(module, shared).units[0]
    start = arena.heap(rank).data_ptr()
    return [log["params"] for log in logs], all(
        start <= t.data_ptr() < start + arena.heap_bytes for t in (unit.data, unit.grad)
    )


@unittest.skipIf(why_not(), why_not())
class TestSharedMemory(unittest.TestCase):
    def test_over_shared_memory_every_bit_is_gloos(self):
        for n in (2, 3):
            results = run_ranks(everywhere, n, Arena(n, heap_bytes=1 << 14), timeout=60)
            for (gloo, shared), inside in results:
                self.assertTrue(inside)
                self.assertTrue(same(shared, results[0][0][1]))
                if n == 2:  # with more, gloo's reduce-scatter has an order of its own
                    self.assertTrue(same(gloo, shared))
                torch.testing.assert_close(gloo, shared, rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    unittest.main()
