"""The tests of mutants run in processes forked from one that has torch already."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import sessions


class RunServer:
    """A process that runs tests in processes of their own (run_server.py). One run at a time."""

    def __init__(self) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command, scripts = [sys.executable, "-m", "mutants.run_server"], Path(__file__).parents[1]
        self._process = subprocess.Popen(command, cwd=scripts, start_new_session=True, **pipes)

    def run(self, folder: Path, python_path: Path, names: list[str], deadline: float) -> bool:
        """Run tests in `folder`, which gets result.json and output.txt; return whether they ended by the deadline."""
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        question = {"folder": str(folder), "python_path": str(python_path), "result": str(result), "names": names}
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()
        session = int(self._process.stdout.readline())
        sessions.begun(session)
        late = threading.Event()
        timer = threading.Timer(deadline, lambda: (late.set(), sessions.end(session, alive=True)))
        timer.start()
        try:
            self._process.stdout.readline()
        finally:
            timer.cancel()
            sessions.end(session)
        return not late.is_set()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
