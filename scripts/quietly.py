"""Where nobody reads on (`course list | head -1`), a program ends: quietly, with the exit code of Unix tools.

`python quietly.py SCRIPT ARGS` does for another script what `python SCRIPT ARGS` does, and ends like that, too.
"""

import os
import runpy
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

CLOSED = 141  # 128 + SIGPIPE


def quietly(action: Callable[[], Any]) -> Any:
    """What `action` returns; CLOSED where it, or what it has printed, cannot go on because nobody reads.

    A pipe to anything else that breaks is a fault as any other: BrokenPipeError is raised.
    """
    try:
        try:
            result = action()
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # now: when Python itself does, at its end, it is too late to be quiet
        return result
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise
        with open(os.devnull, "w") as nowhere:
            for stream in closed:
                os.dup2(nowhere.fileno(), stream.fileno())  # what is left to print goes there
        return CLOSED


def _is_closed(stream: TextIO) -> bool:
    """Whether the other end of a pipe has been closed. True where a system cannot tell."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    code = quietly(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
    sys.exit(code if code == CLOSED else 0)
