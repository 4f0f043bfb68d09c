"""What the tests of the ladder share: two short recipes, and each plan's run, made once."""

from dataclasses import replace
from functools import lru_cache

from ladder import run_virtual
from plan import parse_plan
from recipe import Recipe

SHORT = Recipe(steps=4, warmup=2)  # the last step's window is a partial one
TIED = replace(SHORT, tied=True)


@lru_cache
def run(text: str, recipe: Recipe = SHORT):
    """A plan's logs, run once."""
    return run_virtual(parse_plan(text), recipe)
