"""What each algorithm costs, predicted: rounds, bytes, and seconds in the alpha-beta model.

A message of b bytes takes alpha + b beta seconds, in one round a rank sends one message and receives one, and every
round is as slow as its largest message. N ranks, T bytes a rank, L = ceil(log2 N), P = the largest power of two <= N:

    algorithm            rounds            busiest rank sends     busiest link   path
    ring                 2(N-1)            2T(N-1)/N              the same       2T(N-1)/N
    tree                 2L                T L                    T              2T L
    halving (N = P)      2L                2T(P-1)/P              T              2T(P-1)/P
    halving (N > P)      2 log2 P + 2      T more                 T              2T more
    broadcast            L                 T L                    T              T L
    pipelined broadcast  C + N - 2         T                      T              T + (N-2)T/C
    reduce               L                 T                      T              T L
    reduce_scatter       N-1               T(N-1)/N               the same       T(N-1)/N
    allgather            N-1               T(N-1)                 the same       T(N-1)
    alltoall             N-1               T(N-1)/N               T/N            T(N-1)/N
    barrier              L                 0                      0              0

Two levels, K nodes of S ranks: the sum of a ring of S ranks on T bytes (inside) and one of K ranks on T/S (between).
The sizes of chunks are those of whole float32 elements, 4 bytes. Source: Thakur, Rabenseifner and Gropp, 2005.
"""

import math
from dataclasses import dataclass

from hierarchical import check_node_size, owner
from pipelined import check_count
from ranks import check_world_size

ELEMENT = 4  # bytes: chunks are cut between float32 elements


@dataclass(frozen=True)
class Link:
    """What a message costs: `alpha` seconds, and `beta` seconds for each of its bytes."""

    alpha: float
    beta: float

    def __post_init__(self):
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value!r}")

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message."""
        return self.alpha + nbytes * self.beta


@dataclass(frozen=True)
class Cost:
    """What one collective costs.

    `rounds`: the longest chain of messages that wait for each other. `sent`: bytes that the busiest rank sends. `link`:
    bytes on the busiest link, from one rank to one other. `path`: bytes one after the other, the largest message that
    arrives in each round. A tree's root sends L T bytes, but its last leaf waits for 2 L T.
    """

    rounds: int
    sent: int
    link: int
    path: int

    def seconds(self, link: Link) -> float:
        """Return the predicted time if every pair of ranks has such a link of its own."""
        return self.rounds * link.alpha + self.path * link.beta


def ring(world_size: int, nbytes: int) -> Cost:
    """All-reduce around a ring. A rank never sends its own chunk in the first half, its left one's in the second."""
    n, elements = check(world_size, nbytes), _elements(nbytes)
    kept = 2 * (elements // n) + (elements % n == n - 1)  # the two shortest chunks that are neighbours
    sent = ELEMENT * (2 * elements - kept) * (n > 1)
    return Cost(2 * (n - 1), sent, sent, 2 * (n - 1) * largest(nbytes, n))


def tree(world_size: int, nbytes: int) -> Cost:
    """All-reduce up a binomial tree and down again."""
    depth = depth_of(check(world_size, nbytes))
    return Cost(2 * depth, depth * nbytes, nbytes * (depth > 0), 2 * depth * nbytes)


def halving(world_size: int, nbytes: int) -> Cost:
    """All-reduce by recursive halving and doubling; exact if P divides the length. Ranks from P on are guests."""
    core = 1 << check(world_size, nbytes).bit_length() - 1
    steps, guests = core.bit_length() - 1, world_size > core
    halved = sum(largest(nbytes, 1 << step + 1) for step in range(steps))  # a half, a quarter, an eighth ...
    sent = nbytes + sum(largest(nbytes, 1 << step) for step in range(1, steps)) if steps else 0
    link = nbytes * (world_size > 1)  # with the nearest partner a half is exchanged, and later the other half
    return Cost(2 * (steps + guests), sent + guests * nbytes, link, 2 * (halved + guests * nbytes))


def hierarchical(world_size: int, nbytes: int, node_size: int) -> Cost:
    """All-reduce on two levels: inside and between.

    `path` is exact for full nodes. With a smaller last node rounds of both kinds overlap: up to twice as much.
    """
    inside, between = hierarchical_parts(world_size, nbytes, node_size)
    sent, members = inside.sent + between.sent, world_size % node_size
    if members:  # a rank of the smaller node sends fewer bytes inside, but goes around the ring of each slice it owns
        one_slice, owners = largest(nbytes, node_size), [owner(i, node_size, members) for i in range(node_size)]
        for rank in range(members):
            mine, lefts = owners.count(rank), owners.count((rank - 1) % members)
            sent_inside = (2 * nbytes - (mine + lefts) * one_slice) * (members > 1)
            sent = max(sent, sent_inside + mine * between.sent)
    return Cost(inside.rounds + between.rounds, sent, max(inside.link, between.link), inside.path + between.path)


def hierarchical_parts(world_size: int, nbytes: int, node_size: int) -> tuple[Cost, Cost]:
    """Return the cost inside the nodes and between them, which are links of different speed: two rings.

    Where the last node has fewer ranks, one of them owns several slices, whose rings between the nodes take turns.
    """
    check_node_size(node_size, check(world_size, nbytes))
    across = ring(-(-world_size // node_size), largest(nbytes, node_size))
    turns = -(-node_size // (world_size % node_size or node_size))
    return ring(node_size, nbytes), Cost(turns * across.rounds, across.sent, across.link, turns * across.path)


def broadcast(world_size: int, nbytes: int) -> Cost:
    """Along a binomial tree: the source sends L times, then the last leaf has it."""
    depth = depth_of(check(world_size, nbytes))
    return Cost(depth, depth * nbytes, nbytes * (depth > 0), depth * nbytes)


def pipelined_broadcast(world_size: int, nbytes: int, chunks: int = 8) -> Cost:
    """Along a chain in `chunks` pieces: T bytes pass each link, after one piece has passed the N-2 links before."""
    n = check(world_size, nbytes)
    check_count("chunks", chunks)
    if n == 1:
        return Cost(0, 0, 0, 0)
    chunks = min(chunks, max(1, _elements(nbytes)))
    return Cost(chunks + n - 2, nbytes, nbytes, nbytes + (n - 2) * largest(nbytes, chunks))


def reduce(world_size: int, nbytes: int) -> Cost:
    """Up a binomial tree: everybody but the root sends once."""
    depth = depth_of(check(world_size, nbytes))
    return Cost(depth, nbytes * (depth > 0), nbytes * (depth > 0), depth * nbytes)


def reduce_scatter(world_size: int, nbytes: int) -> Cost:
    """The first half of the ring all-reduce; `nbytes` is the whole input."""
    moved = (check(world_size, nbytes) - 1) * largest(nbytes, world_size)
    return Cost(world_size - 1, moved, moved, moved)


def allgather(world_size: int, nbytes: int) -> Cost:
    """The second half of the ring all-reduce; `nbytes` is one rank's input."""
    moved = (check(world_size, nbytes) - 1) * nbytes
    return Cost(world_size - 1, moved, moved, moved)


def alltoall(world_size: int, nbytes: int) -> Cost:
    """To everybody else its chunk of `nbytes`."""
    chunk = largest(nbytes, check(world_size, nbytes)) * (world_size > 1)
    return Cost(world_size - 1, (world_size - 1) * chunk, chunk, (world_size - 1) * chunk)


def barrier(world_size: int, nbytes: int = 0) -> Cost:
    """Messages without content."""
    return Cost(depth_of(check(world_size, nbytes)), 0, 0, 0)


ALLREDUCE = {"ring": ring, "tree": tree, "halving": halving}  # the simplest first
OTHERS = {
    "broadcast": broadcast,
    "pipelined_broadcast": pipelined_broadcast,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "allgather": allgather,
    "alltoall": alltoall,
    "barrier": barrier,
}


def best_chunks(world_size: int, nbytes: int, link: Link) -> int:
    """Return in how many pieces the pipelined broadcast is fastest: about sqrt((N-2) T beta / alpha), at least 1.

    More pieces fill the chain sooner, and each costs a latency. There are no more pieces than elements.
    """
    most = max(1, _elements(nbytes))
    waiting = (check(world_size, nbytes) - 2) * nbytes * link.beta
    if world_size <= 2 or waiting >= link.alpha * most**2:
        return most if world_size > 2 and waiting > 0 else 1
    guess = max(1, math.isqrt(int(waiting / link.alpha)))
    return min((guess, guess + 1), key=lambda chunks: chunks * link.alpha + waiting / chunks)


def check(world_size: int, nbytes: int) -> int:
    """Return `world_size`; raise ValueError unless it is a number of ranks and `nbytes` a number of bytes."""
    check_world_size(world_size)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes must be a whole number of at least 0, got {nbytes!r}")
    return world_size


def depth_of(world_size: int) -> int:
    """Return L = ceil(log2 N): in how many rounds news can reach everybody."""
    return (world_size - 1).bit_length()


def largest(nbytes: int, parts: int) -> int:
    """Return the bytes of the largest of `parts` chunks."""
    return ELEMENT * -(-_elements(nbytes) // parts)


def _elements(nbytes: int) -> int:
    return -(-nbytes // ELEMENT)
