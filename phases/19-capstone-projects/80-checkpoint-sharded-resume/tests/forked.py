"""N ranks as forked processes over socket pairs: started in milliseconds, and a death is a real one."""

import json
import os
import socket
import struct
import traceback

DIED_WITH_ANOTHER = 75  # exit code of a rank that ended because its connection broke


class Died(ConnectionError):
    """The other end of a connection is closed."""


class ForkedComm:
    """What a save needs of a `Comm`: `agree`, through the parent, who collects all facts and hands them on."""

    def __init__(self, rank, world_size, line):
        self.rank, self.world_size, self.line = rank, world_size, line

    def agree(self, facts):
        send(self.line, ["agree", facts])
        return receive(self.line)


def run_forked(worker, world_size, *args, seconds=60.0):
    """Run `worker(comm, *args)` in N processes; return (exit code, result) of each.

    The ranks that live when another dies find their connection broken at the next agreement, and may still act.
    """
    lines, children = [], []
    for rank in range(world_size):
        ours, theirs = socket.socketpair()
        ours.settimeout(seconds)
        theirs.settimeout(seconds)
        child = os.fork()
        if child == 0:
            for line in (*lines, ours):
                line.close()
            _be_rank(worker, ForkedComm(rank, world_size, theirs), args)
        theirs.close()
        lines.append(ours)
        children.append(child)
    results, waiting = [None] * world_size, set(range(world_size))
    while waiting:
        facts = {}
        for rank in sorted(waiting):
            try:
                kind, value = receive(lines[rank])
            except (Died, OSError):
                kind, value = "died", None
            if kind == "agree":
                facts[rank] = value
            else:
                results[rank] = value
                waiting.discard(rank)
        for rank in facts:
            if len(facts) == world_size:
                send(lines[rank], [facts[each] for each in range(world_size)])
            else:
                lines[rank].shutdown(socket.SHUT_WR)
    for line in lines:
        line.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return list(zip(codes, results, strict=True))


def _be_rank(worker, comm, args):
    code = 1
    try:
        send(comm.line, ["result", worker(comm, *args)])
        code = 0
    except Died:
        code = DIED_WITH_ANOTHER
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def send(line, value):
    data = json.dumps(value).encode()
    try:
        line.sendall(struct.pack("<I", len(data)) + data)
    except OSError as error:
        raise Died(str(error)) from error


def receive(line):
    return json.loads(_exactly(line, *struct.unpack("<I", _exactly(line, 4))))


def _exactly(line, count):
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise Died("the other end is closed")
        data += part
    return data
