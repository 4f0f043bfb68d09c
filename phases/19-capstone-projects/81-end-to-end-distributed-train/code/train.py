"""The training loop: a GPT on N ranks, composed of the modules that lessons 76 to 80 built.

What is not here: how ranks talk. That is in the communicator, the optimizer and the checkpoint.
"""

import hashlib
import math
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path

import torch
from asyncsave import AsyncSaver  # 80: the same, while training goes on
from checkpoint import CheckpointError, save_shard  # 80: all ranks' files, or none
from comm import TorchComm  # 76: the ranks
from corpus import Batches
from counter import not_finite  # 78: in one pass
from determinism import be_deterministic, check_random_state, noise_seed, random_state, set_random_state
from flat import flat_param_numel
from gpt import MiniGPT
from job import Job
from memory import check_whole
from mesh import must_agree  # 76: one error on every rank, before anything is changed
from resume import changes, check_counts, read_checkpoint, refuse_together  # 80's load_resharded, for its owner only
from spike_guard import SpikeGuard
from zero import ZeroOptimizer  # 78: the mean gradient, sharded Adam

EXAM = 128  # held-out sequences that an exam consists of


class NonFiniteError(RuntimeError):
    """A rank's loss or gradient is NaN or infinite. Raised on every rank, before any parameter has changed."""


def train(rank: int, world_size: int, job: Job, comm=None) -> dict:
    """Be one rank of the job. Returns its log: a row a step (from 1), and what it holds at the end.

    Raises CheckpointError, with the steps done and the drill's, if the step of `inject_nan` is over already.
    """
    trainer = Trainer(job, rank, world_size, comm)
    comm, optimizer = trainer.comm, trainer.optimizer
    start = trainer.load(job.resume) if job.resume else 0
    if job.inject_nan and job.inject_nan[0] <= start:
        raise CheckpointError(f"{job.resume}: saved after {start} steps, but the drill is for step {job.inject_nan[0]}")
    log = {"rows": [], "masters": {}, "start": start, "initial_exam": trainer.examine()}
    calls, sent = Counter(comm.counters.calls), Counter(comm.counters.bytes)
    with AsyncSaver(comm) if job.background else nullcontext() as saver:
        for step in range(start + 1, job.steps + 1):
            row = trainer.step(step)
            due = step % job.exam_every == 0 or step == job.steps
            log["rows"].append(row | {"exam": trainer.examine() if due else None, "digest": digest(optimizer)})
            if step in job.save_at:
                saved, folder = trainer.state(step), job.folder / f"step_{step}"
                log["masters"][step] = held_masters(saved)
                saver.save(saved, folder, step) if saver else save_shard(saved, folder, step, comm)
    return log | {
        "parameters": flat_param_numel(trainer.model),
        "parameter_norm": parameter_norm(optimizer),
        "memory": optimizer.memory(),
        "shard_bytes": optimizer.shard_bytes(),
        "calls": comm.counters.calls - calls,
        "bytes": comm.counters.bytes - sent,
    }


class Trainer:
    """One rank of a job: its model, its optimizer, and where it stands in the data. All ranks make one.

    `spikes`, if it is set, hears every step's loss on every rank, before any parameter changes, and may raise. `wish`
    is what this rank would have all ranks know at its next step (that it was asked to stop, say); `wishes` are all
    ranks' of the last step. They travel with the losses, and cost no message.

    Raises ValueError on every rank if they disagree on the job.
    """

    def __init__(self, job: Job, rank: int, world_size: int, comm=None):
        self.job, self.rank, self.world_size, self.comm = job, rank, world_size, comm or TorchComm()
        self.identity = job.identity(world_size)
        must_agree(self.comm, "the job", self.identity | job.plan())  # on several nodes, command lines may differ
        self.identity["device"] = self.comm.device.type
        be_deterministic(self.comm.device)
        self.model = job.build().to(self.comm.device)
        self.optimizer = ZeroOptimizer(  # all ranks begin with rank 0's parameters
            self.model, world_size, rank, job.lr, stage=job.stage, comm=self.comm
        )
        self.batches, self.drawn = Batches(job.corpus.train, job.rows_of(world_size), job.seq, job.seed), 0  # samples
        sequences = min(EXAM, (len(job.corpus.held_out) - 1) // job.seq)
        self.exam = Batches(job.corpus.held_out, sequences, job.seq, seed=0).batch(0)
        torch.manual_seed(noise_seed(job.seed, 0, rank))  # noise: each rank its own dropout
        self.spikes: SpikeGuard | None = None
        self.wish, self.wishes = "", [""] * world_size

    def step(self, step: int) -> dict:
        """Do one optimizer step; return its row: number (from 1), mean loss over all ranks, gradient norm, seconds.

        Raises NonFiniteError, with the step and the norm, if the norm of the mean gradient is not finite.
        """
        job, optimizer, began = self.job, self.optimizer, time.perf_counter()
        everything = self.batches.take(self.drawn)  # of all ranks (rows, seq + 1)
        self.drawn += len(everything)
        mine = everything.tensor_split(self.world_size)[self.rank].to(self.comm.device)
        weight = Fraction(self.world_size, len(everything))  # of a row: the mean over ranks is the mean over all rows
        with poisoned(self.model) if job.inject_nan == (step, self.rank) else nullcontext():
            loss = backward(self.model, mine, job.microbatches, weight, optimizer.no_sync)
        loss, self.wishes = guard(self.comm, step, loss, optimizer, self.wish)
        if self.spikes is not None:
            self.spikes.check(step, loss)
        norm = optimizer.clip_grad_norm_(job.clip).item()  # of the mean gradient, the same on every rank
        if not math.isfinite(norm):
            raise NonFiniteError(f"step {step}: the mean gradient's norm is {norm}; no parameter was changed")
        optimizer.param_groups[0]["lr"] = job.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        return {"step": step, "loss": loss, "norm": norm, "seconds": time.perf_counter() - began}

    def skip(self, steps: int) -> None:
        """Pass over the samples of so many steps: they count as drawn."""
        self.drawn += steps * self.batches.rows

    def state(self, position: int) -> dict:
        """Return what this rank must save to go on exactly here, after `position` steps.

        The parameters are the masters of all ranks together. The tensors are the live ones.
        """
        optimizer = self.optimizer.state_dict()
        return {
            "job": self.identity,
            "position": position,  # steps done: the learning rate follows from it
            "data": self.batches.position(self.drawn),  # what was really drawn: the next batch follows from it
            "losses": [] if self.spikes is None else list(self.spikes.losses),  # that the next one is compared with
            "random": random_state(self.comm.device),
            "optimizer": {key: value for key, value in optimizer.items() if key != "layout"},
            "layout": self._layout(),  # which elements of the flat buffers this shard holds, for the manifest
        }

    def load(self, folder: Path | str) -> int:
        """Restore all of it from a checkpoint of any number of ranks; return the number of steps that were done.

        Raises the same CheckpointError on every rank, with nothing changed, if the checkpoint is damaged, of another
        job, or not of this loop at all. What the optimizer refuses it repeats, after the folder.
        """
        saved = read_checkpoint(folder, self.comm, self._fault_of_owner, self._layout())
        refuse_together(folder, self.comm, lambda: self._fault_in(saved))
        try:
            self.optimizer.load_state_dict(saved["optimizer"] | {"layout": self.optimizer.layout()})
        except ValueError as error:  # on every rank, with nothing changed
            raise CheckpointError(f"{folder}: {error}") from None
        self.optimizer.zero_grad()  # of a step that was given up
        self.drawn = self.batches.drawn_at(saved["data"])
        if self.spikes is not None:
            self.spikes.forget(saved["losses"])
        if len(saved["random"]) == self.world_size:
            set_random_state(saved["random"][self.rank])
        else:  # noise belongs to ranks, and these are others
            torch.manual_seed(noise_seed(self.job.seed, saved["position"], self.rank))
        return saved["position"]

    def _layout(self) -> list[dict]:
        return [place | {"unit": f"optimizer/state/{place['unit']}"} for place in self.optimizer.layout()]

    def _fault_of_owner(self, was: dict) -> str:
        if isinstance(was.get("plan"), str):
            how = "train_on_grid(..., resume=...) goes on with it, under this plan or one that has another dp and m"
            return f"saved by a run over a grid, under the plan {was['plan']}: {how}"
        return changes(was, self.identity, self.job.may_change)

    def _fault_in(self, saved: dict) -> str | None:
        """Say why this run cannot go on from a saved state; None if it can."""
        try:
            check_whole("position", saved["position"], least=0)
            if saved["position"] >= self.job.steps:
                return f"saved after {saved['position']} steps, and the run has only {self.job.steps}"
            self.batches.take(self.batches.drawn_at(saved["data"]))  # the next batch: that there is one
            check_counts(saved["optimizer"], saved["position"])
            if not all(isinstance(loss, float) and math.isfinite(loss) for loss in saved["losses"]):
                return f"losses: expected finite numbers, found {saved['losses']}"
            if len(saved["random"]) == self.world_size:
                device = self.comm.device
                check_random_state(saved["random"][self.rank], random_state(device), device)
            return None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"not a checkpoint of this training loop: {error!r}"

    @torch.no_grad()
    def examine(self) -> float:
        """Return the mean loss on held-out text, without dropout. Each rank reads its share of the rows."""
        mine = self.exam[self.rank :: self.world_size].to(self.comm.device)
        self.model.eval()
        loss = self.model.loss(*halves(mine)).item() * len(mine)
        self.model.train()
        return sum(self.comm.agree(loss)) / len(self.exam)


def halves(sequences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, (rows, seq) each, of (rows, seq + 1). No rows become one, which should weigh nothing.

    A rank without rows takes part in a forward and backward all the same: with ZeRO-3 the others need its parameters.
    """
    rows = sequences if len(sequences) else sequences.new_zeros(1, sequences.shape[1])
    return rows[:, :-1], rows[:, 1:]


def backward(
    model: MiniGPT, sequences: torch.Tensor, microbatches: int = 1, weight: Fraction | None = None, no_sync=nullcontext
) -> float:
    """Add the gradient of the mean loss over all tokens of `sequences` (rows, seq + 1); return that loss.

    The rows go through the model in parts, to hold fewer activations at a time. Each part counts by its tokens: the
    mean of the means of unequal parts would be another loss. `weight`: what a row counts, if not 1 / rows. All
    backwards but the last are inside `no_sync()`.
    """
    losses, weight = [], weight or Fraction(1, len(sequences))
    for left, part in zip(reversed(range(microbatches)), sequences.tensor_split(microbatches), strict=True):
        with no_sync() if left else nullcontext():
            loss = model.loss(*halves(part)) * float(len(part) * weight)
            loss.backward()
        losses.append(loss.detach())
    return sum(losses).item()


@contextmanager
def poisoned(model: MiniGPT):
    """Inside, a gradient becomes NaN: a drill."""
    hook = next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    try:
        yield
    finally:
        hook.remove()


def guard(comm, step: int, loss: float, optimizer: ZeroOptimizer, wish: str = "") -> tuple[float, list[str]]:
    """Return the mean loss over all ranks, and what each rank wishes (a few letters).

    If any rank's loss or gradient is not finite, all ranks raise the same NonFiniteError. It names the step, the rank,
    and `loss` with its value or `gradient`.
    """
    if optimizer.stage == 1:
        finite = not not_finite([unit.grad for unit in optimizer.units])
    else:  # the gradients have left already, and the optimizer has looked at them
        finite = not any(bool(shard.own_bad) for shard in optimizer.shards)
    facts = comm.agree({"loss": loss, "finite": finite, "wish": wish})
    for rank, fact in enumerate(facts):
        if not fact["finite"] or not math.isfinite(fact["loss"]):
            what = "gradient" if math.isfinite(fact["loss"]) else f"loss is {fact['loss']} and its gradient"
            raise NonFiniteError(f"step {step}: rank {rank}'s {what} is not finite; no parameter was changed")
    return sum(fact["loss"] for fact in facts) / len(facts), [fact["wish"] for fact in facts]


def held_masters(saved: dict) -> torch.Tensor:
    """Return a copy of the fp32 parameters in a rank's saved state, (elements held,)."""
    return torch.cat([unit["master"].cpu() for unit in saved["optimizer"]["state"].values()])


def parameter_norm(optimizer: ZeroOptimizer) -> float:
    """Return the norm of all parameters, in fp64. All ranks call it."""
    with optimizer.gathered():
        return math.hypot(
            *(torch.linalg.vector_norm(unit.data, dtype=torch.float64).item() for unit in optimizer.units)
        )


def digest(optimizer: ZeroOptimizer) -> str:
    """Return a hash of all parameters' bits: equal on two ranks only if their models are equal. All ranks call it."""
    hasher = hashlib.sha256()
    with optimizer.gathered():
        for unit in optimizer.units:
            hasher.update(unit.data[: unit.numel].clone().cpu().view(torch.uint8).numpy())  # numpy pins what it sees
    return hasher.hexdigest()[:16]
