"""Failure drills: a real run goes wrong on purpose, and you read the report that a cluster would leave.

`python code/main.py --drill kill` starts a small training loop and kills its last rank in step 3. What `run_ranks`
found goes to stderr, as an uncaught error would; then it is explained. A drill never ends with exit code 0.
"""

import os
import queue
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import demo
import flight
import torch
import torch.distributed as dist
from comm import TorchComm
from ranks import RankError, run_ranks
from torch_mesh import TorchMesh

FAILED, NOT_AS_EXPECTED = 1, 3  # exit codes: the failure was shown; it was not (2 is the parser's)
SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has none; there a killed process exits with code 15


def train(rank: int, world_size: int, fault: Callable) -> None:
    """Be a rank of a data-parallel loop: each step averages the gradients. The last rank's `fault` comes in step 3."""
    comm, weights = TorchComm(), torch.zeros(4)
    for step in range(1, 5):
        gradient = torch.full((4,), float(step + rank))
        if step == 3 and rank == world_size - 1:
            gradient = fault(gradient)
        comm.all_reduce(gradient, "avg")
        weights -= 0.1 * gradient


def killed(gradient: torch.Tensor) -> torch.Tensor:
    """End as a process does when its machine runs out of memory."""
    os.kill(os.getpid(), SIGKILL)


def stalled(gradient: torch.Tensor) -> torch.Tensor:
    """Wait for a batch from a loader that is gone."""
    batches = queue.Queue()
    return gradient * batches.get()


def raised(gradient: torch.Tensor) -> torch.Tensor:
    """Trip over a mistake in the program that only this rank's data show."""
    labels = {0: "cat", 1: "dog"}
    return gradient * len(labels[2])


def another_dtype(gradient: torch.Tensor) -> torch.Tensor:
    """Bring float64, as a rank does that took a number from numpy."""
    return gradient.double()


def another_shape(gradient: torch.Tensor) -> torch.Tensor:
    """Bring fewer elements, as a rank does whose last batch is short."""
    return gradient[:3]


def train_and_compare(rank: int, world_size: int, fault: Callable) -> None:
    """Train; when the call is refused, let rank 0 print what every rank was told."""
    try:
        train(rank, world_size, fault)
    except ValueError as error:
        told = [None] * world_size
        dist.all_gather_object(told, str(error))  # refused before any data moved, so the group still works
        if set(told) != {str(error)}:
            raise AssertionError(f"ranks were told different things: {told}") from error
        if rank == 0:
            print(*(f"[rank {r}] ValueError: {words}" for r, words in enumerate(told)), sep="\n", file=sys.stderr)
        raise


def receive_first(rank: int, world_size: int, fault: None) -> None:
    """Pass tensors around a ring in the wrong order: nobody sends before it has received."""
    mesh, mine = TorchMesh(), torch.full((4,), float(rank))
    with flight.inside("pass to the left"):  # lone messages are not recorded by themselves
        mesh.recv((rank + 1) % world_size)
        mesh.send((rank - 1) % world_size, mine)


@dataclass(frozen=True)
class Drill:
    """A failure, and what the report must say. In texts `{last}` is the last rank, at which the fault is."""

    happens: str
    look_for: str
    fault: Callable | None
    exitcode: int | None
    reason: str  # a regular expression
    collective: str
    worker: Callable = train
    blames_last: bool = True  # False: any rank may be the first to raise
    seconds: float = 60.0  # the longest wait in one communication


_AFTER_2, _IN_3 = "after communication 2 (all_reduce)", "in communication 3 (all_reduce)"
DRILLS = {
    "kill": Drill(
        "rank {last} is killed in step 3, as by a machine without memory",
        "the rank, the signal, and how far it had come",
        killed,
        -9 if hasattr(signal, "SIGKILL") else 15,
        "^(was killed by SIGKILL|exited with code 15)",
        _AFTER_2,
    ),
    "stall": Drill(
        "rank {last} stops coming in step 3: it waits, without an error, for something of its own",
        "who waited and who is blamed; the stack of the blamed rank, innermost call first",
        stalled,
        None,
        "^stalled while rank [0-9]+ waited in communication 3",
        _AFTER_2,
        seconds=3.0,
    ),
    "raise": Drill(
        "rank {last} raises an error of its own in step 3, while the others wait for it inside the all-reduce",
        "one traceback, and the line of the program in it, not the others' lost connections",
        raised,
        1,
        "^raised KeyError: 2$",
        _AFTER_2,
    ),
    "mismatch": Drill(
        "rank {last} brings float64 to the all-reduce of step 3, the others bring float32",
        "the same words on every rank, with the values and who has them",
        another_dtype,
        1,
        '^raised ValueError: ranks disagree .* dtype: rank .* has "float32"; rank {last} has "float64"',
        _IN_3,
        worker=train_and_compare,
        blames_last=False,
    ),
    "mismatch-shape": Drill(
        "rank {last} brings 3 elements to the all-reduce of step 3, the others bring 4",
        "the same words on every rank, with the values and who has them",
        another_shape,
        1,
        r"^raised ValueError: ranks disagree .* shape: rank .* has \[4\]; rank {last} has \[3\]",
        _IN_3,
        worker=train_and_compare,
        blames_last=False,
    ),
    "deadlock": Drill(
        "every rank waits for its right neighbour's message before it sends its own",
        "the word deadlock, and a circle of waits that ends where it began",
        None,
        1,
        r"\ndeadlock: rank ([0-9]+)( waited for rank [0-9]+)* waited for rank \1$",
        "in communication 1 (pass to the left)",
        worker=receive_first,
        blames_last=False,
        seconds=3.0,
    ),
}


def drill(name: str, world_size: int) -> int:
    """Run a drill on at least 2 ranks: say what will happen, show the report, explain it. Return the exit code."""
    chosen, last = DRILLS[name], str(world_size - 1)
    demo.say(f"drill {name}, {world_size} ranks: {chosen.happens.replace('{last}', last)}.")
    demo.say(f"look for: {chosen.look_for}.\n")
    try:
        run_ranks(chosen.worker, world_size, chosen.fault, collective_timeout=chosen.seconds, timeout=120)
    except RankError as found:
        error = found
    else:
        print(f"drill {name}: the run ended without a failure", file=sys.stderr)
        return NOT_AS_EXPECTED
    print("".join(traceback.format_exception_only(type(error), error)), file=sys.stderr, flush=True)
    demo.say("how to read this")
    for line in explain(error, world_size):
        demo.say(f"  {line}")
    if wrong := differences(chosen, error, world_size):
        print(f"drill {name}: this is not the failure to be shown: {'; '.join(wrong)}", file=sys.stderr)
        return NOT_AS_EXPECTED
    return FAILED


def differences(chosen: Drill, error: RankError, world_size: int) -> list[str]:
    """Return where a report differs from what the drill was to show: nothing if it does not."""
    last = world_size - 1
    reason = chosen.reason.replace("{last}", str(last))
    checks = {
        f"rank {error.rank} is blamed, not rank {last}": error.rank == last or not chosen.blames_last,
        f"exit code {error.exitcode}, not {chosen.exitcode}": error.exitcode == chosen.exitcode,
        f"it was {error.collective}, not {chosen.collective}": error.collective == chosen.collective,
        f"the reason does not match {reason!r}": re.search(reason, error.reason) is not None,
    }
    return [words for words, holds in checks.items() if not holds]


def explain(error: RankError, world_size: int) -> list[str]:
    """Say, from the fields of a RankError alone, who is the cause, where it was, and who are only victims."""
    rank, code = f"rank {error.rank}", error.exitcode
    others = ", ".join(str(r) for r in range(world_size) if r != error.rank)
    victims = f"ranks {others}: they waited for {rank}; whatever they report came after it"
    if "deadlock: " in error.reason:
        cause = f"no rank alone: a circle of waits; {rank} is only the first whose time was up"
        victims = "none: each rank waited, and was waited for"
    elif "ranks disagree" in error.reason:
        cause = f"the rank whose value differs, in the text; {rank} is only the first that was heard"
        victims = "none: every rank raised the same error, before any data moved"
    elif code is None:
        cause = f"{rank}: it still ran when the others had waited too long; the stack shows on what"
    elif code < 0:
        cause = f"{rank}: ended from outside by signal {-code} (a shell shows {128 - code}), so there is no traceback"
    else:
        ending = "the traceback ends at the line that raised it" if error.traceback else "it left no traceback"
        cause = f"{rank}: it {error.reason.splitlines()[0]}; {ending}"
    where = f"{rank} was {error.collective}"
    if error.collective.startswith("after"):
        where += ": it came out of that one and never went into the next"
    if error.collective.startswith("in"):
        where += ": it went into that one and never came out"
    return [f"cause:   {cause}", f"where:   {where}", f"victims: {victims}"]
