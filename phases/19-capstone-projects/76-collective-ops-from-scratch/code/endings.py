"""How a demonstration ends when it cannot go on: with one line where the error says all there is to say."""

import sys
from collections.abc import Callable

from ranks import RankError


def say_why(program: Callable[[], int], *known: type[Exception]) -> int:
    """Run a program and return its exit code; 1 where it raises what a user can mend, which is said on stderr.

    That is a ValueError, an OSError, one of `known`, also if a rank raised it, and Ctrl-C, whose exit code is 130. Of
    any other failure of a rank, all that is known is printed. What is left is a fault of the program: a traceback.
    """
    try:
        return program()
    except (ValueError, *known) as error:
        print(f"stopped: {error}", file=sys.stderr)
    except OSError as error:
        print(f"stopped: {f'{error.filename}: {error.strerror}' if error.filename else error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped: by Ctrl-C", file=sys.stderr)
        return 130  # what shells say of a command that it ended
    except RankError as error:
        kind, _, message = error.reason.partition(": ")
        says_it_all = kind.endswith(tuple(each.__name__ for each in known))
        print(f"stopped: {message if says_it_all else error}", file=sys.stderr)
    return 1
