"""Lesson 76's main.py under a name of its own, and a way to run it in this process."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

CODE = Path(__file__).resolve().parents[1] / "code"
spec = importlib.util.spec_from_file_location("main_76", CODE / "main.py")
main_76 = sys.modules["main_76"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main_76)


def run(*argv: str):
    """(exit code, everything printed)"""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        with mock.patch.object(sys, "argv", ["main.py", *argv]):
            try:
                code = main_76.main()
            except SystemExit as error:
                code = error.code
    return code, out.getvalue()
