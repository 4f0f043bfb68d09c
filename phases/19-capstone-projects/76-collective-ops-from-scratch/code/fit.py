"""Alpha and beta of this machine: time one round at many sizes, and fit a line.

What is timed is the model's own unit, a round in which all ranks send one message and receive one at once: a ping-pong
of two ranks alone would find links that nobody else uses, and processors that nobody else needs.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cost import Link
from mesh import Mesh, must_agree

SIZES = tuple(1 << k for k in range(10, 25, 2))  # bytes: 1 KB, 4 KB ... 16 MB
_BURST = 1 << 18  # bytes: rounds that are shorter than this are timed several at once, up to 16


def measure_link(mesh: Mesh, sizes: tuple[int, ...] = SIZES, repeats: int = 7) -> list[float]:
    """Return the seconds of one round for each size in bytes: on the slowest rank, the median of `repeats`.

    All ranks call it, and all get the same numbers. Raises ValueError for fewer than two ranks, and for bad sizes.
    """
    for name, values in (("sizes", sizes), ("repeats", (repeats,))):
        if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
            raise ValueError(f"{name} must be whole numbers of at least 1, got {values!r}")
    if mesh.world_size < 2:
        raise ValueError("one rank alone has nobody to send to: a link is measured with at least 2")
    must_agree(mesh, "what to measure", {"sizes": list(sizes), "repeats": repeats})
    left, right = (mesh.rank - 1) % mesh.world_size, (mesh.rank + 1) % mesh.world_size
    seconds = []
    for size in sizes:
        message, rounds = torch.zeros(size, dtype=torch.uint8), max(1, min(16, _BURST // size))

        def burst(message=message, rounds=rounds):
            for _ in range(rounds):
                mesh.sendrecv(left, message, right)

        burst()  # the first one also pays for memory
        seconds.append(timed(mesh, burst, repeats) / rounds)
    return seconds


def timed(mesh: Mesh, call: Callable[[], object], repeats: int) -> float:
    """Return how long `call` takes on the slowest rank, the median of `repeats`; the ranks start together."""
    found = []
    for _ in range(repeats):
        mesh.agree(None)
        started = time.perf_counter()
        call()
        found.append(max(mesh.agree(time.perf_counter() - started)))
    return statistics.median(found)


def fit_link(sizes: list[int], seconds: list[float]) -> Link:
    """Return the alpha and beta for which alpha + size beta has the least squares of *relative* errors.

    In absolute errors only the largest sizes would count. Neither number can become negative. Raises ValueError unless
    there are two different sizes and all times are positive.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"a line needs a time for each of two sizes or more, got {len(sizes)} and {len(seconds)}")
    if not all(0 < t < math.inf for t in seconds) or not all(0 <= s < math.inf for s in sizes):
        raise ValueError(f"sizes and seconds must be positive, got {list(sizes)} and {list(seconds)}")
    scale = max(sizes)  # so that both unknowns are seconds
    a = [1 / t for t in seconds]  # minimise the sum of (alpha a + beta b - 1)^2
    b = [size / scale / t for size, t in zip(sizes, seconds, strict=True)]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    alpha, beta = (sum(a) * bb - sum(b) * ab) / (aa * bb - ab * ab), (sum(b) * aa - sum(a) * ab) / (aa * bb - ab * ab)
    if alpha < 0:
        alpha, beta = 0.0, sum(b) / bb
    elif beta < 0:
        alpha, beta = sum(a) / aa, 0.0
    return Link(alpha, beta / scale)


def measured_crossover(sizes: list[int], ring: list[float], tree: list[float]) -> float | None:
    """Return the size from which on the ring was the faster one: where two measured curves cross for the last time.

    Between two sizes both curves count as straight in a plot with logarithmic axes. None if the tree was still faster
    at the end, or the ring from the beginning. Raises ValueError, with both numbers, if there are not as many times as
    sizes.
    """
    gaps = [math.log(r / t) for r, t in zip(ring, tree, strict=True)]
    if len(sizes) != len(gaps):
        raise ValueError(f"each size needs its times, got {len(sizes)} sizes and {len(gaps)} times")
    slower = [i for i, gap in enumerate(gaps) if gap > 0]
    if not slower or slower[-1] == len(gaps) - 1:
        return None
    i = slower[-1]
    share = gaps[i] / (gaps[i] - gaps[i + 1])  # of the way to the next size
    return math.exp(math.log(sizes[i]) * (1 - share) + math.log(sizes[i + 1]) * share)


def save_link(path: Path, link: Link, about: str) -> None:
    """Write a fitted link, and about what it is, as JSON."""
    path.write_text(json.dumps({"alpha": link.alpha, "beta": link.beta, "about": about}, indent=1) + "\n")


def load_link(path: Path) -> tuple[Link, str]:
    """Read what `save_link` has written. Raises ValueError, naming the file, if it holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or set(found) != {"alpha", "beta", "about"}:
            raise ValueError("expected an object with alpha, beta and about")
        return Link(found["alpha"], found["beta"]), str(found["about"])
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a saved link: {error}") from None


def _dot(x: list[float], y: list[float]) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))
