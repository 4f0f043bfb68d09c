"""`Plan`: how a recipe is dealt to ranks, as plain data that is checked, printed, costed and run."""

from dataclasses import asdict, dataclass
from itertools import product

import torch
from grid import check_grid
from memory import STAGES, check_whole
from recipe import Recipe
from stages import layers_of
from tensor_parallel import check_divides

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """dp x pp x tp ranks; a ZeRO stage over dp (0: plain replicas); microbatches a step and replica.

    `dtype`: of parameters, activations and gradients. With bfloat16, masters and moments are fp32 (ZeRO keeps them),
    loss and norm are computed in fp32 and fp64; so it needs a stage of 1 or more.

    Raises ValueError for a size below 1, a stage or dtype that there is not, or bfloat16 without masters.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    microbatches: int = 1
    dtype: str = "float32"

    def __post_init__(self):
        check_grid(self.dp, self.pp, self.tp)
        check_whole("microbatches", self.microbatches, least=1)
        check_whole("zero", self.zero, least=0)
        if self.zero >= len(STAGES):
            raise ValueError(f"zero must be from 0 to {len(STAGES) - 1}, got {self.zero}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.dtype == "bfloat16" and self.zero == 0:
            raise ValueError("bfloat16 parameters need fp32 masters, which ZeRO keeps: zero must be 1, 2 or 3, got 0")

    def __str__(self) -> str:
        ways = f"dp{self.dp} pp{self.pp} tp{self.tp} zero{self.zero} m{self.microbatches}"
        return ways if self.dtype == "float32" else f"{ways} {self.dtype}"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.tp

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError unless the recipe's model can be cut so."""
        check_divides(self.tp, heads=recipe.heads, hidden=4 * recipe.dim)
        layers_of(recipe.blocks, 0, self.pp)

    def window(self, rows: int, recipe: Recipe) -> tuple[int, int]:
        """Return (microbatches, rows of each) of a replica in a step of so many rows: fewer in a partial window."""
        full = -(-recipe.rows // (self.dp * self.microbatches))
        count = -(-rows // (self.dp * full))
        return count, -(-rows // (self.dp * count))

    def places(self) -> list[dict[str, int]]:
        """Return every rank's place in the grid."""
        axes = [range(size) for size in (self.dp, self.pp, self.tp)]
        return [dict(zip(("dp", "pp", "tp"), place, strict=True)) for place in product(*axes)]

    def program(self, recipe: Recipe) -> list[dict]:
        """Return what each rank runs: its place, its layers, its heads, its rows of a full batch."""
        self.check(recipe)
        count, size = self.window(recipe.rows, recipe)
        heads, rows = recipe.heads // self.tp, count * size
        return [
            place
            | {
                "layers": layers_of(recipe.blocks, place["pp"], self.pp),
                "heads": [place["tp"] * heads, (place["tp"] + 1) * heads],
                "rows": [min(recipe.rows, (place["dp"] + i) * rows) for i in (0, 1)],
                "microbatches": count,
            }
            for place in self.places()
        ]

    def facts(self) -> dict:
        """Return all of it as JSON, for ranks to compare."""
        return asdict(self)


def parse_plan(text: str) -> Plan:
    """Return the plan of a text such as "dp2 pp2 tp1 zero1 m4"; what is left out is as in `Plan`.

    Raises ValueError for anything else.
    """
    names, values = {"dp": "dp", "pp": "pp", "tp": "tp", "zero": "zero", "m": "microbatches"}, {}
    for word in text.replace(",", " ").split():
        letters = word.rstrip("0123456789")
        name, value = ("dtype", word) if word in DTYPES else (names.get(letters), word[len(letters) :])
        if name is None or not value or name in values:
            raise ValueError(f"a plan is written like 'dp2 pp2 tp1 zero1 m4', got {text!r}")
        values[name] = value if name == "dtype" else int(value)
    if not values:
        raise ValueError(f"a plan is written like 'dp2 pp2 tp1 zero1 m4', got {text!r}")
    return Plan(**values)
