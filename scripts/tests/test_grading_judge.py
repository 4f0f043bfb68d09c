"""Verdicts: right answers pass; wrong ones, and those that only look as if they passed, do not."""

import sys
import unittest
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading import records
from grading.isolation import NONE, Isolation
from grading.judge import Judge, Verdict
from grading_course import LIMITS, RIGHT, RINGS, TESTS, GradedCourse
from lessons import Course

LINUX = sys.platform == "linux"
PLAIN = Isolation(fork=True)


class Verdicts(GradedCourse):
    def assert_incorrect(self, verdict, reason: str) -> None:
        self.assertEqual(verdict.status, "incorrect", verdict)
        self.assertIn(reason, verdict.reason)


class TestAnswers(Verdicts):
    def test_right_ones(self):
        verdicts = self.judge_all([RIGHT, "return [*ring[steps:], *ring[:steps]]", RIGHT])
        self.assertEqual([verdict.status for verdict in verdicts], ["correct"] * 3)
        self.assertEqual([(verdict.tests, verdict.passed) for verdict in verdicts], [(3, 3)] * 3)
        self.assertEqual([verdict.reused for verdict in verdicts], [True, False, True])

    def test_the_lessons_own_code_runs_once(self):
        exercise = self.exercise("turn")
        with Judge(self.graded, self.lesson, LIMITS) as judge:
            with mock.patch.object(judge, "_perform", wraps=judge._perform) as performed:
                judge.prepare(exercise)
                judge.prepare(exercise)
                self.assertEqual(judge.judge(exercise, {}).status, "correct")
            self.assertEqual(performed.call_count, 1)

    def test_the_first_failure_is_kept_with_its_place(self):
        (verdict,) = self.judge_all(["return ring[1:] + ring[:1]"])
        self.assert_incorrect(verdict, "a test failed")
        self.assertEqual(verdict.test, "test_wheel.TestTurn.test_by_any")
        self.assertEqual(verdict.failure["kind"], "AssertionError")
        self.assertEqual(verdict.failure["subtest"], "(steps=0)")
        self.assertIn("[2, 3, 1] != [1, 2, 3]", verdict.failure["message"])
        self.assertEqual(verdict.failure["assertion"], "self.assertEqual(turn([1, 2, 3], steps), expected)")

    def test_an_error_has_the_line_in_the_module(self):
        (verdict,) = self.judge_all(["return ring.turned"])
        self.assertEqual(verdict.failure["kind"], "AttributeError")
        line = RINGS[: RINGS.index(RIGHT)].count("\n") + 1
        self.assertEqual(verdict.failure["frames"][-1], [f"{self.WHEELS}/code/rings.py", line, "turn"])

    def test_a_module_that_does_not_import(self):
        (verdict,) = self.judge_all([f"{RIGHT}\n\n\nraise KeyError('top')"])
        self.assertEqual((verdict.test, verdict.failure["kind"]), ("loading", "KeyError"))

    def test_what_is_printed_is_kept(self):
        (verdict,) = self.judge_all(["print('here', steps)"])
        self.assertIn("here 0\n", verdict.output)


class TestTricks(Verdicts):
    """Nothing that a student's code does to the process counts as a right answer."""

    TRICKS: ClassVar = {
        "exits with 0": ("import os; os._exit(0)", "exit code 0 in the middle"),
        "leaves the interpreter": ("raise SystemExit(0)", "a test failed"),
        "leaves while it is imported": ("pass\n\n\nraise SystemExit(0)", "a test failed"),
        "prints OK": ("print('Ran 3 tests in 0.0s\\n\\nOK')", "a test failed"),
        "skips": ("import unittest; raise unittest.SkipTest", "a test was skipped"),
        "closes what is open": ("import os; os.closerange(3, 4096)", ""),
        "forks and lets the child go on": ("import os; return [2, 3, 1] if os.fork() == 0 else os.wait() and 0", ""),
        "replaces the assertion": ("import unittest; unittest.TestCase.assertEqual = lambda *a: None", "a test failed"),
        "replaces equality": ("import builtins; builtins.len = lambda x: 3", "a test failed"),
        "replaces the result": (
            "import unittest; unittest.TestResult.addFailure = unittest.TestResult.addSuccess",
            "a test failed",
        ),
        "exits in a thread": (
            "import sys, threading; t = threading.Thread(target=sys.exit); t.start(); t.join()",
            "a test failed",
        ),
        "dies": ("import os; os.kill(os.getpid(), 11)", "by signal 11"),
        "writes everywhere": (
            "import os\n    for n in range(3, 64):\n        try:\n            os.write(n, b'finished\\n')\n"
            "        except OSError:\n            pass\n    " + RIGHT,
            "something else was written",
        ),
    }

    @unittest.skipUnless(LINUX, "the sandbox needs Linux")
    def test_each(self):
        for isolation in (None, PLAIN):
            verdicts = self.judge_all([text for text, _ in self.TRICKS.values()], isolation)
            for (what, (_, reason)), verdict in zip(self.TRICKS.items(), verdicts, strict=True):
                with self.subTest(what=what, isolation=isolation):
                    self.assert_incorrect(verdict, reason)

    @unittest.skipUnless(LINUX, "the sandbox needs Linux")
    def test_the_supervisor_killed_from_inside(self):
        """Where nothing hides it; the next run finds a new one."""
        search = (
            "import os\n    for name in os.listdir('/proc'):\n        if name.isdigit():\n"
            "            line = open(f'/proc/{name}/cmdline').read()\n"
            "            if 'grading.zygote' in line and os.getppid() != int(name):\n"
            "                stat = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()\n"
            "                grand = open(f'/proc/{stat[1]}/stat').read().rpartition(')')[2].split()[1]\n"
            "                os.kill(int(grand), 9)\n                break\n    return ring[steps:] + ring[:steps]"
        )
        killed, after = self.judge_all([search, "return [*ring[steps:], *ring[:steps]]"], PLAIN)
        self.assert_incorrect(killed, "the code ended the processes that watch it")
        self.assertEqual(after.status, "correct")


class TestHangs(Verdicts):
    @unittest.skipUnless(LINUX, "the sandbox needs Linux")
    def test_an_endless_loop_says_where(self):
        (verdict,) = self.judge_all(["while True:\n        pass"], limits=replace(LIMITS, test_seconds=0.5))
        self.assert_incorrect(verdict, "a test took too long")
        self.assertEqual(verdict.test, "test_wheel.TestTurn.test_by_any")
        self.assertRegex(verdict.stacks, r'rings\.py", line \d+ in turn')


class TestTheMachineCannotJudge(Verdicts):
    def test_the_lessons_own_code_fails(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", "[2, 3, 1]", "[9]")
        same, other = self.judge_all([RIGHT, "return 0"])
        for verdict in (same, other):
            self.assertEqual(verdict.status, "error")
            self.assertIn("the tests fail here on the lesson as it is: test_wheel.TestTurn.test_by_one", verdict.reason)

    def test_the_lessons_own_module_does_not_import(self):
        gears = "import rings\n\nif rings.turn([1, 2]) != [2, 1]:\n    raise ImportError('no gears here')\n"
        self.put(f"{self.WHEELS}/code/gears.py", gears)
        self.put(f"{self.WHEELS}/tests/test_wheel.py", TESTS.replace("from rings", "import gears\nfrom rings"))
        self.graded = Course(self.root)
        self.lesson = self.graded.find("1")
        wrong, raising, top = self.judge_all(["return ring", "return ring[9]", f"{RIGHT}\n\n\n{gears[14:]}"])
        self.assertEqual((wrong.status, wrong.test), ("error", "loading"))
        self.assertIn("no line of what was handed in was at work: ImportError: no gears here", wrong.reason)
        self.assert_incorrect(raising, "a test failed")
        self.assert_incorrect(top, "a test failed")

    def test_no_test_can_run_here(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", "class TestTurn", '@unittest.skip("no")\nclass TestTurn')
        self.assertEqual(self.judge_all(["return 0"])[0].status, "error")


class TestElsewhere(Verdicts):
    def test_without_isolation(self):
        right, wrong, gone = self.judge_all(
            ["return [*ring[steps:], *ring[:steps]]", "return 0", "import os; os._exit(0)"], NONE
        )
        self.assertEqual(right.status, "correct")
        self.assert_incorrect(wrong, "a test failed")
        self.assert_incorrect(gone, "exit code 0")

    @unittest.skipUnless(LINUX, "the sandbox needs Linux")
    def test_files_outside_are_noticed_and_put_back(self):
        with Judge(self.graded, self.lesson, LIMITS, PLAIN) as judge:
            file = judge.layout.folder / judge.layout.path("rings")  # this judge's alone: others may grade beside us
            empty = f"open({str(file)!r}, 'w').close()\n    {RIGHT}"
            verdicts = [
                judge.judge(self.exercise("turn"), {"rings": RINGS.replace(RIGHT, text)})
                for text in (empty, "return [*ring[steps:], *ring[:steps]]")
            ]
        self.assert_incorrect(verdicts[0], "it changed files outside its folder")
        self.assertEqual(verdicts[1].status, "correct")


class TestSomebodyElse(Verdicts):
    """The laid out lesson is changed from outside, while it is graded: no student pays for that."""

    def damaged(self, times: int):
        with Judge(self.graded, self.lesson, LIMITS) as judge:
            if not judge.isolation.mounts:
                self.skipTest("no mount namespace is permitted here")
            exercise, perform = self.exercise("turn"), judge._perform
            self.assertEqual(judge.judge(exercise, {}).status, "correct")

            def perform_on_damage(request):
                nonlocal times
                if times > 0:
                    times -= 1
                    (judge.layout.folder / judge.layout.path("main")).unlink()
                    (judge.layout.folder / judge.layout.tests / "test_wheel.py").write_text("import nothing_there\n")
                return perform(request)

            with mock.patch.object(judge, "_perform", perform_on_damage):
                text = RINGS.replace(RIGHT, "return [*ring[steps:], *ring[:steps]]")
                return judge.judge(exercise, {"rings": text})

    def test_it_is_put_back_and_run_again(self):
        self.assertEqual(self.damaged(1).status, "correct")

    def test_if_it_goes_on_nothing_is_decided(self):
        verdict = self.damaged(9)
        self.assertEqual(verdict.status, "error")
        self.assertIn("files of the laid out lesson are changed from outside", verdict.reason)


class TestMachine(Verdicts):
    """What the machine refuses in the middle of a class is nobody's wrong answer."""

    def verdict(self, spoil) -> Verdict:
        with Judge(self.graded, self.lesson, LIMITS) as judge:
            exercise = self.exercise("turn")
            self.assertEqual(judge.judge(exercise, {}).status, "correct")
            spoil(judge)
            return judge.judge(exercise, {"rings": RINGS.replace(RIGHT, "return [*ring[steps:], *ring[:steps]]")})

    @unittest.skipUnless(LINUX, "plain processes elsewhere")
    def test_no_private_folder(self):
        def spoil(judge):
            home = judge._process().folder.parent
            home.rmdir()
            home.write_text("")

        verdict = self.verdict(spoil)
        self.assertEqual(verdict.status, "error", verdict)
        self.assertIn("the run could not be started: NotADirectoryError", verdict.reason)

    def test_the_lesson_cannot_be_copied(self):
        def spoil(judge):
            perform = judge._perform
            judge._perform = lambda request: perform(replace(request, source=f"{request.source}/nothing"))

        verdict = self.verdict(spoil)
        self.assertEqual(verdict.status, "error", verdict)
        self.assertIn("FileNotFoundError", verdict.reason)


class TestTorch(GradedCourse):
    """Lessons whose tests use PyTorch."""

    def test_what_torch_itself_replaces_is_no_trick(self):
        uses = "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).zero_grad()"  # imports torch._dynamo
        tests = TESTS.replace("import sys\n", "import sys\nimport torch\n", 1)
        tests = tests.replace("def test_by_one(self):\n", f"def test_by_one(self):\n        {uses}\n")
        self.put(f"{self.WHEELS}/tests/test_wheel.py", tests)
        (verdict,) = self.judge_all(["return [*ring[steps:], *ring[:steps]]"])
        self.assertEqual(verdict.status, "correct", verdict.reason)


class TestRecords(unittest.TestCase):
    """What is a proof, and what is not."""

    def outcome(self, *events: dict, nonce: str = "n") -> records.Outcome:
        lines = [records.line(nonce, event).decode().rstrip("\n") for event in events]
        return records.read("n", lines)

    def test_every_test_once_in_order(self):
        found, end = {"event": "found", "tests": ["a", "b"]}, {"event": "finished"}
        a, b = ([{"event": "start", "test": t}, {"event": "pass", "test": t}] for t in "ab")
        good = self.outcome(found, *a, *b, end)
        self.assertTrue(good.proves(good))
        for events in (
            (found, *a, end),
            (found, *a, *b),
            (found, *a, *a, *b, end),
            (found, *b, *a, end),
            (found, *a, b[0], end),
            ({"event": "found", "tests": ["a"]}, *a, end),
            ({"event": "found", "tests": []}, end),
            (found, *a, *b, end, {"event": "surprise"}),
            (found, *a, b[0], {"event": "pass", "test": "b", "skipped": True}, end),
            (found, *a, *b, {"event": "fail", "test": "b"}, end),
        ):
            self.assertFalse(self.outcome(*events).proves(good), events)
        self.assertFalse(self.outcome(found, *a, *b, end, nonce="other").proves(good))

    def test_lines_that_are_no_records(self):
        self.assertEqual(records.read("n", ["", "n", "n {", "n []", 'n {"event": 3}', "x y"]).foreign, 6)


if __name__ == "__main__":
    unittest.main()
