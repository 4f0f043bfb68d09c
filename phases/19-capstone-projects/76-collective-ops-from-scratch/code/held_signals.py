"""Signals that wait: Python raises KeyboardInterrupt between any two lines, also between those that end what was begun.

A launcher that is interrupted twice, the second time while it ends its ranks, would leave some of them running.
"""

import os
import signal
import threading

_entered: list["HeldSignals"] = []  # in this process, outermost first


class HeldSignals:
    """While it is entered, signals only join `heard`; `answer()` does what they would have done, at a safe point.

    with HeldSignals(signal.SIGINT) as signals:
        signals.answer()  # raises KeyboardInterrupt if Ctrl-C was pressed

    What was not answered inside is answered when it is left, unless an error is on its way already. A signal that is
    ignored stays ignored. Python delivers signals to the main thread alone: in another one nothing is held. A process
    that is forked inside has its old handlers.
    """

    def __init__(self, *numbers: int):
        self.heard: list[int] = []  # in the order in which they came
        self._numbers, self._before = numbers, {}

    def answer(self) -> None:
        """Call the handler that each signal had before; one that would have ended the process does nothing."""
        while self.heard:
            number = self.heard.pop(0)
            if callable(self._before[number]):
                self._before[number](number, None)

    def __enter__(self) -> "HeldSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: not installed from Python, and cannot be from here
                    self._before[number] = handler
                    signal.signal(number, self._hear)
            _entered.append(self)
        return self

    def __exit__(self, kind, *_) -> None:
        if self in _entered:
            _entered.remove(self)
        self._restore()
        if kind is None:
            self.answer()

    def _hear(self, number: int, frame) -> None:
        self.heard.append(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _restore_all() -> None:
    while _entered:
        _entered.pop()._restore()


if hasattr(os, "register_at_fork"):  # a rank that is asked to end must not wait for a safe point of its launcher
    os.register_at_fork(after_in_child=_restore_all)
