"""`--deeper`: tied weights, memory against time, stages of equal time, pipelines side by side, each with its claim."""

import time
from functools import partial

import demo
import torch
from balance import balanced_bounds, equal_bounds, profile_layers, stage_sums
from comm import Comm, TorchComm
from mesh_comm import MeshComm
from meter import MeteredPipeline
from one_process import train_one_process
from pipeline import Pipeline
from pipeline_data import StageGradients, split_grid
from ranks import run_ranks
from schedule import SCHEDULES, make_schedule, stages_per_rank
from sidebyside import compare, slowest
from simulator import simulate
from stage_mlp import build_pipeline, make_batch, sgd_step
from stopwatch import Stopwatch
from tied import TiedWeight
from tied_toy import DIM, TiedStage, token_loss, tokens, whole_model
from torch import nn
from torch.nn.functional import mse_loss
from virtual import VirtualCluster

STEPS, ROWS, SEQ = 5, 2, 5


def tied_worker(mesh, name: str, microbatches: int, tie: bool) -> list[torch.Tensor | None]:
    """Train on a virtual rank; return its copies of the matrix at the end, of its first and last stage."""
    comm, count = MeshComm(mesh), mesh.world_size * stages_per_rank(name)
    stages = [TiedStage(stage, count) for stage in range(mesh.rank, count, mesh.world_size)]
    copies = [stage.matrix for stage in stages if stage.matrix is not None]
    tied = TiedWeight(copies[0] if copies else None, comm)
    shapes = [(ROWS, SEQ), *[(ROWS, SEQ, DIM)] * (count - 1)]
    schedule = make_schedule(name, mesh.world_size, microbatches)
    pipeline = Pipeline(stages, schedule, token_loss, shapes, comm=comm, tied=tied if tie else None)
    for step in range(STEPS):
        pipeline.step(*(part.chunk(microbatches) for part in tokens(step, ROWS * microbatches)))
        for stage in stages:
            sgd_step(stage, 0.5)
    return [copy.detach() for copy in copies]


def check_tied(claims: demo.Claims, microbatches: int = 4, num_ranks: int = 3) -> None:
    """Claim: with gradients summed before the step, copies stay equal, and are what one process has."""
    rows, good, drifted = [], True, True
    for name in SCHEDULES:
        model = whole_model(num_ranks * stages_per_rank(name))
        for step in range(STEPS):
            x, target = tokens(step, ROWS * microbatches)
            token_loss(model(x), target).backward()
            sgd_step(model, 0.5)
        alone = model[0].matrix.detach()
        for tie in (True, False):
            copies = [c for rank in VirtualCluster(num_ranks).run(tied_worker, name, microbatches, tie) for c in rank]
            apart = (copies[0] - copies[-1]).abs().max().item()
            off = max((copy - alone).abs().max().item() for copy in copies)
            good &= not tie or (apart == 0 and off < 1e-5)
            drifted &= tie or apart > 1e-3
            rows.append([name, "summed" if tie else "not summed", apart, off])
    demo.table(
        ["schedule", "gradients of the copies", "copies apart", "off one process"],
        rows,
        f"A tied embedding after {STEPS} steps, {num_ranks} ranks",
    )
    claims.check("tied: copies stay equal, and are one process's", good)
    claims.check("not summed, they drift apart", drifted)


def memory_worker(rank: int, world_size: int, name: str, microbatches: int, checkpoint: bool) -> list:
    """Be one rank: return [peak of activations in bytes, milliseconds a step, do the gradients have the same bits]."""
    comm, width, depth, rows = TorchComm(), 128, 6, 64
    torch.manual_seed(rank)
    stage = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))
    stage = stage.to(comm.device)
    schedule, shapes = make_schedule(name, world_size, microbatches), [(rows, width)] * world_size
    x, target = torch.randn(2, microbatches, rows, width, generator=torch.Generator().manual_seed(7)).to(comm.device)
    found = []
    for kind, options in ((Pipeline, {}), (MeteredPipeline, {"checkpoint": checkpoint})):
        stage.zero_grad()
        pipeline = kind(stage, schedule, mse_loss, shapes, comm=comm, **options)
        pipeline.step(x, target)
        found.append([p.grad for p in stage.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    plain = Pipeline(stage, schedule, mse_loss, shapes, comm=comm, checkpoint=checkpoint)
    times = []
    for _ in range(5):
        comm.agree(None)
        started = time.perf_counter()
        plain.step(x, target)
        times.append(time.perf_counter() - started)
    return [pipeline.meter.peak, 1e3 * min(times), same]


def check_memory(claims: demo.Claims, microbatches: int = 8) -> None:
    """Claim: a microbatch costs a stage L + 1 tensors; with checkpointing 1, and L more once."""
    rows, good, same, unit = [], True, True, 64 * 128 * 4
    for name in ("gpipe", "1f1b"):
        for checkpoint in (False, True):
            found = run_ranks(memory_worker, 2, name, microbatches, checkpoint)
            alive = [microbatches if name == "gpipe" else min(microbatches, 2 - rank) for rank in range(2)]
            tensors = [found[rank][0] / unit for rank in range(2)]
            expected = [live + 6 if checkpoint else 7 * live for live in alive]
            # The last rank's loss saves its difference, too, and a gradient scalar: less than two tensors a microbatch.
            good &= tensors[0] == expected[0] and expected[1] <= tensors[1] <= expected[1] + 2 * alive[1]
            same &= all(each[2] for each in found)
            how = "inputs only" if checkpoint else "everything"
            rows.append([name, how, expected[0], tensors[0], tensors[1], max(each[1] for each in found)])
    columns = ["schedule", "kept for backward", "predicted", "rank 0", "rank 1", "ms a step"]
    demo.table(columns, rows, f"Activations in tensors of 64 x 128, 6 layers a stage, N = 2, M = {microbatches}")
    claims.check("peaks: (L + 1) x alive, with checkpointing alive + L", good)
    claims.check("recomputed gradients have the same bits", same)


WIDTH, HEAD = 256, 2048  # of an uneven model: 8 equal layers and a wide head, as a language model has one


def uneven_layers(seed: int = 7) -> list[nn.Module]:
    """Return the layers of the uneven model."""
    torch.manual_seed(seed)
    return [*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)), nn.Linear(WIDTH, HEAD)]


def uneven_times(rows: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each layer's forward and backward pass, the loss counted with the head."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has
    loss = SquaredError(torch.zeros(rows, HEAD))
    both = profile_layers([*uneven_layers(), loss], torch.randn(rows, WIDTH))
    torch.set_num_threads(before)
    forward, backward = ([*times[:-2], times[-2] + times[-1]] for times in both)
    return forward, backward


class SquaredError(nn.Module):
    """The loss as a layer, to be timed like one."""

    def __init__(self, target: torch.Tensor):
        super().__init__()
        self.target = target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, HEAD) -> ()."""
        return mse_loss(x, self.target)


def balance_worker(rank: int, world_size: int, cuts: dict[str, list], microbatches: int, rows: int) -> list:
    """Be one rank of a model, cut in each way in turn: return [milliseconds of each, ratio, low, high]."""
    comm, steps = TorchComm(), {}
    x = torch.randn(microbatches, rows, WIDTH, device=comm.device)
    target = torch.randn(microbatches, rows, HEAD, device=comm.device)
    schedule, shapes = make_schedule("1f1b", world_size, microbatches), [(rows, WIDTH)] * world_size
    for cut, bounds in cuts.items():
        stage = nn.Sequential(*uneven_layers()[slice(*bounds[rank])]).to(comm.device)
        step = partial(Pipeline(stage, schedule, mse_loss, shapes, comm=comm).step, x, target)
        steps[cut] = partial(slowest, step, comm)
    balanced, equal = compare(dict(reversed(steps.items())))
    return [[1e3 * equal.seconds, 1e3 * balanced.seconds], equal.ratio, equal.low, equal.high]


def check_balance(claims: demo.Claims, microbatches: int = 8, rows: int = 128, num_stages: int = 2) -> None:
    """Claim: simulated, the balanced cut's step is shorter than that of equally many layers. Measured, it is shown."""
    forward, backward = uneven_times(rows)
    layers = [f + b for f, b in zip(forward, backward, strict=True)]
    cuts = {
        "equally many layers": equal_bounds(len(layers), num_stages),
        "equal time": balanced_bounds(layers, num_stages),
    }
    times, ratio, low, high = run_ranks(balance_worker, num_stages, cuts, microbatches, rows)[0]
    found, schedule = [], make_schedule("1f1b", num_stages, microbatches)
    for (cut, bounds), measured in zip(cuts.items(), times, strict=True):
        halves = [t / 2 for t in stage_sums(backward, bounds)]
        predicted = simulate(schedule, stage_sums(forward, bounds), halves, halves)
        pace = 1e3 * max(stage_sums(layers, bounds))
        found.append([cut, str(bounds), pace, predicted.bubble, 1e3 * predicted.step, measured])
    columns = ["cut", "layers of each stage", "slowest stage, ms", "bubble", "step, ms, simulated", "measured"]
    demo.table(columns, found, f"An uneven model: 8 layers and a wide head, 1F1B, N = {num_stages}, M = {microbatches}")
    simulated = found[0][4] / found[1][4]
    demo.say(f"      {ratio:.2f} times as fast ({low:.2f} to {high:.2f}); simulated {simulated:.2f}")
    claims.check("the balanced cut's step is shorter in the simulation", found[1][4] < found[0][4])


def grid_pipeline(comm: Comm, name: str, batch: int, microbatches: int, num_stages: int) -> tuple[Pipeline, Comm]:
    """Return a rank's pipeline in a grid of replicas x stages, and its data-parallel group."""
    pipe, data = split_grid(comm, num_stages)
    pipeline = build_pipeline(pipe, batch, microbatches, name)
    pipeline.on_gradients = StageGradients(pipeline.stages, data).launch
    return pipeline, data


def grid_worker(rank: int, world_size: int, name: str, batch: int, microbatches: int) -> dict:
    """Train in a grid of 2 replicas x 2 stages; return what this rank found."""
    comm = TorchComm()
    pipeline, data = grid_pipeline(comm, name, batch, microbatches, 2)
    pipeline.stopwatch, launched, launch = Stopwatch(pipeline.comm), [], pipeline.on_gradients

    def noted(stage: int):
        launched.append((stage, len(pipeline.stopwatch._spans)))  # after so many computations of this rank
        return launch(stage)

    pipeline.on_gradients = noted
    losses, calls = [], data.counters.calls["all_reduce"]
    for step in range(STEPS):
        rows = [part.chunk(data.world_size)[data.rank] for part in make_batch(step, 2 * batch * microbatches)]
        losses += pipeline.step(*(part.to(comm.device).chunk(microbatches) for part in rows)).tolist()
        for stage in pipeline.stages.values():
            sgd_step(stage)
    parameters = {i: [p.detach().cpu() for p in stage.parameters()] for i, stage in pipeline.stages.items()}
    calls = data.counters.calls["all_reduce"] - calls
    return {"losses": losses, "replica": data.rank, "launched": launched, "calls": calls, "parameters": parameters}


def check_grid(claims: demo.Claims, batch: int = 3, microbatches: int = 4) -> None:
    """Claim: 2 pipelines of 2 ranks train as one process does on all rows; a stage's gradients leave when complete."""
    _, _, alone = train_one_process(STEPS, batch, 2 * microbatches)
    rows, good, early = [], True, True
    for name in SCHEDULES:
        found = run_ranks(grid_worker, 4, name, batch, microbatches)
        off = 0.0
        for rank in found:
            flat = [p for stage in sorted(rank["parameters"]) for p in rank["parameters"][stage]]
            count, parameters = 2 * stages_per_rank(name), [*alone.parameters()]
            size = len(parameters) // count
            own = [p for stage in rank["parameters"] for p in parameters[stage * size : (stage + 1) * size]]
            off = max(off, *((a - b).abs().max().item() for a, b in zip(flat, own, strict=True)))
            good &= off < 1e-6 and rank["calls"] == STEPS * len(rank["parameters"])
        order = [found[r]["launched"][: len(found[r]["parameters"])] for r in (0, 1)]
        total = microbatches * stages_per_rank(name) * (3 if name == "zb-h1" else 2)
        early &= name != "interleaved" or order[0][0][1] < total
        rows.append([name, *("; ".join(f"stage {s} after {at} of {total}" for s, at in each) for each in order), off])
    columns = ["schedule", "rank 0 averages", "rank 1 averages", "off one process"]
    demo.table(
        columns, rows, f"2 pipelines x 2 ranks, {STEPS} steps of 2 x {microbatches} microbatches of {batch} rows"
    )
    claims.check("parameters are one process's; one all-reduce a stage and step", good)
    claims.check("a stage's gradients leave while the rank's other stage is still at work", early)


def deeper(args) -> int:
    """Run all four; return the exit code."""
    claims = demo.Claims()
    check_tied(claims)
    check_memory(claims)
    check_balance(claims)
    check_grid(claims)
    return claims.verdict("LESSON 79, DEEPER: PIPELINE VERIFIED")
