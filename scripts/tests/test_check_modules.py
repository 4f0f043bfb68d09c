import unittest

from fake_course import IDIOM, FakeCourse

from check_modules import AS_PYTHON, machine_paths, source_faults

CODE = f"{FakeCourse.WHEELS}/code"


class TestModuleNames(FakeCourse):
    def test_two_of_a_name(self):
        self.put(f"{self.CARTS}/code/rings.py", '"""Rings again."""\n')
        self.assert_fault(f"{self.CARTS}/code/rings.py", 1, f"a module is called 'rings' already: {CODE}/rings.py")

    def test_a_test_named_like_another_lessons(self):
        self.put(f"{self.CARTS}/tests/test_wheel.py", self.text(f"{self.CARTS}/tests/test_cart.py"))
        self.assert_fault(f"{self.CARTS}/tests/test_wheel.py", 1, "a module is called 'test_wheel' already")

    def test_a_script_named_like_a_lessons_module(self):
        self.put("scripts/carts.py", '"""Carts."""\n')
        self.assert_fault("scripts/carts.py", 1, "a module is called 'carts' already")

    def test_names_of_the_standard_library_and_of_dependencies(self):
        for name in ("queue", "profile", "code", "torch"):
            with self.subTest(name):
                self.put(f"{CODE}/{name}.py", '"""No."""\n')
                self.assert_fault(f"{CODE}/{name}.py", 1, f"shadows the module {name!r}")


class TestSources(FakeCourse):
    def test_imports_of_main(self):
        line = self.replace(f"{CODE}/rings.py", '"""Rings."""\n', '"""Rings."""\nimport main\n')
        self.assert_fault(f"{CODE}/rings.py", line + 1, "imports main")
        line = self.replace(f"{self.WHEELS}/tests/test_wheel.py", "from rings", "from main import Wheel\nfrom rings")
        self.assert_fault(f"{self.WHEELS}/tests/test_wheel.py", line, "imports main")

    def test_sys_path_in_a_module_or_a_script(self):
        for name in (f"{CODE}/rings.py", "scripts/helper.py"):
            self.put(name, self.text(name) + f"import sys\nfrom pathlib import Path\n{IDIOM}")
            line = len(self.text(name).splitlines())
            self.assert_fault(name, line, "touches sys.path; only main.py and tests do")

    def test_another_idiom_in_main_or_a_test(self):
        for name in (f"{CODE}/main.py", f"{self.WHEELS}/tests/test_wheel.py"):
            line = self.replace(name, 'glob("*/*/code")', 'glob("*/*/src")')
            self.assert_fault(name, line, "in another way than the course's one line")

    def test_a_file_that_does_not_parse(self):
        self.put(f"{CODE}/rings.py", "x = 1\ndef\n")
        self.assert_fault(f"{CODE}/rings.py", 2, "does not parse")

    def test_ways_to_touch_it(self):
        for source in ("from sys import path", "import sys\nsys.path.insert(0, '.')", "import sys\nsys.path = []"):
            self.assertTrue(source_faults(source, "module"), source)
            self.assertTrue(source_faults(source, "main"), source)
        self.assertEqual(source_faults("import os\nos.path.join('a')\nx.sys.path", "module"), [])
        self.assertEqual(source_faults(IDIOM, "main"), [])
        self.assertEqual(source_faults(f"import sys\n{AS_PYTHON}", "script"), [])  # runs another script in its place
        self.assertTrue(source_faults(f"import sys\n{AS_PYTHON}", "module"))


class TestMachinePaths(FakeCourse):
    def test_where_they_are_found(self):
        self.put("scripts/helper.py", '"""Help."""\n\nWHERE = "/ho' + 'me/ada/course"\n')
        self.assert_fault("scripts/helper.py", 3, "a path of one machine: /ho" + "me/ada")
        self.put(".github/notes.txt", "see /Us" + "ers/ada")
        self.assert_fault(".github/notes.txt", 1, "a path of one machine")

    def test_pictures_and_ignored_files_are_left_alone(self):
        (self.root / "scripts" / "x.png").write_bytes(b"\xff\xfe/ho" + b"me/ada")
        self.put("scripts/outputs/log.txt", "/ro" + "ot/x")
        self.assert_good()


class TestMachinePathPattern(unittest.TestCase):
    def test_what_is_one(self):
        for path in (
            "/ho" + "me/ada/x",
            "/wo" + "rk/main",
            "/ro" + "ot/.cache",
            "C:" + "\\Users\\ada",
            "'/Us" + "ers/x'",
        ):
            self.assertEqual(len(machine_paths(path)), 1, path)

    def test_what_is_none(self):
        for text in ("phases/work/x", "https://example.org/home/x", "~/home/x", "/tmp/x", "/workers/x", "${X}/home/y"):
            self.assertEqual(machine_paths(text), [], text)
