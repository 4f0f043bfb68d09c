"""Nobody reads on: whatever the command, it ends, quietly."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from fake_course import FakeCourse

import quietly

COURSE = Path(__file__).resolve().parents[1] / "course.py"
LINES = "for number in range({lines}):\n    print(number, 'x' * {width}{more})\n"


@unittest.skipUnless(os.name == "posix", "elsewhere a pipe breaks in other ways")
class TestClosedOutput(FakeCourse):
    def end(self, *command: str, both: bool = False) -> subprocess.CompletedProcess:
        """Run a command whose output nobody reads (with `both`, nor its errors)."""
        read, write = os.pipe()
        os.close(read)
        errors = write if both else subprocess.PIPE
        try:
            return subprocess.run(command, stdout=write, stderr=errors, text=True, timeout=120)
        finally:
            os.close(write)

    def assert_quiet(self, *command: str) -> None:
        result = self.end(*command)
        expected = (quietly.CLOSED, 0) if "--help" in command else (quietly.CLOSED,)  # argparse lets it pass
        self.assertEqual(result.stderr, "", command)
        self.assertIn(result.returncode, expected, command)

    def test_commands_of_every_kind(self):
        for words in (["list"], ["run", "1"], ["break", "1"], ["catalog"], ["quiz", "1", "--help"]):
            self.assert_quiet(sys.executable, str(COURSE), "--root", str(self.root), *words)

    def test_a_script_in_its_place_whenever_it_prints(self):
        for lines, width, more in ((1, 1, ""), (3, 1, ", flush=True"), (1, 1 << 20, ""), (99_999, 9, "")):
            self.put("script.py", LINES.format(lines=lines, width=width, more=more))
            self.assert_quiet(sys.executable, quietly.__file__, str(self.root / "script.py"))

    def test_nobody_reads_the_errors_either(self):
        self.put("script.py", "import sys\nprint('told', file=sys.stderr, flush=True)\n")
        result = self.end(sys.executable, quietly.__file__, str(self.root / "script.py"), both=True)
        self.assertEqual(result.returncode, quietly.CLOSED)

    def test_another_pipe_that_breaks_is_a_fault(self):
        self.put("script.py", "import os\nread, write = os.pipe()\nos.close(read)\nos.write(write, b'x')\n")
        command = [sys.executable, quietly.__file__, str(self.root / "script.py")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 1)
        self.assertIn("BrokenPipeError", result.stderr)


class TestScript(FakeCourse):
    def run_script(self, text: str, *arguments: str) -> subprocess.CompletedProcess:
        self.put("some/beside.py", "VALUE = 7\n")
        self.put("some/script.py", text)
        command = [sys.executable, quietly.__file__, str(self.root / "some/script.py"), *arguments]
        return subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=120)

    def test_it_is_as_if_python_had_started_it(self):
        told = "import sys, beside\nprint(__name__, sys.argv[1:], beside.VALUE, __file__ == sys.argv[0])\n"
        self.assertEqual(self.run_script(told, "--a", "b").stdout, "__main__ ['--a', 'b'] 7 True\n")
        for end, code in (("", 0), ("raise SystemExit(3)", 3), ("raise SystemExit('why')", 1), ("1 / 0", 1)):
            self.assertEqual(self.run_script(end).returncode, code, end)

    def test_its_processes_find_its_functions(self):
        text = """import multiprocessing

def say(queue):
    queue.put("found")

if __name__ == "__main__":
    for method in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=say, args=(queue,))
        process.start()
        process.join()
        print(process.exitcode, queue.get() if process.exitcode == 0 else "")
"""
        result = self.run_script(text)
        self.assertEqual(set(result.stdout.splitlines()), {"0 found"}, result.stderr)


if __name__ == "__main__":
    unittest.main()
