"""`Job`: all that defines a run. The same job is the same run, on any number of ranks that share its rows."""

from dataclasses import dataclass, field
from pathlib import Path

from corpus import Corpus
from gpt import MiniGPT
from learning_rate import warmup_cosine
from memory import check_whole


@dataclass(frozen=True)
class Job:
    """All that defines a run: the same job gives the same run, and a resumed run must have the same `identity`.

    Raises ValueError for a count below 1, more microbatches than sequences, a stage that there is not, a rate that
    falls before it has risen, or a name in `may_change` that no checkpoint records.
    """

    corpus: Corpus
    steps: int = 20
    batch: int = 4  # sequences a rank and step, unless `rows` says how many there are in all
    rows: int | None = None  # sequences a step over all ranks, dealt to any number of them
    microbatches: int = 1  # parts of a rank's rows, each with its own forward and backward
    stage: int = 1  # of ZeRO
    seq: int = 16
    model: dict = field(default_factory=lambda: {"dim": 32, "heads": 4, "blocks": 2})
    dropout: float = 0.1
    lr: float = 5e-3
    warmup: int = 4  # steps until the learning rate is `lr`
    decay: int = 0  # the step at which it has come down to `floor` of that; 0: it stays
    floor: float = 0.1
    clip: float = 1.0  # the largest norm that the gradient may have
    seed: int = 7
    exam_every: int = 1  # steps between two looks at held-out text
    save_at: tuple[int, ...] = ()
    folder: Path | None = None  # checkpoints go to folder/step_<n>
    background: bool = False  # save while training goes on (lesson 80's AsyncSaver)
    resume: Path | None = None
    may_change: tuple[str, ...] = ()  # what of `identity` a resumed run may have otherwise than the checkpoint
    inject_nan: tuple[int, int] | None = None  # (step, rank): a drill for the guard

    def __post_init__(self):
        for name in ("steps", "batch", "microbatches", "seq", "exam_every"):
            check_whole(name, getattr(self, name), least=1)
        sequences = self.batch if self.rows is None else self.rows
        check_whole("rows", sequences, least=1)
        if isinstance(self.stage, bool) or self.stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, got {self.stage!r}")
        if self.microbatches > sequences:
            raise ValueError(f"{sequences} sequences cannot be {self.microbatches} microbatches")
        check_whole("decay", self.decay, least=0)
        if 0 < self.decay <= self.warmup:
            raise ValueError(f"the rate rises until step {self.warmup}, so it cannot be down at step {self.decay}")
        known = self.identity(1) if self.may_change else {}
        if unknown := sorted(set(self.may_change) - known.keys()):
            raise ValueError(f"may_change: there is no {', '.join(unknown)} in {', '.join(known)}")

    def build(self) -> MiniGPT:
        """Return the model as it is before the first step."""
        return MiniGPT(self.corpus.vocab, seq=self.seq, dropout=self.dropout, seed=self.seed, **self.model)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (from 1): a function of the step alone, so a resume cannot bend it."""
        return warmup_cosine(step, self.lr, self.warmup, self.decay, self.floor)

    def rows_of(self, world_size: int) -> int:
        """Return the number of sequences a step, over all ranks."""
        return self.batch * world_size if self.rows is None else self.rows

    def identity(self, world_size: int) -> dict:
        """Return what a checkpoint of this run records and a resumed run compares. Nothing in it is of one rank."""
        names = "microbatches stage seq model dropout lr warmup decay floor clip seed".split()
        facts = {"rows": self.rows_of(world_size)} | {name: getattr(self, name) for name in names}
        return facts | {"corpus": self.corpus.fingerprint()}

    def plan(self) -> dict:
        """Return when this run does what, in which all ranks must take part."""
        names = "steps exam_every save_at background may_change".split()
        resume = None if self.resume is None else str(self.resume)
        return {name: getattr(self, name) for name in names} | {"resume": resume}
