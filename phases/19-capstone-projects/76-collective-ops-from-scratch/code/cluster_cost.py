"""What all-reduces cost on a described cluster, up to thousands of ranks, without running them.

An algorithm is data: its rounds, each a list of messages, and how often a round comes again. A round takes as long as
its slowest message; messages that leave a node together share its uplinks. For K nodes of S ranks, both powers of two,
u uplinks, in(b) = a message of b bytes inside, out(b, k) = one that leaves together with k - 1 others of its node:

    ring          2(N-1) max(in(T/N), out(T/N, 1))           only one rank of a node sends out
    tree          2 [log2 S in(T) + log2 K out(T, S)]        all ranks of a node send T out, again and again
    halving       2 sum in(T/2d) + 2 sum out(T/2d, S)        d = 1, 2 ... S/2 and S, 2S ... N/2: little is left for afar
    hierarchical  2(S-1) in(T/S) + 2(K-1) out(T/N, S)

Halving in this order sends as few bytes between nodes as two levels do, in fewer rounds. If all ranks of a node share
one uplink, the ring overtakes both for large messages on some hundred ranks: while its one message leaves, those inside
the node move as well. What the model leaves out are the switches above the nodes: halving's last exchanges all cross
the middle of the network at once, and the real network is often thinner there.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cluster import Cluster
from cost import check, depth_of, largest

Message = tuple[int, int, int]  # from rank, to rank, bytes
Round = tuple[int, list[Message]]  # how often it comes, and its messages: those that arrive in it
MOST = 4096  # ranks in a table


@dataclass(frozen=True)
class Prediction:
    """Rounds and seconds of one algorithm on a cluster."""

    rounds: int
    seconds: float


def predict(cluster: Cluster, rounds: Iterator[Round]) -> Prediction:
    """Add up the rounds of an algorithm."""
    count, seconds = 0, 0.0
    for times, messages in rounds:
        count, seconds = count + times, seconds + times * round_seconds(cluster, messages)
    return Prediction(count, seconds)


def round_seconds(cluster: Cluster, messages: list[Message]) -> float:
    """Return the time of the slowest message, when all are sent at once."""
    size, inside, between = cluster.ranks_per_node, cluster.inside, cluster.between
    leaving = Counter(src // size for src, dst, _ in messages if src // size != dst // size)
    crowd = {node: max(1.0, count / cluster.uplinks) for node, count in leaving.items()}
    return max(
        inside.seconds(nbytes) if src // size == dst // size else between.seconds(nbytes * crowd[src // size])
        for src, dst, nbytes in messages
    )


def ring(n: int, nbytes: int) -> Iterator[Round]:
    """In each round everybody sends a chunk to the left."""
    if n > 1:
        yield 2 * (n - 1), [(rank, (rank - 1) % n, largest(nbytes, n)) for rank in range(n)]


def tree(n: int, nbytes: int) -> Iterator[Round]:
    """Up the tree: who has few children can send early, but a parent takes one message a round. Then down again."""
    sent, up, depth = [0] * n, defaultdict(list), depth_of(n)
    for rank in reversed(range(n)):
        received = 0
        for distance in (1 << k for k in reversed(range(rank.bit_length(), depth))):
            if rank + distance < n:
                received = max(received + 1, sent[rank + distance])
                up[received].append((rank + distance, rank, nbytes))
        sent[rank] = received + 1
    for turn in sorted(up):
        yield 1, up[turn]
    for distance in (1 << k for k in range(depth)):
        yield 1, [(rank - distance, rank, nbytes) for rank in range(distance, min(2 * distance, n))]


def halving(n: int, nbytes: int) -> Iterator[Round]:
    """Halving, and the same way back. Guests, the ranks from the largest power of two on, come first and go last."""
    steps = n.bit_length() - 1
    core = 1 << steps
    exchanges = [[(rank, rank ^ 1 << k, largest(nbytes, 2 << k)) for rank in range(core)] for k in range(steps)]
    if n == core:
        return ((2, exchange) for exchange in exchanges)
    guests = range(core, n)
    halved = defaultdict(list, {0: [(guest, guest - core, nbytes) for guest in guests]})
    for k, exchange in enumerate(exchanges):
        for message in exchange:  # a round late are all who depend on a guest, whose host is rank guest - core
            first = message[0] >> (k + 1) << (k + 1)  # of the ranks that the two have heard of by then
            halved[k + (first < len(guests))].append(message)
    returned = [(guest - core, guest, nbytes) for guest in guests]
    return ((1, messages) for messages in [*halved.values(), *exchanges, returned])


def hierarchical(n: int, nbytes: int, node_size: int) -> Iterator[Round]:
    """Rings inside the nodes, and rings across them, of ranks at the same place in their nodes. Full nodes only."""
    size, nodes = node_size, n // node_size
    if size > 1:
        left = [rank - rank % size + (rank - 1) % size for rank in range(n)]
        yield 2 * (size - 1), [(rank, left[rank], largest(nbytes, size)) for rank in range(n)]
    if nodes > 1:
        part = largest(largest(nbytes, size), nodes)
        yield 2 * (nodes - 1), [(rank, (rank - size) % n, part) for rank in range(n)]


def cluster_table(cluster: Cluster, nbytes: int, sizes: list[int] | None = None) -> dict[int, dict[str, Prediction]]:
    """Return, for each number of ranks, each all-reduce's prediction, the fastest first.

    Without `sizes`: one node, two, four ... as far as the cluster, and 4,096 ranks, go. Raises ValueError for more
    ranks than the cluster has, and for nodes that are not full.
    """
    size = cluster.ranks_per_node
    table = {}
    for n in default_sizes(cluster) if sizes is None else sizes:
        if type(n) is not int or not 1 <= n <= cluster.ranks or (n > size and n % size):
            raise ValueError(f"ranks: expected 1 to {size}, or a multiple of it up to {cluster.ranks}, got {n!r}")
        check(n, nbytes)
        found = {name: predict(cluster, rounds(n, nbytes)) for name, rounds in FLAT.items()}
        found["hierarchical"] = predict(cluster, hierarchical(n, nbytes, min(n, size)))
        table[n] = dict(sorted(found.items(), key=lambda pair: pair[1].seconds))
    return table


def default_sizes(cluster: Cluster) -> list[int]:
    """Return the numbers of ranks of one node, two, four ... that the cluster has, up to 4,096."""
    most = min(cluster.ranks, MOST)
    doubling = [cluster.ranks_per_node << k for k in range(MOST.bit_length())]
    return [n for n in doubling if n <= most] or [most]


FLAT = {"ring": ring, "tree": tree, "halving": halving}
