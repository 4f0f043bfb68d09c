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
from memory import check_whole

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
    """Return a text of the synthetic language of `seed`: token ids (total_tokens,), the same on every machine.

    Raises ValueError unless `total_tokens` is a whole number of at least 1.
    """
    check_whole("total_tokens", total_tokens, least=1)
    return Language(seed).sample(total_tokens)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, with the size of the vocabulary and a loss to beat (nats a token)."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocab: int
    yardstick: float
    yardstick_name: str

    @classmethod
    def split(cls, tokens: torch.Tensor, vocab: int, yardstick: float, yardstick_name: str) -> "Corpus":
        """Hold the last tenth of the tokens out."""
        cut = len(tokens) * 9 // 10
        return cls(tokens[:cut], tokens[cut:], vocab, yardstick, yardstick_name)

    def fingerprint(self) -> str:
        """Return a hash of the tokens, which a resumed run must share."""
        return fingerprint(torch.cat([self.train, self.held_out]))


def fingerprint(tokens: torch.Tensor) -> str:
    """Return a hash of tokens (total_tokens,)."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def synthetic(seed: int, total_tokens: int = 40_000) -> Corpus:
    """Return a corpus of the synthetic language."""
    tokens = make_corpus(seed, total_tokens)
    return Corpus.split(tokens, Language.vocab, Language.entropy_floor(), "entropy floor of the language")


def from_text(path: Path, seq: int) -> Corpus:
    """Return a corpus of the characters of a UTF-8 text file, line endings as "\\n"; the vocabulary is the file's.

    Raises ValueError if the file cannot be read as text, repeats one character, or its held-out tenth is shorter than
    one sequence of `seq` tokens and the target of its last.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # -sig: some editors begin a file with an invisible mark
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    counts = Counter(text)
    letters = {letter: i for i, letter in enumerate(sorted(counts))}
    corpus = Corpus.split(
        torch.tensor([letters[letter] for letter in text], dtype=torch.int64),
        len(letters),
        -sum(n / len(text) * math.log(n / len(text)) for n in counts.values()),
        "unigram entropy of the text",
    )
    if len(corpus.held_out) <= seq or len(letters) < 2:
        found = f"{len(text)} characters, {len(letters)} of them distinct"
        raise ValueError(f"{path}: {found}: too few to train on sequences of {seq}, a tenth of them held out")
    return corpus


class Batches:
    """The samples of a run as one endless stream, a function of the seed: where training stands is one number.

    The tokens are cut into windows of `seq` (+ 1 for the last target): the samples. Each epoch visits all of them in a
    new order drawn from (seed, epoch). A batch is the next `rows` samples of the stream. Where an epoch ends within a
    batch, the batch goes on with the next epoch: nothing is dropped or repeated, whatever the number of rows.

    Raises ValueError if there are fewer windows than rows.
    """

    def __init__(self, tokens: torch.Tensor, rows: int, seq: int, seed: int):
        check_whole("rows", rows, least=1)
        check_whole("seq", seq, least=1)
        self.per_epoch = max(0, len(tokens) - 1) // seq  # samples
        if self.per_epoch < rows:
            raise ValueError(f"{len(tokens)} tokens hold {self.per_epoch} windows of {seq}: a batch needs {rows}")
        self.windows = tokens[: self.per_epoch * seq + 1].unfold(0, seq + 1, seq)  # (windows, seq + 1)
        self.rows, self.seed = rows, seed
        self._epoch, self._order = None, None  # the order last drawn: an epoch is drawn once, not once a step
        self._stream = {"seed": seed, "windows": self.per_epoch, "tokens": fingerprint(tokens)}

    def batch(self, step: int) -> torch.Tensor:
        """Return the samples of a step (from 0) if each step had as many, for all ranks together (rows, seq + 1)."""
        return self.take(step * self.rows)

    def take(self, drawn: int) -> torch.Tensor:
        """Return the batch that comes after `drawn` samples, for all ranks together (rows, seq + 1)."""
        return self.windows[self.indices(drawn)]

    def indices(self, drawn: int) -> torch.Tensor:
        """Return which windows the batch after `drawn` samples has (rows,)."""
        found, end = [], drawn + self.rows
        while drawn < end:
            epoch, place = divmod(drawn, self.per_epoch)
            found.append(self._order_of(epoch)[place : place + end - drawn])
            drawn += len(found[-1])
        return torch.cat(found)

    def _order_of(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.per_epoch, generator=draw)
        return self._order

    def position(self, drawn: int) -> dict:
        """Return what a checkpoint records of the data: the samples drawn, where that is, and of which stream."""
        epoch, place = divmod(drawn, self.per_epoch)
        return {"samples": drawn, "epoch": epoch, "place": place, **self._stream}

    def drawn_at(self, position: dict) -> int:
        """Return the samples drawn at a recorded position. Raises ValueError if it is not one of this stream."""
        check_whole("samples", position["samples"], least=0)
        mine = self.position(position["samples"])
        wrong = [f"{key} was {position.get(key)!r}, is {mine[key]!r}" for key in mine if position.get(key) != mine[key]]
        if wrong:
            raise ValueError(f"the data's position: {'; '.join(wrong)}")
        return position["samples"]
