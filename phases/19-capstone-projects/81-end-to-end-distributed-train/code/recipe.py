"""`Recipe`: all that defines a training run, whatever ranks it is dealt to; and how a batch is dealt."""

from dataclasses import asdict, dataclass

import torch
from corpus import Batches, make_corpus
from gpt import MiniGPT
from learning_rate import warmup_cosine
from memory import check_whole

IGNORED = -100  # a target that is none: padding


@dataclass(frozen=True)
class Recipe:
    """A model, its data and its schedule. `rows`: sequences a step, over all ranks and microbatches.

    Sequences have unequal lengths: after a sequence's end its targets are IGNORED, so that every microbatch has another
    number of tokens. In the last step only `last_rows` sequences are left.

    Raises ValueError for a size below 1, or a last step that is larger than the others.
    """

    steps: int = 30
    rows: int = 24
    last_rows: int = 12
    seq: int = 8
    vocab: int = 64
    dim: int = 16
    heads: int = 4
    blocks: int = 4
    tied: bool = False
    dropout: float = 0.0
    lr: float = 1e-2
    warmup: int = 5  # steps until the learning rate is `lr`
    floor: float = 0.1  # of `lr`, at the end
    clip: float = 0.5
    seed: int = 7

    def __post_init__(self):
        for name in ("steps", "rows", "last_rows", "seq", "dim", "heads", "blocks"):
            check_whole(name, getattr(self, name), least=1)
        if self.last_rows > self.rows:
            raise ValueError(f"the last step has {self.last_rows} rows, the others only {self.rows}")

    def build(self) -> MiniGPT:
        """Return the whole model as it is before the first step."""
        sizes = {"dim": self.dim, "heads": self.heads, "blocks": self.blocks, "seq": self.seq}
        return MiniGPT(self.vocab, **sizes, dropout=self.dropout, seed=self.seed, tied=self.tied)

    def learning_rate(self, step: int) -> float:
        """Return a step's rate (from 1): up to `lr`, then down to `floor` of it at the last step."""
        return warmup_cosine(step, self.lr, self.warmup, self.steps, self.floor)

    def rows_of(self, step: int) -> int:
        """Return the number of sequences of a step (from 1)."""
        return self.last_rows if step == self.steps else self.rows

    def facts(self) -> dict:
        """Return all of it as JSON, for ranks to compare."""
        return asdict(self)


class Reader:
    """The batches of a recipe as a function of the step: every rank reads the whole batch, and so can count it."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        text = make_corpus(recipe.seed, 20_000) % recipe.vocab
        self.batches = Batches(text, recipe.rows, recipe.seq, recipe.seed)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's tokens and targets, (rows, seq) each; steps count from 1."""
        rows = self.batches.batch(step - 1)[: self.recipe.rows_of(step)]  # (rows, seq + 1)
        draw = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        lengths = torch.randint(1, self.recipe.seq + 1, (len(rows), 1), generator=draw)
        beyond = torch.arange(self.recipe.seq) >= lengths
        return rows[:, :-1], rows[:, 1:].masked_fill(beyond, IGNORED)


def deal(
    tokens: torch.Tensor, targets: torch.Tensor, replicas: int, replica: int, microbatches: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return a replica's microbatches of tokens and of targets, all of one shape (rows, seq).

    Where the rows cannot be dealt out equally, rows without a target fill up the last replicas: they weigh nothing.
    """
    size = -(-len(tokens) // (replicas * microbatches))
    missing = size * replicas * microbatches - len(tokens)
    tokens = torch.cat([tokens, tokens.new_zeros(missing, tokens.shape[1])])
    targets = torch.cat([targets, targets.new_full((missing, targets.shape[1]), IGNORED)])
    return tuple(part.chunk(replicas)[replica].split(size) for part in (tokens, targets))
