"""`Noise`: a stream of random numbers of one's own, beside the one that several ranks draw alike."""

import torch


class Noise:
    """In its context, torch draws from a stream that begins with `seed`; outside, the usual one has not moved.

    Tensor parallel ranks hold the same activations, so they must drop the same of them: their usual streams are equal.
    What each has alone, the weights of its own heads, it drops with noise of its own.
    """

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin the stream anew, with another seed."""
        self.state = torch.Generator(self.device).manual_seed(seed).get_state()

    def __enter__(self):
        self._outside = self._read()
        self._write(self.state)

    def __exit__(self, *error):
        self.state = self._read()
        self._write(self._outside)

    def _read(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _write(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
