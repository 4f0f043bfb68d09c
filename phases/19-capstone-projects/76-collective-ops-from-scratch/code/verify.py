"""Is our answer right? Each collective next to torch.distributed's own on gloo, and a comparison that cannot be fooled.

What "equal" means: as many results, of the same shapes and dtypes. Where nothing is rounded (broadcast, all-gather,
integers, bools) every bit is the same. A sum of floats depends on the order of its terms: two orders of N terms differ
by at most 2 (N-1) eps sum|x_i| an element, as long as no partial sum overflows; NaN and infinity stand at the same
places.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import wire
from collectives import MOVES, PRIMITIVES, check_call, check_chunks
from comm import WIDER
from mesh import QueueMesh
from ranks import check_world_size, run_ranks, start_method

ADDS = ("allreduce", "reduce_scatter")  # the others only move


@dataclass(frozen=True)
class Case:
    """One collective with each rank's input. Raises ValueError, with the values, for what could not be run."""

    op: str
    tensors: list[torch.Tensor]
    src: int = 0

    def check(self, world_size: int) -> None:
        """Raise ValueError unless `world_size` ranks can run this."""
        if not isinstance(self.op, str) or self.op not in PRIMITIVES:
            raise ValueError(f"op must be one of {', '.join(PRIMITIVES)}, got {self.op!r}")
        check_world_size(world_size)
        if not isinstance(self.tensors, list | tuple) or len(self.tensors) != world_size:
            found = len(self.tensors) if isinstance(self.tensors, list | tuple) else type(self.tensors).__name__
            raise ValueError(f"a list of {world_size} tensors is needed, one a rank, got {found}")
        for tensor in self.tensors:
            check_call(self.op, world_size, tensor, "sum" if self.op in ADDS else MOVES, self.src)
            if self.op == "reduce_scatter":
                check_chunks(tensor, world_size)
        kinds = [f"{wire.dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in self.tensors]
        if len(set(kinds)) > 1:
            raise ValueError(f"all ranks need the same dtype and shape, got {', '.join(kinds)}")


@dataclass(frozen=True)
class Verdict:
    """Whether our results equal gloo's, how far apart they are at most, and the payload bytes that ours took."""

    match: bool
    max_abs_diff: float
    total_bytes: int


def run_mesh(op: str, world_size: int, per_rank_tensors: list, src: int = 0) -> tuple[list[torch.Tensor], int]:
    """Run our collective over queues between processes; return ([result of each rank], payload bytes sent by all)."""
    case = Case(op, per_rank_tensors, src)
    case.check(world_size)
    ranks = run_ranks(_ours, world_size, _inboxes(world_size, None), [case], backend=None)
    return [results[0] for results, _ in ranks], sum(sent[0] for _, sent in ranks)


def gloo_reference(op: str, world_size: int, per_rank_tensors: list, src: int = 0) -> list[torch.Tensor]:
    """Run torch.distributed's own collective on gloo; return [result of each rank].

    gloo sees contiguous memory only (it ignores strides), sums of bool and int16 go through int32, and what only moves
    goes as bytes, because gloo refuses several dtypes.
    """
    case = Case(op, per_rank_tensors, src)
    case.check(world_size)
    return [results[0] for results in run_ranks(_gloo, world_size, [case])]


def verify_against_gloo(op: str, world_size: int, per_rank_tensors: list, src: int = 0) -> tuple[bool, float]:
    """Run both; return (match, max_abs_diff). The difference is infinite if the results cannot be compared."""
    (verdict,) = verify_cases(world_size, [Case(op, per_rank_tensors, src)])
    return verdict.match, verdict.max_abs_diff


def verify_cases(world_size: int, cases: list[Case]) -> list[Verdict]:
    """Run many cases, ours and gloo's, in one set of processes."""
    for case in cases:
        case.check(world_size)
    ranks = run_ranks(_both, world_size, _inboxes(world_size, "gloo"), cases)
    verdicts = []
    for i, case in enumerate(cases):
        ours, theirs = [results[i] for (results, _), _ in ranks], [results[i] for _, results in ranks]
        verdicts.append(Verdict(*compare(case.op, case.tensors, ours, theirs), sum(sent[i] for (_, sent), _ in ranks)))
    return verdicts


def compare(op: str, inputs: list, ours: list, theirs: list) -> tuple[bool, float]:
    """Compare all ranks' results of `op` on `inputs`; return (match, max_abs_diff)."""
    if not len(ours) == len(theirs) == len(inputs):
        return False, math.inf
    match, worst = True, 0.0
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False, math.inf
        if wire.tensor_to_bytes(a) == wire.tensor_to_bytes(b):
            continue
        gap = _gap(a, b)
        rounds = op in ADDS and (a.is_floating_point() or a.is_complex())
        match = match and rounds and bool((gap <= _bound(op, inputs, rank)).all())
        worst = max(worst, gap.max().item())
    return match, worst


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| for each element, as float64: 0 where both are NaN or the same infinity, infinite where one is."""
    if not (a.is_floating_point() or a.is_complex()):
        pairs = zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True)
        return torch.tensor([float(abs(x - y)) for x, y in pairs], dtype=torch.float64)  # exact before the last step
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return gap.nan_to_num(nan=math.inf, posinf=math.inf)


def _bound(op: str, inputs: list, rank: int) -> torch.Tensor:
    """2 (N-1) eps sum|x_i| for each element of the rank's result; 0 where that is not finite."""
    wide = torch.complex128 if inputs[0].is_complex() else torch.float64
    magnitude = sum(x.detach().to(wide).abs() for x in inputs)
    if op == "reduce_scatter":
        magnitude = magnitude.tensor_split(len(inputs))[rank]
    bound = 2 * (len(inputs) - 1) * torch.finfo(inputs[0].dtype).eps * magnitude
    return bound.nan_to_num(nan=0.0, posinf=0.0)


def _inboxes(world_size: int, backend: str | None) -> list:
    return QueueMesh.inboxes(world_size, start_method(backend))


def _both(rank: int, world_size: int, boxes: list, cases: list[Case]):
    return _ours(rank, world_size, boxes, cases), _gloo(rank, world_size, cases)


def _ours(rank: int, world_size: int, boxes: list, cases: list[Case]) -> tuple[list[torch.Tensor], list[int]]:
    mesh = QueueMesh(rank, world_size, boxes)
    results, sent = [], []
    for case in cases:
        before = mesh.counters.bytes_sent
        options = {"src": case.src} if case.op == "broadcast" else {}
        results.append(PRIMITIVES[case.op](mesh, case.tensors[rank], **options))
        sent.append(mesh.counters.bytes_sent - before)
    return results, sent


def _gloo(rank: int, world_size: int, cases: list[Case]) -> list[torch.Tensor]:
    return [_gloo_collective(case.op, case.tensors[rank], world_size, case.src) for case in cases]


def _gloo_collective(op: str, tensor: torch.Tensor, world_size: int, src: int) -> torch.Tensor:
    x = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op in ADDS:
        wide = x.to(WIDER.get(x.dtype, x.dtype))
        if op == "allreduce":
            dist.all_reduce(wide)
            return wide.to(x.dtype)
        parts = list(wide.tensor_split(world_size))
        dist.reduce_scatter(out := torch.empty_like(parts[0]), parts)
        return out.to(x.dtype)
    data = x.view(-1).view(torch.uint8)
    if op == "broadcast":
        dist.broadcast(data, src)
        return x
    parts = [torch.empty_like(data) for _ in range(world_size)]
    dist.all_gather(parts, data)
    shape = (world_size, *x.shape[1:]) if x.dim() == 0 else (world_size * x.shape[0], *x.shape[1:])
    return torch.cat(parts).view(x.dtype).view(shape)
