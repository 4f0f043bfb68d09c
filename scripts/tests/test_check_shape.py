import json
import shutil
import subprocess
import unittest

from fake_course import FakeCourse

MAIN = f"{FakeCourse.WHEELS}/code/main.py"
EXERCISES = f"{FakeCourse.WHEELS}/exercises.json"


class TestTopLevel(FakeCourse):
    def test_something_that_does_not_belong(self):
        self.put("notes.md", "x\n")
        self.assert_fault("notes.md", 1, "does not belong on the top level")
        self.put("tools/x.py", '"""X."""\n')
        self.assert_fault("tools", 1, "does not belong on the top level")

    def test_something_that_is_missing(self):
        for name in ("LICENSE", "README.md", "pyproject.toml", "catalog.json"):
            (self.root / name).unlink()
            self.assert_fault(name, 1, "missing")

    @unittest.skipUnless(shutil.which("git"), "git is not installed")
    def test_git_says_which_files_count(self):
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        self.put(".gitignore", "*.log\nbuild-*/\n")
        self.put("run.log", "x\n")
        self.put("build-1/x.txt", "x\n")
        self.assert_good()
        self.put("run.txt", "x\n")  # not committed yet, but not ignored either
        self.assert_fault("run.txt", 1, "does not belong on the top level")

    def test_editors_find_every_lesson(self):
        self.replace("pyproject.toml", f'"{self.CARTS}/code"', "")
        self.assert_fault("pyproject.toml", 1, f'"{self.CARTS}/code" is missing')

    def test_dot_files_and_ignored_folders_are_fine(self):
        self.put(".editorconfig", "x\n")
        self.put("outputs/plot.txt", "x\n")
        self.assert_good()


class TestLessonShape(FakeCourse):
    def test_each_part_is_needed(self):
        for name in ("docs/en.md", "code/main.py", "quiz.json"):
            with self.subTest(name):
                path = self.root / self.WHEELS / name
                text = path.read_text()
                path.write_text("\n")
                self.assert_fault(f"{self.WHEELS}/{name}", 1, "missing or empty")
                path.unlink()
                self.assert_fault(f"{self.WHEELS}/{name}", 1, "missing or empty")
                path.write_text(text)

    def test_tests_are_needed(self):
        test = f"{self.WHEELS}/tests/test_wheel.py"
        self.put(test, "def test_x(): pass\n")
        self.assert_fault(test, 1, "holds no unittest.TestCase with a test method")
        self.put(test, "import unittest\nclass TestX(unittest.TestCase):\n    def check(self): pass\n")
        self.assert_fault(test, 1, "holds no unittest.TestCase with a test method")
        (self.root / test).unlink()
        self.assert_fault(f"{self.WHEELS}/tests", 1, "there is no tests/test_*.py")

    def test_a_lesson_folder_that_would_never_be_found(self):
        self.put("phases/01-basics/3-Carts/docs/en.md", "# X\n")
        self.assert_fault("phases/01-basics/3-Carts", 1, "is not in a lesson folder")
        self.put("phases/notes.md", "x\n")
        self.assert_fault("phases/notes.md", 1, "is not in a lesson folder")

    def test_a_phase_folder_without_a_number(self):
        (self.root / "phases/01-basics").rename(self.root / "phases/basics")
        self.assert_fault("phases/basics", 1, "a phase folder is called NN-name")

    def test_no_lesson_at_all(self):
        for path in (self.root / "phases").rglob("*"):
            if path.is_file():
                path.unlink()
        for path in sorted((self.root / "phases").rglob("*"), reverse=True):
            path.rmdir()
        self.assert_fault("phases", 1, "there is no lesson")


class TestPublicNames(FakeCourse):
    def test_all_must_be_a_literal_list(self):
        good = self.text(MAIN)
        for text in ("names()", '("Wheel",)', "[1]", "[]", '["Wheel"] + []', '["Wheel", "Wh" + "eel"]'):
            with self.subTest(text):
                line = self.replace(MAIN, '["Wheel"]', text)
                self.assert_fault(MAIN, line, "__all__ must be a literal list")
                self.put(MAIN, good)
        self.replace(MAIN, "__all__", "names")
        self.assert_fault(MAIN, 1, "__all__ must be a literal list")

    def test_its_names_must_be_there_once(self):
        line = self.replace(MAIN, '["Wheel"]', '["Wheel", "main", "Tyre", "Wheel"]')
        self.assert_fault(MAIN, line, "__all__ names 'Tyre', which main.py neither defines nor imports")
        self.assert_fault(MAIN, line, "__all__ names 'Wheel' twice")


class TestExercises(FakeCourse):
    def change(self, number: int, **changes: object) -> None:
        """Change keys of one exercise; None removes the key."""
        value = json.loads(self.text(EXERCISES))
        for key, new in changes.items():
            value[number].pop(key) if new is None else value[number].update({key: new})
        self.put_json(EXERCISES, value)

    def line(self, number: int, key: str) -> int:
        """The line of a key of an exercise."""
        hits = [i for i, text in enumerate(self.text(EXERCISES).splitlines(), 1) if text.strip().startswith(f'"{key}"')]
        return hits[number]

    def test_each_fault(self):
        for number, key, value, message in [
            (1, "function", "rings.twist", "no function 'rings.twist'"),
            (1, "function", ["rings.turn", "carts.Cart.move"], "no function 'carts.Cart.move'"),
            (1, "function", "rings.Wheel", "no function 'rings.Wheel'"),
            (1, "function", [], "function must be a name or a list of names"),
            (0, "tests", "test_wheel.TestWheel.test_other", "no test 'test_wheel.TestWheel.test_other'"),
            (0, "tests", 3, "tests must be a name or a list of names"),
            (0, "points", True, "points is True"),
            (0, "points", 0, "points is 0"),
            (0, "points", 1.5, "points is 1.5"),
            (0, "kind", "guess", "unknown kind 'guess'"),
            (0, "hint", "", "hint is ''"),
            (0, "id", 3, "id is 3"),
            (1, "id", "turn", "the id 'turn' is taken"),
            (0, "depends_on", ["roll"], "'roll' is the id of no earlier exercise"),
            (0, "depends_on", "roll", "depends_on must be a list of ids"),
            (0, "solution", "x", "unknown key 'solution'"),
        ]:
            with self.subTest(key=key, value=value):
                good = self.text(EXERCISES)
                self.change(number, **{key: value})
                self.assert_fault(EXERCISES, self.line(number if key != "solution" else 0, key), message)
                self.put(EXERCISES, good)

    def test_a_test_may_come_from_a_base_in_its_file(self):
        folder = f"{self.WHEELS}/tests/test_wheel.py"
        classes = "class Turns:\n    def test_turn(self): pass\n\n\nclass TestTurns(Turns, unittest.TestCase): pass\n"
        self.put(folder, f"{self.text(folder)}\n\n{classes}")
        self.change(0, tests=["test_wheel.TestWheel.test_name", "test_wheel.TestTurns.test_turn"])
        self.assertEqual(self.faults(), [])
        self.change(0, tests="test_wheel.TestTurns.test_name")
        self.assert_fault(EXERCISES, self.line(0, "tests"), "no test 'test_wheel.TestTurns.test_name'")

    def test_missing_keys_and_other_shapes(self):
        self.change(1, hint=None)
        self.assertTrue([fault for fault in self.faults() if "exercise 2: the key 'hint' is missing" in fault])
        self.put(EXERCISES, "{}")
        self.assert_fault(EXERCISES, 1, "a list of exercises is expected")
        self.put(EXERCISES, "[\n3]")
        self.assert_fault(EXERCISES, 2, "an exercise must be an object")
        self.put(EXERCISES, "[\n")
        self.assert_fault(EXERCISES, 2, "no valid JSON")

    def test_a_lesson_may_have_none(self):
        (self.root / EXERCISES).unlink()
        (self.root / self.WHEELS / "mutants.json").unlink()
        self.replace("catalog.json", '"exercises": 2', '"exercises": 0')
        self.assert_good()
