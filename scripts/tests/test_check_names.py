import ast
import unittest

from fake_course import FakeCourse

from signatures import Signature, bind, compare, of_fields, of_function

DOCS = f"{FakeCourse.WHEELS}/docs/en.md"


def signature(source: str, method: bool = False) -> Signature:
    return of_function(ast.parse(f"def {source}: ...").body[0], method)


def problem(source: str, call: str, mention: bool = False, method: bool = False) -> str | None:
    return bind(signature(source, method), ast.parse(call, mode="eval").body, mention)


class TestSignatures(unittest.TestCase):
    def test_calls_that_bind(self):
        for source, call in [
            ("f(a, b=1)", "f(1)"),
            ("f(a, b=1)", "f(b=2, a=1)"),
            ("f(a, /, *rest, k, **more)", "f(1, 2, 3, k=4, z=5)"),
            ("f(a, b, c)", "f(x, ...)"),
            ("f(a, b, c)", "f(*args)"),
            ("f(a, b, c)", "f(1, **options)"),
        ]:
            self.assertIsNone(problem(source, call), (source, call))

    def test_calls_that_do_not(self):
        for source, call, message in [
            ("f(a)", "f(1, 2)", "2 positional arguments, at most 1"),
            ("f(a, b)", "f(1)", "b is missing"),
            ("f(a, *, k)", "f()", "a, k are missing"),
            ("f(a, *, k)", "f(1, 2)", "at most 1"),
            ("f(a)", "f(b=1)", "there is no parameter 'b'"),
            ("f(a, /)", "f(a=1)", "there is no parameter 'a'"),
            ("f(a, b=1)", "f(1, a=2)", "'a' is passed twice"),
            ("f(a, b)", "f(1, 2, 3, ...)", "3 positional"),
            ("f(a, b)", "f(*args, c=1)", "there is no parameter 'c'"),
        ]:
            self.assertIn(message, problem(source, call) or "", (source, call))

    def test_self_is_not_passed(self):
        self.assertIsNone(problem("f(self, a)", "f(1)", method=True))
        self.assertIn("at most 1", problem("f(self, a)", "f(1, 2)", method=True))
        static = ast.parse("@staticmethod\ndef f(a): ...").body[0]
        self.assertEqual(of_function(static, method=True).positional, ("a",))

    def test_a_mention_may_leave_everything_out(self):
        self.assertIsNone(problem("f(a)", "f()", mention=True))
        self.assertIsNone(problem("f(a, b=1)", "f(b=2)", mention=True))
        self.assertIn("missing", problem("f(a, b)", "f(1)", mention=True))

    def test_fields(self):
        source = """
class A:
    a: int
    b: ClassVar[int] = 1
    c: list = field(init=False)
    d: list = field(default_factory=list)
    _: KW_ONLY
    e: int
"""
        found = of_fields(ast.parse(source).body)
        self.assertEqual((found.positional, found.only_keyword, set(found.required)), (("a", "d"), ("e",), {"a", "e"}))

    def test_shown_signatures(self):
        real = signature("f(a, b, *, k=1)")
        shown = [ast.parse(f"def f({text}): ...").body[0] for text in ("a, b, *, k", "a", "b, a", "a, c")]
        self.assertEqual([compare(real, item) is None for item in shown], [True, True, False, False])


class TestInlineNames(FakeCourse):
    def bad(self, code: str, message: str) -> None:
        """One inline code must give one fault at its line."""
        good = self.text(DOCS)
        line = self.docs("Ship it.", f"Ship `{code}`.")
        with self.subTest(code):
            self.assert_docs_fault(line, message)
            self.assertEqual(len(self.faults()), 1)
        self.put(DOCS, good)

    def good(self, code: str) -> None:
        """One inline code must give no fault."""
        good = self.text(DOCS)
        self.docs("Ship it.", f"Ship `{code}`.")
        with self.subTest(code):
            self.assert_good()
        self.put(DOCS, good)

    def test_functions_that_do_not_exist(self):
        for code in ("flatten_params(model)", "rings.flatten", "rings.flatten(x)", "rings.Wheel.fly", "Wheel.fly(1)"):
            self.bad(code, f"{code.split('(')[0]}: there is no such name")
        self.bad("PipelineStage(rank, layers)", "PipelineStage: there is no such name")
        self.bad("carts.Cart.fly", "no such name")

    def test_calls_that_do_not_bind(self):
        self.bad("turn(ring, rank, steps)", "turn(...) does not fit its definition: 3 positional")
        self.bad("turn(ring, backwards=True)", "there is no parameter 'backwards'")
        self.bad("Wheel.roll(1) + Cart.move(1)", "wheel is missing")
        self.bad("Wheel.roll(1, 2)", "at most 1")
        self.bad("Cart(1, 2.0, 3)", "at most 2")
        self.bad("turn(Wheel(), spokes=1)", "there is no parameter 'spokes'")
        self.bad("roll(1, 2)", "roll(...) does not fit")
        self.bad("turn(ring, 1, 2) -> ring", "3 positional")

    def test_signatures_shown(self):
        self.bad("turn(ring, *, backwards)", "shown otherwise than it is written: there is no parameter 'backwards'")
        self.bad("def turn(steps, ring)", "in another order")
        self.bad("def unroll(ring, *, steps)", "unroll: there is no such name")
        self.good("turn(ring, steps: int = 1, *, reverse) -> list")
        self.good("def turn(ring, steps=1)")

    def test_what_is_true_or_none_of_our_business(self):
        for code in (
            "turn()",
            "rings.turn",
            "rings.turn(steps=1)",
            "Wheel.__doc__",
            "rings.Wheel.roll(3)",
            "Wheel.size",
            "turn(ring, ...)",
            "turn(ring, *steps)",
            "Cart(4, load=2.0)",
            "Cart.move(1, wheel)",
            "roll(3)",
            "ceil(P / N) + log2(N)",
            "2(N-1)/N",
            "T(N)",
            "fsync(fd)",
            "torch.nn.Linear(2, 2)",
            "loss.backward()",
            "wheel.anything(1)",
            "rings.json",
            "a/b(c)",
            "ring[shift:]",
            "wheel(distance)",  # a parameter's name: a callback
            "open(path)",
        ):
            self.good(code)

    def test_a_variable_called_like_a_module(self):
        # Everyone calls a communicator `comm`, and comm.py is the module that defines its class.
        use = "        rings = []\n        rings.sort()\n        return distance"
        self.replace(f"{self.WHEELS}/code/rings.py", "        return distance", use)
        self.good("rings.roll(1)")
        self.good("rings.sort()")
        self.bad("rings.roll(1, 2)", "at most 1")
        self.bad("rings.reverse()", "rings.reverse: there is no such name")

    def test_inherited_members(self):
        self.replace(f"{self.CARTS}/code/carts.py", "@dataclass\n", "class Big(Wheel):\n    pass\n\n\n@dataclass\n")
        self.good("Big.roll(1)")
        self.good("Big(3)")
        self.bad("Big(3, 4, 5)", "at most 2")
        self.bad("Big.fly", "no such name")

    def test_a_class_with_a_base_from_elsewhere(self):
        net = "class Net(torch.nn.Module):\n    def grow(self, by):\n        self.zero_grad()\n"
        text = f"import torch\n\n\n{net}\n\n@dataclass\n"
        self.replace(f"{self.CARTS}/code/carts.py", "@dataclass\n", text)
        self.good("Net.zero_grad")
        self.good("Net(1, 2)")
        self.bad("Net.shrink", "no such name")
        self.bad("Net.grow(1, 2)", "at most 1")


class TestPythonBlocks(FakeCourse):
    def block(self, *lines: str) -> int:
        """Put a python block under Ship It; the line of its fence."""
        text = "\n".join(("Ship it:", "", "```python", *lines, "```"))
        before, _, rest = self.text(DOCS).partition("## Ship It\n\n")
        after = rest[rest.index("\n\n## Exercises") :]
        self.put(DOCS, f"{before}## Ship It\n\n{text}{after}")
        return (before + "## Ship It\n\n").count("\n") + 3

    def test_calls(self):
        line = self.block("from rings import Wheel, turn", "", "turn([1], 2, 3)")
        self.assert_docs_fault(line + 3, "turn(...) does not fit its definition")
        line = self.block("from rings import turn", "turn()")
        self.assert_docs_fault(line + 2, "ring is missing")
        line = self.block("x = flatten(3)")
        self.assert_docs_fault(line + 1, "flatten: there is no such name")

    def test_methods_of_what_a_block_makes(self):
        line = self.block("wheel = Wheel(3)", "wheel.roll(1)", "wheel.roll(1, 2)", "wheel.fly()")
        self.assert_docs_fault(line + 3, "wheel.roll(...) does not fit its definition")
        self.assert_docs_fault(line + 4, "wheel.fly: there is no such name")
        self.assertEqual(len(self.faults()), 2)

    def test_imports(self):
        line = self.block("from rings import Wheel, Tyre")
        self.assert_docs_fault(line + 1, "imports 'Tyre', which rings.py does not define")
        line = self.block("import hoops")
        self.assert_docs_fault(line + 1, "imports 'hoops', which is no module of the course")
        self.block("from main import Wheel", "import os", "import torch.nn as nn", "import rings as r", "r.turn([])")
        self.assert_good()
        line = self.block("from rings import turn as twist", "twist([1], 1, 2)")
        self.assert_docs_fault(line + 2, "twist(...) does not fit")

    def test_other_projects_may_be_imported_where_they_are_compared(self):
        self.docs("from torch import nn\n", "from torch import nn\nimport deepspeed\n\ndeepspeed.initialize(model=1)\n")
        self.assert_good()

    def test_names_of_the_block_come_first(self):
        self.block("def turn(a, b, c, d): ...", "turn(1, 2, 3, 4)", "for fly in []:", "    fly(1)")
        self.assert_good()
        self.block("from torch import turn", "turn(1, 2, 3, 4)")
        self.assert_good()

    def test_a_block_that_is_no_python(self):
        line = self.block("turn ring")
        self.assert_docs_fault(line, "does not parse")
