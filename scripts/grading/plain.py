"""Where a process cannot be kept apart (no Linux): the same runs as plain processes. For practice only.

`python -m grading.plain FOLDER REQUEST`, started in the folder scripts/: performs the request (a JSON file), and
writes the records beside it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sessions
from grading import runner
from grading.limits import Limits, environment
from grading.records import Channel, line
from grading.sandbox import Ended


class Plain:
    """What a Zygote is elsewhere, without isolation; only the deadline of a whole run holds."""

    def __init__(self, limits: Limits, path: list[str]) -> None:
        self.limits, self._path = limits, path
        self._home = tempfile.TemporaryDirectory(prefix="cg-", ignore_cleanup_errors=True)
        self.folder = Path(self._home.name).resolve() / "run"
        self._process: subprocess.Popen | None = None

    def run(self, request: runner.Request) -> Ended:
        """Perform a request."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(parents=True)
        home, begin, nonce = self.folder.parent, time.monotonic(), os.urandom(16).hex()
        home.joinpath("request.json").write_text(json.dumps({"request": vars(request), "nonce": nonce}))
        own = environment(self.folder)
        own["PYTHONPATH"] = os.pathsep.join(str(self.folder / folder) for folder in self._path)
        command = [sys.executable, "-m", "grading.plain", str(self.folder), str(home / "request.json")]
        scripts = Path(__file__).resolve().parents[1]
        reason, code = "exited", None
        with open(home / "output", "wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(command, cwd=scripts, env=own, start_new_session=os.name == "posix", **streams)
            self._process = process
            try:
                code = process.wait(request.run_seconds)
            except subprocess.TimeoutExpired:
                reason = "deadline"
            finally:
                sessions.end(process.pid, alive=process.poll() is None)
                process.kill()
                process.wait()
        return Ended(
            reason,
            code,
            code == 0,
            output=_read(home / "output")[: self.limits.output_bytes],
            records=_read(home / "records").splitlines(),
            stacks=_read(home / "stacks"),
            nonce=nonce,
            seconds=time.monotonic() - begin,
        )

    def interrupt(self) -> None:
        """From another thread: end a run that is going on."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Delete the folder."""
        self._home.cleanup()


def _read(path: Path) -> str:
    return path.read_bytes()[: 1 << 24].decode(errors="replace") if path.is_file() else ""


def main(folder: str, request: str) -> None:
    """Perform the request in this process."""
    file = Path(request)
    value = json.loads(file.read_text())
    file.unlink()
    with open(file.with_name("records"), "wb", buffering=0) as records, open(file.with_name("stacks"), "wb") as stacks:
        channel = Channel(records.fileno(), stacks.fileno(), value["nonce"])
        _perform(runner.Request(**value["request"]), Path(folder), channel)
        os._exit(0)


def _perform(request: runner.Request, folder: Path, channel: Channel) -> None:
    try:
        runner.lay_out(request, folder)
    except OSError as error:  # a full disk, say: no line of what was handed in was at work
        failure = runner.describe(error, folder)
        os.write(channel.records, line(channel.nonce, {"event": "fail", "test": runner.LOADING, **failure}))
        return
    runner.perform(request, folder, channel)


if __name__ == "__main__":
    main(*sys.argv[1:])
