"""Being asked to stop: a signal sets a flag, and the ranks, once they have told each other, stop after the same step.

A rank that stopped by itself would leave the others waiting in their next collective, with nothing saved.
"""

import signal
import threading


class StopSignals:
    """While it is entered, SIGTERM and SIGINT ask to stop instead of ending the process.

    with StopSignals() as stop:
        ...
        if stop.requested: ...

    A second SIGINT (Ctrl-C pressed twice) raises KeyboardInterrupt; a second SIGTERM changes nothing: launchers and
    schedulers repeat it. What handled the signals before handles them again afterwards. Python delivers signals to the
    main thread alone: in another one nothing is installed, and `request` is the only way to ask.
    """

    def __init__(self):
        self.requested = False
        self._before = {}

    def request(self) -> None:
        """Ask to stop, as a signal does."""
        self.requested = True

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it was not installed from Python, and cannot be from here
                signal.signal(number, handler)
        self._before.clear()

    def _heard(self, number, frame) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
