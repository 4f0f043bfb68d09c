"""What the texts quote is compared with what the commands print."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mdtext import Document
from reruns.commands import run_in, run_quoted
from reruns.compare import first_missing, same
from reruns.quoted import Quoted, quoted_commands

TABLE = ["rank  steps  ms   loss", "----  -----  ---  ------", "   0     12  3.1  2.5001", "   1     12  4.0  2.5002"]


class TestQuotedCommands(unittest.TestCase):
    def found(self, *lines: str) -> list[Quoted]:
        return quoted_commands(Document("\n".join(lines)))

    def test_commands_of_a_shell_block_in_order_without_comments(self):
        found = self.found(
            "```bash", "python a.py  # first", "python b.py \\", "  --flag", "```", "", "```text", "x", "```"
        )
        self.assertEqual([quoted.command for quoted in found], ["python a.py", "python b.py --flag"])
        self.assertEqual([len(quoted.outputs) for quoted in found], [0, 1])
        self.assertEqual([quoted.line for quoted in found], [2, 4])

    def test_a_command_in_the_line_before(self):
        (found,) = self.found("Some words, then", "from `python a.py --trace`, some rows:", "", "```text", "x", "```")
        self.assertEqual((found.command, found.line, len(found.outputs)), ("python a.py --trace", 2, 1))

    def test_more_of_the_same_output_with_a_mark(self):
        mark = "<!-- numbers differ from run to run -->"
        block = ["```text", "x 1", "```"]
        (found,) = self.found("From `python a.py`:", "", *block, "", mark, *block)
        self.assertEqual([differs for _, differs in found.outputs], [None, "numbers"])

    def test_one_command_named_twice_runs_once(self):
        block = ["```text", "x", "```", ""]
        (found,) = self.found("From `python a.py`:", "", *block, "Again from `python a.py`:", "", *block)
        self.assertEqual(len(found.outputs), 2)

    def test_what_cannot_run_here_says_why(self):
        for command, why in (
            ("python code/main.py --backend nccl", "needs GPUs"),
            ("python3 -m venv .venv", "installs something"),
            ("python -m unittest discover -s tests", "runs tests, which CI does by itself"),
            ("python scripts/course.py check-exercises", "runs tests, which CI does by itself"),
            ("python scripts/course.py check-exercises 76", None),
            ("python scripts/course.py quiz 76", "asks a reader at the terminal"),
            ("python scripts/course.py quiz-forms 76", None),
            ("python code/main.py --text FILE", "has a placeholder"),
            ("torchrun --nnodes=2 code/main.py", "needs several hosts"),
            ("python code/main.py --steps 4", None),
        ):
            with self.subTest(command):
                self.assertEqual(Quoted(command, 1).skipped, why)


class TestCompare(unittest.TestCase):
    def missing(self, quoted: list[str], printed: list[str], measured: bool = False) -> int | None:
        return first_missing(quoted, printed, measured)

    def test_some_rows_in_order(self):
        printed = ["begin", *TABLE, "", "end"]
        self.assertIsNone(self.missing(TABLE[:2] + TABLE[3:], printed))
        self.assertEqual(self.missing(["end", "begin"], printed), 1)

    def test_times_are_masked_by_unit_and_by_column(self):
        slower = [line[:13] + "  " + line[13:] for line in TABLE]  # a wider column
        slower[1:] = ["----  -----  -----  ------", "   0     12   97.5  2.5001", "   1     12     12  2.5002"]
        self.assertIsNone(self.missing(TABLE, slower))
        self.assertIsNone(self.missing(["took 3.1 ms, 2 GB/s"], ["took 45 ms, 17.25 GB/s"]))

    def test_other_numbers_are_not(self):
        for old, new in (("12", "13"), ("2.5002", "2.5102"), ("   1 ", "   2 "), ("loss", "cost")):
            with self.subTest(new):
                self.assertIsNotNone(self.missing(TABLE, [line.replace(old, new) for line in TABLE]))

    def test_the_last_digit_may_differ_by_one(self):
        self.assertTrue(same("loss 2.5001", "loss 2.5002"))
        self.assertFalse(same("loss 2.5001", "loss 2.5004"))
        self.assertFalse(same("4 claims", "5 claims"))

    def test_rounding_errors_are_of_this_processor_but_stay_small(self):
        self.assertTrue(same("off by 1.5e-08", "off by 7.4e-09"))
        self.assertFalse(same("off by 1.5e-08", "off by 4.2e-03"))

    def test_a_run_that_measures_is_compared_by_its_words(self):
        self.assertIsNone(self.missing(["ours 1.15, met"], ["ours 0.97, missed"], measured=True))
        self.assertEqual(self.missing(["ours 1.15, met"], ["theirs 0.97, met"], measured=True), 0)

    def test_paths_of_this_machine(self):
        self.assertIsNone(self.missing(["wrote /one/place/x.png"], ["wrote /another/much/longer/x.png"]))


class TestRunning(unittest.TestCase):
    def faults(self, command: str, shown: str, deadline: float = 60.0) -> list[str]:
        (quoted,) = quoted_commands(Document(f"```bash\n{command}\n```\n\n```text\n{shown}\n```"))
        with tempfile.TemporaryDirectory() as folder:
            found = run_quoted(Path("docs/en.md"), quoted, Path(folder), Path(folder), deadline)
        return [str(fault) for fault in found]

    def test_what_is_printed(self):
        self.assertEqual(self.faults("echo loss 2.5", "loss 2.5"), [])

    def test_a_number_that_is_not_printed_is_a_fault_at_its_line(self):
        self.assertEqual(
            self.faults("echo loss 2.5", "loss 2.7"), ["docs/en.md:6: echo loss 2.5 does not print: loss 2.7"]
        )

    def test_a_command_that_fails(self):
        self.assertEqual(self.faults("echo oh; exit 3", "oh"), ["docs/en.md:2: echo oh; exit 3: exit code 3: oh"])

    def test_a_drill_may_fail(self):
        self.assertEqual(self.faults("echo stopped: here; exit 1", "stopped: here"), [])

    def test_a_command_that_never_ends_is_killed_with_its_children(self):
        with tempfile.TemporaryDirectory() as folder:
            code, _ = run_in("sleep 1000 & echo $! > child; sleep 1000", Path(folder), 1.0)
            child = int((Path(folder) / "child").read_text())
            self.assertIsNone(code)
            state = Path(f"/proc/{child}/stat")
            self.assertTrue(not state.exists() or state.read_text().split()[2] == "Z")


if __name__ == "__main__":
    unittest.main()
