"""Sockets: bytes that come in pieces, connections that end, strangers who call. Both ends are in this process."""

import gc
import itertools
import os
import selectors
import socket
import sys
import threading
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import listeners
import torch
from listeners import FAMILIES, Listeners
from mesh import MeshTimeout
from ranks import RankError, run_ranks
from socket_mesh import SocketMesh

BIG = torch.arange(1 << 21)  # 16 MB: no connection holds it
SOON = 10.0  # seconds: a wait that need not be one


class Connected:
    """In the place of `Listeners`: connections that exist already."""

    family = ""

    def __init__(self, world_size: int):
        self.world_size, self.ends = world_size, [{} for _ in range(world_size)]
        for a, b in itertools.combinations(range(world_size), 2):
            self.ends[a][b], self.ends[b][a] = socket.socketpair()

    def connect(self, rank: int, timeout: float) -> dict:
        return dict(self.ends[rank])


class TestSockets(unittest.TestCase):
    def setUp(self):
        self.wires = Connected(3)
        self.meshes = [SocketMesh(rank, 3, self.wires, timeout=SOON) for rank in range(3)]
        self.addCleanup(lambda: [end.close() for ends in self.wires.ends for end in ends.values()])

    def end(self, rank: int) -> None:
        """What the system does when a process ends."""
        for connection in self.wires.ends[rank].values():
            connection.close()

    def fails(self, words: str, peer: int, call, *args) -> None:
        with self.assertRaisesRegex(MeshTimeout, words) as caught:
            call(*args)
        self.assertEqual(caught.exception.waited_for, peer)

    def on_the_wire(self, *tensors) -> bytes:
        """The bytes that rank 1 sends to rank 0 for these messages."""
        for tensor in tensors:
            self.meshes[1].send(0, tensor)
        return self.wires.ends[0][1].recv(1 << 20)

    def test_bytes_come_one_by_one(self):
        data = self.on_the_wire(torch.arange(5), torch.tensor(True), torch.empty(0, 3))
        wire = self.wires.ends[1][0]
        sender = threading.Thread(target=lambda: [wire.send(data[i : i + 1]) for i in range(len(data))])
        sender.start()
        found = [self.meshes[0].recv(1) for _ in range(3)]
        sender.join()
        self.assertEqual([x.tolist() for x in found], [[0, 1, 2, 3, 4], True, []])
        self.assertEqual(found[2].shape, (0, 3))

    def test_two_ranks_send_more_than_fits_before_they_receive(self):
        def talk(rank):
            self.meshes[rank].send(1 - rank, BIG + rank)
            found[rank] = self.meshes[rank].recv(1 - rank)

        found = {}
        threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertTrue(torch.equal(found[0], BIG + 1) and torch.equal(found[1], BIG))

    def test_a_connection_that_has_ended_is_noticed_at_once(self):
        self.end(1)
        words = r"rank 0 waited for a message \(tag 2\) from rank 1: its connection has ended"
        self.fails(words, 1, self.recv, 0, 1, 2)
        with self.assertRaisesRegex(ValueError, "cannot be used again after its failure: rank 0 waited for a message"):
            self.meshes[0].recv(2)

    def recv(self, rank, *args):
        return self.meshes[rank].recv(*args)

    def test_what_came_before_the_end_is_received(self):
        for value in (7, 8):
            self.meshes[1].send(0, torch.full((1000,), value))
        self.end(1)
        self.assertEqual([self.meshes[0].recv(1)[999].item() for _ in range(2)], [7, 8])
        self.fails("from rank 1: its connection has ended", 1, self.recv, 0, 1)

    def test_half_a_message_is_none(self):
        data = self.on_the_wire(torch.arange(5))
        for cut in (1, len(data) - 1):
            with self.subTest(bytes=cut):
                self.setUp()
                self.wires.ends[1][0].send(data[:cut])
                self.end(1)
                self.fails("from rank 1: its connection has ended", 1, self.recv, 0, 1)

    def test_others_talk_on_when_one_has_ended(self):
        self.end(1)
        for step in range(3):
            self.meshes[0].send(2, torch.tensor([step]))
            self.assertEqual(self.meshes[2].recv(0).item(), step)
            self.meshes[2].send(0, torch.tensor([-step]))
            self.assertEqual(self.meshes[0].recv(2).item(), -step)
        self.assertEqual(self.meshes[0]._ready(0.0, None), [])  # the end is news once
        self.fails("to take a message .* its connection has ended", 1, self.meshes[0].send, 1, torch.ones(1))

    @unittest.skipUnless(sys.platform == "linux", "elsewhere an end is an end, whatever was not read")
    def test_an_end_by_force_says_so(self):
        self.meshes[0].send(1, torch.ones(1))
        self.end(1)  # without having read it
        self.fails("from rank 1: its connection has ended: Connection reset by peer", 1, self.recv, 0, 1)

    def test_a_send_to_a_rank_that_has_ended(self):
        self.end(1)
        words = r"rank 0 waited for rank 1 to take a message \(tag 0\): its connection has ended"
        self.fails(words, 1, self.meshes[0].send, 1, BIG)

    def test_a_send_that_nobody_takes(self):
        self.meshes[0].timeout = 0.05
        words = r"rank 0 waited for rank 1 to take a message \(tag 0\): not in 0.05 s"
        self.fails(words, 1, self.meshes[0].send, 1, BIG)

    def test_nothing_there_is_not_the_end(self):
        memory = memoryview(bytearray(8))
        self.assertEqual(self.meshes[0]._pull(1, memory), 0)
        self.assertEqual(self.meshes[0]._gone, {})
        self.meshes[1].send(0, torch.ones(1))
        self.assertEqual(self.meshes[0].recv(1).item(), 1.0)

    def test_room_to_send_ends_a_wait_only_where_it_is_asked_for(self):
        mesh = self.meshes[0]
        with mock.patch.object(mesh._selector, "select", wraps=mesh._selector.select) as select:
            self.assertEqual(mesh._ready(SOON, 1), [])  # there is room
            self.assertEqual(mesh._ready(0.01, None), [])
        self.assertEqual([call.args for call in select.call_args_list], [(SOON,), (0.01,)])
        self.assertEqual({key.events for key in mesh._selector.get_map().values()}, {selectors.EVENT_READ})
        self.meshes[2].send(0, torch.ones(1))
        self.assertEqual(mesh._ready(SOON, None), [2])

    def test_a_message_for_which_there_is_no_memory(self):
        data = self.on_the_wire(torch.arange(5), torch.arange(6))
        self.wires.ends[1][0].send(data)
        with mock.patch.object(torch, "empty", side_effect=RuntimeError("not enough memory")):
            with self.assertRaisesRegex(RuntimeError, "not enough memory"):
                self.meshes[0].recv(1)
        with self.assertRaisesRegex(ValueError, "cannot be used again after its failure: not enough memory"):
            self.meshes[0].recv(1)

    def test_too_many_dimensions_are_refused_and_not_counted(self):
        with self.assertRaisesRegex(ValueError, r"(?=.*\b8\b)(?=.*\b9\b)"):
            self.meshes[0].send(1, torch.ones([1] * 9))
        self.assertEqual(self.meshes[0].counters.messages_sent, 0)

    def test_very_long_deadlines(self):
        self.meshes[0].timeout = 1e12
        self.meshes[1].send(0, torch.ones(1))
        self.assertEqual(self.meshes[0].recv(1).item(), 1.0)

    def test_connections_are_closed_with_the_mesh_and_its_parts(self):
        with mock.patch.object(SocketMesh, "agree", return_value=[[0, 0, 0]] * 3):  # the other ranks' part
            part = self.meshes[0].split(0)
        ends, self.meshes = self.wires.ends[0], self.meshes[1:]
        gc.collect()
        part.send(1, torch.ones(1))
        self.assertNotEqual(self.wires.ends[1][0].recv(1), b"")  # it is open still
        del part
        gc.collect()
        self.assertEqual([end.fileno() for end in ends.values()], [-1, -1])


def exchange(rank, n, made):
    mesh = SocketMesh(rank, n, made, timeout=SOON)
    return mesh.agree(rank), mesh.sendrecv((rank + 1) % n, torch.tensor([rank]), (rank - 1) % n).item()


def exchange_twice(rank, n, hubs):
    return [exchange(rank, n, made) for made in hubs]


def one_fails_while_another_calls_it(rank, n, made):
    if rank == 1:
        KEPT.update(made.connect(1, SOON))  # nobody above has to be heard
    else:
        raise ValueError("before it hears anybody")


KEPT = {}


class TestListeners(unittest.TestCase):
    def call(self, made: Listeners, rank: int, words: bytes) -> socket.socket:
        """Be somebody who calls a rank and says something."""
        address = made._sockets[rank].getsockname()
        caller = socket.socket(made._sockets[rank].family)
        self.addCleanup(caller.close)
        caller.connect(address)
        caller.sendall(words)
        return caller

    def each(self):
        for family in FAMILIES:
            with self.subTest(family=family):
                yield partial(Listeners, family=family)

    def test_strangers_hold_nobody_up(self):
        for make in self.each():
            made = make(3)
            strangers = (b"", b"x" * 16 + made._hello(2)[16:], made.secret[:10], made._hello(7))
            for rank in range(3):
                callers = [self.call(made, rank, words) for words in strangers]
                callers[2].close()
            found = run_ranks(exchange, 3, made, backend=None, timeout=60)
            self.assertEqual(found, [([0, 1, 2], 2), ([0, 1, 2], 0), ([0, 1, 2], 1)])

    def test_a_rank_is_heard_once(self):
        made = Listeners(2)
        first, _ = (self.call(made, 0, made._hello(1)) for _ in range(2))
        connections = made.connect(0, SOON)
        self.assertEqual(list(connections), [1])
        self.assertEqual(connections[1].getpeername(), first.getsockname())
        connections[1].close()

    def test_a_rank_that_does_not_come_is_named(self):
        for make in self.each():
            made = make(4)
            waiting = self.call(made, 1, made._hello(2))
            words = "rank 1 waited for rank 3 to connect: it did not in 0.05 s"
            with self.assertRaisesRegex(MeshTimeout, words) as caught:
                made.connect(1, 0.05)
            self.assertEqual(caught.exception.waited_for, 3)
            self.assertEqual({each.fileno() for each in made._sockets}, {-1})
            waiting.settimeout(SOON)
            self.assertEqual(waiting.recv(1), b"")  # what was connected is closed

    def test_a_rank_whose_address_is_gone_is_named(self):
        made = Listeners(2)
        with mock.patch.object(socket.socket, "connect", side_effect=ConnectionRefusedError("refused")):
            with self.assertRaisesRegex(MeshTimeout, "rank 1 could not connect to rank 0: refused") as caught:
                made.connect(1, SOON)
        self.assertEqual(caught.exception.waited_for, 0)

    def test_words_in_pieces(self):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            said = bytearray()
            self.assertFalse(listeners._finished(ours, said, 5))
            theirs.sendall(b"abc")
            self.assertFalse(listeners._finished(ours, said, 5))
            theirs.sendall(b"defg")
            self.assertTrue(listeners._finished(ours, said, 5))
            self.assertEqual((bytes(said), ours.recv(9)), (b"abcde", b"fg"))  # the rest is not for us
            theirs.close()
            self.assertTrue(listeners._finished(ours, bytearray(), 5))

    def test_once_in_each_rank_but_again_in_another_run(self):
        for make in self.each():
            made = make(2)
            with self.assertRaisesRegex(RankError, "rank 0 raised ValueError: before it hears anybody"):
                run_ranks(one_fails_while_another_calls_it, 2, made, backend=None, timeout=60)
            for _ in range(2):
                found = run_ranks(exchange, 2, made, backend=None, timeout=60)
                self.assertEqual(found, [([0, 1], 1), ([0, 1], 0)])
            with self.assertRaisesRegex(RankError, "has connected through these listeners before"):
                run_ranks(exchange_twice, 2, [made, made], backend=None, timeout=60)

    def test_they_can_be_given_to_spawned_ranks(self):
        with mock.patch.dict(os.environ, RANKS_START_METHOD="spawn"):
            hubs = [Listeners(2, family) for family in FAMILIES]
            found = run_ranks(exchange_twice, 2, hubs, backend=None, timeout=60)
        self.assertEqual(found, [[([0, 1], 1)] * len(FAMILIES), [([0, 1], 0)] * len(FAMILIES)])

    def test_they_close_when_nobody_needs_them(self):
        for make in self.each():
            made = make(3)
            listening = made._sockets
            self.assertNotIn(-1, [each.fileno() for each in listening])
            del made
            gc.collect()
            self.assertEqual([each.fileno() for each in listening], [-1] * 3)

    def test_bad_input(self):
        for world_size in (0, True, "2", 1.5):
            words = f"world_size must be a whole number of at least 1, got {world_size!r}"
            with self.assertRaisesRegex(ValueError, words):
                Listeners(world_size)
        for family in ("udp", None, socket.AF_INET):
            with self.assertRaisesRegex(ValueError, f"family must be one of tcp.*, got {family!r}"):
                Listeners(2, family)
        with self.assertRaisesRegex(ValueError, "the listeners are for 2 ranks, there are 3"):
            SocketMesh(0, 3, Listeners(2))
        for rank in (-1, 2, True):
            with self.assertRaisesRegex(ValueError, f"rank must be a rank from 0 to 1, got {rank!r}"):
                SocketMesh(rank, 2, Listeners(2))
        for timeout in (0, float("nan"), float("inf"), "5"):
            with self.assertRaisesRegex(ValueError, f"timeout must be a positive number of seconds, got {timeout!r}"):
                SocketMesh(0, 2, Listeners(2), timeout)
            with self.assertRaisesRegex(ValueError, f"timeout must be a positive number of seconds, got {timeout!r}"):
                Listeners(2).connect(0, timeout)
        with self.assertRaisesRegex(ValueError, "rank must be a rank from 0 to 1, got -1"):
            Listeners(2).connect(-1, 1.0)


if __name__ == "__main__":
    unittest.main()
