"""`course start`, `export` and `try`, on a tiny course and on the real one."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fake_course import EXERCISES
from test_course import CommandLine

from check_exercises import KEYS as EXERCISE_KEYS
from course import main
from exercises import trial
from exercises.folder import write_folder
from exercises.model import load_exercises
from exercises.starter import KEYS, export_files, starter_files
from exercises.surgery import is_stub
from faults import UserError
from lessons import Course

ROOT = Path(__file__).resolve().parents[2]

RING_TESTS = """import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import rings


class TestRings(unittest.TestCase):
    def test_turn(self):
        self.assertEqual(rings.turn([1, 2, 3]), [2, 3, 1], "turned to the left")

    def test_roll(self):
        self.assertEqual(rings.Wheel(3, size=2).roll(8), 4)
"""


class Learner(CommandLine):
    """A course whose first lesson has two exercises with tests that notice."""

    def setUp(self):
        super().setUp()
        self.put(f"{self.WHEELS}/tests/test_rings.py", RING_TESTS)
        turn, roll = (dict(exercise) for exercise in EXERCISES)
        turn["tests"] = "test_rings.TestRings.test_turn"
        roll.update(function="rings.Wheel.roll", tests=["test_rings.TestRings"])
        self.exercises = [turn, roll]
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        self.put(f"{self.WHEELS}/mutants.json", "[]")
        self.put(f"{self.WHEELS}/code/__pycache__/rings.pyc", "old")
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.work = Path(holder.name).resolve()
        self.mine = self.work / "mine"
        self.rings = self.mine / self.WHEELS / "code" / "rings.py"

    def course(self, *args: str, folder: Path) -> subprocess.CompletedProcess:
        """Run one command in this process, which is quicker, in a folder."""
        outs, before = (io.StringIO(), io.StringIO()), Path.cwd()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(outs[0]), contextlib.redirect_stderr(outs[1]):
                code = main(["--root", str(self.root), *args])
        finally:
            os.chdir(before)
        return subprocess.CompletedProcess(args, code, outs[0].getvalue(), outs[1].getvalue())

    def start(self, *args: str) -> Path:
        self.assert_clear(self.course("start", "1", "mine", *args, folder=self.work), 0, "")
        return self.mine

    def write(self, old: str, new: str) -> None:
        """Replace a text in the learner's rings.py."""
        text = self.rings.read_text(encoding="utf-8")
        self.assertIn(old, text)
        self.rings.write_text(text.replace(old, new), encoding="utf-8")

    def solve(self, exercise: int, body: str) -> None:
        self.write(
            f'raise NotImplementedError("[{self.exercises[exercise]["id"]}] {EXERCISES[exercise]["hint"]}")', body
        )

    def tried(self, *args: str, code: int) -> str:
        result = self.course("try", "mine", *args, folder=self.work)
        self.assert_clear(result, code, "")
        return result.stdout + result.stderr


class TestStart(Learner):
    def test_what_a_learner_gets(self):
        folder = self.start()
        found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        own = ["code/main.py", "code/rings.py", "docs/en.md", "exercises.json", "quiz.json"]
        own += ["tests/test_rings.py", "tests/test_wheel.py"]
        self.assertEqual(found, sorted([".course.json", "START.md", *(f"{self.WHEELS}/{name}" for name in own)]))
        text = self.rings.read_text(encoding="utf-8")
        self.assertTrue(is_stub(text, "turn") and is_stub(text, "Wheel.roll"))
        self.assertIn('"""Turn a ring."""', text)
        start = (folder / "START.md").read_text(encoding="utf-8")
        self.assertIn("course.py try", start)
        self.assertIn(f"the files that you changed in `{self.WHEELS}/code`", start)

    def test_the_quiz_has_no_keys_and_the_text_no_solutions(self):
        lesson = self.start() / self.WHEELS
        quiz = json.loads((lesson / "quiz.json").read_text(encoding="utf-8"))
        self.assertEqual(len(quiz["questions"]), 6)
        for question in quiz["questions"]:
            self.assertEqual(set(question), {"id", "stage", "question", "options"})
        text = (lesson / "docs" / "en.md").read_text(encoding="utf-8")
        self.assertIn("def turn(ring, steps=1, *, reverse=False):\n    ...\n    # your turn: exercise turn\n```", text)
        self.assertNotIn("ring[shift:]", text)

    def test_only_borrowed_modules_come_along_and_links_to_the_rest_are_words(self):
        self.put_json(f"{self.CARTS}/exercises.json", [{**self.exercises[0], "function": "carts.Cart.move"}])
        self.replace(f"{self.CARTS}/exercises.json", "test_rings.TestRings.test_turn", "test_cart.TestCart")
        self.put(f"{self.WHEELS}/code/unused.py", '"""Nobody needs it."""\n')
        text = "See [the code](../code/carts.py), [wheels](../../01-wheels/docs/en.md#x) and [all](https://e.org/a)."
        self.replace(f"{self.CARTS}/docs/en.md", "Nothing rolls.", text)
        self.assert_clear(self.course("start", "2", "mine", folder=self.work), 0, "")
        code = self.mine / self.WHEELS
        self.assertEqual([path.name for path in code.rglob("*.py")], ["rings.py"])
        self.assertIn('roll(self, distance):\n        """Roll on."""\n        return', self.rings.read_text())
        text = (self.mine / self.CARTS / "docs" / "en.md").read_text(encoding="utf-8")
        self.assertIn("See [the code](../code/carts.py), wheels and [all](https://e.org/a).", text)

    def test_the_default_folder(self):
        result = self.course("start", "1", folder=self.work)
        self.assert_clear(result, 0, "what is next".capitalize())
        self.assertTrue((self.work / "learn" / "01-wheels" / "START.md").is_file())

    def test_nothing_is_overwritten(self):
        self.start()
        before = {path: path.read_bytes() for path in self.mine.rglob("*") if path.is_file()}
        self.assert_clear(self.course("start", "1", "mine", folder=self.work), 2, "mine is not empty")
        for command in ("start", "export"):
            result = self.course(command, "1", "no/such/mine", folder=self.work)
            self.assert_clear(result, 2, "no/such/mine: the folder no/such does not exist")
        self.assertFalse((self.work / "no").exists())
        self.assertEqual({path: path.read_bytes() for path in self.mine.rglob("*") if path.is_file()}, before)
        (self.work / "file").write_text("x")
        self.assert_clear(self.course("start", "1", "file", folder=self.work), 2, "file is a file")
        self.assert_clear(self.course("start", "1", "file/x", folder=self.work), 2, f"course: {Path('file', 'x')}")
        self.assert_clear(self.course("start", "1", "phases/x", folder=self.root), 2, "inside the course's own phases")
        (self.work / "empty").mkdir()
        self.assert_clear(self.course("start", "1", "empty", folder=self.work), 0, "lesson 01")

    def test_bad_lessons(self):
        self.assert_clear(self.course("start", "7", "mine", folder=self.work), 2, "no lesson '7'; the lessons are")
        self.assert_clear(self.course("start", "2", "mine", folder=self.work), 2, "lesson 02 has no exercises")
        line = self.replace(f"{self.WHEELS}/exercises.json", "rings.Wheel.roll", "rings.Wheel.fly")
        result = self.course("start", "1", "mine", folder=self.work)
        self.assert_clear(result, 2, f"{self.WHEELS}/exercises.json:{line}: exercise 2: no function 'rings.Wheel.fly'")
        self.assertFalse(self.mine.exists())

    def test_json(self):
        result = json.loads(self.course("start", "1", "mine", "--json", folder=self.work).stdout)
        self.assertEqual((result["folder"], result["lesson"], result["starter"]), ("mine", "01-wheels", True))


class TestExport(Learner):
    def test_it_runs_alone(self):
        self.assert_clear(self.course("export", "2", "mine", folder=self.work), 0, "lesson 02")
        shutil.rmtree(self.root / "phases")
        lesson = self.mine / self.CARTS
        for command in (["code/main.py"], ["-m", "unittest", "discover", "-s", "tests"]):
            named = [str(lesson / word) if word in ("code/main.py", "tests") else word for word in command]
            self.assertEqual(self.run_python(*named), 0)

    def run_python(self, *args: str) -> int:
        return subprocess.run([sys.executable, *args], cwd=self.work, capture_output=True, timeout=120).returncode

    def test_with_solutions_and_as_a_starter(self):
        self.assert_clear(self.course("export", "1", "whole", folder=self.work), 0, "lesson 01")
        whole = self.work / "whole" / self.WHEELS
        self.assertEqual((whole / "code" / "rings.py").read_text(), self.text(f"{self.WHEELS}/code/rings.py"))
        self.assertIn("correct", (whole / "quiz.json").read_text())
        self.start()
        self.assert_clear(self.course("export", "1", "other", "--starter", folder=self.work), 0, "lesson 01")
        self.assertEqual(tree(self.work / "other"), tree(self.mine))


class TestTry(Learner):
    def test_the_way_of_a_learner(self):
        self.start()
        text = self.tried(code=1)
        self.assertRegex(text, r"(?m)^turn  not started$")
        self.assertIn(f"{self.rings.relative_to(self.work)}, line 4: rings.turn is still to be written", text)
        self.assertIn("Hint: Cut it in two.", text)
        self.assertIn("0 of 2 exercises passed, 0 of 5 points", text)
        self.solve(0, "return ring")
        text = self.tried(code=1)
        self.assertIn("test_turn (test_rings.TestRings.test_turn)", text)
        self.assertIn("turned to the left", text)
        self.write("return ring\n", "return ring[1:] + ring[:1]\n")
        self.assertIn("1 of 2 exercises passed, 2 of 5 points", self.tried(code=1))
        self.assertIn("1 of 1 exercise passed, 2 of 2 points", self.tried("turn", code=0))
        self.solve(1, "return distance / self.size")
        self.assertIn("2 of 2 exercises passed, 5 of 5 points", self.tried(code=0))
        self.assertIn("2 of 2 exercises passed", self.tried("roll", code=0))

    def test_what_is_not_written_yet_is_lent_by_the_course(self):
        self.exercises[0]["tests"] = self.exercises[1]["tests"] = ["test_rings.TestRings"]  # both need both functions
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.assertRegex(self.tried(code=1), r"(?m)^turn  passed .*\nroll  not started$")
        self.assertRegex(self.tried("turn", code=0), "1 of 1 exercise passed")

    def test_one_exercise_needs_what_is_written_of_those_before_it(self):
        self.start()
        self.solve(1, "return distance / self.size")
        self.assertIn("1 of 1 exercise passed, 3 of 3 points", self.tried("roll", code=0))
        self.solve(0, "return ring")
        self.assertRegex(self.tried("roll", code=1), r"(?m)^turn  failed [^$]*0 of 2 exercises passed, 0 of 5 points")

    def test_none_is_blamed_for_another(self):
        self.exercises[0]["tests"] = ["test_rings.TestRings"]  # needs both functions
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.solve(1, "return distance")
        text = self.tried(code=1)
        self.assertRegex(text, r"(?m)^turn  passed .*\nroll  failed ")
        self.assertIn("turn is right by itself, but with what else you changed in rings.py (exercises: roll) it", text)
        self.assertIn("1 of 2 exercises passed, 2 of 5 points", text)
        self.assertIn("but with what else you changed in rings.py", self.tried("turn", code=0))
        self.write("return ring[1:] + ring[:1]", "return ring")
        self.assertRegex(self.tried(code=1), r"(?m)^turn  failed [^$]*0 of 2 exercises")
        self.write("return ring\n", "return ring[1:] + ring[:1]\n")
        self.write("return distance", "return distance / self.size")
        self.write("self.size = size", "self.size = spokes")
        text = self.tried(code=0)
        self.assertIn("turn is right by itself, but with what else you changed in rings.py (exercises: roll) it", text)
        self.assertIn("roll is right by itself, but with what else you changed in rings.py (exercises: turn)", text)

    def test_what_call_each_other_in_a_circle_are_not_right(self):
        self.start()
        self.solve(
            0, "return [ring[int(Wheel(3, len(ring)).roll(at + 1) * len(ring)) % len(ring)] for at in range(len(ring))]"
        )
        self.solve(1, "return turn(list(range(99)))[int(distance / self.size) - 1]")
        text = self.tried(code=1)
        self.assertRegex(text, r"(?m)^turn  failed ")
        self.assertIn(
            "turn is right only with the course's own roll, and with yours not: they call each other in", text
        )
        self.assertRegex(self.tried("roll", code=1), r"(?m)^turn  failed ")
        self.write("turn(list(range(99)))[int(distance / self.size) - 1]", "distance / self.size")
        self.assertIn("2 of 2 exercises passed", self.tried(code=0))

    def test_what_does_not_parse_elsewhere_is_not_its_fault(self):
        gears = '"""Gears."""\n\n\ndef mesh(teeth):\n    """Mesh them."""\n    return teeth\n'
        self.put(f"{self.WHEELS}/code/gears.py", gears)
        self.put(f"{self.WHEELS}/tests/test_rings.py", RING_TESTS.replace("import rings", "import gears\nimport rings"))
        self.exercises[1]["function"] = "gears.mesh"
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.rings.with_name("gears.py").write_text("def mesh(:\n")
        self.assertRegex(self.tried(code=1), r"(?m)^turn  passed .*\nroll  broken$")

    def test_a_folder_that_is_read_only(self):
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        paths = [self.mine, *self.mine.rglob("*")]
        for path in reversed(paths):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            with tempfile.TemporaryDirectory() as holder:
                trial._copy(self.mine, Path(holder))
                modes = {path.stat().st_mode & 0o777 for path in Path(holder).rglob("*")}
            self.assertEqual(modes, {0o700, 0o600})
            self.assertIn("1 of 1 exercise passed", self.tried("turn", code=0))
        finally:
            for path in paths:
                path.chmod(0o755 if path.is_dir() else 0o644)

    def test_what_course_grade_does_not_take_is_named_and_does_not_help(self):
        self.start()
        self.write("self.size = size", "self.size = self.width = size")
        self.solve(0, "return rest(ring) + ring[:1]")
        self.rings.write_text(self.rings.read_text() + "\n\ndef rest(ring):\n    return ring[1:]\n")
        self.solve(1, "return distance / self.size")
        text = self.tried(code=0)
        self.assertIn("You changed more of the lesson's own code: rings.Wheel.__init__\nThat is not taken by", text)
        self.write("return distance / self.size", "return distance / self.width")
        text = self.tried(code=1)
        self.assertRegex(text, r"(?m)^turn  passed .*\nroll  failed ")
        self.assertIn("roll is right only with what else you changed: rings.Wheel.__init__\n", text)
        self.assertIn("has no attribute 'width'", text)
        self.assertEqual(json.loads(self.tried("--json", code=1))["left_out"], ["rings.Wheel.__init__"])

    def test_json(self):
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        result = json.loads(self.tried("--json", code=1))
        self.assertEqual((result["points"], result["of"], result["tests"]), (2, 5, "the course's"))
        self.assertEqual([row["status"] for row in result["exercises"]], ["passed", "not started"])
        self.assertEqual([row["id"] for row in result["exercises"]], ["turn", "roll"])

    def test_edited_tests_do_not_count(self):
        self.start()
        tests = self.mine / self.WHEELS / "tests" / "test_rings.py"
        tests.write_text("import unittest\nclass TestRings(unittest.TestCase):\n    def test_turn(self): pass\n")
        self.solve(0, "return ring")
        self.assertIn("turned to the left", self.tried("turn", code=1))

    def test_another_version_of_the_lesson_is_judged_by_the_folder_itself(self):
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.put(f"{self.WHEELS}/tests/test_rings.py", RING_TESTS.replace("[2, 3, 1]", "[3, 1, 2]"))
        self.assertIn("its own tests were used", self.tried("turn", code=0))

    def test_in_another_version_nothing_is_lent_and_that_is_said(self):
        self.exercises[0]["tests"] = ["test_rings.TestRings"]  # needs both functions
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        self.start()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.put(f"{self.WHEELS}/tests/test_rings.py", f"{RING_TESTS}\n")
        text = self.tried("turn", code=1)
        self.assertRegex(text, r"(?m)^turn  not judged ")
        self.assertIn("it needs roll, which is still to be written, and the course cannot lend it", text)
        self.assertIn("make a new folder with course start", text)

    def test_what_does_not_parse_or_is_missing(self):
        self.start()
        self.write("def turn(ring", "def turn((ring")
        self.assertIn("rings.py: line 4: not Python", self.tried(code=1))
        self.write("def turn((ring", "def spin(ring")
        self.assertIn("there is no function turn", self.tried(code=1))
        self.rings.unlink()
        self.assertIn("rings.py is missing", self.tried(code=1))

    def test_folders_and_links_in_place_of_modules(self):
        self.start()
        (self.rings.parent / "extra.py").mkdir()
        self.solve(0, "return ring[1:] + ring[:1]")
        self.assertIn("1 of 1 exercise passed", self.tried("turn", code=0))
        for make in (self.rings.mkdir, lambda: self.rings.symlink_to("/nowhere/at/all")):
            self.rings.unlink(missing_ok=True)
            make()
            self.assertIn(f"{self.rings.relative_to(self.work)} is missing", self.tried(code=1))
            self.rings.rmdir() if self.rings.is_dir() else self.rings.unlink()

    def test_nothing_is_left_in_the_folder(self):
        self.start()
        self.solve(0, "open('litter', 'w').close(); return ring")
        before = tree(self.mine)
        self.tried(code=1)
        self.assertEqual(tree(self.mine), before)

    def test_bad_commands(self):
        self.start()
        self.assertIn("no exercise 'spin'; the exercises are: turn, roll", self.tried("spin", code=2))
        self.assertIn("--deadline is 0", self.tried("--deadline", "0", code=2))
        self.assert_clear(self.course("try", "nowhere", folder=self.work), 2, "there is no folder nowhere")
        self.assert_clear(self.course("try", ".", folder=self.work), 2, "is not a folder that course start has made")
        for text, message in [
            ("{", ":1: no valid JSON"),
            ("[]", ':1: an object with "format": 1'),
            ('{"format": 1, "lesson": 7}', ":1: lesson is 7; a str is expected"),
            ('{"format": 1, "lesson": "x", "path": "../..", "version": "", "starter": true}', "no lesson in '../..'"),
        ]:
            (self.mine / ".course.json").write_text(text)
            self.assertIn(message, self.tried(code=2))


class TestModel(Learner):
    def test_exercises_and_bad_content(self):
        lesson = Course(self.root).find("1")
        turn, roll = load_exercises(lesson)
        self.assertEqual((turn.functions, turn.tests), (("rings.turn",), ("test_rings.TestRings.test_turn",)))
        self.assertEqual((roll.by_module, roll.depends_on), ({"rings": ["Wheel.roll"]}, ("turn",)))
        self.assertEqual(set(EXERCISE_KEYS) - set(vars(turn)), {"function"})
        self.replace(f"{self.WHEELS}/exercises.json", '"points": 2', '"points": "2"')
        with self.assertRaisesRegex(UserError, r"exercises.json:\d+: exercise 1: points is '2'"):
            load_exercises(lesson)


class TestProof(Learner):
    def proven(self, *args: str, code: int) -> str:
        result = self.course("check-exercises", "1", *args, folder=self.work)
        self.assert_clear(result, code, "")
        return result.stdout + result.stderr

    def test_good_exercises(self):
        text = self.proven(code=0)
        for name in ("(all) solution", "(all) starter", "turn stub", "roll stub"):
            self.assertRegex(text, rf"(?m)^01 {re.escape(name)} [\d.]+ s: ok$")
        self.assertIn("4 proofs, 0 faults", text)
        self.assertIn("3 proofs, 0 faults", self.proven("--missing", code=0))
        result = json.loads(self.proven("--only", "roll", "--json", code=0))
        self.assertEqual([(row["exercise"], row["claim"], row["fault"]) for row in result], [("roll", "stub", "")])

    def test_a_test_that_notices_nothing(self):
        self.exercises[1]["tests"] = ["test_wheel.TestWheel"]
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises)
        text = self.proven(code=1)
        self.assertIn("roll stub", text)
        self.assertIn("FAULT: the tests do not notice that it is missing: passed", text)
        self.assertIn("FAULT: nothing fails of roll (failed)", text)

    def test_a_solution_that_fails_and_a_hint_that_is_hidden(self):
        self.replace(f"{self.WHEELS}/code/rings.py", "return distance / self.size", "return turn([0])[0]")
        self.assertRegex(self.proven(code=1), r"solution [\d.]+ s: FAULT: failed: test_roll .*AssertionError: 0 != 4")
        told = "try: turned = rings.turn([1, 2, 3])\n        except NotImplementedError: turned = None\n        "
        silent = RING_TESTS.replace("self.assertEqual(rings.turn([1, 2, 3])", f"{told}self.assertEqual(turned")
        self.put(f"{self.WHEELS}/tests/test_rings.py", silent)
        self.put_json(f"{self.WHEELS}/exercises.json", self.exercises[:1])
        self.assertIn("FAULT: its hint is not shown", self.proven("--only", "turn", code=1))

    def test_bad_commands(self):
        self.assertIn("no exercise 'spin' in 01-wheels", self.proven("--only", "spin", code=2))
        self.assertIn("--jobs is 0", self.proven("--jobs", "0", code=2))


class TestTheRealLessons(unittest.TestCase):
    def test_every_starter(self):
        course = Course(ROOT)
        for lesson in course.lessons:
            with self.subTest(lesson.number), tempfile.TemporaryDirectory() as holder:
                files = starter_files(course, lesson)
                self.assertEqual(files, starter_files(course, lesson))
                whole = export_files(course, lesson)
                self.assertEqual(set(files) - set(whole), {"START.md"})
                exercises = load_exercises(lesson)
                stubs = {lesson.rel("code", f"{name}.py") for each in exercises for name in each.by_module}
                changed = {path for path in whole if whole[path] != files[path]}
                text = {lesson.rel("docs/en.md"), lesson.rel("quiz.json"), ".course.json"}
                self.assertEqual(changed, stubs | text)
                ids = {each.id for each in exercises}
                code = "".join(files[path].decode() for path in stubs)
                self.assertEqual({name for name in ids if f'"[{name}] ' in code}, ids)
                quiz = json.loads(files[lesson.rel("quiz.json")])
                self.assertFalse({key for question in quiz["questions"] for key in question} & set(KEYS))
                write_folder(Path(holder), files)
                written = {path.relative_to(holder).as_posix() for path in Path(holder).rglob("*") if path.is_file()}
                self.assertEqual(written, set(files))


def tree(folder: Path) -> dict[str, bytes]:
    """All files with their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    unittest.main()
