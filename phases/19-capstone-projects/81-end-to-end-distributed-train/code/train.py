"""The training loop: a GPT on N ranks, composed of the modules that lessons 76 to 80 built.

What is not here: how ranks talk. That is in the communicator, the optimizer and the checkpoint.
"""

import hashlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoint import CheckpointError, load_shard, save_shard  # 80: all ranks' files, or none
from comm import TorchComm  # 76: the ranks
from corpus import Batches, Corpus
from gpt import MiniGPT
from zero import ZeroOptimizer  # 78: the mean gradient, sharded Adam

EXAM = 128  # held-out sequences examined after each step
SPIKE = 2.0  # a loss this many times the step before's is a spike


class NonFiniteError(RuntimeError):
    """A rank's loss or gradient is NaN or infinite. Raised on every rank, before any parameter has changed."""


@dataclass(frozen=True)
class Job:
    """All that defines a run: the same job gives the same run, and a resumed run must have the same `identity`."""

    corpus: Corpus
    steps: int = 20
    batch: int = 4  # sequences a rank and step
    seq: int = 16
    model: dict = field(default_factory=lambda: {"dim": 32, "heads": 4, "blocks": 2})
    dropout: float = 0.1
    lr: float = 5e-3
    warmup: int = 4  # steps until the learning rate is `lr`
    clip: float = 1.0
    seed: int = 7
    exam_every: int = 1  # steps between two looks at held-out text
    save_at: tuple[int, ...] = ()
    folder: Path | None = None  # checkpoints go to folder/step_<n>
    resume: Path | None = None
    inject_nan: tuple[int, int] | None = None  # (step, rank): a drill for the guard

    def build(self) -> MiniGPT:
        """Return the model as it is before the first step."""
        return MiniGPT(self.corpus.vocab, seq=self.seq, dropout=self.dropout, seed=self.seed, **self.model)

    def identity(self) -> dict:
        """Return what a checkpoint of this run records and a resumed run compares."""
        names = ("batch", "seq", "model", "dropout", "lr", "warmup", "clip", "seed")
        return {name: getattr(self, name) for name in names} | {"corpus": self.corpus.fingerprint()}


def train(rank: int, world_size: int, job: Job, comm=None, on_spike=None) -> dict:
    """Be one rank of the job. Returns its log: a row a step, and what it holds at the end.

    `on_spike(step, loss before, loss)` is called when a step's loss is more than twice the one before.
    """
    comm = comm or TorchComm()
    model = job.build().to(comm.device)
    optimizer = ZeroOptimizer(model, world_size, rank, job.lr, comm=comm)  # all ranks begin with rank 0's parameters
    batches = Batches(job.corpus.train, job.batch * world_size, job.seq, job.seed)
    exam = Batches(job.corpus.held_out, min(EXAM, (len(job.corpus.held_out) - 1) // job.seq), job.seq, 0).batch(0)
    torch.manual_seed(job.seed + 1 + rank)  # noise: each rank its own dropout
    start = resume(job, model, optimizer, comm) if job.resume else 0
    log = {"rows": [], "masters": {}, "start": start, "initial_exam": examine(model, exam)}
    for step in range(start, job.steps):
        began = time.perf_counter()
        mine = batches.batch(step).chunk(world_size)[rank].to(comm.device)  # (batch, seq + 1)
        loss = model.loss(mine[:, :-1], mine[:, 1:])
        loss.backward()
        if job.inject_nan == (step, rank):
            optimizer.units[0].grad[0] = float("nan")
        mean_loss = guard(comm, step, loss, optimizer)
        if log["rows"] and mean_loss > SPIKE * log["rows"][-1]["loss"] and on_spike is not None:
            on_spike(step, log["rows"][-1]["loss"], mean_loss)
        norm = optimizer.clip_grad_norm_(job.clip)
        optimizer.param_groups[0]["lr"] = job.lr * min(1.0, (step + 1) / job.warmup)
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": step, "loss": mean_loss, "norm": norm.item(), "seconds": time.perf_counter() - began}
        due = (step + 1) % job.exam_every == 0 or step + 1 == job.steps
        log["rows"].append(row | {"exam": examine(model, exam) if due else None, "digest": digest(optimizer)})
        if step + 1 in job.save_at:
            save_shard(state(job, optimizer, step + 1), job.folder / f"step_{step + 1}", step + 1, comm)
            log["masters"][step + 1] = [shard.master.cpu().clone() for shard in optimizer.shards]
    held = {"memory": optimizer.memory(), "shard_bytes": optimizer.shard_bytes(), "calls": dict(comm.counters.calls)}
    parameters = sum(param.numel() for param in model.parameters())
    return log | held | {"parameters": parameters, "parameter_norm": parameter_norm(model)}


def guard(comm, step: int, loss: torch.Tensor, optimizer: ZeroOptimizer) -> float:
    """Return the mean loss over all ranks. If any rank's loss or gradient is not finite, all ranks stop, naming it."""
    finite = all(bool(torch.isfinite(unit.grad).all()) for unit in optimizer.units)
    facts = comm.agree({"loss": loss.item(), "finite": finite})
    for rank, fact in enumerate(facts):
        if not fact["finite"] or not math.isfinite(fact["loss"]):
            what = "gradient" if math.isfinite(fact["loss"]) else f"loss is {fact['loss']} and its gradient"
            raise NonFiniteError(f"step {step}: rank {rank}'s {what} is not finite; no parameter was changed")
    return sum(fact["loss"] for fact in facts) / len(facts)


@torch.no_grad()
def examine(model: MiniGPT, exam: torch.Tensor) -> float:
    """Return the loss on a fixed batch of held-out text (rows, seq + 1), without dropout."""
    exam = exam.to(next(model.parameters()).device)
    model.eval()
    loss = model.loss(exam[:, :-1], exam[:, 1:]).item()
    model.train()
    return loss


def state(job: Job, optimizer: ZeroOptimizer, position: int) -> dict:
    """Return what this rank must save to go on exactly here. The parameters are the masters of all ranks together."""
    saved = optimizer.state_dict()
    layout = [place | {"unit": f"optimizer/state/{place['unit']}"} for place in optimizer.layout()]
    random = {"cpu": torch.get_rng_state()}
    device = optimizer.units[0].data.device
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return {"optimizer": saved, "position": position, "random": random, "job": job.identity(), "layout": layout}


def resume(job: Job, model: MiniGPT, optimizer: ZeroOptimizer, comm) -> int:
    """Restore this rank from `job.resume`; return the step to go on with.

    Raises CheckpointError on every rank, with nothing changed, if the checkpoint is of another job.
    """
    saved = load_shard(job.resume, comm)
    differences = [
        f"{name} was {saved['job'].get(name)!r}, is {value!r}"
        for name, value in job.identity().items()
        if saved["job"].get(name) != value
    ]
    if differences:
        raise CheckpointError(f"{job.resume}: saved by another job: {'; '.join(differences)}")
    if saved["position"] >= job.steps:
        raise CheckpointError(f"{job.resume}: saved after {saved['position']} steps, and the run has only {job.steps}")
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"]["cpu"])
    if "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"], comm.device)
    return saved["position"]


def digest(optimizer: ZeroOptimizer) -> str:
    """Return a hash of all parameters' bits: equal on two ranks only if their models are equal."""
    hasher = hashlib.sha256()
    for unit in optimizer.units:
        hasher.update(unit.data.cpu().view(torch.uint8).numpy())
    return hasher.hexdigest()[:16]


@torch.no_grad()
def parameter_norm(model: MiniGPT) -> float:
    """Return the 2-norm of all parameters."""
    return math.sqrt(sum(param.double().square().sum().item() for param in model.parameters()))
