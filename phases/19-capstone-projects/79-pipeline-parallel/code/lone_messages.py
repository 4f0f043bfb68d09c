"""Messages as one would write them at first, and a run of a schedule's messages alone: where 1F1B deadlocks."""

import torch
from instructions import Compute, Exchange, Message, Schedule, consumer, count_stages, needs
from mesh import Mesh


def add_lone_messages(orders: dict[int, list[Compute]]) -> Schedule:
    """Insert messages as one would at first: receive right before a computation, send right after it, each alone.

    Where a lone send waits for its receiver (large messages, NCCL), 1F1B written like this deadlocks.
    """
    num_ranks, num_stages = len(orders), count_stages(orders)
    program: dict[int, list] = {rank: [] for rank in orders}
    for rank, order in orders.items():
        for compute in order:
            producers = [c for c in needs(compute, num_stages) if c.stage % num_ranks != rank]
            program[rank] += [Exchange(recvs=(Message(c.stage % num_ranks, compute),)) for c in producers]
            program[rank].append(compute)
            feeds = consumer(compute, num_stages)
            if feeds is not None and feeds.stage % num_ranks != rank:
                program[rank].append(Exchange(sends=(Message(feeds.stage % num_ranks, feeds),)))
    return program


def pass_messages(mesh: Mesh, schedule: Schedule) -> None:
    """Run a schedule's messages alone, empty, without a model: a test of its communication.

    On VirtualCluster(buffered=False) a send that is posted alone waits for its receiver.
    """
    for item in schedule[mesh.rank]:
        if isinstance(item, Exchange):
            for message in item.sends:
                mesh.send(message.peer, torch.empty(0), message.feeds.tag, lone=not item.recvs)
            for message in item.recvs:
                mesh.recv(message.peer, message.feeds.tag)
