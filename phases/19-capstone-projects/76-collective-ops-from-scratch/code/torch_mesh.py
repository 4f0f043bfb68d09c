"""`TorchMesh`: a mesh over torch.distributed's point-to-point messages: our collectives run wherever a group does."""

from collections import defaultdict, deque

import torch
import torch.distributed as dist
import wire
from mesh import CONTROL, Mesh

_MAX_DIM = 8  # a header is: context, tag, round stamp, dtype, number of dimensions, then the sizes
_HEADER = 8 * (5 + _MAX_DIM)  # bytes
_INLINE = 1024 - _HEADER  # a payload of up to so many bytes travels with its header
_BUFFERED = 16  # messages to each peer, on average, that may be on their way before `send` waits for the oldest
_in_flight = deque()  # (work, memory) of the whole process: a message may outlive the mesh that sent it


class TorchMesh(Mesh):
    """A mesh over a process group (default: the world). Waits end with the group's own timeout.

    Each message is a header of fixed size, then the payload: the receiver learns dtype and shape before it posts the
    receive, so no message can land in a buffer of another kind. For CPU tensors, over gloo; for those on GPUs see
    `NcclMesh`. `send` is buffered for several messages a peer; after that it waits for the oldest to be received.
    """

    def __init__(self, group=None):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group, self._stash = group, defaultdict(deque)

    def _post(self, dst, tag, stamp, tensor, lone):
        if tensor.dim() > _MAX_DIM:
            raise ValueError(f"a message may have {_MAX_DIM} dimensions, this tensor has {tensor.dim()}")
        sizes = [*tensor.shape, *[0] * (_MAX_DIM - tensor.dim())]
        first = torch.empty(_HEADER + _INLINE, dtype=torch.uint8)
        header = torch.tensor([*tag, stamp, wire.DTYPES.index(tensor.dtype), tensor.dim(), *sizes])
        first[:_HEADER] = header.view(torch.uint8)
        payload = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        inline = len(payload) <= _INLINE and not payload.is_cuda
        if inline:
            first[_HEADER : _HEADER + len(payload)] = payload
        try:
            _in_flight.append((dist.isend(first, group=self._group, group_dst=dst), first))
            if not inline:
                self._send_payload(dst, payload)
        except RuntimeError as error:
            raise self._lost(dst, tag, str(error), sending=True) from error
        while len(_in_flight) > _BUFFERED * self.world_size:  # gloo never says that a send is complete, unless asked to
            _in_flight.popleft()[0].wait()  # wait; until then its memory must stay

    def _send_payload(self, dst, payload):
        _in_flight.append((dist.isend(payload, group=self._group, group_dst=dst), payload))

    def _receive_payload(self, src, payload):
        dist.recv(payload, group=self._group, group_src=src)

    def _take(self, src, tag):
        while not self._stash[src, tag]:
            try:
                sender_tag, message = self._receive(src)
            except RuntimeError as error:  # gloo's words name no rank
                raise self._lost(src, tag, str(error)) from error
            self._stash[src, sender_tag].append(message)
        return self._stash[src, tag].popleft()

    def _receive(self, src):
        first = torch.empty(_HEADER + _INLINE, dtype=torch.uint8)
        dist.recv(first, group=self._group, group_src=src)
        context, tag, stamp, dtype, dim, *sizes = first[:_HEADER].view(torch.int64).tolist()
        device = torch.device("cpu") if tag == CONTROL else self.device
        tensor = torch.empty(sizes[:dim], dtype=wire.DTYPES[dtype], device=device)
        payload = tensor.view(-1).view(torch.uint8)
        if len(payload) <= _INLINE and not payload.is_cuda:
            payload.copy_(first[_HEADER : _HEADER + len(payload)])
        else:
            self._receive_payload(src, payload)
        return (context, tag), (stamp, tensor)
