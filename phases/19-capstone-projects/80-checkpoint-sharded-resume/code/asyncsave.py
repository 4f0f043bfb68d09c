"""Asynchronous save: the state is copied before the call returns, and a thread writes the copy while training goes on.

What a crash loses: the thread runs the same five steps as `save_shard`, so until the rename the previous checkpoint is
the newest one, and after it the new one is. A save in flight is lost as a whole, or not at all.
"""

import datetime
import sys
import threading
import weakref

import torch
import torch.distributed as dist
from checkpoint import Save
from comm import TorchComm
from manifest import CheckpointError, ShardManifest
from packed import bytes_of
from storage import DISK, Storage
from strictjson import check_integer
from team import Team


class AsyncSaver:
    """Saves in the background, one save at a time. All ranks make it, and call its methods, together.

    with AsyncSaver(comm) as saver:
        for step in ...:
            saver.save(state, folder / f"step_{step}", step)

    A call raises what went wrong with the save before it, the same CheckpointError on every rank, and then has done
    nothing itself. `timeout` bounds, in seconds, how long a call waits for the save before it and how long a rank's
    thread waits for the other ranks'. One copy of the state (T bytes a rank) is held from the first save on: its memory
    is used again by each save, so the first one, which must get it from the system, blocks longest.

    The interpreter's exit waits for a save in flight. A rank of `run_ranks` ends without that as soon as its worker
    returns: leave the `with` block, or call `close`, before.
    """

    def __init__(self, comm=None, *, timeout: float = 600.0, crc32: bool = False, storage: Storage = DISK):
        self._start_with(Team.of_comm(_OwnGroup(comm, timeout)), timeout, crc32, storage)
        self._states_by_rank = lambda state: {self.team.ranks[0]: state}

    @classmethod
    def of_one_process(cls, world_size: int, *, timeout=600.0, crc32=False, storage: Storage = DISK) -> "AsyncSaver":
        """Save the states of all ranks from one process: `save` takes a list, as `save_sharded` does."""
        check_integer("world_size", world_size, least=1)
        saver = cls.__new__(cls)
        saver._start_with(Team.of_one_process(world_size), timeout, crc32, storage)

        def by_rank(states):
            if not isinstance(states, list | tuple) or len(states) != world_size:
                raise CheckpointError(f"state: expected a list of {world_size} states, one a rank")
            return dict(enumerate(states))

        saver._states_by_rank = by_rank
        return saver

    def _start_with(self, team: Team, timeout: float, crc32: bool, storage: Storage) -> None:
        self.team, self.timeout, self.crc32, self.storage = team, timeout, crc32, storage
        self._buffers, self._thread, self._saving = CopyBuffers(), None, ""
        self._manifest, self._failure = None, []  # of the last save
        weakref.finalize(self, _complain, self._failure)  # at the interpreter's exit at the latest

    def save(self, state, dest_dir, step, *, wall_clock_seconds=0.0) -> None:
        """Wait for the save before this one, copy `state`, and return; what is saved is the state of this moment."""
        self.wait()
        states = self._states_by_rank(state)
        save = Save(dest_dir, step, wall_clock_seconds, self.team, self.storage, self.crc32)
        self._buffers.reuse()
        save.pack(states, keep=self._buffers.copy)
        self._buffers.finish()
        self._manifest, self._saving = None, f"the save of step {step} into {dest_dir}"
        self._thread = threading.Thread(target=self._write, args=(save,), name=self._saving)
        self._thread.start()

    def wait(self) -> ShardManifest | None:
        """Wait for the save in flight; return the last save's manifest (None: nothing saved, or its error was raised).

        Raises what went wrong; CheckpointError, with the step, the folder and the time limit, after `timeout` seconds:
        the save still goes on then.
        """
        if self._thread is not None:
            self._thread.join(self.timeout)
            if self._thread.is_alive():
                raise CheckpointError(f"{self._saving} has not finished after {self.timeout:g} s")
            self._thread = None
        if self._failure:
            what, error = self._failure.pop()
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{what} failed: {error}") from error
            raise error  # a lost peer, say: the launcher knows these
        return self._manifest

    def close(self) -> None:
        """Wait for the save in flight and raise what went wrong."""
        self.wait()

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:  # else the error that is on its way matters more, and must not wait
            self.close()

    def _write(self, save: Save) -> None:
        try:
            self._manifest = save.publish()
        except BaseException as error:
            self._failure.append((self._saving, error))


class CopyBuffers:
    """Memory for the copy of a state, a buffer a region, kept from save to save."""

    def __init__(self):
        self._buffers: list[torch.Tensor] = []
        self._used, self._from_gpu = 0, False

    def reuse(self) -> None:
        """Begin a new copy in the same memory."""
        self._used, self._from_gpu = 0, False

    def copy(self, tensor: torch.Tensor) -> memoryview:
        """Copy a tensor of any strides and device into the next buffer; return its bytes, in row-major order."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if len(self._buffers[self._used]) < size:
            self._buffers[self._used] = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        buffer = self._buffers[self._used][:size]
        self._used += 1
        buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        self._from_gpu |= tensor.is_cuda
        return bytes_of(buffer)

    def finish(self) -> None:
        """Return when all copies are complete: from pinned memory's other side they run on their own."""
        if self._from_gpu:
            torch.cuda.current_stream().synchronize()


class _OwnGroup(TorchComm):
    """How the ranks' threads agree: over a gloo group of their own, so that no message of the training is mixed in.

    It keeps out of the flight record, which says where a rank's main thread is.
    """

    def __init__(self, comm, timeout: float):
        base = comm if isinstance(comm, TorchComm) else TorchComm()
        if comm is not None and (base.rank, base.world_size) != (comm.rank, comm.world_size):
            raise ValueError("comm must have the ranks of the default process group, or be a TorchComm")
        ranks = dist.get_process_group_ranks(base.group or dist.group.WORLD)
        options = {"timeout": datetime.timedelta(seconds=timeout), "use_local_synchronization": True}
        super().__init__(dist.new_group(ranks, backend="gloo", **options))

    def agree(self, facts) -> list:
        self.counters.control_calls += 1
        return self._agree(facts)


def _complain(failure: list) -> None:
    for what, error in failure:
        print(f"{what} failed, and nobody waited to hear it: {error}", file=sys.stderr)
