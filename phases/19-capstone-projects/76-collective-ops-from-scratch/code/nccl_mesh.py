"""`NcclMesh`: a mesh of GPUs. Headers go over gloo, on the CPU; payloads from GPU to GPU, over NCCL.

NCCL knows no tags, and does what it is asked, for one communicator, strictly in order: two ranks that both send first
would wait for each other on their GPUs. So each ordered pair of ranks has a communicator of its own, on which messages
flow one way only, in the order of their headers. That is N(N-1) of them: right for the GPUs of one machine.
"""

import itertools
from collections import deque

import torch
import torch.distributed as dist
from torch_mesh import TorchMesh


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
        pairs = list(itertools.permutations(range(self.world_size), 2))
        self._lines = {pair: dist.new_group(list(pair), backend="nccl") for pair in pairs}
        self._leaving = deque()  # (work, payload): memory that a GPU may still have to read

    def _send_payload(self, dst, payload):
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        me = self.members[self.rank]
        if len(payload) > 0:
            self._leaving.append((dist.isend(payload, dst, group=self._lines[me, dst]), payload))

    def _receive_payload(self, src, payload):
        if len(payload) > 0:
            dist.irecv(payload, src, group=self._lines[src, self.members[self.rank]]).wait()
