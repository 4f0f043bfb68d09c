"""Any tensor as plain memory, as a library that moves memory takes it: 1-d, contiguous, real numbers or bytes."""

import torch

LABEL_BYTES = 128


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return x's elements 1-d and contiguous, a view where that is possible: gloo ignores strides and conjugation."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def fill(x: torch.Tensor, elements: torch.Tensor) -> None:
    """Put the elements of a flat tensor into x, unless it is a view of x."""
    if elements.data_ptr() != x.data_ptr():
        x.detach().copy_(elements.view(x.shape))


def reals(elements: torch.Tensor) -> torch.Tensor:
    """Return the same memory with complex numbers as pairs of real ones: NCCL knows no others."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


def divide(x: torch.Tensor, n: int) -> torch.Tensor:
    """Divide x in place by a whole number and return it: complex elements part by part, the same bits everywhere."""
    (torch.view_as_real(x) if x.is_complex() else x).div_(n)
    return x


def raw(elements: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes: what only moves may be of a dtype that gloo does not know."""
    return elements.view(torch.uint8)


def kind(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def label(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a checked message says of itself, dtype and shape, as LABEL_BYTES bytes."""
    text = kind(tensor).encode()[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unexpected(rank: int, tensor: torch.Tensor, peer: int, tag: int, got: str) -> str:
    """Return the words for a message that is not of its receiver's dtype and shape."""
    return f"rank {rank} expected {kind(tensor)} from rank {peer} (tag {tag}), got {got}"
