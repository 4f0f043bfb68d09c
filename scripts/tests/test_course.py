import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from fake_course import FakeCourse

import catalog
import course
from jsonpos import Located
from lessons import Course, UnknownLesson

COURSE = Path(__file__).resolve().parents[1] / "course.py"


class CommandLine(FakeCourse):
    def course(self, *args: str, folder: Path | None = None) -> subprocess.CompletedProcess:
        """Run one command on the fake course, from some other folder."""
        command = [sys.executable, str(COURSE), "--root", str(self.root), *args]
        return subprocess.run(command, cwd=folder or tempfile.gettempdir(), capture_output=True, text=True, timeout=120)

    def assert_clear(self, result: subprocess.CompletedProcess, code: int, message: str) -> None:
        """The exit code, the message, and no traceback."""
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertIn(message, result.stdout + result.stderr)
        self.assertNotIn("Traceback", result.stderr)


class TestList(CommandLine):
    def test_table(self):
        lines = self.course("list").stdout.splitlines()
        self.assertEqual(lines[0].split(), ["no", "title", "minutes", "needs", "quiz", "exercises", "folder"])
        self.assertEqual(lines[2].split(), ["02", "The", "Cart", "45", "01", "1/3/2", "0", self.CARTS])

    def test_json(self):
        self.assertEqual(
            json.loads(self.course("list", "--json").stdout), json.loads(self.text("catalog.json"))["lessons"]
        )

    def test_q03_a_broken_lesson_is_still_shown(self):
        self.put(f"{self.WHEELS}/quiz.json", "{")
        self.put(f"{self.CARTS}/quiz.json", '{"questions": [{"q": "?", "choices": [], "answer": "x"}]}')
        self.put(f"{self.CARTS}/docs/en.md", "nothing")
        self.put(f"{self.CARTS}/code/main.py", "def")
        lines = self.course("list").stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines[1:]], ["01", "02"])
        self.assertEqual(lines[2].split()[1:], ["?", "?", "0/0/0", "0", self.CARTS])


class TestSystem(CommandLine):
    def test_a_full_disk_is_no_traceback_and_a_fault_of_the_code_is_one(self):
        full, fault = OSError(errno.ENOSPC, "No space left on device", "table"), OSError(errno.EBADF, "Bad file")
        told = io.StringIO()
        with mock.patch.object(course, "list_lessons", side_effect=[full, fault]), contextlib.redirect_stderr(told):
            self.assertEqual(course.main(["--root", str(self.root), "list"]), 2)
            self.assertRaises(OSError, course.main, ["--root", str(self.root), "list"])
        self.assertEqual(told.getvalue(), "course: table: No space left on device\n")


class TestRun(CommandLine):
    def test_arguments_and_exit_code_are_passed_on(self):
        result = self.course("run", "1", "--", "--steps", "3")
        self.assert_clear(result, 0, "told: Wheel --steps 3")
        self.assertEqual(self.course("run", "01-wheels", "--", "--fail").returncode, 3)

    @unittest.skipUnless(os.name == "posix", "elsewhere the demonstration is a process of its own")
    def test_a_signal_for_the_command_reaches_the_demonstration(self):
        self.put(f"{self.WHEELS}/code/main.py", "import os\nprint(os.getpid())")
        command = [sys.executable, str(COURSE), "--root", str(self.root), "run", "01"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            printed = process.communicate(timeout=120)[0]
        self.assertEqual(int(printed), process.pid)  # they are one process

    def test_unknown_lessons_and_options(self):
        self.assert_clear(self.course("run", "99"), 2, "no lesson '99'; the lessons are: 01, 02")
        self.assert_clear(self.course("run", "wheels"), 2, "no lesson 'wheels'")
        self.assert_clear(self.course("run", "01", "--steps", "3"), 2, "unrecognized arguments")
        self.assert_clear(self.course("check", "--", "x"), 2, "only run and break pass anything on")
        self.assert_clear(self.course(), 2, "COMMAND")
        self.assert_clear(self.course("fly"), 2, "invalid choice")

    def test_a_lesson_without_main(self):
        (self.root / self.WHEELS / "code" / "main.py").unlink()
        self.assert_clear(self.course("run", "01"), 2, "lesson 01 has no phases/01-basics/01-wheels/code/main.py")

    def test_a_number_that_two_phases_use(self):
        (self.root / "phases" / "02-more" / "01-hoops").mkdir(parents=True)
        with self.assertRaisesRegex(UnknownLesson, "could be any of: 01-wheels, 01-hoops"):
            Course(self.root).find("01")


class TestTest(CommandLine):
    def setUp(self) -> None:
        super().setUp()
        test = "import unittest\n\n\nclass TestHelp(unittest.TestCase):\n    def test_help(self):\n        pass\n"
        self.put("scripts/tests/test_help.py", test)

    def test_everything(self):
        result = self.course("test")
        self.assert_clear(result, 0, "scripts")
        rows = [line.split() for line in result.stdout.splitlines()[-3:]]
        self.assertEqual(
            [(row[0], row[1], row[-1]) for row in rows],
            [
                ("01-wheels", "1", "ok"),
                ("02-carts", "1", "ok"),
                ("scripts", "1", "ok"),
            ],
        )
        self.assertEqual(result.stderr.count("Ran 1 test in"), 3)

    def test_json(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", '"Wheel")', '"Wheels")')
        result = self.course("test", "--json")
        self.assertEqual(result.returncode, 1)
        rows = json.loads(result.stdout)
        self.assertEqual(
            [(row["name"], row["ran"], row["result"]) for row in rows[:2]],
            [("01-wheels", 1, "FAILED"), ("02-carts", 1, "ok")],
        )
        self.assertEqual(rows[0]["exit_code"], 1)

    def test_one_failure_is_enough(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", '"Wheel")', '"Wheels")')
        result = self.course("test")
        self.assert_clear_but_failed(result, "FAILED")
        self.assertEqual([line.split()[-1] for line in result.stdout.splitlines()[-3:]], ["FAILED", "ok", "ok"])
        self.assertEqual(self.course("test", "02").returncode, 0)

    def test_no_test_is_a_failure(self):
        self.replace(f"{self.WHEELS}/tests/test_wheel.py", "def test_name", "def name")
        self.assert_clear_but_failed(self.course("test", "01"), "NO TEST RAN")
        (self.root / self.WHEELS / "tests" / "test_wheel.py").unlink()
        self.assert_clear_but_failed(self.course("test", "01"), "NO TEST RAN")

    def test_a_hang_ends_at_the_deadline(self):
        self.put(f"{self.WHEELS}/tests/test_wheel.py", "import threading\nthreading.Event().wait()\n")
        self.assert_clear_but_failed(self.course("test", "01", "--deadline", "0.5"), "TIMED OUT")

    def assert_clear_but_failed(self, result: subprocess.CompletedProcess, word: str) -> None:
        """Exit code 1 and the word in the table."""
        self.assertEqual(result.returncode, 1)
        self.assertIn(word, result.stdout)


class TestCheck(CommandLine):
    def test_no_fault(self):
        self.assert_clear(self.course("check"), 0, "2 lessons checked, 0 faults")

    def test_json(self):
        self.assertEqual(json.loads(self.course("check", "--json").stdout), {"lessons": 2, "faults": []})
        line = self.replace(f"{self.WHEELS}/docs/en.md", "Ship it.", "Ship `rings.twist`.")
        result = self.course("check", "--json")
        (fault,) = json.loads(result.stdout)["faults"]
        self.assertEqual((fault["path"], fault["line"], result.returncode), (f"{self.WHEELS}/docs/en.md", line, 1))

    def test_a_line_a_fault(self):
        line = self.replace(f"{self.WHEELS}/docs/en.md", "Ship it.", "Ship `rings.twist`.")
        result = self.course("check", folder=self.root / "phases")
        self.assertEqual(result.returncode, 1)
        wanted = f"{self.WHEELS}/docs/en.md:{line}: rings.twist: there is no such name in the course's code\n"
        self.assertEqual(result.stdout, wanted)

    def test_it_needs_neither_torch_nor_git(self):
        code = "import sys; sys.modules.update(torch=None, numpy=None, matplotlib=None); import course; "
        code += f"sys.exit(course.main(['--root', {str(self.root)!r}, 'check']))"
        self.put(".git/HEAD", "")  # looks like a repository, but no git can be found
        env = {key: value for key, value in os.environ.items() if key != "PATH"} | {"PATH": ""}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=COURSE.parent, env=env, capture_output=True, text=True, timeout=120
        )
        self.assert_clear(result, 0, "0 faults")


class TestCatalog(CommandLine):
    def test_what_it_says(self):
        first, second = json.loads(self.text("catalog.json"))["lessons"]
        self.assertEqual(
            first,
            {
                "id": "01-wheels",
                "path": self.WHEELS,
                "title": "The Wheel",
                "minutes": 30,
                "prerequisites": [],
                "skills": ["Python basics"],
                "names": ["Wheel"],
                "quiz": {"pre": 1, "check": 3, "post": 2},
                "exercises": 2,
            },
        )
        self.assertEqual((second["prerequisites"], second["skills"]), (["01-wheels"], ["patience"]))

    def test_q05_a_renamed_lesson_fails_until_the_catalog_is_written_again(self):
        self.assert_clear(self.course("catalog", "--check"), 0, "")
        (self.root / self.WHEELS).rename(self.root / "phases/01-basics/01-rollers")
        line = self.text("catalog.json").splitlines().index('      "id": "01-wheels",') + 1
        self.assert_clear(
            self.course("catalog", "--check"), 1, f'catalog.json:{line}: out of date: \'"id": "01-wheels"'
        )
        self.assertEqual(self.course("check").returncode, 1)
        (fault,) = json.loads(self.course("catalog", "--check", "--json").stdout)["faults"]
        self.assertEqual((fault["path"], fault["line"]), ("catalog.json", line))
        self.assert_clear(self.course("catalog"), 0, "catalog.json: 2 lessons")
        written = json.loads(self.course("catalog", "--json").stdout)
        self.assertEqual(written, {"file": "catalog.json", "lessons": 2, "faults": []})
        self.assert_clear(self.course("catalog", "--check"), 0, "")

    def test_q05_each_number_drifts(self):
        for name, old, new, found in [
            (f"{self.WHEELS}/docs/en.md", "~30", "~35", '"minutes": 30'),
            (f"{self.WHEELS}/docs/en.md", "# The Wheel", "# Wheels", '"title": "The Wheel"'),
            (f"{self.WHEELS}/quiz.json", '"stage": "check"', '"stage": "post"', '"check": 3'),
            (f"{self.WHEELS}/code/main.py", '["Wheel"]', '["main"]', '"Wheel"'),
            (f"{self.WHEELS}/exercises.json", self.text(f"{self.WHEELS}/exercises.json"), "[]", '"exercises": 2'),
            (f"{self.CARTS}/docs/en.md", "1; patience", "patience", '"prerequisites": ['),
        ]:
            with self.subTest(found):
                good = self.text(name)
                self.replace(name, old, new)
                (fault,) = catalog.check_catalog(Course(self.root))
                self.assertIn("out of date", fault.message)
                self.assertIn(found, self.text("catalog.json").splitlines()[fault.line - 1] + fault.message)
                self.put(name, good)
                catalog.write(Course(self.root))
        self.assert_good()

    def test_too_short_too_long_missing(self):
        text = self.text("catalog.json")
        lines = len(text.splitlines())
        self.put("catalog.json", text + "more\n")
        self.assert_fault("catalog.json", lines + 1, "out of date: 'more'")
        self.put("catalog.json", "".join(text.splitlines(keepends=True)[:-1]))
        self.assert_fault("catalog.json", lines, "ends too early")
        (self.root / "catalog.json").unlink()
        self.assert_fault("catalog.json", 1, "missing")

    def test_twice_is_the_same(self):
        self.assertEqual(catalog.render(Course(self.root)), catalog.render(Course(self.root)))


class TestLocated(FakeCourse):
    def test_lines_of_parts(self):
        located = Located('{\n "a": [\n  1,\n  {"b": "x\\n"}\n ],\n "c": {}, "d": []\n}')
        self.assertEqual(located.value, {"a": [1, {"b": "x\n"}], "c": {}, "d": []})
        places = [(), ("a",), ("a", 0), ("a", 1, "b"), ("c",), ("a", 1, "missing"), ("zzz",)]
        self.assertEqual([located.line(*place) for place in places], [1, 2, 3, 4, 6, 4, 1])

    def test_bad_text(self):
        for text in ("", "{", '{"a": 1,}', "[1 2]", '{"a": 1, "a": 2}', "[] x"):
            with self.assertRaises(json.JSONDecodeError):
                Located(text)
