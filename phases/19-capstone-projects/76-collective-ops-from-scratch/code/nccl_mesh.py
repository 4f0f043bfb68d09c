"""`NcclMesh`: a mesh of GPUs. Headers go over gloo, on the CPU; payloads from GPU to GPU, over NCCL.

NCCL knows no tags, and does what it is asked, for one communicator, strictly in order: two ranks that both send first
would wait for each other on their GPUs. So each ordered pair of ranks has a communicator of its own, on which messages
flow one way only, in the order of their headers. That is N(N-1) of them: right for the GPUs of one machine.
"""

import itertools
import os
from collections import deque

import torch
import torch.distributed as dist
from torch_mesh import TorchMesh

_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"  # its advice is what we do: a group a direction


class NcclMesh(TorchMesh):
    """A mesh over the default group of `run_ranks(..., backend="nccl")`; tensors are on this rank's GPU.

    All ranks make it together. `recv` returns a tensor that the current stream may use; nothing waits on the CPU for
    the GPU. Raises RuntimeError where the group has no NCCL.
    """

    def __init__(self):
        super().__init__()
        if "nccl" not in dist.get_backend_config():
            raise RuntimeError("there is no NCCL in the default group: call run_ranks with backend='nccl'")
        self.device = torch.device("cuda", torch.cuda.current_device())
        os.environ.setdefault(_WARNING, "false")
        pairs = list(itertools.permutations(range(self.world_size), 2))
        self._lines = {pair: dist.new_group(list(pair), backend="nccl") for pair in pairs}
        self._leaving = deque()  # (work, payload): memory that a GPU may still have to read
        self._connect(pairs)

    def _connect(self, pairs) -> None:
        """Send one byte along each line. NCCL connects two ranks at their first message, and both must come for it."""
        for src, dst in pairs:  # in one order for all: nobody waits for one who waits for another
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            if self.rank == src:
                dist.isend(byte, dst, group=self._lines[src, dst]).wait()
            elif self.rank == dst:
                dist.irecv(byte, src, group=self._lines[src, dst]).wait()
        torch.cuda.synchronize()

    def _send_payload(self, dst, payload):
        if not payload.is_cuda:  # long facts
            return super()._send_payload(dst, payload)
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        if len(payload) > 0:
            line = self._lines[self.members[self.rank], dst]
            self._leaving.append((dist.isend(payload, dst, group=line), payload))

    def _receive_payload(self, src, payload):
        if not payload.is_cuda:
            return super()._receive_payload(src, payload)
        if len(payload) > 0:
            dist.irecv(payload, src, group=self._lines[src, self.members[self.rank]]).wait()
