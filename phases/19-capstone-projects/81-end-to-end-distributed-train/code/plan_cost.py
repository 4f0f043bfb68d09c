"""What a plan costs, by formula: bytes each rank passes to collectives in a step, bytes on the wire, bytes held."""

from collections import Counter
from math import ceil

from plan import DTYPES, Plan
from recipe import Recipe
from stages import layers_of

# What N ranks together put on the wire for a payload of T bytes on each, divided by (N - 1) T: lesson 76's formulas.
ON_THE_WIRE = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}


def layer_sizes(plan: Plan, recipe: Recipe, stage: int) -> dict[str, int]:
    """Return the elements of each layer on a rank of a stage: a matrix's 1/tp; norms and row biases whole.

    A tied matrix that both ends of one stage use is an entry of its own, "tied".
    """
    d, v, tp = recipe.dim, recipe.vocab * recipe.dim, plan.tp
    sizes = {"embedding": v + recipe.seq * d, "head": 2 * d + v}
    layers = {
        name: sizes.get(name, (12 * d * d + 7 * d) // tp + 6 * d) for name in layers_of(recipe.blocks, stage, plan.pp)
    }
    if recipe.tied and plan.pp == 1:
        layers |= {"embedding": sizes["embedding"] - v, "head": sizes["head"] - v, "tied": v}
    return layers


def units_of(plan: Plan, recipe: Recipe, stage: int) -> dict[str, int]:
    """Return the elements of each flat unit, padded so that dp ranks have equal shards. From ZeRO-2 on, one a layer."""
    layers = layer_sizes(plan, recipe, stage)
    units = layers if plan.zero >= 2 else {"all": sum(layers.values())}
    shards = plan.dp if plan.zero else 1
    return {name: ceil(size / shards) * shards for name, size in units.items()}


def held(plan: Plan, recipe: Recipe, place: dict[str, int]) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on a rank between backward and update."""
    padded = sum(units_of(plan, recipe, place["pp"]).values())
    own, size = padded // (plan.dp if plan.zero else 1), DTYPES[plan.dtype].itemsize
    wide = max(4, size)  # masters and moments
    copies = 3 if size < wide and plan.zero in (1, 2) else 2  # a master of the parameters' own dtype is no copy
    return {
        "parameters": wide * own if plan.zero == 3 else size * padded,
        "gradients": size * (own if plan.zero >= 2 else padded),
        "optimizer": copies * wide * own,
    }


def payload(plan: Plan, recipe: Recipe, place: dict[str, int], rows: int, parameters: int) -> dict[str, int]:
    """Return the bytes a rank passes to each operation in a step of `rows` sequences, by "axis operation".

    `parameters`: the number of the whole model's parameter tensors, each of which has a place in the row of norms.
    """
    count, part = plan.window(rows, recipe)
    size, units = DTYPES[plan.dtype].itemsize, units_of(plan, recipe, place["pp"])
    activation = size * part * recipe.seq * recipe.dim
    blocks = sum(name.startswith("block") for name in layers_of(recipe.blocks, place["pp"], plan.pp))
    neighbours = (place["pp"] > 0) + (place["pp"] < plan.pp - 1)  # a gradient to the left, an activation to the right
    whole = size * sum(units.values())
    result = Counter({"world all_reduce": 8 * (1 + parameters), "pp broadcast": 8 * count})
    result["pp exchange"] = neighbours * count * activation
    if plan.tp > 1:
        result["tp all_reduce"] = 4 * blocks * count * activation  # attention and MLP, forward and backward
    if plan.zero == 0:
        result["dp all_reduce"] = whole
    else:
        result["dp reduce_scatter"] = whole
        result["dp all_reduce"] = 4 * (1 + plan.dp)  # skip the step? And a checksum a rank
    if plan.zero in (1, 2):
        result["dp all_gather"] = whole
    if plan.zero == 3:  # before forward and before backward; a tied matrix stays in between
        result["dp all_gather"] = size * count * sum(n * (1 if name == "tied" else 2) for name, n in units.items())
    return {name: n for name, n in result.items() if n}


def wire(plan: Plan, recipe: Recipe, rows: int, parameters: int) -> int:
    """Return the bytes that all ranks together put on the wire in a step."""
    payloads = [payload(plan, recipe, place, rows, parameters) for place in plan.places()]
    copies = 2 * DTYPES[plan.dtype].itemsize * recipe.vocab * recipe.dim  # of a tied matrix, on two stages
    tied = plan.dp * plan.tp * copies if recipe.tied and plan.pp > 1 else 0  # each sends its gradient once
    return together(plan, payloads) + tied


def together(plan: Plan, payloads: list[dict[str, int]]) -> int:
    """Return what all ranks put on the wire for the payloads of each, by "axis operation"."""
    sizes = {"dp": plan.dp, "pp": plan.pp, "tp": plan.tp, "world": plan.world_size}
    total, result = sum(map(Counter, payloads), Counter()), 0
    for name, size in total.items():
        axis, operation = name.split()
        ring = operation != "exchange"
        result += ON_THE_WIRE[operation] * size * (sizes[axis] - 1) // sizes[axis] if ring else size
    return result
