"""What happens inside a rank's process: rendezvous, the worker's call, delivery of its result, and a clean end."""

import datetime
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

import flight
import torch
import torch.distributed as dist
import wire


@dataclass(frozen=True)
class Run:
    """One launch: its folder (rendezvous, results, reports) and its settings."""

    folder: Path
    world_size: int
    backend: str | None
    collective_timeout: float

    @property
    def board(self) -> Path:
        """The file in which each rank records its position."""
        return self.folder / "positions"

    def result(self, rank: int) -> Path:
        """The file that appears, whole, when a rank has its result."""
        return self.folder / f"result{rank}"

    def error(self, rank: int) -> Path:
        """The file in which a rank reports why it failed."""
        return self.folder / f"error{rank}.json"

    def stack(self, rank: int) -> Path:
        """The file to which a rank writes its stack when asked by SIGUSR1."""
        return self.folder / f"stack{rank}"


class Call:
    """A worker and its arguments, encoded only where the start method needs it: fork hands them over as they are."""

    def __init__(self, worker, args: tuple):
        self.worker, self.args = worker, args

    def __getstate__(self):
        return wire.dumps((self.worker, self.args))

    def __setstate__(self, data):
        self.data = data  # decoded in `get`, so that a failure to decode is reported like any other

    def get(self):
        """Return (worker, args)."""
        return wire.loads(self.data) if hasattr(self, "data") else (self.worker, self.args)


def main(rank: int, run: Run, call: Call, pipe) -> None:
    """Be rank `rank`: the target of its process. Never returns; ends with exit code 0 or 1."""
    torch.set_num_threads(1)  # 4 ranks with 2 threads each on 2 cores ran 34 times slower than with one
    if hasattr(os, "setpgid"):
        os.setpgid(
            0, 0
        )  # a group of its own: Ctrl-C reaches the launcher alone, and the rank's own children end with it
    threading.Thread(target=_end_with_parent, args=(run.folder,), daemon=True).start()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, open(run.stack(rank), "w"), all_threads=False)
    flight.attach(run.board, rank)
    try:
        join_group(rank, run.world_size, run.backend, run.collective_timeout, run.folder / "store")
        worker, args = call.get()
        _publish(run.result(rank), wire.dumps(worker(rank, run.world_size, *args)))
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: a rank without a result has failed
        _publish(run.error(rank), json.dumps(_report(error)).encode())
        _exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    pipe.send_bytes(b"done")
    pipe.recv_bytes()  # until all have finished: a rank that leaves early would cut off its last messages
    if run.backend == "nccl":
        dist.destroy_process_group()
    _exit(0)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips 0.3 s of clean-up; all that matters has been delivered


def _publish(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _report(error: BaseException) -> dict:
    lost_a_peer = isinstance(error, ConnectionError | TimeoutError | EOFError | dist.DistError)
    return {
        "reason": f"raised {type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next)),
        "victim": lost_a_peer or "gloo/transport" in str(error),  # gloo raises plain RuntimeErrors
        "when": time.time(),
    }


def _end_with_parent(folder: Path) -> None:
    """End when the launcher is gone, even by SIGKILL: its end of a pipe closes."""
    parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill_group(process) -> None:
    """Kill a rank and what it started. Safe while the process is not joined: until then its id is not used again."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # no groups here, or the rank never made its own
        process.kill()


def join_group(rank: int, world_size: int, backend: str | None, seconds: float, store_path: Path | None = None) -> None:
    """Make this process a member of the default process group: through a fresh file store, or torchrun's variables.

    With NCCL the group also carries gloo for CPU tensors: control traffic stays off the GPU.
    """
    if backend is None:
        return
    choose_interface()
    options = {"timeout": datetime.timedelta(seconds=seconds)}
    if store_path is not None:
        options |= {"store": dist.FileStore(str(store_path), world_size), "rank": rank, "world_size": world_size}
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else backend, **options)


def choose_interface() -> None:
    """Make gloo use the loopback interface unless GLOO_SOCKET_IFNAME is set; check that one if it is.

    Raises ValueError if the interface does not exist (gloo's own message does not say which do). Several nodes need a
    real interface, so there nothing is chosen.
    """
    if sys.platform == "win32":
        return
    names = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None:
        one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        if one_node and loopback in names:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    elif not set(chosen.split(",")) <= set(names):
        raise ValueError(f"GLOO_SOCKET_IFNAME={chosen!r}: no such interface; there are {', '.join(names)}")


def join(worker, world_size: int, args: tuple, backend: str | None, seconds: float) -> list:
    """Run the worker in this process, which torchrun started as one of `world_size` ranks; gather all results."""
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(f"world_size {world_size}, but the launcher started {started} processes")
    torch.set_num_threads(1)
    if not dist.is_initialized():  # once a process: the launcher's store cannot be used for a second rendezvous
        join_group(rank, world_size, backend or "gloo", seconds)
    data = wire.dumps(worker(rank, world_size, *args))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, data)
    return [wire.loads(item) for item in everyone]
