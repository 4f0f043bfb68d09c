"""`--bench`: verified save and load on 2 ranks, beside the disk, sha256 alone and torch.distributed.checkpoint."""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import demo
import sidebyside
import torch
from checkpoint import load_shard, save_shard
from comm import TorchComm
from ranks import run_ranks
from shardfile import bytes_of

RANKS = 2


def run(folder: Path, megabytes: int) -> None:
    """Print both tables. Ratios are theirs / ours, pair by pair: above 1 means ours is faster."""
    for title, rows in run_ranks(_measure, RANKS, str(folder), megabytes)[0]:
        cells = [(row.name, row.seconds, row.ratio, f"{row.low:.2f} to {row.high:.2f}") for row in rows]
        demo.table(["", "seconds", "theirs / ours", "95% interval"], cells, f"{title}, {RANKS} ranks x {megabytes} MB")


def _measure(rank: int, world_size: int, folder: str, megabytes: int) -> list:
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    comm, numel = TorchComm(), megabytes * 1_000_000 // 4 // 4
    state = {f"rank{rank}.part{part}": torch.randn(numel) for part in range(4)}
    live = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    ours, theirs, raw = (Path(folder, name) for name in ("ours", "theirs", f"raw{rank}"))

    def write_and_fsync():
        with open(raw, "wb", buffering=0) as file:
            for tensor in state.values():
                file.write(bytes_of(tensor))
            os.fsync(file.fileno())

    def hash_only():
        digest = hashlib.sha256()
        for tensor in state.values():
            digest.update(bytes_of(tensor))

    def save_theirs(**options):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs, **options))

    saves = {
        "save_shard (sha256, fsync, manifest)": lambda: save_shard(state, ours, 1, comm),
        "the disk alone: write + fsync": write_and_fsync,
        "sha256 alone": hash_only,
        "torch.distributed.checkpoint.save": save_theirs,
        "torch.distributed.checkpoint.save, 2 threads": lambda: save_theirs(thread_count=2),
    }
    loads = {
        "load_shard (sha256)": lambda: load_shard(ours, comm),
        "sha256 alone": hash_only,
        "torch.distributed.checkpoint.load (unverified)": lambda: dcp.load(live, checkpoint_id=theirs),
    }
    with contextlib.suppress(ImportError):  # not a dependency
        from safetensors.torch import load_file, save_file

        alone = str(Path(folder, f"safetensors{rank}"))
        saves["safetensors.save_file (no hash, no fsync)"] = lambda: save_file(state, alone)
        # its tensors are pages of the file, read when touched: copy them, as a training job would
        loads["safetensors.load_file + clone (unverified)"] = lambda: [t.clone() for t in load_file(alone).values()]

    def compare(group: dict[str, Callable]) -> list:
        return sidebyside.compare({name: partial(sidebyside.slowest, work, comm) for name, work in group.items()})

    return [("save", compare(saves)), ("load", compare(loads))]
