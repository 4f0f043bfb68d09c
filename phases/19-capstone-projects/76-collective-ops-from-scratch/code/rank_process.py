"""What happens inside a rank's process: rendezvous, the worker's call, delivery of its result, and a clean end."""

import atexit
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
from contextlib import suppress
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
        """The file to which a rank writes its stack when asked by SIGUSR1 (not on Windows)."""
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
    """Be rank `rank`: the target of its process. Never returns; ends with exit code 0 or the failure's."""
    torch.set_num_threads(1)  # 4 ranks with 2 threads each on 2 cores ran 34 times slower than with one
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # own group: Ctrl-C reaches the launcher alone, and what the rank starts can be ended with it
    threading.Thread(target=_end_with_parent, args=(run.folder, os.getppid()), daemon=True).start()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, open(run.stack(rank), "w"), all_threads=False)
    flight.attach(run.board, rank)
    try:
        join_group(rank, run.world_size, run.backend, run.collective_timeout, run.folder / "store")
        worker, args = call.get()
        _publish(run.result(rank), _encoded(worker(rank, run.world_size, *args)))
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: a rank without a result has failed
        _publish(run.error(rank), json.dumps(_report(error)).encode())
        _exit(error.code & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    try:
        pipe.send_bytes(b"done")
        pipe.recv_bytes()  # until all have finished: a rank that leaves early would cut off its last messages
    except (EOFError, OSError):
        _end_group(run.folder)
    if run.backend == "nccl":
        dist.destroy_process_group()
    _exit(0)


def _exit(code: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # skips 0.3 s of clean-up; all that matters has been delivered


def _encoded(result) -> bytes:
    try:
        return wire.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise ValueError(f"a result of type {kind} cannot be sent to the launcher: {error}") from error


def _publish(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_suffix(".tmp")
    with suppress(FileNotFoundError):  # the launcher has been killed, and its folder is gone: nobody asks any more
        temporary.write_bytes(data)
        temporary.rename(path)


def _report(error: BaseException) -> dict:
    """Describe an error to the launcher: what, where, and whether another rank may be its cause."""
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return {
        "reason": f"raised {reason}",
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next)),
        "victim": any(_lost_a_peer(each) for each in chain),
        "waited_for": next((each.waited_for for each in chain if _says_for_whom(each)), None),
        "when": time.time(),
    }


def _says_for_whom(error: BaseException) -> bool:
    return isinstance(getattr(error, "waited_for", None), int)  # a mesh's


def _lost_a_peer(error: BaseException) -> bool:
    if _says_for_whom(error):
        return True
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError):  # rendezvous
        return True
    words = "".join(traceback.format_exception_only(type(error), error))  # also where str(error) raises
    if any(sign in words for sign in ("gloo/transport", "pair closure", "ncclRemoteError")):  # gloo: RuntimeErrors
        return True
    return isinstance(error, ConnectionError | TimeoutError | EOFError) and flight.position().inside


def _end_with_parent(folder: Path, parent_id: int) -> None:
    """End when the launcher is gone, even by SIGKILL: then its end of a pipe closes.

    A process forked by another thread can hold that end open, so the parent's id is looked at, too.
    """
    parent = parent_process()
    while parent.is_alive() and os.getppid() == parent_id:
        parent.join(1.0)
    _end_group(folder)


def _end_group(folder: Path) -> None:
    """End this rank and all it started, now that no launcher will do it."""
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill_group(process) -> None:
    """Kill a rank, if it still runs, and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # no groups here, or the rank never made its own
        process.kill()


def under_torchrun() -> bool:
    """Say whether a launcher (torchrun or alike) has already made this process one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def join_group(rank: int, world_size: int, backend: str | None, seconds: float, store_path: Path | None = None) -> None:
    """Make this process a member of the default process group: through a fresh file store, or torchrun's variables.

    With NCCL the group also carries gloo for CPU tensors: control traffic stays off the GPU.
    """
    if backend is None:
        return
    if (interface := gloo_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    options = {"timeout": datetime.timedelta(seconds=seconds)}
    if store_path is not None:
        store = dist.FileStore(str(store_path), world_size)
        store.set(f"rank {rank}", "is here")  # ranks may start seconds apart; from here on, `seconds` is enough
        store.wait([f"rank {each}" for each in range(world_size)], datetime.timedelta(days=1))
        options |= {"store": store, "rank": rank, "world_size": world_size}
    else:
        options |= _torchruns_store(options["timeout"])
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")  # its watchdog waits 4 times this: a minute
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if under_torchrun() else rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else backend, **options)


def _torchruns_store(timeout: datetime.timedelta) -> dict:
    """Return the launcher's store, and this process's place, as `init_process_group` takes them.

    The store outlives the processes of a run that is restarted (--max-restarts), and with it the addresses of the dead:
    each life of the run gets a part of its own.
    """
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"life {life}", store), "rank": rank, "world_size": world_size}


def gloo_interface() -> str | None:
    """Return the network interface for gloo: GLOO_SOCKET_IFNAME if it is set, else loopback; None leaves it to gloo.

    Several nodes need a real interface, so there gloo chooses. Raises ValueError if the one that is set does not exist:
    gloo's own message does not say which do.
    """
    if sys.platform == "win32":
        return None
    names = [name for _, name in socket.if_nameindex()]
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        if not set(chosen.split(",")) <= set(names):
            raise ValueError(f"GLOO_SOCKET_IFNAME={chosen!r}: no such interface; there are {', '.join(names)}")
        return chosen
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    one_node = not under_torchrun() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return loopback if one_node and loopback in names else None


def check_started(world_size: int) -> None:
    """Raise ValueError unless torchrun started so many processes."""
    started = int(os.environ["WORLD_SIZE"])
    if world_size != started:
        raise ValueError(f"world_size {world_size}, but the launcher started {started} processes")


def join(worker, world_size: int, args: tuple, backend: str | None, seconds: float) -> list:
    """Run the worker in this process, which torchrun started as one of `world_size` ranks; gather all results."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    first = not dist.is_initialized()
    if first:  # once a process: the launcher's store cannot be used for a second rendezvous
        join_group(rank, world_size, backend or "gloo", seconds)
    data = _encoded(worker(rank, world_size, *args))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, data)
    if first:
        atexit.register(_leave_group)
    return [wire.loads(item) for item in everyone]


def _leave_group() -> None:
    """End the group before the interpreter ends: its threads, still alive then, now and then abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
