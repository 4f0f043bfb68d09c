"""`Agreement`: ranks find out that they have done different things, in the small reduction that a step makes anyhow."""

import zlib
from collections import deque

import torch
from adam import AdamSettings
from comm import Comm
from flat import FlatUnit
from mesh import must_agree

EXACT = 1 << 24  # whole numbers below it have no rounding in fp32
REMEMBERED = 4096  # gathers that an error can still name


class Agreement:
    """What a step takes for granted: all ranks gathered the same units in the same order, and have the same settings.

    If not, nothing fails: gathers of different units meet, and where these have one size, parameters are exchanged. So
    each rank makes a checksum of both. It travels with a step's small reduction of one number, which gets N elements
    more: each rank writes into its own place and leaves zeros in the others'. Then a sum and a maximum alike bring
    every checksum to everybody, unchanged.
    """

    def __init__(self, comm: Comm, units: list[FlatUnit]):
        self.comm, self.units = comm, units
        self.differs = torch.zeros(1, device=comm.device)  # what the last reduction has told: 1 or 0
        self.start_anew()

    def start_anew(self) -> None:
        """Forget what was gathered. All ranks do so at the same point."""
        self.checksum, self.count, self.recent = 0, 0, deque(maxlen=REMEMBERED)

    def note(self, number: int) -> None:
        """Take down that a unit is being gathered."""
        self.checksum = zlib.crc32(b"%d " % number, self.checksum)
        self.count += 1
        self.recent.append(number)

    def reduce(self, value: torch.Tensor, op: str, settings: list[AdamSettings]) -> torch.Tensor:
        """Return `value` (1,), a sum or a maximum over ranks, and note in `differs` whether these agree."""
        text = repr(list(map(_facts, settings)))
        message = value.new_zeros(1 + self.comm.world_size)
        message[:1] = value
        message[1 + self.comm.rank] = zlib.crc32(text.encode(), self.checksum) % EXACT
        self.comm.all_reduce(message, op=op)
        self.differs = (message[1:] != message[1]).any().float().reshape(1)
        return message[:1]

    def insist(self, settings: list[AdamSettings]) -> None:
        """Raise the same ValueError on all ranks if the last reduction has told that they do not agree.

        It says which gather was the first that differed, or which setting. On a GPU it waits for the device.
        """
        if not self.differs.item():
            return
        facts = self._first_difference()
        for index, group in enumerate(settings):
            facts |= {f"{name} of group {index}": value for name, value in _facts(group).items()}
        must_agree(self.comm, "a step", facts)
        raise ValueError(f"ranks disagree on a step: not in their settings, nor in the last {REMEMBERED} gathers")

    def _first_difference(self) -> dict[str, str]:
        """Return which unit this rank gathered where the first difference is, if there is one. All ranks call it."""
        everyone = self.comm.agree([self.count, list(self.recent)])
        begin = max(count - len(recent) for count, recent in everyone)
        for index in range(begin, max(count for count, _ in everyone)):
            gathered = [recent[index - count] if index < count else None for count, recent in everyone]
            if len(set(gathered)) > 1:
                mine = gathered[self.comm.rank]
                where = "nothing" if mine is None else f"the unit of {self.units[mine].slots[0].name}"
                return {f"gather {index + 1}": where}
        return {}


def _facts(settings: AdamSettings) -> dict[str, float | list[float]]:
    """Return all settings, where 1 is 1.0 and a tuple a list."""
    return {name: list(map(float, v)) if name == "betas" else float(v) for name, v in vars(settings).items()}
