"""Children that hear Ctrl-C, also where these tests run in a shell's background, in which it is ignored by all."""

import os
import signal
from functools import partial

HEARING = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)} if os.name == "posix" else {}
