"""Functions found, stubbed and grafted as text: by hand on small modules, and every function of every exercise."""

import sys
import unittest
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

from exercises.model import load_exercises
from exercises.surgery import GraftError, decode, find, graft, graft_all, is_stub, stub, stub_all
from lessons import Course

LESSON = dedent('''\
    """A lesson's module."""

    import os

    SCALE = 2


    def helper(x):
        return x * SCALE


    def work(
        x,  # (rows,)
        f=lambda y: y,
    ) -> "dict[str, int]":  # what comes out
        """Work.

        Over two lines."""
        # a comment in the body
        total = helper(x)
        return f(total)
        # a comment behind it

    # a comment of the module


    class Wheel:
        """A wheel."""

        SPOKES = 3

        @property
        def size(self):
            return self.SPOKES

        @size.setter
        def size(self, value):
            self.SPOKES = value

        @staticmethod
        def roll(x):
            return x

        class Inner:
            async def turn(self): return 1


    def after():
        return work(1)
    ''')


def run(text: str) -> dict:
    """The module's names."""
    names: dict = {"__name__": "module"}
    exec(compile(text, "module", "exec"), names)
    return names


class TestFind(unittest.TestCase):
    def lines(self, qualname, text=LESSON):
        span = find(text, qualname)
        self.assertEqual(text[span.start : span.end], "".join(text.splitlines(True)[span.first - 1 : span.last]))
        return text[span.start : span.end]

    def test_from_the_decorator_to_the_comment_at_the_end(self):
        self.assertTrue(self.lines("work").startswith("def work(\n"))
        self.assertTrue(self.lines("work").endswith("    # a comment behind it\n"))
        self.assertEqual(self.lines("Wheel.roll"), "    @staticmethod\n    def roll(x):\n        return x\n")

    def test_a_property_is_its_getter(self):
        self.assertEqual(self.lines("Wheel.size").splitlines()[-1].strip(), "return self.SPOKES")

    def test_async_in_a_nested_class_on_one_line(self):
        self.assertEqual(self.lines("Wheel.Inner.turn"), "        async def turn(self): return 1\n")

    def test_the_last_definition_counts(self):
        text = (
            "def f(): return 1\nif True:\n    def f():\n        return 2\nif __name__ == '__main__':\n    def f(): 3\n"
        )
        self.assertEqual(self.lines("f", text), "    def f():\n        return 2\n")

    def test_wide_characters_and_odd_separators_do_not_shift_it(self):
        text = 'x = "\u2028\x0c\x85 äöü"; y = 1\ndef f(a="ä"): return "ü"\nz = 1\n'
        span = find(text, "f")
        self.assertEqual(text[span.start : span.end], 'def f(a="ä"): return "ü"\n')

    def test_what_is_not_there(self):
        for qualname, text, expected in [
            ("nothing", LESSON, "no function nothing"),
            ("Wheel.nothing", LESSON, "no function Wheel.nothing"),
            ("Cart.roll", LESSON, "no class Cart"),
            ("SCALE", LESSON, "line 5: SCALE is no function"),
            ("f", "def f(): pass\nf = 3\n", "line 2: f is no function"),
            ("f", "def f(:\n", "line 1: not Python"),
            ("f", "x = 1\nif x:\n    def f(): 1\nelse:\n    def f(): 2\n", "line 2: f is defined in two branches"),
            ("f", "try:\n    def f(): 1\nexcept OSError:\n    def f(): 2\n", "line 1: f is defined in two branches"),
            ("f", "x = '\0'\n", "not Python"),
        ]:
            with self.subTest(qualname), self.assertRaisesRegex(GraftError, expected):
                find(text, qualname)


class TestStub(unittest.TestCase):
    def test_the_body_goes_and_all_else_stays(self):
        text = stub(LESSON, "work", 'Say "twice".')
        body = "    # a comment in the body\n    total = helper(x)\n    return f(total)\n    # a comment behind it\n"
        expected = '    raise NotImplementedError("Say \\"twice\\".")\n'
        self.assertEqual(text, LESSON.replace(body, expected))
        with self.assertRaisesRegex(NotImplementedError, '^Say "twice".$'):
            run(text)["after"]()

    def test_one_line_with_and_without_a_docstring(self):
        self.assertEqual(
            stub("def f(x): return x  # gone\ny = 1\n", "f", "h"),
            'def f(x):\n    raise NotImplementedError("h")\ny = 1\n',
        )
        self.assertEqual(
            stub('class A:\n  def f(x): "doc"; return x', "A.f", "h"),
            'class A:\n  def f(x):\n      "doc"\n      raise NotImplementedError("h")',
        )

    def test_colons_that_do_not_end_the_signature(self):
        text = (
            "def f(x: int = {1: 2}[1], *, g=lambda a: a) -> (lambda: 0):  # why: so\n    @x[1:2]\n    def h(): pass\n"
        )
        self.assertEqual(stub(text, "f", "h"), text.split("\n")[0] + '\n    raise NotImplementedError("h")\n')

    def test_a_long_hint_is_one_text(self):
        hint = "Words  and 'quotes' \"here\", a back\\slash, a tab\t, a line\nbreak, äöü; " * 9
        text = stub(LESSON, "Wheel.Inner.turn", hint)
        self.assertLess(max(map(len, text.splitlines())), 121)
        with self.assertRaises(NotImplementedError) as caught:
            run(text)["Wheel"].Inner().turn().send(None)
        self.assertEqual(str(caught.exception), hint)

    def test_windows_newlines_stay(self):
        text = stub("def f():\r\n    return 1\r\nx = 1\r\n", "f", "h")
        self.assertEqual(text, 'def f():\r\n    raise NotImplementedError("h")\r\nx = 1\r\n')

    def test_what_a_stub_is(self):
        for body, expected in [
            ("raise NotImplementedError", True),
            ('"""Doc."""\n    raise NotImplementedError("hint")\n    return 1', True),
            ("pass", False),
            ('"""Doc."""', False),
            ("x = 1\n    raise NotImplementedError", False),
            ("raise ValueError", False),
            ("if x: raise NotImplementedError", False),
        ]:
            self.assertEqual(is_stub(f"def f(x):\n    {body}\n", "f"), expected, body)


class TestGraft(unittest.TestCase):
    def grafted(self, submitted, qualname="work", pristine=LESSON):
        text = graft(pristine, dedent(submitted) if isinstance(submitted, str) else submitted, qualname)
        self.assertEqual(graft(text, submitted if isinstance(submitted, bytes) else dedent(submitted), qualname), text)
        return run(text)

    def test_only_the_function_comes(self):
        names = self.grafted("""\
            SCALE = 100
            def helper(x): return 0
            def work(x, f=None):
                return helper(x) + 1
            def after(): return "changed"
            """)
        self.assertEqual(names["after"](), 3)

    def test_new_names_come_along_transitively_and_unused_ones_do_not(self):
        names = self.grafted("""\
            import os, math
            import json as js
            from functools import reduce, partial
            unused = 1 / 0
            TABLE = {}
            TABLE["a"] = 10
            TABLE.update(b=20)
            FIRST, (SECOND, *REST) = 1, (2, 3)
            try:
                import nothing_of_the_kind
            except ImportError:
                nothing_of_the_kind = 7
            class Kept(dict):
                def both(self): return deep(TABLE)
            def work(x, f=None):
                return [Kept().both(), REST, nothing_of_the_kind, js.dumps(x), SCALE]
            def deep(table):
                return reduce(lambda a, b: a + b, table.values()) + math.floor(SECOND)
            if __name__ == "__main__":
                def deep(table): return 1 / 0
            """)
        self.assertEqual(names["after"](), [32, [3], 7, "1", 2])
        self.assertNotIn("unused", names)
        self.assertNotIn("partial", names)

    def test_a_helper_that_needs_a_later_class_of_the_lesson(self):
        names = self.grafted("""\
            def work(x): return Sub.SPOKES
            class Wheel: pass
            class Sub(Wheel): pass
            """)
        self.assertEqual(names["after"](), 3)

    def test_methods_and_attributes_of_the_class(self):
        names = self.grafted(
            """\
            class Wheel:
                TYRES = 5
                unused = 1 / 0
                SPOKES = 1000

                @staticmethod
                def roll(x, t=TYRES):
                    return Wheel._more(x) + t

                @classmethod
                def _more(cls, x):
                    text = '''
            not indented
                as it is'''
                    return cls.SPOKES + x + len(text)

                def _less(self): pass
            """,
            "Wheel.roll",
        )
        self.assertEqual(names["Wheel"].roll(1), 3 + 1 + 26 + 5)
        self.assertFalse(hasattr(names["Wheel"], "unused") or hasattr(names["Wheel"], "_less"))

    def test_a_statement_that_also_defines_what_the_lesson_has(self):
        names = self.grafted("SCALE, MINE = 100, 5\ndef work(x, f=None): return helper(x) + MINE\n")
        self.assertEqual((names["after"](), names["SCALE"]), (7, 2))

    def test_future_and_star_imports_and_submodules(self):
        names = self.grafted("""\
            '''Mine.'''
            from __future__ import annotations
            import os.path
            from math import *
            def work(x: Unknown, f=None): return floor(pi) + len(os.path.sep)
            """)
        self.assertEqual(names["after"](), 4)
        self.assertEqual(names["__doc__"], "A lesson's module.")

    def test_no_star_import_without_need(self):
        text = graft(LESSON, "from math import *\ndef work(x):\n    y = helper(x)\n    return y\n", "work")
        self.assertNotIn("import *", text)

    def test_tabs_newlines_bom_and_encoding(self):
        lines = ["class Wheel:", "\tdef roll(x):", "\t\tif x:", "\t\t\treturn '''ä", "\tb'''", "\t\treturn 0", ""]
        for name, data in [
            ("tabs", "\n".join(lines).encode()),
            ("crlf", "\r\n".join(lines).encode()),
            ("cr", "\r".join(lines).encode()),
            ("bom", b"\xef\xbb\xbf" + "\n".join(lines).encode()),
            ("cookie", "\n".join(["# -*- coding: latin-1 -*-", *lines]).encode("latin-1")),
        ]:
            with self.subTest(name):
                self.assertEqual(self.grafted(data, "Wheel.roll")["Wheel"].roll(1), "ä\n\tb")
                self.assertEqual(self.grafted(data, "Wheel.roll")["Wheel"].roll(0), 0)
        self.assertEqual(self.grafted("\ufeffdef work(x): return 5\r\n")["after"](), 5)

    def test_the_end_of_a_file_without_a_newline(self):
        self.assertEqual(self.grafted("def work(x, f=None):\n    return 5")["after"](), 5)

    def test_what_cannot_be_grafted(self):
        for data, expected in [
            (b"\n\ndef work(x)\n    return 1\n", "line 3: not Python: expected ':'"),
            (b"def work(x):\n    return '\xff'\n", "line 2: byte .* is not utf-8"),
            (b"# coding: nonsense\ndef work(x): pass\n", "line 1: no Python source: unknown encoding"),
            ("def work(x): pass\n".encode("utf-16"), "line 1: no Python source: .*; save the file as UTF-8"),
            (b"\ndef work(x): return '\0'\n", "line 2: not Python: it holds a NUL"),
            (b"work = 1\n", "line 1: work is no function"),
            (b"", "no function work"),
            (b"def work(x):\n\treturn 1\n        return 2\n", "line 3: not Python"),
            (b"def work(x): return " + b"(" * 5000 + b")" * 5000, "not Python"),
        ]:
            with self.subTest(data[:30]), self.assertRaisesRegex(GraftError, expected):
                graft(LESSON, data, "work")

    def test_decode(self):
        self.assertEqual(decode(b"\xef\xbb\xbfa\r\nb\rc\n"), "a\nb\nc\n")


class TestEveryExercise(unittest.TestCase):
    def test_stub_and_graft_of_each_function(self):
        course = Course(ROOT)
        for lesson in course.lessons:
            for exercise in load_exercises(lesson):
                for module, names in exercise.by_module.items():
                    with self.subTest(lesson=lesson.number, exercise=exercise.id, module=module):
                        text = (lesson.folder / "code" / f"{module}.py").read_text(encoding="utf-8")
                        self.round_trip(text, {name: exercise.hint for name in names})

    def round_trip(self, text, hints):
        starter = stub_all(text, hints)
        self.assertEqual(stub_all(text, hints), starter)
        self.assertEqual(stub_all(starter, hints), starter)
        compile(starter, "starter", "exec")
        for name in hints:
            self.assertFalse(is_stub(text, name), name)
            self.assertTrue(is_stub(starter, name), name)
        self.assertEqual(graft_all(text, text, list(hints)), text)
        self.assertEqual(graft_all(starter, text, list(hints)), text)
        self.assertEqual(graft_all(text, starter, list(hints)), starter)
        windows = text.replace("\n", "\r\n").encode("utf-8-sig")
        self.assertEqual(graft_all(starter, windows, list(hints)), text)


if __name__ == "__main__":
    unittest.main()
