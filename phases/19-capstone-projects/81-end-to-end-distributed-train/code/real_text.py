"""A real text of megabytes that is wherever Python is: the source of its standard library, byte by byte."""

import hashlib
import math
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from corpus import Corpus

VOCAB = 256  # a token is a byte


def standard_library(folder: Path | None = None) -> bytes:
    """Return the source of those modules of the standard library that are one file each, in the order of their names.

    For one release of Python it is the same on all systems, unless a distributor has changed a module. Line ends are
    "\\n". Raises ValueError if there is no source in `folder`, the library's own by default.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    text = b"".join(file.read_bytes().replace(b"\r\n", b"\n") for file in files if file.is_file())
    if not text:
        raise ValueError(f"{folder}: expected the source of Python's standard library, found no module of it")
    return text


def describe(text: bytes) -> str:
    """Return which text it is: of what Python, how long, and its SHA-256."""
    version = ".".join(map(str, sys.version_info[:3]))
    return f"standard library of Python {version}: {len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()}"


def bytes_corpus(text: bytes) -> Corpus:
    """Return a corpus of the bytes of a text; the loss to beat is the bigram entropy of its held-out tenth."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    corpus = Corpus.split(tokens, VOCAB, math.nan, "bigram entropy of the held-out text")
    return replace(corpus, yardstick=entropies(corpus.held_out, VOCAB)[1])


def entropies(tokens: torch.Tensor, vocab: int) -> tuple[float, float]:
    """Return a text's unigram and bigram entropy in nats a token, from its own counts.

    The first is the loss of one who knows how often each token comes in this very text; the second that of one who
    knows how often it comes after each other token. Neither has learned it from another text: so no table of single
    tokens, or of pairs, has a lower loss on this one.
    """
    pairs, firsts = torch.bincount(tokens[:-1] * vocab + tokens[1:]), torch.bincount(tokens[:-1])
    return _entropy(torch.bincount(tokens)), _entropy(pairs) - _entropy(firsts)


def _entropy(counts: torch.Tensor) -> float:
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log()).sum().item()
