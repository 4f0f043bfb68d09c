"""Uneven data: ranks with different numbers of batches take the same number of steps."""

from collections.abc import Iterable, Iterator

END = object()


def uneven(batches: Iterable, comm) -> Iterator:
    """Yield this rank's batches, then None as long as another rank still has one.

    Before each step the ranks ask each other "has anyone a batch left?": one small control message. All ranks must
    take every step: on None call `ddp.without_data()`, else the others wait. So a loop may be left early only on all.
    """
    batches = iter(batches)
    while True:
        batch = next(batches, END)
        if not any(comm.agree(batch is not END)):
            return
        yield None if batch is END else batch
