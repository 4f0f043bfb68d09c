"""`--bench`: verified save and load on 2 ranks, beside the disk, sha256 alone and torch.distributed.checkpoint."""

import contextlib
import hashlib
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import demo
import sidebyside
import torch
import torch.distributed as dist
from asyncsave import AsyncSaver
from checkpoint import load_shard, save_shard
from comm import TorchComm
from ranks import run_ranks
from packed import bytes_of
from restore import load_into

RANKS = 2
SAVE, BLOCKED, LOAD, MAPPED = (
    "save",
    "asynchronous save: how long the training stands still",
    "load: read into tensors",
    "load, mapped: the pages of the file are the tensors",
)
DISK, HASH, DCP, DCP_ASYNC = (
    "the disk alone: write + fsync",
    "sha256 alone",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.async_save",
)
TARGETS = {(SAVE, DISK): 0.75, (SAVE, DCP): 1.1, (BLOCKED, DCP_ASYNC): 1 / 0.8, (MAPPED, HASH): 0.85}  # theirs / ours


def run(claims: demo.Claims, folder: Path, megabytes: int) -> None:
    """Print the tables. Ratios are theirs / ours, pair by pair: above 1 means ours, the first row, is faster.

    Targets are for 100 MB a rank or more, and missed only if the whole interval is below: small files are all fsync.
    """
    for title, rows in run_ranks(_measure, RANKS, str(folder), megabytes)[0]:
        cells = [(row.name, row.seconds, row.ratio, f"{row.low:.2f} to {row.high:.2f}") for row in rows]
        demo.table(["", "seconds", "theirs / ours", "95% interval"], cells, f"{title}, {RANKS} ranks x {megabytes} MB")
        if megabytes >= 100:
            check_targets(claims, title, rows)


def check_targets(claims: demo.Claims, title: str, rows: list[sidebyside.Row]) -> None:
    """Check each row that has a target; but a slow disk leaves no room to be faster than what only waits for it."""
    disk = next((row.seconds for row in rows if row.name == DISK), 0.0)
    for row in rows:
        target = TARGETS.get((title, row.name))
        if target is not None and row.name == DCP and row.seconds < target * disk:
            demo.say(f"no target beside {DCP}: the disk alone takes {disk / row.seconds:.2f} of its time")
        elif target is not None:
            claim = f"target: row {rows[0].name!r} at least {target:g} times as fast as row {row.name!r}"
            claims.check(claim, *row.against(target))


def _measure(rank: int, world_size: int, folder: str, megabytes: int) -> list:
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    comm, numel = TorchComm(), megabytes * 1_000_000 // 4 // 4
    state = {f"rank{rank}.part{part}": torch.randn(numel) for part in range(4)}
    live = {name: torch.empty_like(tensor).zero_() for name, tensor in state.items()}
    kept, numbers = [Path(folder, name) for name in ("ours", "theirs")], itertools.count()
    save_shard(state, kept[0], 1, comm)
    dcp.save(state, checkpoint_id=kept[1])

    def new_place() -> Path:  # every save goes to a new place: the old file's end is not part of its time
        return Path(folder, f"save{next(numbers)}")

    def write_and_fsync(place: Path):
        place.mkdir(exist_ok=True)
        with open(place / f"raw{rank}", "wb", buffering=0) as file:
            for tensor in state.values():
                file.write(bytes_of(tensor))
            os.fsync(file.fileno())

    def hash_only():
        digest = hashlib.sha256()
        for tensor in state.values():
            digest.update(bytes_of(tensor))

    def save_theirs(place: Path, **options):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place, **options))

    saver, in_flight = AsyncSaver(comm), []
    apart = dist.new_group(backend="gloo")  # for DCP's thread: its messages would mix with the main thread's
    saves = {
        "save_shard (sha256, fsync, manifest)": lambda place: save_shard(state, place, 1, comm),
        "save_shard, CRC-32 too": lambda place: save_shard(state, place, 1, comm, crc32=True),
        DISK: write_and_fsync,
        HASH: lambda place: hash_only(),
        DCP: save_theirs,
        "torch.distributed.checkpoint.save, 2 threads": partial(save_theirs, thread_count=2),
    }
    blocked = {
        "AsyncSaver.save": lambda place: saver.save(state, place, 1),
        DCP_ASYNC: lambda place: in_flight.append(dcp.async_save(state, checkpoint_id=place, process_group=apart)),
        "save_shard": lambda place: save_shard(state, place, 1, comm),
    }
    into_live = {"load_shard, into live tensors (sha256)": lambda place: load_shard(kept[0], comm, into=live)}
    loads = {
        **into_live,
        "load_shard, new tensors (sha256)": lambda place: load_shard(kept[0], comm),
        HASH: lambda place: hash_only(),
        "torch.distributed.checkpoint.load (unverified)": lambda place: dcp.load(live, checkpoint_id=kept[1]),
    }
    mapped = {
        "load_shard, mapped (sha256)": lambda place: load_shard(kept[0], comm, mapped=True),
        HASH: lambda place: hash_only(),
        **into_live,
        "mapped, then copied into live tensors": lambda place: load_into(live, load_shard(kept[0], comm, mapped=True)),
    }
    with contextlib.suppress(ImportError):  # not a dependency
        from safetensors.torch import load_file, save_file

        alone = str(Path(folder, f"safetensors{rank}"))
        saves["safetensors.save_file (no hash, no fsync)"] = lambda place: save_file(state, alone)
        # its tensors are pages of the file, read when touched: copy them, as a training job would
        loads["safetensors.load_file + clone (unverified)"] = lambda place: [
            t.clone() for t in load_file(alone).values()
        ]

    def seconds(work: Callable[[Path], object]) -> float:
        """Time one call, then finish what it has put into the background, and make room on the disk."""
        place = new_place()
        taken = sidebyside.slowest(lambda: work(place), comm)
        saver.wait()
        while in_flight:
            in_flight.pop().result()
        comm.agree(None)
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
        comm.agree(None)
        return taken

    def compare(group: dict[str, Callable]) -> list:
        return sidebyside.compare({name: partial(seconds, work) for name, work in group.items()}, pairs=15)

    tables = {SAVE: saves, BLOCKED: blocked, LOAD: loads, MAPPED: mapped}
    return [(title, compare(group)) for title, group in tables.items()]
