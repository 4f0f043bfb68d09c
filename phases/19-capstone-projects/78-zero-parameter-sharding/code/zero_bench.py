"""`--bench`: our ZeRO-1 beside DDP with torch's ZeroRedundancyOptimizer or Adam. Same model, data, fp32 everywhere."""

from functools import partial

import demo
import memory
import sidebyside
import torch
from comm import Comm, TorchComm
from flat import gather_flat_params
from ranks import run_ranks
from torch import nn
from zero import ZeroOptimizer

LR, CHECKED_STEPS, PAIRS = 1e-3, 3, 21
OURS, SHARDED, REPLICATED = "ours", "DDP + ZeroRedundancyOptimizer", "DDP + Adam"
TUNED = {"gradient_as_bucket_view": True, "static_graph": True}  # of DDP


def transformer() -> nn.Module:
    """Return a transformer encoder of 3.2M parameters, equal on all ranks."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def ours(module: nn.Module, comm: Comm) -> tuple:
    """Return (what to call, the optimizer, the tensors of its state)."""
    optimizer = ZeroOptimizer(module, comm.world_size, comm.rank, LR, comm=comm)
    return module, optimizer, lambda: [t for shard in optimizer.shards for t in shard.tensors().values()]


def sharded(module: nn.Module, comm: Comm, tuned: bool) -> tuple:
    """Return the same of torch's sharded Adam; tuned: buckets without copies, and the fused kernel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    options = {"parameters_as_bucket_view": True, "fused": True} if tuned else {}
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=LR, **options)
    return DistributedDataParallel(module, **(TUNED if tuned else {})), optimizer, lambda: moments(optimizer.optim)


def replicated(module: nn.Module, comm: Comm, tuned: bool) -> tuple:
    """Return the same of torch's plain Adam, whole on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    optimizer = torch.optim.Adam(module.parameters(), LR, fused=tuned or None)  # False is not the default
    return DistributedDataParallel(module, **(TUNED if tuned else {})), optimizer, lambda: moments(optimizer)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what a torch optimizer holds for each element of its parameters."""
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


CONTENDERS = {
    OURS: ours,
    f"{SHARDED}, default": partial(sharded, tuned=False),
    f"{SHARDED}, tuned": partial(sharded, tuned=True),
    f"{REPLICATED}, default": partial(replicated, tuned=False),
    f"{REPLICATED}, tuned": partial(replicated, tuned=True),
}


def measure(rank: int, world_size: int) -> dict:
    """Be one rank: let every contender take a few steps, compare what they hold, then time all, interleaved."""
    comm, steps, params, state = TorchComm(), {}, {}, {}
    x = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(rank)).to(comm.device)  # (batch, seq, dim)
    for name, make in CONTENDERS.items():
        module = transformer().to(comm.device)
        call, optimizer, held = make(module, comm)

        def step(call=call, optimizer=optimizer) -> None:
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(CHECKED_STEPS):
            step()
        params[name] = gather_flat_params(module)
        state[name] = memory.live_bytes(held())
        steps[name] = partial(sidebyside.slowest, step, comm)
    return {
        "numel": params[OURS].numel(),
        "difference": {name: (theirs - params[OURS]).abs().max().item() for name, theirs in params.items()},
        "state": state,
        "rows": sidebyside.compare(steps, PAIRS),
    }


def bench(args) -> int:
    """Compare on `args.world_size` ranks; return the exit code: whether all rows train the same model.

    With plain Adam on gloo and 2 ranks that means the same bits. Else sums and fused kernels round differently, and
    Adam makes steps of up to lr of that noise where a gradient is almost zero: a tenth of lr is allowed.
    """
    found = run_ranks(measure, args.world_size, backend=args.backend)
    state = {name: max(each["state"][name] for each in found) for name in CONTENDERS}
    worst = {name: max(each["difference"][name] for each in found) for name in CONTENDERS}
    rows = [
        [row.name, row.seconds * 1e3, row.ratio, f"{row.low:.2f} to {row.high:.2f}", state[row.name], worst[row.name]]
        for row in found[0]["rows"]
    ]
    numel, columns = found[0]["numel"], ["ms a step", "ours is x times as fast", "95% interval"]
    title = f"{numel:,} parameters, fp32, {args.world_size} ranks, {args.backend}, {PAIRS} interleaved pairs, no checks"
    demo.table(["", *columns, "state bytes a rank", "max |a-b|"], rows, title)
    claims = demo.Claims()
    same = "the same model after {} steps, within lr / 10 = {:g}"
    claims.check(same.format(CHECKED_STEPS, LR / 10), max(worst.values()) <= LR / 10, f"{max(worst.values()):.2g}")
    if args.world_size <= 2 and args.backend == "gloo":
        exact = [worst[f"{name}, default"] == 0 for name in (SHARDED, REPLICATED)]
        claims.check("with torch's plain Adam the same bits", all(exact))
    sizes = state[OURS] == 12 * memory.shard_bounds(numel, args.world_size, 0)[2]
    claims.check("ours holds 12 ceil(P/N) bytes of state (torch's rows have no master copy: 8 P/N or more)", sizes)
    return claims.verdict("ZeRO-1 beside torch's own: the same training, timed")
