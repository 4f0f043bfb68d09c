import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from unittest import mock

import agreement
import torch
from adam import AdamSettings
from agreement import Agreement
from comm import TorchComm
from ranks import run_ranks
from torch import nn
from zero_cases import Odd, optimizer_for, put_gradients, refusals, same, snapshot, virtual

INF = float("inf")


class Fork(nn.Module):
    """Three blocks of one size; the loss is of one of them, as the caller says."""

    def __init__(self, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, way: int) -> torch.Tensor:
        """Return the sum of what one block makes of a batch. All run forward, but backward comes to one only."""
        return [each(torch.arange(8.0).view(2, 4)) for each in self.ways][way].square().sum()


def fork_in(comm, clip, stage=3):
    """Be one rank: a good step, then one in which the last rank goes another way; returns what the ranks say of it."""
    module = Fork()
    optimizer = optimizer_for(module, comm, stage=stage)

    def step(way):
        module(way).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(1.0, clip)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with optimizer.gathered():
        before = snapshot(module, optimizer)
    messages = []
    for _ in range(2):  # once they have parted, no step is taken any more
        try:
            step(2 if comm.rank == comm.world_size - 1 else 1)
        except ValueError as error:
            messages.append(str(error))
    state = optimizer.state_dict()
    with optimizer.gathered():
        unchanged = same(before, snapshot(module, optimizer))
    optimizer.load_state_dict(state)
    step(1)
    return messages, unchanged, optimizer.steps


def fork_in_processes(rank, world_size, clip):
    return fork_in(TorchComm(), clip)


def message(n: int) -> str:
    others = ", ".join(map(str, range(n - 1)))
    words = f'rank {others} has "the unit of ways.1.weight"; rank {n - 1} has "the unit of ways.2.weight"'
    return f"ranks disagree on a step: gather 12: {words}"


class TestGathers(unittest.TestCase):
    """Rank N-1 gathers one block while the others gather another of the same size. Nothing else fails then."""

    def test_all_ranks_refuse_the_step_and_say_which_gather(self):
        for n in (2, 3, 5):
            for clip in (None, 2.0, INF):
                with self.subTest(n=n, clip=clip):
                    for messages, unchanged, steps in virtual(n, fork_in, clip):
                        self.assertEqual(messages, [message(n)] * 2)
                        self.assertTrue(unchanged)
                        self.assertEqual(steps, 2)

    def test_processes_too(self):
        for n, clip in ((2, None), (3, 2.0)):
            with self.subTest(n=n, clip=clip):
                for messages, unchanged, steps in run_ranks(fork_in_processes, n, clip, timeout=60):
                    self.assertEqual((messages, unchanged, steps), ([message(n)] * 2, True, 2))

    def test_who_does_not_wait_skips_and_says_so_later(self):
        """As on a GPU, where a flag is read with every second step here."""

        def worker(comm):
            module = Fork()
            optimizer = optimizer_for(module, comm, stage=3, fused=True, max_skipped=2)
            optimizer._lazy = True
            counts, error = [], None
            for step in range(4):
                module(1 + comm.rank if step else 0).backward()
                try:
                    optimizer.step()
                except ValueError as raised:
                    error = step, str(raised)
                optimizer.zero_grad()
                counts.append((optimizer.steps, optimizer.skipped_steps))
                if error:
                    return counts, error

        words = 'rank 0 has "the unit of ways.1.weight"; rank 1 has "the unit of ways.2.weight"'
        error = 1, f"ranks disagree on a step: gather 9: {words}"
        self.assertEqual(virtual(2, worker), [([(1, 0), (1, 1)], error)] * 2)

    def test_differences_that_nobody_remembers(self):
        def worker(comm):
            notes = Agreement(comm, [])
            for number in (comm.rank, 7, 7, 7):
                notes.note(number)
            notes.reduce(torch.zeros(()), "sum", [])
            notes.insist([])

        with mock.patch.object(agreement, "REMEMBERED", 3):
            words = "ranks disagree on a step: not in their settings, nor in the last 3 gathers"
            self.assertEqual(refusals(2, worker), [words] * 2)

    def test_one_rank_gathered_more(self):
        def worker(comm):
            optimizer = optimizer_for(Fork(), comm, stage=3)
            notes = Agreement(comm, optimizer.units)
            for number in (2, 1, 0)[: 2 + comm.rank]:
                notes.note(number)
            notes.reduce(torch.zeros(()), "max", [])
            notes.insist([])

        words = 'gather 3: rank 0 has "nothing"; rank 1 has "the unit of ways.2.weight"'
        self.assertEqual(refusals(2, worker), [f"ranks disagree on a step: {words}"] * 2)

    def test_the_order_counts_and_the_value_is_reduced_as_ever(self):
        def worker(comm, orders, op, dtype):
            notes = Agreement(comm, [])
            for number in orders[comm.rank]:
                notes.note(number)
            value = notes.reduce(torch.tensor(0.5 + comm.rank, dtype=dtype), op, [AdamSettings(1)])
            return value.item(), value.dtype, tuple(value.shape), notes.differs.item()

        cases = {
            ((1, 2), (1, 2), (1, 2)): 0,
            ((1, 2), (2, 1), (1, 2)): 1,
            ((1, 2), (12,), (1, 2)): 1,
            ((), (), (0,)): 1,
        }
        for orders, differs in cases.items():
            for op, expected in (("sum", 4.5), ("max", 2.5)):
                for dtype in (torch.float32, torch.float64):
                    with self.subTest(orders=orders, op=op, dtype=dtype):
                        found = virtual(3, worker, orders, op, dtype)
                        self.assertEqual(found, [(expected, dtype, (1,), differs)] * 3)

    def test_checksums_are_exact_in_a_sum(self):
        """Of many pairs of orders, none that differ have one checksum, and none that are equal two."""

        def worker(comm, other):
            notes, found = Agreement(comm, []), []
            for number in range(200):
                notes.note(number + 1000 * (other and comm.rank == 1))
                notes.reduce(torch.ones(()), "sum", [])
                found.append(notes.differs.item())
            return found

        for other in (False, True):
            self.assertEqual(virtual(2, worker, other), [[float(other)] * 200] * 2)


class TestSettings(unittest.TestCase):
    """A schedule that runs on one rank only, or more often there, gives each shard steps of another size."""

    def drift(self, n, change, clip=None, **settings):
        """Change a group's settings before the second of four steps, back after it. Returns what each rank was told."""

        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, groups=[{"params": [module.scale]}], **settings)
            errors, group = [], optimizer.param_groups[1]
            kept = dict(group)
            for step in range(4):
                with optimizer.gathered():
                    before = snapshot(module, optimizer)
                put_gradients(module, comm.rank, step)
                if step == 1:
                    change(group, comm.rank)
                for _ in range(2 if step == 1 else 1):
                    if clip:
                        optimizer.clip_grad_norm_(1.0, clip)
                    try:
                        optimizer.step()
                    except ValueError as error:
                        with optimizer.gathered():
                            errors.append((str(error), same(before, snapshot(module, optimizer))))
                        group.update(kept)  # the gradients are still there: the step is taken now
            return errors, optimizer.steps, optimizer.skipped_steps

        return virtual(n, worker)

    def test_each_setting_in_each_stage(self):
        changes = {
            "lr": (dict(lr=0.02), "lr of group 1: rank 0, 1 has 0.01; rank 2 has 0.02"),
            "one bit of lr": (dict(lr=0.010000000000000002), "lr of group 1: rank 0, 1 has 0.01; rank 2 has 0.01000"),
            "betas": (dict(betas=(0.9, 0.99)), "betas of group 1: rank 0, 1 has [0.9, 0.999]; rank 2 has [0.9, 0.99]"),
            "eps": (dict(eps=1e-6), "eps of group 1: rank 0, 1 has 1e-08; rank 2 has 1e-06"),
            "decay": (dict(weight_decay=0.1), "weight_decay of group 1: rank 0, 1 has 0.0; rank 2 has 0.1"),
        }
        for stage in (1, 2, 3):
            for name, (changed, words) in changes.items():
                found = self.drift(3, lambda group, rank: rank == 2 and group.update(changed), stage=stage)  # noqa: B023
                with self.subTest(stage=stage, name=name):
                    for errors, steps, skipped in found:
                        self.assertEqual([unchanged for _, unchanged in errors], [True])
                        self.assertTrue(errors[0][0].startswith(f"ranks disagree on a step: {words}"), errors)
                        self.assertEqual((steps, skipped), (4, 0))

    def test_with_the_norm(self):
        for clip in (2.0, INF):
            for errors, *counts in self.drift(2, lambda group, rank: rank and group.update(lr=0.5), clip=clip):
                self.assertEqual(
                    errors, [("ranks disagree on a step: lr of group 1: rank 0 has 0.01; rank 1 has 0.5", True)]
                )
                self.assertEqual(counts, [4, 0])

    def test_equal_numbers_are_equal_however_they_are_written(self):
        def write(group, rank):
            group.update(lr=1 if rank else 1.0, betas=[0.9, 0.999] if rank else (0.9, 0.999), weight_decay=0)

        for errors, *counts in self.drift(2, write):
            self.assertEqual((errors, counts), ([], [5, 0]))

    def test_who_does_not_wait_skips(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, fused=True, max_skipped=3)
            optimizer._lazy = True
            kept = []
            for step in range(2):
                before = snapshot(module, optimizer)
                put_gradients(module, comm.rank, step)
                optimizer.param_groups[0]["lr"] = 0.25 if step == 1 and comm.rank else 0.5
                optimizer.step()
                kept.append(same(before, snapshot(module, optimizer)))
            return kept, optimizer.steps, optimizer.skipped_steps

        self.assertEqual(virtual(2, worker), [([False, True], 1, 1)] * 2)


if __name__ == "__main__":
    unittest.main()
