"""A witness in a run: Python tells it of looks behind the scenes, before they succeed, and it writes them down.

An audit hook cannot be taken away again, and what it has written cannot be unwritten. `gc.get_objects` is what somebody
needs who wants to find the writer of the results; frames lead there, too. Code that Python's own library or a package
runs is not meant, nor are the lesson's tests.
"""

import os
import sys
from collections.abc import Callable, Sequence

SEARCHES = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")  # no exercise needs these
LOOKS = ("sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile")
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
ATTRIBUTES = {"object.__getattr__": FRAMES, "object.__setattr__": ("__code__",)}  # whatever way they are spelt
MOST = 20  # that are told


def watch(tell: Callable[..., None], trusted: Sequence[str]) -> None:
    """From now on `tell(event, what=, file=, function=)` for each, once a place; event is "fail" for searches.

    `trusted`: folders whose code may do so. What is compiled from a text, as by exec, is not trusted.
    """
    folders = tuple(f"{folder}{os.sep}" for folder in trusted)
    seen: set[tuple] = set()
    busy: list[bool] = []

    def hook(event: str, args: tuple) -> None:
        if event not in _EVENTS or busy:  # in this order: some events come by the hundred thousand
            return
        if event in ATTRIBUTES and args[1] not in ATTRIBUTES[event]:
            return
        busy.append(True)
        try:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename == _INSPECT:
                frame = frame.f_back
            file = "" if frame is None else frame.f_code.co_filename
            what = args[1] if event in ATTRIBUTES else event
            place = (what, file, "" if frame is None else frame.f_code.co_name)
            if place not in seen and len(seen) < MOST and not file.startswith((*folders, "<frozen ")):
                seen.add(place)
                tell("fail" if event in SEARCHES else "noted", what=what, file=file, function=place[2])
        finally:
            busy.clear()

    sys.addaudithook(hook)


_EVENTS = {*SEARCHES, *LOOKS, *ATTRIBUTES}
_INSPECT = os.path.join(os.path.dirname(os.__file__), "inspect.py")
