"""course mutants and course break on the tiny course: what counts as rejected, and that nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from fake_course import FakeCourse, mutant
from interrupts import HEARING

SCRIPT = Path(__file__).resolve().parents[1] / "course.py"
FILE = f"{FakeCourse.WHEELS}/mutants.json"
TESTS = """import sys
import time
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

from rings import turn


class TestWheel(unittest.TestCase):
    def test_name(self):
        self.assertEqual(turn("abcd"), "bcda")
        self.assertEqual(turn("abcd", 1, reverse=True), "dabc")

    def test_nothing(self):
        pass
"""


class Commands(FakeCourse):
    def setUp(self):
        super().setUp()
        self.put(f"{self.WHEELS}/tests/test_wheel.py", TESTS)
        self.temporary = self.root / "temporary"
        self.temporary.mkdir()

    def start(self, *arguments: str) -> subprocess.Popen:
        environment = {**os.environ, "TMPDIR": str(self.temporary)}
        command = [sys.executable, str(SCRIPT), "--root", str(self.root), *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env=environment, **pipes, **HEARING)

    def course(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        self.assertEqual(list(self.temporary.iterdir()), [], "copies are left")
        return process.returncode, out, err

    def proven(self, *mutants: dict) -> tuple[int, dict[str, dict]]:
        """Put these mutants into the lesson and run them; return the exit code and {id: row}."""
        self.put_json(FILE, list(mutants))
        code, out, err = self.course("mutants", "01", "--json")
        self.assertTrue(out, err)
        return code, {row["id"]: row for row in json.loads(out)}


class TestMutants(Commands):
    def test_rejected_and_not(self):
        test = "test_wheel.TestWheel.test_"
        hop = "import time\n    time.sleep(600)\n    shift = steps"
        code, rows = self.proven(
            mutant("one-way"),
            mutant("unseen", caught_by=f"{test}nothing"),
            mutant("misspelt", new="stepps"),
            mutant("raises", new="steps / 2"),
            mutant("raises-as-it-says", new="steps / 2", raises="TypeError"),
            mutant("raises-something-else", new="steps / 2", raises="ValueError"),
            mutant("fails-where-it-should-raise", raises="TypeError"),
            mutant("hangs", old="shift = -steps if reverse else steps", new=hop, hangs=True),
        )
        self.assertEqual(code, 1)
        rejected = {name for name, row in rows.items() if row["rejected"]}
        self.assertEqual(rejected, {"one-way", "raises-as-it-says", "hangs"})
        self.assertEqual(rows["one-way"]["found"], "AssertionError: 'bcda' != 'dabc'")
        self.assertIn("NameError: name 'stepps' is not defined", rows["misspelt"]["found"])
        self.assertEqual(rows["unseen"]["found"], "passed")
        self.assertIn("stopped after", rows["hangs"]["found"])

    def test_a_test_that_fails_anyway_proves_nothing(self):
        self.replace(f"{self.WHEELS}/code/rings.py", "ring[shift:] + ring[:shift]", "ring[shift:]")
        code, rows = self.proven(mutant("one-way"))
        self.assertEqual((code, rows["one-way"]["rejected"]), (1, False))
        self.assertIn("does not pass without the fault", rows["one-way"]["found"])

    def test_a_table_of_all_lessons(self):
        code, out, _ = self.course("mutants", "--jobs", "3")
        self.assertEqual(code, 0)
        self.assertIn("8 of 8 wrong answers are rejected", out)
        self.assertRegex(out, r"01\s+one-way-0\s+turn\s+test_wheel.TestWheel.test_name\s+AssertionError")

    def test_what_it_does_not_know(self):
        (self.root / FILE).unlink()
        code, _, err = self.course("mutants")
        self.assertEqual((code, err), (2, "course: no lesson has a mutants.json\n"))
        self.put_json(FILE, [mutant("one-way"), {"id": "two"}])
        for arguments, message in [
            (("02",), "lesson 02 has no mutants.json"),
            (("01",), f"{FILE}:13: no mutant: missing 8 required"),
            (("01", "--jobs", "0"), "--jobs must be at least 1, got 0"),
        ]:
            code, _, err = self.course("mutants", *arguments)
            self.assertEqual(code, 2)
            self.assertIn(message, err)


class TestBreak(Commands):
    def setUp(self):
        super().setUp()
        self.put_json(FILE, [mutant("one-way"), mutant("unseen", caught_by="test_wheel.TestWheel.test_nothing")])

    def test_the_list(self):
        code, out, _ = self.course("break", "01")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"one-way\s+turn\s+A ring turns one way\.")
        listed = json.loads(self.course("break", "01", "--json")[1])
        self.assertEqual([set(row) for row in listed], [{"mutant", "exercise", "what"}] * len(listed))
        self.assertTrue(all(row["mutant"] in out for row in listed) and listed)
        code, _, err = self.course("break", "01", listed[0]["mutant"], "--json")
        self.assertEqual((code, err), (2, "course: --json is for the list of faults: leave out MUTANT\n"))

    def test_the_fault_the_symptom_and_the_test_that_notices(self):
        code, out, _ = self.course("break", "01", "one-way", "--", "a", "b")
        self.assertEqual(code, 0)
        for part in (
            "01 one-way: A ring turns one way.",
            "-    shift = -steps if reverse else steps",
            "+    shift = steps",
            "Look for: It never turns back.",
            "told: Wheel a b --out ",
            "the demonstration does not notice this fault",
            "caught by the test test_wheel.TestWheel.test_name:\n   AssertionError: 'bcda' != 'dabc'",
        ):
            self.assertIn(part, out)

    def test_a_demonstration_that_notices(self):
        check = 'if Wheel.__name__:\n        print("FAIL  rings turn back: no")\n        return 1\n    print('
        self.replace(f"{self.WHEELS}/code/main.py", "print(", check)
        code, out, _ = self.course("break", "01", "unseen")
        self.assertEqual(code, 0)
        self.assertIn("== caught by the demonstration's check: rings turn back: no", out)
        self.assertIn("== not caught by the test test_wheel.TestWheel.test_nothing: passed", out)

    def test_a_demonstration_that_ends_with_an_error(self):
        code, out, _ = self.course("break", "01", "unseen", "--", "--fail")
        self.assertEqual(code, 0)
        self.assertIn("== caught by the demonstration, which ends with an error: exit code 3", out)

    def test_nobody_notices(self):
        self.assertEqual(self.course("break", "01", "unseen")[0], 1)

    def test_another_fault(self):
        code, _, err = self.course("break", "01", "two-ways")
        self.assertEqual(code, 2)
        self.assertIn("lesson 01 has no mutant 'two-ways'; it has one-way, unseen", err)


@unittest.skipUnless(hasattr(os, "killpg"), "signals of POSIX")
class TestInterrupted(Commands):
    """A child of the demonstration writes its number and waits; the interrupt must end it too."""

    def test_no_process_and_no_copy_is_left(self):
        with tempfile.TemporaryDirectory() as name:
            told = Path(name) / "pid"
            child = "import os, pathlib, time; os.setpgid(0, 0)"
            child += f"; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
            wait = f"import subprocess\n    subprocess.run([sys.executable, '-c', {child!r}])\n    print("
            self.replace(f"{self.WHEELS}/code/main.py", "print(", wait)
            self.put_json(FILE, [mutant("one-way")])
            for number in (signal.SIGINT, signal.SIGTERM):
                process = self.start("break", "01", "one-way")
                end = time.monotonic() + 60
                while not (told.exists() and told.read_text()) and time.monotonic() < end:
                    time.sleep(0.05)
                pid = int(told.read_text())
                process.send_signal(number)
                process.communicate(timeout=60)
                self.assertNotEqual(process.returncode, 0)
                self.assertEqual(list(self.temporary.iterdir()), [])
                self.assertTrue(ended(pid))
                told.unlink()


def ended(pid: int, seconds: float = 10) -> bool:
    """Whether a process ends within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":  # ended, nobody asked for it yet
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    unittest.main()
