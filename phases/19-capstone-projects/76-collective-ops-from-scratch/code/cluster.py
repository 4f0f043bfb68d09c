"""A cluster, described: nodes of equally many ranks, the links inside a node and between nodes. Read from JSON.

    {"name": "4 servers", "nodes": 4, "ranks_per_node": 8, "uplinks": 1,
     "inside": {"latency_us": 2, "gigabytes_per_second": 20},
     "between": {"latency_us": 30, "gigabytes_per_second": 1.25}}

`uplinks` is how many network links a node has. When k of its ranks send out at once over u of them, each gets
min(1, u/k) of a link's bandwidth. The network beyond is as fast as all uplinks together (a full fat tree).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from cost import Link


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `ranks_per_node` ranks each; rank r is on node r // ranks_per_node."""

    name: str
    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link
    uplinks: int

    def __post_init__(self):
        for key in ("nodes", "ranks_per_node", "uplinks"):
            _check_count(key, getattr(self, key))

    @property
    def ranks(self) -> int:
        """Return how many ranks there are in all."""
        return self.nodes * self.ranks_per_node


def link(latency_us: float, gigabytes_per_second: float) -> Link:
    """Return a link from the two numbers of a data sheet: microseconds, and 10^9 bytes a second in one direction."""
    return Link(latency_us * 1e-6, 1e-9 / gigabytes_per_second)


def read_cluster(path: str | Path) -> Cluster:
    """Read a description. Raises ValueError, with the key and the value, for anything that is not as shown above."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    try:
        return _cluster(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _cluster(found) -> Cluster:
    _check_keys("the cluster", found, ("name", "nodes", "ranks_per_node", "uplinks", "inside", "between"))
    if not isinstance(found["name"], str):
        raise ValueError(f"name: expected text, found {_show(found['name'])}")
    for key in ("nodes", "ranks_per_node", "uplinks"):
        _check_count(key, found[key])
    return Cluster(**found | {key: _link(key, found[key]) for key in ("inside", "between")})


def _link(name: str, found) -> Link:
    keys = ("latency_us", "gigabytes_per_second")
    _check_keys(name, found, keys)
    for key in keys:
        value = found[key]
        if type(value) not in (int, float) or not 1e-9 <= value <= 1e9:
            raise ValueError(f"{name}.{key}: expected a number from 1e-9 to 1e9, found {_show(value)}")
    return link(**found)


def _check_keys(name: str, found, expected: tuple[str, ...]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a JSON object, found {_show(found)}")
    faults = [f"missing key {key!r}" for key in expected if key not in found]
    faults += [f"unknown key {_show(key)}" for key in found if key not in expected]
    if faults:
        raise ValueError(f"{name}: {', '.join(faults)}")


def _check_count(key: str, value) -> None:
    if type(value) is not int or not 1 <= value <= 10**9:
        raise ValueError(f"{key}: expected a whole number from 1 to 1,000,000,000, found {_show(value)}")


def _no_key_twice(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key appears twice in {_show([key for key, _ in pairs])}")
    return found


def _show(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Eight H100s a node. NVLink 4 carries 900 GB/s, which is 450 in each direction (NVIDIA H100 data sheet); the network is
# one 400 Gb/s InfiniBand adapter a GPU, 50 GB/s in each direction (DGX H100 data sheet). Latencies depend on software:
# these are of the order of those that NCCL's own cost model assumes (hwLat in src/graph/tuning.cc).
H100 = Cluster("8 x H100 a node, NVLink inside, 400 Gb/s a GPU between", 512, 8, link(2, 450), link(5, 50), 8)
