"""Meshes: messages, counters, deadlines, sub-meshes. The same programs over every transport: test_transports.py."""

import math
import queue
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import mesh as mesh_module
import torch
import torch_mesh
from mesh import MeshTimeout, QueueMesh, must_agree
from torch_mesh import TorchMesh
from virtual import VirtualCluster


def pair(fn, world_size=2, **options):
    return VirtualCluster(world_size, **options).run(fn)


class TestMessages(unittest.TestCase):
    def test_two_ranks_one_send_one_receive(self):
        def work(mesh):
            if mesh.rank == 0:
                return mesh.send(1, torch.arange(3.0))
            return mesh.recv(0)

        nothing, received = pair(work)
        self.assertIsNone(nothing)
        self.assertTrue(torch.equal(received, torch.arange(3.0)))

    def test_bad_peers_and_tags_are_refused(self):
        mesh = QueueMesh(0, 2, [None, None])
        for peer in (-1, 2, 0, True, 1.0, "1", None):
            for call in (lambda p=peer: mesh.send(p, torch.ones(1)), lambda p=peer: mesh.recv(p)):
                words = (
                    f"peer must be a rank from 0 to 1, got {peer!r}"
                    if peer != 0
                    else "rank 0 cannot exchange messages with itself"
                )
                with self.assertRaisesRegex(ValueError, words):
                    call()
        for tag in (-1, True, 0.5, "a", None, 1 << 31, 1 << 70):
            with self.assertRaisesRegex(ValueError, f"a tag is a whole number from 0 to 2147483647, got {tag!r}"):
                mesh.send(1, torch.ones(1), tag)
        with self.assertRaisesRegex(ValueError, "send needs a tensor, got list"):
            mesh.send(1, [1.0])
        self.assertEqual(mesh.counters.messages_sent, 0)

    def test_gloo_messages_have_at_most_eight_dimensions(self):
        with mock.patch.object(torch_mesh.dist, "get_rank", return_value=0):
            with mock.patch.object(torch_mesh.dist, "get_world_size", return_value=2):
                mesh = TorchMesh()
        with self.assertRaisesRegex(ValueError, "8 dimensions, this tensor has 9"):
            mesh.send(1, torch.ones([1] * 9))

    def test_an_observer_sees_each_payload_message(self):
        seen = []

        def work(mesh):
            mesh.observer = lambda *message: seen.append(message)
            mesh.agree("control is not payload")
            if mesh.rank == 0:
                mesh.send(1, torch.tensor([5]))
            else:
                mesh.recv(0)

        pair(work)
        self.assertEqual(seen, [(1, 0, 1, torch.tensor([5]))])


class TestCounters(unittest.TestCase):
    def counters(self, work, world_size):
        return pair(lambda mesh: [work(mesh), mesh.counters][1], world_size)

    def test_bytes_and_messages_of_each_rank(self):
        def work(mesh):
            if mesh.rank == 0:
                mesh.send(1, torch.ones(3, dtype=torch.bfloat16))
                mesh.send(1, torch.ones(2, 2))
                mesh.send(1, torch.ones(0))
            else:
                [mesh.recv(0) for _ in range(3)]

        sender, receiver = self.counters(work, 2)
        self.assertEqual((sender.bytes_sent, sender.bytes_received, sender.messages_sent), (22, 0, 3))
        self.assertEqual((receiver.bytes_sent, receiver.bytes_received, receiver.messages_sent), (0, 22, 0))

    def test_a_chain_takes_a_round_a_link(self):
        def work(mesh):  # 0 -> 1 -> 2 -> 3
            if mesh.rank > 0:
                mesh.recv(mesh.rank - 1)
            if mesh.rank < 3:
                mesh.send(mesh.rank + 1, torch.ones(1))

        self.assertEqual([count.rounds for count in self.counters(work, 4)], [1, 2, 3, 3])

    def test_a_rank_sends_one_message_a_round_and_receives_one(self):
        def fan_out(mesh):
            if mesh.rank == 0:
                [mesh.send(dst, torch.ones(1)) for dst in (1, 2, 3)]
            else:
                mesh.recv(0)

        def fan_in(mesh):
            if mesh.rank == 0:
                [mesh.recv(src) for src in (1, 2, 3)]
            else:
                mesh.send(0, torch.ones(1))

        self.assertEqual([count.rounds for count in self.counters(fan_out, 4)], [3, 1, 2, 3])
        self.assertEqual([count.rounds for count in self.counters(fan_in, 4)], [3, 1, 1, 1])

    def test_sending_and_receiving_share_a_round(self):
        def work(mesh):
            mesh.sendrecv(1 - mesh.rank, torch.ones(1), 1 - mesh.rank)

        self.assertEqual([count.rounds for count in self.counters(work, 2)], [1, 1])

    def test_control_is_counted_apart(self):
        for count in self.counters(lambda mesh: mesh.agree([1, "ab"]), 3):
            self.assertEqual((count.control_messages, count.control_bytes), (2, 2 * len('[1, "ab"]')))
            self.assertEqual((count.messages_sent, count.bytes_sent, count.rounds), (0, 0, 0))

    def test_a_sub_mesh_uses_the_same_port(self):
        def work(mesh):
            half = mesh.split(mesh.rank // 2)
            for each in (mesh, half, mesh, half):  # four messages one after the other, whatever mesh they go through
                peer = mesh.rank ^ 1 if each is mesh else 1 - half.rank
                each.sendrecv(peer, torch.ones(2), peer)

        for count in self.counters(work, 4):
            self.assertEqual((count.messages_sent, count.rounds, count.bytes_sent), (4, 4, 32))


class TestSplit(unittest.TestCase):
    def test_members_and_order(self):
        def work(mesh):
            sub = mesh.split(mesh.rank % 2, key=-mesh.rank)
            return sub.rank, sub.world_size, sub.members

        self.assertEqual(
            pair(work, 5),
            [(2, 3, [4, 2, 0]), (1, 2, [3, 1]), (1, 3, [4, 2, 0]), (0, 2, [3, 1]), (0, 3, [4, 2, 0])],
        )

    def test_messages_of_two_meshes_do_not_mix(self):
        def work(mesh):
            sub = mesh.split(0, key=-mesh.rank)  # the same two ranks, in reverse
            if mesh.rank == 0:
                mesh.send(1, torch.tensor([1]))
                sub.send(0, torch.tensor([2]))
            else:
                return sub.recv(1).item(), mesh.recv(0).item()

        self.assertEqual(pair(work)[1], (2, 1))

    def test_messages_of_two_sub_meshes_do_not_mix(self):
        def work(mesh):
            first, second = mesh.split(0), mesh.split(0)
            if mesh.rank == 0:
                first.send(1, torch.tensor([1]))
                second.send(1, torch.tensor([2]))
            else:
                return second.recv(0).item(), first.recv(0).item()

        self.assertEqual(pair(work)[1], (2, 1))

    def test_sub_meshes_of_sub_meshes(self):
        def work(mesh):
            quarter = mesh.split(mesh.rank // 4).split(mesh.rank // 2)
            return quarter.agree(mesh.rank)

        self.assertEqual(pair(work, 8), [[rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(8)])


class TestAgree(unittest.TestCase):
    def test_every_rank_sees_the_same_values_also_its_own(self):
        def work(mesh):
            return mesh.agree({"shape": (2, mesh.rank), 1: None})

        expected = [{"shape": [2, rank], "1": None} for rank in range(3)]
        self.assertEqual(pair(work, 3), [expected] * 3)

    def disagreement(self, *facts):
        """The error of each rank when rank r brings facts[r]; None where there is none."""

        def work(mesh):
            try:
                must_agree(mesh, "the plan", facts[mesh.rank])
            except ValueError as error:
                return str(error)

        words = pair(work, len(facts))
        self.assertEqual(len(set(words)), 1)
        return words[0]

    def test_equal_facts_pass(self):
        self.assertIsNone(self.disagreement({"a": [1], "b": "x"}, {"b": "x", "a": (1,)}))
        self.assertIsNone(self.disagreement({"lr": math.nan}, {"lr": math.nan}))

    def test_differences_are_named_with_ranks_and_values(self):
        words = self.disagreement({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2})
        self.assertRegex(words, "the plan.*b: rank 0, 2 has 2; rank 1 has 3$")
        self.assertNotIn("a: rank", words)
        self.assertIn("b: rank 0 has nothing; rank 1 has null", self.disagreement({"a": 1}, {"a": 1, "b": None}))

    def test_facts_of_another_kind_are_a_difference_too(self):
        self.assertIn('facts: rank 0 has nothing; rank 1 has ["split", 0]', self.disagreement({"a": 1}, ["split", 0]))


class TestDeadline(unittest.TestCase):
    def mesh(self, timeout=0.01):
        return QueueMesh(0, 3, [queue.Queue() for _ in range(3)], timeout)

    def test_the_error_says_who_waited_for_whom(self):
        with self.assertRaisesRegex(
            MeshTimeout, r"rank 0 waited for a message \(tag 4\) from rank 2: .*\b0\.01\b"
        ) as e:
            self.mesh().recv(2, tag=4)
        self.assertEqual(e.exception.waited_for, 2)
        with self.assertRaisesRegex(MeshTimeout, "rank 0 waited for facts from rank 2"):
            self.mesh().agree(1)

    def test_messages_for_others_do_not_prolong_it(self):
        clock, calls = [0.0], []

        class Busy:
            """A box in which a message of rank 1 arrives every second."""

            def get(self, timeout):
                calls.append(timeout)
                assert len(calls) < 100, "the deadline never came"
                clock[0] += min(timeout, 1.0)
                if timeout < 1.0:
                    raise queue.Empty
                return 1, (0, 0), 1, (bytes(4), "float32", (1,))

        with mock.patch.object(mesh_module.time, "monotonic", lambda: clock[0]), self.assertRaises(MeshTimeout):
            QueueMesh(0, 3, [Busy()] * 3, timeout=3.0).recv(2)
        self.assertEqual(calls, [3.0, 2.0, 1.0, 0.0])

    def test_a_mesh_that_failed_cannot_be_used_again_nor_its_sub_meshes(self):
        mesh = self.mesh()
        with mock.patch.object(QueueMesh, "agree", return_value=[[0, 0, 0]] * 3):  # the other ranks' part
            half = mesh.split(0)
        with self.assertRaises(MeshTimeout):
            half.recv(1)
        for each in (mesh, half):
            for call in (
                lambda each=each: each.recv(1),
                lambda each=each: each.send(1, torch.ones(1)),
                lambda each=each: each.agree(0),
            ):
                with self.assertRaisesRegex(ValueError, "cannot be used again after its failure: rank 0 waited for"):
                    call()


if __name__ == "__main__":
    unittest.main()
