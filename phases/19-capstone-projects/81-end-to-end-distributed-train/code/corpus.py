"""What the model reads: a synthetic language whose entropy is known, or a text file; and the order of its batches."""

import bisect
import hashlib
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

SUCCESSORS = (0.5, 0.2, 0.15, 0.1, 0.05)  # after each token, five tokens may follow, with these probabilities


@dataclass(frozen=True)
class Language:
    """A Markov chain over `vocab` tokens. Which tokens may follow which is drawn from the seed."""

    seed: int
    vocab: int = 64

    def successors(self) -> list[list[int]]:
        """Return, for each token, the tokens that may follow, most probable first."""
        draw = random.Random(self.seed)
        return [draw.sample(range(self.vocab), len(SUCCESSORS)) for _ in range(self.vocab)]

    def sample(self, total_tokens: int) -> torch.Tensor:
        """Return a text of `total_tokens` tokens (total_tokens,)."""
        rows, draw = self.successors(), random.Random(self.seed + 1)
        levels = list(itertools.accumulate(SUCCESSORS[:-1]))
        text, token = [], 0
        for _ in range(total_tokens):
            token = rows[token][bisect.bisect(levels, draw.random())]
            text.append(token)
        return torch.tensor(text)

    @staticmethod
    def entropy_floor() -> float:
        """Return the entropy of the next token given the last, in nats: no model can have a lower expected loss."""
        return -sum(p * math.log(p) for p in SUCCESSORS)


def make_corpus(seed: int, total_tokens: int) -> torch.Tensor:
    """Return a text of the synthetic language of `seed`: token ids (total_tokens,), the same on every machine."""
    if total_tokens < 1:
        raise ValueError(f"total_tokens must be at least 1, got {total_tokens}")
    return Language(seed).sample(total_tokens)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, with the size of the vocabulary and a loss to beat (nats a token)."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocab: int
    yardstick: float
    yardstick_name: str

    def fingerprint(self) -> str:
        """Return a hash of the tokens, which a resumed run must share."""
        return hashlib.sha256(torch.cat([self.train, self.held_out]).numpy().tobytes()).hexdigest()[:16]


def synthetic(seed: int, total_tokens: int = 40_000) -> Corpus:
    """Return a corpus of the synthetic language, a tenth of it held out."""
    tokens = make_corpus(seed, total_tokens)
    cut = total_tokens * 9 // 10
    return Corpus(tokens[:cut], tokens[cut:], 64, Language.entropy_floor(), "entropy floor of the language")


def from_text(path: Path, seq: int) -> Corpus:
    """Return a corpus of the characters of a UTF-8 text file: the vocabulary from the file, its last tenth held out.

    Raises ValueError if the file cannot be read as text or is too short for one sequence on each side.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: cannot be read as UTF-8 text: {error}") from None
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text], dtype=torch.int64)
    cut = len(text) * 9 // 10
    if min(cut, len(text) - cut) <= seq:
        raise ValueError(f"--text {path}: {len(text)} characters are too few for sequences of {seq}")
    entropy = -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())
    return Corpus(tokens[:cut], tokens[cut:], len(letters), entropy, "unigram entropy of the text")


class Batches:
    """The batches of a run as a function of (seed, step): where training stands is one number.

    The tokens are cut into windows of `seq` (+ 1 for the last target). Each epoch visits them in a new order drawn from
    (seed, epoch), `rows` a batch, and drops the few that do not fill one. Raises ValueError if all are too few.
    """

    def __init__(self, tokens: torch.Tensor, rows: int, seq: int, seed: int):
        self.windows = tokens[: (len(tokens) - 1) // seq * seq + 1].unfold(0, seq + 1, seq)  # (windows, seq + 1)
        self.rows, self.seed, self.per_epoch = rows, seed, len(self.windows) // rows
        if self.per_epoch < 1:
            raise ValueError(f"{len(tokens)} tokens hold {len(self.windows)} windows of {seq}: a batch needs {rows}")

    def batch(self, step: int) -> torch.Tensor:
        """Return step's windows for all ranks together (rows, seq + 1)."""
        epoch, place = divmod(step, self.per_epoch)
        order = torch.randperm(
            len(self.windows), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        )
        return self.windows[order[place * self.rows : (place + 1) * self.rows]]
