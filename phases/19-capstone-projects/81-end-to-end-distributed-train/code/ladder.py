"""The equivalence ladder: every way to deal a recipe to 1-8 ranks is run, and held against the golden run.

    python scripts/course.py ladder [--quick] [--json] [--only "dp2 pp2 zero1 m2"] [--dtype D] [--tied] [--steps N]

Each line is a plan; whether losses and gradients have the golden run's bits, or else how far the losses and norms are
off; the bytes that all ranks put on the wire in a step, predicted and counted; and the bytes that the fullest rank
holds, predicted and counted. The exit code is 1 if one of them is not what it must be.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product

import demo
import plan_cost
import torch
from comm import TorchComm
from golden import golden_run
from grid_train import train_on_grid
from mesh_comm import MeshComm
from plan import DTYPES, Plan, parse_plan
from ranks import run_ranks
from recipe import Recipe
from virtual import VirtualCluster

CHOSEN = tuple(  # each axis alone, each pair, all three; each stage; windows of one and of several microbatches
    map(
        parse_plan,
        "m1|m4|zero3 m2|dp2|dp3 zero1 m2|dp2 zero2|pp2 m4|pp4 zero3 m2|tp2|tp4 zero2|dp2 tp2 zero1|pp2 tp2 m2|"
        "dp2 pp2 zero3 m2|dp2 pp2 tp2 zero1 m2|dp3 zero1 bfloat16|"
        "pp2 zero2 m2 bfloat16".split("|"),
    )
)
AS_PROCESSES = tuple(map(parse_plan, ("dp2 zero3", "pp2 m4", "tp2", "dp2 pp2 tp2 zero1 m2")))
MOST_RANKS = 64  # of a plan
AMPLIFIED = 64  # later norms may be so many times further off than the first: see `bounds`
BF16 = 2.0**-8, 2.0**-6, 2.0**-3  # the same three bounds for bfloat16, whose eps is 2^-7: stated, not derived
BF16_TIED = 2.0**-5, 2.0**-6, math.inf


@dataclass
class Rung:
    """What came of one plan. `faults` is empty if all was as it must be."""

    plan: str
    where: str  # "virtual" ranks, or "processes"
    must_be_bitwise: bool
    bitwise: bool
    loss_off: float  # nats, at the worst step
    norm_off: float
    sent_predicted: int  # bytes on the wire in a full step, all ranks together
    sent: int
    held_predicted: int  # bytes, on the rank that holds most
    held: int
    seconds: float
    faults: list[str] = field(default_factory=list)


def all_plans(recipe: Recipe, most_ranks: int = 8, dtype: str = "float32") -> list[Plan]:
    """Return every combination that fits so many ranks and the recipe's model, with each ZeRO stage.

    Microbatches are 1 without a pipeline and 2 with one; and 4, where there is one rank or only a pipeline.
    """
    plans, stages = [], range(dtype == "bfloat16", 4)  # bfloat16 needs the masters that ZeRO keeps
    for tp, pp, dp, zero, microbatches in product(*[range(1, most_ranks + 1)] * 3, stages, (1, 2, 4)):
        plan = Plan(dp, pp, tp, zero, microbatches, dtype)
        wanted = {1, 4} if plan.world_size == 1 else {2, 4} if dp == tp == 1 and pp > 1 else {2} if pp > 1 else {1}
        if plan.world_size <= most_ranks and microbatches in wanted and fits(plan, recipe):
            plans.append(plan)
    return plans


def fits(plan: Plan, recipe: Recipe) -> bool:
    """Say whether the recipe's model can be cut so."""
    try:
        plan.check(recipe)
    except ValueError:
        return False
    return True


def check_comparable(plan: Plan, recipe: Recipe) -> None:
    """Raise ValueError unless the recipe can be dealt so, to not too many ranks, with a bound for what comes out."""
    plan.check(recipe)
    if plan.world_size > MOST_RANKS:
        raise ValueError(f"{plan} has {plan.world_size} ranks: the ladder runs at most {MOST_RANKS} on one machine")
    if plan.microbatches > recipe.rows:
        raise ValueError(f"{recipe.rows} sequences cannot be {plan.microbatches} microbatches")
    if plan.dtype == "bfloat16" and recipe.steps > Recipe.steps:
        raise ValueError(f"bfloat16 has bounds for {Recipe.steps} steps at most, got --steps {recipe.steps}")


@cache
def golden(recipe: Recipe, microbatches: int, dtype: str) -> list[dict]:
    """Return the golden run, computed once."""
    torch.set_num_threads(1)
    return golden_run(recipe, microbatches, DTYPES[dtype])


def is_bitwise(plan: Plan, recipe: Recipe) -> bool:
    """Say whether a plan does the golden run's arithmetic in the golden run's order.

    One replica whose matrices are whole does: each stage computes what one process does, microbatch after microbatch.
    (Not where a tied matrix has two copies, whose gradients are summed apart, or where dividing by the number of
    microbatches rounds.)
    """
    counts = {plan.window(rows, recipe)[0] for rows in (recipe.rows, recipe.last_rows)}
    exact = all(count & (count - 1) == 0 for count in counts)
    return plan.dp == plan.tp == 1 and exact and not (recipe.tied and plan.pp > 1)


def bounds(plan: Plan, recipe: Recipe) -> tuple[float, float, float]:
    """Return how far off may be, relatively: losses, the first step's gradient norms, later norms.

    Two orders of a sum over T tokens differ by at most 2 (T - 1) eps sum|x|: that is derived for the first step. That
    it holds for all losses shows that nothing grows. Later norms see parameters that Adam has moved by up to the
    learning rate where the true gradient is zero; how far that goes is stated here, not derived.
    """
    if plan.dtype == "bfloat16":
        return BF16_TIED if recipe.tied else BF16
    derived = 2 * recipe.rows * recipe.seq * torch.finfo(DTYPES[plan.dtype]).eps
    return derived, derived, AMPLIFIED * derived


def run_virtual(plan: Plan, recipe: Recipe) -> list[dict]:
    """Return each rank's log, from virtual ranks."""
    torch.set_num_threads(1)
    cluster = VirtualCluster(plan.world_size)
    return cluster.run(lambda mesh: train_on_grid(MeshComm(mesh), plan, recipe))


def run_processes(plan: Plan, recipe: Recipe) -> list[dict]:
    """Return each rank's log, from processes."""
    return run_ranks(_be_a_rank, plan.world_size, plan, recipe, timeout=300)


def _be_a_rank(rank: int, world_size: int, plan: Plan, recipe: Recipe) -> dict:
    return train_on_grid(TorchComm(), plan, recipe)


def compare(plan: Plan, recipe: Recipe, logs: list[dict], where: str = "virtual", seconds: float = 0.0) -> Rung:
    """Hold the logs of a plan's ranks against the golden run and the formulas."""
    expected, rows = golden(recipe, plan.microbatches, plan.dtype), logs[0]["rows"]
    pairs = list(zip(rows, expected, strict=True))
    off = {key: max(abs(row[key] - gold[key]) for row, gold in pairs) for key in ("loss", "norm")}
    same = all((row["loss"], row["squares"]) == (gold["loss"], gold["squares"]) for row, gold in pairs)
    faults = [] if same or not is_bitwise(plan, recipe) else ["not the golden run's bits"]
    faults += list(too_far(pairs, *bounds(plan, recipe)))
    if any([row[key] for row in log["rows"]] != [row[key] for row in rows] for log in logs for key in ("loss", "norm")):
        faults.append("ranks report different losses or norms")
    sent = sent_by_all(plan, recipe, logs, faults)
    formula = [plan_cost.held(plan, recipe, log["place"]) for log in logs]
    for log, each in zip(logs, formula, strict=True):
        faults += [
            f"{log['place']} holds {row['held']}, predicted {each}" for row in log["rows"] if row["held"] != each
        ]
    held = max(sum(log["rows"][0]["held"].values()) for log in logs)
    most = max(sum(each.values()) for each in formula)
    costs = *sent, most, held, seconds
    return Rung(str(plan), where, is_bitwise(plan, recipe), same, off["loss"], off["norm"], *costs, faults)


def too_far(pairs: list[tuple[dict, dict]], loss_bound: float, first_bound: float, norm_bound: float):
    """Yield what is further from the golden run than its bound."""
    for step, (row, gold) in enumerate(pairs, 1):
        if not abs(row["loss"] - gold["loss"]) <= loss_bound * gold["loss"]:
            yield f"step {step}: loss {row['loss']!r} instead of {gold['loss']!r}"
        if not abs(row["norm"] - gold["norm"]) <= norm_bound * max(gold["norm"], 1):
            yield f"step {step}: norm {row['norm']!r} instead of {gold['norm']!r}"
    row, gold = pairs[0]
    for number, (found, square) in enumerate(zip(row["squares"], gold["squares"], strict=True)):
        if not abs(found**0.5 - square**0.5) <= first_bound * max(gold["norm"], 1):
            yield f"step 1: gradient norm {found**0.5!r} of parameter {number} instead of {square**0.5!r}"


def sent_by_all(plan: Plan, recipe: Recipe, logs: list[dict], faults: list[str]) -> tuple[int, int]:
    """Return the bytes on the wire of a full step, predicted and counted; add to `faults` where any step differs.

    On virtual ranks the wire itself is counted. Of processes, what they pass to collectives.
    """
    parameters, results = len(logs[0]["rows"][0]["squares"]), []
    for step in range(1, recipe.steps + 1):
        sent = [dict(log["rows"][step - 1]["sent"]) for log in logs]
        on_wire = [each.pop("wire", None) for each in sent]
        formula = [plan_cost.payload(plan, recipe, log["place"], recipe.rows_of(step), parameters) for log in logs]
        for log, found, each in zip(logs, sent, formula, strict=True):
            if {name: n for name, n in found.items() if n} != each:
                faults.append(f"step {step}: {log['place']} sent {found}, predicted {each}")
        if None in on_wire:
            predicted, counted = plan_cost.together(plan, formula), plan_cost.together(plan, sent)
        else:
            predicted, counted = plan_cost.wire(plan, recipe, recipe.rows_of(step), parameters), sum(on_wire)
        if predicted != counted:
            faults.append(f"step {step}: {counted} bytes on the wire, predicted {predicted}")
        results.append((predicted, counted))
    return results[0]


def climb(plan: Plan, recipe: Recipe, processes: bool = False) -> Rung:
    """Run one plan and compare it."""
    began = time.perf_counter()
    logs = (run_processes if processes else run_virtual)(plan, recipe)
    return compare(plan, recipe, logs, "processes" if processes else "virtual", time.perf_counter() - began)


COLUMNS = ("plan", "where", "golden run", "norm off", "sent", "predicted", "held", "predicted", "time")
WIDTHS = "{:<31}  {:<9}  {:<14}  {:<8}  {:>9}  {:>9}  {:>7}  {:>9}  {:>6}"


def line(rung: Rung) -> str:
    """Return a plan's line, with its first fault below if it has one."""
    agreement = "bitwise" if rung.bitwise else f"off {rung.loss_off:.1e}"
    costs = [f"{n:,}" for n in (rung.sent, rung.sent_predicted, rung.held, rung.held_predicted)]
    text = WIDTHS.format(
        rung.plan, rung.where, agreement, f"{rung.norm_off:.1e}", *costs, f"{rung.seconds:.1f} s"
    ).rstrip()
    return text + "".join(f"\n  FAIL  {fault}" for fault in rung.faults[:1])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="course ladder", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="chosen plans, as in CI")
    parser.add_argument("--only", action="append", type=as_plan, metavar="PLAN", help='such as "dp2 pp2 zero1 m2"')
    parser.add_argument("--dtype", choices=DTYPES, help="of all plans; bfloat16 leaves out those without ZeRO")
    parser.add_argument("--processes", action="store_true", help="run the plans as processes, not as virtual ranks")
    parser.add_argument("--tied", action="store_true", help="the head's matrix is the token embedding")
    parser.add_argument("--steps", type=demo.positive, default=Recipe.steps, help="steps of the run (default: 30)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if args.quick and args.only:
        parser.error("--quick has chosen plans, --only your own: one of them")
    if args.dtype and args.only:
        parser.error("a plan says its dtype itself, as in --only 'dp2 zero1 bfloat16'")
    return args


def as_plan(text: str) -> Plan:
    """Parse a plan (a type for argparse)."""
    try:
        return parse_plan(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plans_of(args: argparse.Namespace, recipe: Recipe) -> list[tuple[Plan, bool]]:
    """Return what to run: plans, and whether as processes."""
    if args.only:
        return [(plan, args.processes) for plan in args.only]
    plans = CHOSEN if args.quick else all_plans(recipe, dtype=args.dtype or "float32")
    work = [(plan, args.processes) for plan in plans]
    work += [(plan, True) for plan in AS_PROCESSES if not args.processes]
    if args.dtype is None:
        return work
    return [(replace(plan, dtype=args.dtype), how) for plan, how in work if plan.zero or args.dtype != "bfloat16"]


def main(argv: list[str] | None = None) -> int:
    """Climb; return 1 if a plan is not what it must be, 2 if one cannot be run."""
    args = parse_arguments(argv)
    recipe = Recipe(tied=args.tied, steps=args.steps)
    work = plans_of(args, recipe)
    try:
        for plan, _ in work:
            check_comparable(plan, recipe)
    except ValueError as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    rungs = []
    if not args.json:
        print(
            f"{recipe.steps} steps of {recipe.rows} sequences; bytes sent a step by all ranks; bytes held by one rank"
        )
        print(WIDTHS.format(*COLUMNS))
    for plan, processes in work:
        rungs.append(climb(plan, recipe, processes))
        if not args.json:
            print(line(rungs[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(rung) for rung in rungs], indent=2))
    failed = [rung for rung in rungs if rung.faults]
    bitwise = sum(rung.bitwise for rung in rungs)
    print(f"{len(rungs)} plan{'s' * (len(rungs) != 1)} run: {bitwise} bitwise, {len(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
