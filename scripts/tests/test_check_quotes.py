import unittest

from fake_course import RING_QUOTE, FakeCourse

from check_quotes import find_run, split_commands

DOCS = f"{FakeCourse.WHEELS}/docs/en.md"


class TestQuotes(FakeCourse):
    def quote(self, *lines: str) -> int:
        """Replace the quoted block; the line of its fence."""
        return self.docs(RING_QUOTE, "\n".join(("```python", *lines, "```")))

    def test_a_line_that_is_not_there(self):
        line = self.quote("# rings.py", "def turn(ring, steps=1, *, reverse=False):", '    """Turn the ring."""')
        self.assert_docs_fault(line + 3, "not verbatim in rings.py")

    def test_lines_that_are_not_consecutive(self):
        line = self.quote("# rings.py", "    shift = -steps if reverse else steps", "class Wheel:")
        self.assert_docs_fault(line + 3, "not verbatim in rings.py, or not in this order: 'class Wheel:'")

    def test_elided_parts_keep_their_order(self):
        line = self.quote("# rings.py: the wheel", "class Wheel:", "...", "def turn(ring, steps=1, *, reverse=False):")
        self.assert_docs_fault(line + 4, "not verbatim")

    def test_a_changed_indent_within_the_quote(self):
        line = self.quote("# rings.py", "def roll(self, distance):", "        return distance / self.size")
        self.assert_docs_fault(line + 3, "not verbatim")

    def test_good_quotes(self):
        line = self.quote(
            "# rings.py: a method may lose its indent", "def roll(self, distance):", '    """Roll on."""', "", "..."
        )
        self.assert_good()
        self.docs("# rings.py: a method may lose its indent", "# tests/test_wheel.py")
        self.assert_docs_fault(line + 2, "not verbatim in tests/test_wheel.py")

    def test_a_module_of_another_lesson_or_of_none(self):
        line = self.quote("# carts.py", "class Cart:")
        self.assert_good()
        self.docs("# carts.py\n", "# boats.py\n")
        self.assert_docs_fault(line + 1, "quotes boats.py, which does not exist")

    def test_a_quote_of_nothing(self):
        line = self.quote("# rings.py", "...")
        self.assert_docs_fault(line, "quotes nothing")

    def test_drift_in_the_code(self):
        line = self.text(DOCS).splitlines().index("def turn(ring, steps=1, *, reverse=False):") + 1
        self.replace(f"{self.WHEELS}/code/rings.py", "steps=1, *, reverse=False", "steps=2, *, reverse=False")
        self.assert_docs_fault(line, "not verbatim")


class TestFindRun(unittest.TestCase):
    def test_where_and_how_far(self):
        source = ["a", "  b", "    c", "d"]
        self.assertEqual(find_run(["b", "  c"], source, 0), (3, 2))
        self.assertEqual(find_run(["  b", "  c"], source, 0), (None, 1))
        self.assertEqual(find_run(["a"], source, 1), (None, 0))
        self.assertEqual(find_run(["d", "e"], source, 0), (None, 1))


class TestCommands(FakeCourse):
    def bad(self, command: str, message: str) -> None:
        """A command in a shell block, and the same in inline code."""
        with self.subTest(command):
            line = self.docs("Ship it.", f"```bash\necho\n{command}\n```\n\nor `{command}`")
            self.assert_docs_fault(line + 2, message)
            self.assert_docs_fault(line + 5, message)
            self.docs(f"```bash\necho\n{command}\n```\n\nor `{command}`", "Ship it.")

    def test_commands_that_could_not_run(self):
        self.bad("python code/mian.py", "there is no file code/mian.py")
        self.bad("python phases/01-basics/01-wheel/code/main.py", "there is no file phases/01-basics/01-wheel")
        self.bad("python code/main.py --fial", "main.py has no option --fial")
        self.bad("X=1 torchrun --nproc-per-node=2 code/mian.py", "there is no file code/mian.py")
        self.bad("python -m unittest discover -s phases/01-basics/03/tests", "there is no phases/01-basics/03/tests")
        self.bad("cd . && .venv/bin/python -m pytest phases/02-x", "there is no phases/02-x")
        self.bad(".venv\\Scripts\\python code\\mian.py", "there is no file code/mian.py")
        self.bad("course fly 01", "course has no command 'fly'; known are list, run, test, check, catalog")
        self.bad("course catalog --chekc", "course catalog has no option --chekc")

    def test_commands_that_could(self):
        for command in (
            "python3 code/main.py --fail --help",
            "python phases/01-basics/02-carts/code/main.py",
            "torchrun --nnodes=2 phases/01-basics/01-wheels/code/main.py --fail",
            "python -m unittest discover -s phases/01-basics/01-wheels/tests -v",
            "cd phases/01-basics && python 02-carts/code/main.py",
            "course run NN -- --anything",
            "course test 01 --deadline 10",
            "python phases/NN-phase/NN-lesson/code/main.py",
            "git clone x && ls code/mian.py",
        ):
            with self.subTest(command):
                self.docs("Ship it.", f"```bash\n{command}\n```")
                self.assert_good()
                self.docs(f"```bash\n{command}\n```", "Ship it.")

    def test_lines_that_go_on(self):
        line = self.docs("Ship it.", "```bash\npython code/main.py \\\n  --fial\n```")
        self.assert_docs_fault(line + 2, "no option --fial")

    def test_other_texts_too(self):
        line = self.replace("README.md", "# Rolling from scratch\n", "# Rolling\n\nSee `python code/main.py`.\n")
        self.assert_fault("README.md", line + 2, "there is no file code/main.py")

    def test_splitting(self):
        self.assertEqual(split_commands("$ A=1 a b && c # d"), [["a", "b"], ["c"]])
        self.assertEqual(split_commands("it's"), [["it's"]])
        self.assertEqual(split_commands("# nothing"), [])

    def test_file_names(self):
        line = self.docs("Ship it.", "Ship `hoops.py`, not `carts.py`.")
        self.assert_docs_fault(line, "there is no file called hoops.py")


class TestOutputs(FakeCourse):
    def test_an_output_without_its_command(self):
        line = self.docs("```bash\npython code/main.py\n```\n", "This is printed:\n")
        self.assert_docs_fault(line + 2, "an output block must follow the line that names its command")

    def test_an_output_after_inline_code_that_is_no_command(self):
        line = self.docs("```bash\npython code/main.py\n```\n", "This is `python`:\n")
        self.assert_docs_fault(line + 2, "an output block must follow")

    def test_a_word_in_the_place_of_an_output(self):
        there = "told: Wheel"
        for place in ("TABLE", "", "THE_TRACE"):
            line = self.docs(f"```text\n{there}\n```", f"```text\n{place}\n```")
            self.assert_docs_fault(line, "an output block is empty, or holds a word in its place")
            there = place

    def test_the_ways_to_name_it(self):
        self.docs("```bash\npython code/main.py\n```\n", "`python code/main.py` prints:\n")
        self.assert_good()
        self.docs("`python code/main.py` prints:\n\n```text\n", "So:\n\n```text\n$ python code/main.py\n")
        self.assert_good()
