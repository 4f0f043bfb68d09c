"""The virtual cluster: results, deadlocks as cycles, seeds, random state, and errors that name the rank."""

import random
import sys
import threading
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from ranks import RankError
from virtual import DeadlockError, VirtualCluster

ONE = torch.ones(1)


def ring(mesh, rounds=3):
    """Pass a token around; the order in which the ranks speak is their own affair."""
    n = mesh.world_size
    for _ in range(rounds):
        mesh.sendrecv((mesh.rank + 1) % n, ONE, (mesh.rank - 1) % n)


class TestRun(unittest.TestCase):
    def test_results_in_rank_order_with_arguments(self):
        found = VirtualCluster(3).run(lambda mesh, a, b: (mesh.rank, mesh.world_size, a, b), "x", 2)
        self.assertEqual(found, [(rank, 3, "x", 2) for rank in range(3)])

    def test_a_cluster_can_run_again(self):
        cluster = VirtualCluster(4)
        with self.assertRaises(DeadlockError):
            cluster.run(lambda mesh: mesh.recv((mesh.rank + 1) % 4))
        self.assertEqual(cluster.run(ring), [None] * 4)

    def test_one_rank_runs_at_a_time(self):
        inside = []

        def work(mesh):
            for _ in range(5):
                inside.append(mesh.rank)
                self.assertEqual(len(inside), 1)
                inside.pop()
                ring(mesh, 1)

        VirtualCluster(4).run(work)

    def test_a_cluster_inside_a_rank_of_another(self):
        def work(mesh):
            ring(mesh)
            return VirtualCluster(2).run(lambda inner: (mesh.rank, inner.rank))

        self.assertEqual(VirtualCluster(2).run(work), [[(r, 0), (r, 1)] for r in (0, 1)])

    def test_bad_world_sizes(self):
        for world_size in (0, -1, True, "2", 1.5):
            with self.assertRaisesRegex(ValueError, "world_size must be a whole number"):
                VirtualCluster(world_size)

    def test_no_thread_is_left(self):
        before = threading.active_count()
        for work in (ring, lambda mesh: mesh.recv(1 - mesh.rank), lambda mesh: 1 // mesh.rank):
            try:
                VirtualCluster(2).run(work)
            except RuntimeError:
                pass
            self.assertEqual(threading.active_count(), before)


class TestDeadlock(unittest.TestCase):
    def words(self, work, world_size, **options):
        with self.assertRaises(DeadlockError) as caught:
            VirtualCluster(world_size, **options).run(work)
        return str(caught.exception)

    def test_the_cycle_is_named(self):
        self.assertEqual(
            self.words(lambda mesh: mesh.recv(1 - mesh.rank), 2),
            "deadlock: rank 0 waits for rank 1 (receive from rank 1), rank 1 waits for rank 0 (receive from rank 0)",
        )

    def test_only_the_ranks_of_the_cycle_are(self):
        def work(mesh):  # 0 waits for 2, which is part of a cycle with 3; 1 is done
            if mesh.rank != 1:
                mesh.recv({0: 2, 2: 3, 3: 2}[mesh.rank])

        self.assertEqual(
            self.words(work, 4),
            "deadlock: rank 2 waits for rank 3 (receive from rank 3), rank 3 waits for rank 2 (receive from rank 2)",
        )

    def test_a_rank_that_has_finished_is_named(self):
        self.assertEqual(
            self.words(lambda mesh: mesh.rank or mesh.recv(1), 2),
            "deadlock: rank 0 waits for rank 1 (receive from rank 1), which has finished",
        )

    def test_a_wrong_tag(self):
        def work(mesh):
            mesh.send(1, ONE, tag=1) if mesh.rank == 0 else mesh.recv(0, tag=2)

        self.assertIn("rank 1 waits for rank 0 (receive from rank 0), which has finished", self.words(work, 2))

    def test_lone_sends_that_rely_on_buffering(self):
        def both_send_first(mesh):
            mesh.send(1 - mesh.rank, ONE)
            return mesh.recv(1 - mesh.rank).item()

        self.assertEqual(VirtualCluster(2).run(both_send_first), [1.0, 1.0])
        for seed in range(5):
            self.assertEqual(
                self.words(both_send_first, 2, seed=seed, buffered=False),
                "deadlock: rank 0 waits for rank 1 (send to rank 1), rank 1 waits for rank 0 (send to rank 0)",
            )

    def test_a_send_that_is_posted_with_a_receive_needs_no_buffering(self):
        VirtualCluster(4, buffered=False).run(ring)

    def test_an_unbuffered_send_returns_when_the_message_is_taken(self):
        def first(seed, buffered):
            log = []

            def work(mesh):
                if mesh.rank == 0:
                    mesh.send(1, ONE)
                    log.append("has sent")
                else:
                    log.append("will receive")
                    mesh.recv(0)

            VirtualCluster(2, seed, buffered).run(work)
            return log[0]

        self.assertEqual({first(seed, buffered=True) for seed in range(10)}, {"has sent", "will receive"})
        self.assertEqual({first(seed, buffered=False) for seed in range(10)}, {"will receive"})


class TestSeeds(unittest.TestCase):
    def order(self, seed):
        log = []

        def work(mesh):
            for step in range(4):
                log.append((mesh.rank, step))
                ring(mesh, 1)

        VirtualCluster(3, seed).run(work)
        return log

    def test_a_seed_replays_an_interleaving(self):
        self.assertEqual([self.order(seed) for seed in range(5)], [self.order(seed) for seed in range(5)])

    def test_seeds_give_different_ones(self):
        self.assertGreater(len({str(self.order(seed)) for seed in range(10)}), 5)


class TestRandomState(unittest.TestCase):
    def test_each_rank_draws_the_same_numbers_whatever_the_others_do(self):
        def work(mesh):
            drawn = []
            for _ in range(3):
                drawn.append((torch.rand(1).item(), random.random()))
                ring(mesh, 1)
            return drawn

        for seed in range(3):
            torch.manual_seed(11)
            random.seed(11)
            alone = [(torch.rand(1).item(), random.random()) for _ in range(3)]
            torch.manual_seed(11)
            random.seed(11)
            self.assertEqual(VirtualCluster(3, seed).run(work), [alone] * 3)
            self.assertEqual((torch.rand(1).item(), random.random()), alone[0])  # the caller's state is as it was

    def test_a_rank_can_seed_itself(self):
        def work(mesh):
            torch.manual_seed(mesh.rank)
            ring(mesh)
            return torch.rand(1).item()

        expected = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)]
        self.assertEqual(VirtualCluster(3).run(work), expected)


class TestErrors(unittest.TestCase):
    def test_they_name_the_rank_and_keep_the_original(self):
        def work(mesh):
            ring(mesh)
            if mesh.rank == 2:
                raise KeyError("weight")
            ring(mesh)

        for seed in range(5):
            with self.assertRaisesRegex(RankError, "rank 2 raised KeyError: 'weight'") as caught:
                VirtualCluster(4, seed).run(work)
            self.assertEqual(caught.exception.rank, 2)
            self.assertIsInstance(caught.exception.__cause__, KeyError)

    def test_leaving_counts_as_an_error(self):
        for error in (SystemExit(3), KeyboardInterrupt()):

            def work(mesh, error=error):
                if mesh.rank == 1:
                    raise error
                ring(mesh)

            with self.assertRaisesRegex(RankError, f"rank 1 raised {type(error).__name__}"):
                VirtualCluster(2).run(work)

    def test_others_unwind_through_their_finally_blocks(self):
        ended = []

        def work(mesh):
            try:
                if mesh.rank == 0:
                    raise ValueError("first")
                ring(mesh)
            finally:
                ended.append(mesh.rank)
                ring(mesh)

        with self.assertRaisesRegex(RankError, "rank 0 raised ValueError: first"):
            VirtualCluster(3).run(work)
        self.assertIn(0, ended)

    def test_a_rank_that_swallows_exceptions_still_ends(self):
        def work(mesh):
            for _ in range(3):
                try:
                    mesh.recv((mesh.rank + 1) % 3)
                except Exception:
                    pass

        with self.assertRaises(DeadlockError):
            VirtualCluster(3).run(work)


if __name__ == "__main__":
    unittest.main()
