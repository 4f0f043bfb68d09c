import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from comm import TorchComm
from counter import StepCounter, not_finite
from flat import gather_flat_params
from ranks import run_ranks
from zero_cases import Flat, Odd, copy_of, optimizer_for, put_gradients, refusals, same, snapshot, virtual

NAN, INF = float("nan"), float("inf")


def be_lazy(optimizer):
    """Do on a CPU what happens on a GPU: nobody reads the flag, the fused kernel does."""
    optimizer._lazy = True


def bad_step(module, optimizer, bad_ranks, clip=None, value=NAN):
    """Take a step in which these ranks have one bad value, in the last element of the flat buffer."""
    put_gradients(module, optimizer.comm.rank, 0)
    if optimizer.comm.rank in bad_ranks:
        list(module.parameters())[-1].grad.view(-1)[-1] = value
    if clip:
        optimizer.clip_grad_norm_(1.0, clip)
    optimizer.step()
    optimizer.zero_grad()


class TestWhose(unittest.TestCase):
    """45 of `Odd`'s 46 elements lie before the bad one: it is the last rank's shard that shows it."""

    def test_the_rank_with_the_bad_gradient_is_named_not_the_one_whose_shard_shows_it(self):
        def worker(comm, bad_ranks, clip):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            bad_step(module, optimizer, (), clip)
            first = optimizer.last_skip
            bad_step(module, optimizer, bad_ranks, clip)
            return first, optimizer.last_skip, optimizer.skipped_steps

        for clip in (None, 1, 2, INF):
            for bad_ranks, named in (((0,), "0"), ((1,), "1"), ((2,), "2"), ((0, 1), "0, 1")):
                with self.subTest(clip=clip, bad_ranks=bad_ranks), self.assertLogs("zero", "WARNING") as logged:
                    expected = f"step 2: the gradient of rank {named} is not finite"
                    self.assertEqual(virtual(3, worker, bad_ranks, clip), [(None, expected, 1)] * 3)
                self.assertEqual([r.getMessage() for r in logged.records], [f"skipped, 1 in a row: {expected}"])

    def test_over_processes(self):
        self.assertEqual(run_ranks(skip_over_gloo, 3, timeout=60), ["step 1: the gradient of rank 1 is not finite"] * 3)


def skip_over_gloo(rank, world_size):
    """Rank 1 has a NaN."""
    module = Odd()
    optimizer = optimizer_for(module, TorchComm())
    bad_step(module, optimizer, (1,))
    return optimizer.last_skip


class TestInARow(unittest.TestCase):
    def run_steps(self, plan, **settings):
        """`plan`: one letter a step, b for bad. Returns each rank's error, if any, and its counts."""

        def worker(comm):
            module = Odd()
            optimizer, error = optimizer_for(module, comm, **settings), None
            lazy = settings.get("fused")
            if lazy:
                be_lazy(optimizer)
            for number, letter in enumerate(plan, 1):
                try:
                    bad_step(module, optimizer, (comm.rank,) if letter == "b" and comm.rank == 1 else ())
                except RuntimeError as raised:
                    error = (number, str(raised))
                    break
            return error, optimizer.skipped_steps, optimizer.steps

        with self.assertLogs("zero", "WARNING"):
            results = virtual(2, worker)
        self.assertEqual(results[0], results[1])
        return results[0]

    def test_ten_by_default_and_every_rank_stops(self):
        error, skipped, steps = self.run_steps("bbb." + "b" * 12)
        said = "10 steps in a row were skipped; the last was step 2: the gradient of rank 1 is not finite"
        self.assertEqual((error, skipped, steps), ((14, said), 13, 1))

    def test_a_good_step_starts_the_count_anew(self):
        self.assertEqual(self.run_steps("bb.bb.bb", max_skipped=3), (None, 6, 2))
        self.assertEqual(self.run_steps("bb.bbb..", max_skipped=3)[0][0], 6)
        self.assertEqual(self.run_steps("b", max_skipped=1)[0][0], 1)

    def test_when_nobody_waits_for_the_flag_it_is_read_now_and_then(self):
        """With max_skipped = 3 the third, sixth ... step looks."""
        error, skipped, steps = self.run_steps(".bbbbb", max_skipped=3, fused=True)
        self.assertEqual((error[0], skipped, steps), (6, 5, 1))

    def test_bad_settings(self):
        for value in (0, -1, 2.0, True, None):
            messages = refusals(2, lambda comm, value=value: optimizer_for(Odd(), comm, max_skipped=value))
            self.assertTrue(all("max_skipped must be a whole number of at least 1" in m for m in messages), messages)


class TestLazily(unittest.TestCase):
    """What a GPU does, on a CPU: the fused kernel reads the flag, Python does not."""

    def test_a_skipped_step_changes_nothing_and_the_next_goes_on(self):
        def worker(comm, lazy, clip, dtype):
            module = Odd().to(dtype)
            optimizer, log = optimizer_for(module, comm, fused=True, weight_decay=0.1), []
            if lazy:
                be_lazy(optimizer)
            for step in range(4):
                before = snapshot(module, optimizer)
                put_gradients(module, comm.rank, step)
                if step == 2 and comm.rank == 0:
                    module.first.bias.grad[1] = INF
                if clip:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                log.append(same(before, snapshot(module, optimizer)))
            return log, optimizer.skipped_steps, optimizer.steps, gather_flat_params(module)

        for clip in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(clip=clip, dtype=dtype):
                    lazy, read = virtual(3, worker, True, clip, dtype), virtual(3, worker, False, clip, dtype)
                    for mine, theirs in zip(lazy, read, strict=True):
                        self.assertEqual(mine[:3], ([False, False, True, False], 1, 3))
                        self.assertEqual(mine[:3], theirs[:3])
                        self.assertTrue(torch.equal(mine[3], theirs[3]))

    def test_no_step_reads_a_device_value(self):
        """A tensor on the meta device has no value: whoever reads one raises."""
        counter = StepCounter(torch.device("meta"))
        counter.record(not_finite([torch.ones(3, device="meta")]))
        self.assertRaises(RuntimeError, lambda: counter.steps)

    def test_a_lazy_step_reads_no_flag(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm, fused=True)
            be_lazy(optimizer)
            read = []
            with Spy(read):
                put_gradients(module, comm.rank, 0)
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                inside = len(read)
                self.assertEqual(optimizer.skipped_steps, 0)
            return inside, len(read) - inside

        self.assertEqual(virtual(1, worker), [(0, 1)])


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operation that brings a value from a tensor to Python."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.read.append(function)
        return function(*args, **(kwargs or {}))


class TestOneSmallReduction(unittest.TestCase):
    """A step has one small reduction: of a flag, or with clipping of the norm, which tells that as well."""

    def test_with_clipping_or_without(self):
        def worker(comm, clip):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            before = comm.counters.calls.copy(), comm.counters.bytes.copy(), comm.counters.control_calls
            put_gradients(module, comm.rank, 0)
            if clip:
                optimizer.clip_grad_norm_(1.0, clip)
            optimizer.step()
            calls, sent = comm.counters.calls - before[0], comm.counters.bytes - before[1]
            return dict(calls), sent["all_reduce"], comm.counters.control_calls - before[2]

        for clip in (None, 1, 2, INF):
            calls = {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
            self.assertEqual(virtual(3, worker, clip), [(calls, 4 * 4, 0)] * 3)

    def test_what_the_norm_told_is_forgotten_with_the_gradients(self):
        def worker(comm):
            module = Flat(torch.ones(5))
            optimizer = optimizer_for(module, comm)
            module.vector.grad = torch.full((5,), NAN)
            optimizer.clip_grad_norm_(1.0)
            optimizer.zero_grad()  # instead of a step
            put_gradients(module, comm.rank, 0)
            optimizer.step()
            module.vector.grad = torch.ones(5)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            module.vector.grad = torch.full((5,), NAN)
            optimizer.step()  # unclipped: it must look itself
            return optimizer.steps, optimizer.skipped_steps

        self.assertEqual(virtual(2, worker), [(2, 1)] * 2)

    def test_counts_survive_a_save(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)
            for bad in ((), (0,), ()):
                bad_step(module, optimizer, bad)
            resumed = optimizer_for(Odd(), comm)
            resumed.load_state_dict(copy_of(optimizer.state_dict()))
            return resumed.steps, resumed.skipped_steps, type(resumed.steps)

        self.assertEqual(virtual(2, worker), [(2, 1, int)] * 2)


if __name__ == "__main__":
    unittest.main()
