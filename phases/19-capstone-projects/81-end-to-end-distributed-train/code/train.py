"""The training loop: a GPT on N ranks, composed of the modules that lessons 76 to 80 built.

What is not here: how ranks talk. That is in the communicator, the optimizer and the checkpoint.
"""

import hashlib
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoint import CheckpointError, load_shard, save_shard  # 80: all ranks' files, or none
from comm import TorchComm  # 76: the ranks
from corpus import Batches, Corpus
from flat import flat_param_numel
from gpt import MiniGPT
from memory import check_whole
from mesh import must_agree  # 76: one error on every rank, before anything is changed
from zero import ZeroOptimizer  # 78: the mean gradient, sharded Adam

EXAM = 128  # held-out sequences that an exam consists of
SPIKE = 2.0  # a loss this many times the step before's is a spike


class NonFiniteError(RuntimeError):
    """A rank's loss or gradient is NaN or infinite. Raised on every rank, before any parameter has changed."""


@dataclass(frozen=True)
class Job:
    """All that defines a run: the same job gives the same run, and a resumed run must have the same `identity`.

    Raises ValueError for a count below 1, or more microbatches than sequences.
    """

    corpus: Corpus
    steps: int = 20
    batch: int = 4  # sequences a rank and step
    microbatches: int = 1  # parts of these, each with its own forward and backward
    seq: int = 16
    model: dict = field(default_factory=lambda: {"dim": 32, "heads": 4, "blocks": 2})
    dropout: float = 0.1
    lr: float = 5e-3
    warmup: int = 4  # steps until the learning rate is `lr`
    clip: float = 1.0  # the largest norm that the gradient may have
    seed: int = 7
    exam_every: int = 1  # steps between two looks at held-out text
    save_at: tuple[int, ...] = ()
    folder: Path | None = None  # checkpoints go to folder/step_<n>
    resume: Path | None = None
    inject_nan: tuple[int, int] | None = None  # (step, rank): a drill for the guard

    def __post_init__(self):
        for name in ("steps", "batch", "microbatches", "seq", "exam_every"):
            check_whole(name, getattr(self, name), least=1)
        if self.microbatches > self.batch:
            raise ValueError(f"{self.batch} sequences cannot be {self.microbatches} microbatches")

    def build(self) -> MiniGPT:
        """Return the model as it is before the first step."""
        return MiniGPT(self.corpus.vocab, seq=self.seq, dropout=self.dropout, seed=self.seed, **self.model)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (from 1): a function of the step alone, so a resume cannot bend it."""
        return self.lr * min(1.0, step / max(1, self.warmup))

    def identity(self) -> dict:
        """Return what a checkpoint of this run records and a resumed run compares."""
        names = ("batch", "microbatches", "seq", "model", "dropout", "lr", "warmup", "clip", "seed")
        return {name: getattr(self, name) for name in names} | {"corpus": self.corpus.fingerprint()}

    def plan(self) -> dict:
        """Return when this run does what, in which all ranks must take part."""
        resume = None if self.resume is None else str(self.resume)
        return {"steps": self.steps, "exam_every": self.exam_every, "save_at": self.save_at, "resume": resume}


def train(rank: int, world_size: int, job: Job, comm=None, on_spike=None) -> dict:
    """Be one rank of the job. Returns its log: a row a step, and what it holds at the end.

    `on_spike(step, loss before, loss)` is called on every rank, before any parameter has changed, when a step's loss is
    more than twice the one before. Steps count from 1.
    """
    comm = comm or TorchComm()
    must_agree(comm, "the job", job.identity() | job.plan())  # on several nodes, command lines may differ
    be_deterministic(comm.device)
    model = job.build().to(comm.device)
    optimizer = ZeroOptimizer(model, world_size, rank, job.lr, comm=comm)  # all ranks begin with rank 0's parameters
    batches = Batches(job.corpus.train, job.batch * world_size, job.seq, job.seed)
    exam = Batches(job.corpus.held_out, min(EXAM, (len(job.corpus.held_out) - 1) // job.seq), job.seq, seed=0).batch(0)
    torch.manual_seed(job.seed + 1 + rank)  # noise: each rank its own dropout
    start = resume(job, optimizer, comm) if job.resume else 0
    if job.inject_nan and job.inject_nan[0] <= start:
        raise CheckpointError(f"{job.resume}: saved after {start} steps, but the drill is for step {job.inject_nan[0]}")
    log = {"rows": [], "masters": {}, "start": start, "initial_exam": examine(model, exam, comm)}
    calls, sent = Counter(comm.counters.calls), Counter(comm.counters.bytes)
    for step in range(start + 1, job.steps + 1):
        began = time.perf_counter()
        mine = batches.batch(step - 1).chunk(world_size)[rank].to(comm.device)  # (batch, seq + 1)
        loss = backward(model, mine, job.microbatches)
        if job.inject_nan == (step, rank):
            optimizer.units[0].grad[0] = float("nan")
        mean_loss = guard(comm, step, loss, optimizer)
        previous = log["rows"][-1]["loss"] if log["rows"] else math.inf
        if on_spike is not None and mean_loss > SPIKE * previous:
            on_spike(step, previous, mean_loss)
        norm = optimizer.clip_grad_norm_(job.clip).item()  # of the mean gradient, the same on every rank
        if not math.isfinite(norm):
            raise NonFiniteError(f"step {step}: the mean gradient's norm is {norm}; no parameter was changed")
        optimizer.param_groups[0]["lr"] = job.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": step, "loss": mean_loss, "norm": norm, "seconds": time.perf_counter() - began}
        due = step % job.exam_every == 0 or step == job.steps
        log["rows"].append(row | {"exam": examine(model, exam, comm) if due else None, "digest": digest(optimizer)})
        if step in job.save_at:
            saved = state(job, optimizer, step)
            save_shard(saved, job.folder / f"step_{step}", step, comm)
            log["masters"][step] = held_masters(saved)
    norms = [torch.linalg.vector_norm(unit.data, dtype=torch.float64).item() for unit in optimizer.units]
    return log | {
        "parameters": flat_param_numel(model),
        "parameter_norm": math.hypot(*norms),
        "memory": optimizer.memory(),
        "shard_bytes": optimizer.shard_bytes(),
        "calls": comm.counters.calls - calls,
        "bytes": comm.counters.bytes - sent,
    }


def backward(model: MiniGPT, sequences: torch.Tensor, microbatches: int = 1) -> float:
    """Add the gradient of the mean loss over all tokens of `sequences` (rows, seq + 1); return that loss.

    The rows go through the model in parts, to hold fewer activations at a time. Each part counts by its tokens: the
    mean of the means of unequal parts would be another loss.
    """
    losses = []
    for part in sequences.tensor_split(microbatches):
        loss = model.loss(part[:, :-1], part[:, 1:]) * (len(part) / len(sequences))
        loss.backward()
        losses.append(loss.detach())
    return sum(losses).item()


def guard(comm, step: int, loss: float, optimizer: ZeroOptimizer) -> float:
    """Return the mean loss over all ranks. If any rank's loss or gradient is not finite, all ranks stop, naming it."""
    finite = all(bool(torch.isfinite(unit.grad).all()) for unit in optimizer.units)
    facts = comm.agree({"loss": loss, "finite": finite})
    for rank, fact in enumerate(facts):
        if not fact["finite"] or not math.isfinite(fact["loss"]):
            what = "gradient" if math.isfinite(fact["loss"]) else f"loss is {fact['loss']} and its gradient"
            raise NonFiniteError(f"step {step}: rank {rank}'s {what} is not finite; no parameter was changed")
    return sum(fact["loss"] for fact in facts) / len(facts)


@torch.no_grad()
def examine(model: MiniGPT, exam: torch.Tensor, comm) -> float:
    """Return the mean loss on held-out text (rows, seq + 1), without dropout. Each rank reads its share of the rows."""
    mine = exam[comm.rank :: comm.world_size].to(comm.device)
    model.eval()
    loss = model.loss(mine[:, :-1], mine[:, 1:]).item() * len(mine) if len(mine) else 0.0
    model.train()
    return sum(comm.agree(loss)) / len(exam)


def state(job: Job, optimizer: ZeroOptimizer, position: int) -> dict:
    """Return what this rank must save to go on exactly here. The parameters are the masters of all ranks together."""
    device = optimizer.units[0].data.device
    layout = [place | {"unit": f"optimizer/state/{place['unit']}"} for place in optimizer.layout()]
    return {
        "job": job.identity() | {"device": device.type},
        "position": position,  # steps done: batches and learning rate follow from it
        "random": random_state(device),
        "optimizer": optimizer.state_dict(),
        "layout": layout,  # which elements of the flat buffers this shard holds, for the manifest
    }


def held_masters(saved: dict) -> torch.Tensor:
    """Return a copy of the fp32 parameters in a rank's saved state, (elements held,)."""
    return torch.cat([unit["master"].cpu() for unit in saved["optimizer"]["state"].values()])


def resume(job: Job, optimizer: ZeroOptimizer, comm) -> int:
    """Restore this rank from `job.resume`; return the number of steps that were done.

    Raises the same CheckpointError on every rank, with nothing changed, if the checkpoint is damaged, of another job,
    or not of this loop at all.
    """
    saved, mine = load_shard(job.resume, comm), state(job, optimizer, 0)
    faults = comm.agree(_fault_in(saved, mine, job.steps))
    for fault in filter(None, faults):
        raise CheckpointError(f"{job.resume}: {fault}")
    optimizer.load_state_dict(saved["optimizer"])
    set_random_state(saved["random"])
    return saved["position"]


def _fault_in(saved: dict, mine: dict, steps: int) -> str | None:
    """Say why a run of `steps` steps cannot go on from a rank's saved state; None if it can. `mine` is its own."""
    try:
        was, now = saved["job"], mine["job"]
        changed = [f"{name} was {was.get(name)!r}, is {now[name]!r}" for name in now if was.get(name) != now[name]]
        if changed:
            return f"saved by another job: {'; '.join(changed)}"
        check_whole("position", saved["position"], least=1)
        if saved["position"] >= steps:
            return f"saved after {saved['position']} steps, and the run has only {steps}"
        kinds, expected = ({name: (x.dtype, x.shape) for name, x in s["random"].items()} for s in (saved, mine))
        return None if kinds == expected else f"random state: expected {expected}, found {kinds}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"not a checkpoint of this training loop: {error!r}"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return where this rank's noise stands: torch's generator on the CPU, and on the GPU if there is one."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_random_state(saved: dict[str, torch.Tensor]) -> None:
    """Set what `random_state` returned."""
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"])


def be_deterministic(device: torch.device) -> None:
    """On a GPU, let only algorithms run that give the same bits again. (On a CPU, with one thread a rank, all do.)"""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)


def digest(optimizer: ZeroOptimizer) -> str:
    """Return a hash of all parameters' bits: equal on two ranks only if their models are equal."""
    hasher = hashlib.sha256()
    for unit in optimizer.units:
        hasher.update(unit.data.cpu().view(torch.uint8).numpy())
    return hasher.hexdigest()[:16]
