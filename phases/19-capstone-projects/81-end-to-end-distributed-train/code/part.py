"""`Part`: one rank's part of a plan: its layers, its slices of them, its optimizer, and its share of every sum."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from determinism import noise_seed
from grid import AXES, Grid
from noise import Noise
from pipeline import Pipeline
from plan import DTYPES, Plan
from recipe import IGNORED, Recipe, deal
from replicas import ReplicatedAdam
from schedule import make_schedule
from stages import layers_of, take_layers
from tensor_parallel import is_split, split_block
from tied import TiedWeight
from zero import ZeroOptimizer


OWN = 1_000_000  # streams of noise from here on are of one rank alone


class _Row:
    """A pipeline's ranks, for whom `split` is a split of the whole grid."""

    def __init__(self, grid: Grid):
        self.rank, self.agree, self.split = grid.pp.rank, grid.pp.agree, lambda color: grid.split_row("pp", color)


class Part:
    """What a rank holds and runs. All ranks of the grid make one.

    The whole model is built first, from the seed, and each rank keeps its layers and slices: so all plans begin with
    the same numbers. (A model too large for one rank would draw each layer from a seed of its own.)
    """

    def __init__(self, grid: Grid, plan: Plan, recipe: Recipe):
        self.grid, self.plan, self.recipe, place = grid, plan, recipe, grid.place
        whole, device = recipe.build(), grid.world.device
        self.names = [name for name, _ in take_layers(whole, layers_of(recipe.blocks)).named_parameters()]
        self.own_noise = Noise(0, device)
        self.seed_noise(0)
        self.stage = take_layers(whole, layers_of(recipe.blocks, place["pp"], plan.pp))
        if plan.tp > 1:
            for name, layer in self.stage.named_children():
                if name.startswith("block"):
                    split_block(layer, grid.tp.unchecked(), self.own_noise)
        self.stage.to(device, DTYPES[plan.dtype])
        self.tied = self._tie() if recipe.tied and plan.pp > 1 else None
        self.optimizer = self._make_optimizer()
        self.pipelines: dict[tuple[int, int], Pipeline] = {}
        self.divisor = 1.0

    def seed_noise(self, step: int) -> None:
        """Begin this rank's noise as a function of the seed, the steps done, and the rank: two streams."""
        place, seed = self.grid.place, self.recipe.seed
        torch.manual_seed(noise_seed(seed, step, place["dp"] * self.plan.pp + place["pp"]))  # the same along tp
        self.own_noise.restart(noise_seed(seed, step, OWN + self.grid.rank))

    def _tie(self) -> TiedWeight:
        """Join the embedding of the first stage and the head of the last (lesson 79)."""
        copies = {"embedding.tokens.weight", "head.head.weight"}
        held = [param for name, param in self.stage.named_parameters() if name in copies]
        return TiedWeight(held[0] if held else None, _Row(self.grid))

    def _make_optimizer(self):
        if self.plan.zero == 0:
            return ReplicatedAdam(self.stage, self.grid.place["pp"], self.recipe.lr, self.grid.dp)
        comm = self.grid.dp
        return ZeroOptimizer(
            self.stage, comm.world_size, comm.rank, self.recipe.lr, stage=self.plan.zero, comm=comm, fused=False
        )

    def pipeline(self, microbatches: int, rows: int) -> Pipeline:
        """Return the pipeline (of one stage, where pp is 1) for so many microbatches of so many rows."""
        key = microbatches, rows
        if key not in self.pipelines:
            activation = (rows, self.recipe.seq, self.recipe.dim)
            self.pipelines[key] = Pipeline(
                self.stage,
                make_schedule("1f1b", self.plan.pp, microbatches),
                self._loss,
                [(rows, self.recipe.seq)] + [activation] * (self.plan.pp - 1),
                DTYPES[self.plan.dtype],
                self.grid.pp,
                tied=self.tied,
                on_gradients=self.optimizer.launch if self.plan.zero == 0 else None,
            )
        return self.pipelines[key]

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a microbatch's sum over its tokens, divided so that the mean over all microbatches is the loss."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / self.divisor

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Add the gradients of a step's mean loss over all tokens, (rows, seq) each; return this rank's share of it.

        What the mean is divided by is known before the first backward: the number of targets of the whole batch.
        """
        count, _ = self.plan.window(len(tokens), self.recipe)
        self.divisor = (targets != IGNORED).sum().item() / (count * self.plan.dp)
        device = self.grid.world.device
        mine = deal(tokens.to(device), targets.to(device), self.plan.dp, self.grid.place["dp"], count)
        alone = count == 1 and self.tied is None  # one backward a step: gradients may leave while it runs
        with nullcontext() if alone else self.optimizer.no_sync():
            losses = self.pipeline(count, len(mine[0][0])).step(*mine)
        self.optimizer.reduce_gradients()
        counts = self.grid.place["pp"] == self.grid.place["tp"] == 0  # the others have the same losses
        return losses.sum().item() / (count * self.plan.dp) if counts else 0.0

    def totals(self, loss_share: float) -> tuple[float, list[float]]:
        """Return the loss, and the squared gradient norm of every parameter of the whole model. One all-reduce.

        Each element of a gradient is counted by one rank: what is cut, by its holder; what several ranks hold alike, by
        the first of them. Every parameter has a place of its own in the row, and the others add zeros there, which
        changes no bit.
        """
        row = torch.zeros(1 + len(self.names), dtype=torch.float64)
        row[0] = loss_share
        for name, gradient in self.gradients():
            if name in self.names and (is_split(name) or self.grid.place["tp"] == 0):
                row[1 + self.names.index(name)] += gradient.double().square().sum().cpu()
        row = row.to(self.grid.world.device)
        self.grid.world.unchecked().all_reduce(row)
        loss, *squares = row.tolist()
        return loss, squares

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return (parameter's name, elements) of all mean gradients that this rank answers for along dp."""
        if self.plan.zero == 0:
            whole = [(unit.slots, unit.grad, 0) for unit in self.optimizer.units]
            pieces = whole if self.grid.place["dp"] == 0 else []
        else:
            pieces = [(shard.unit.slots, shard.grad, shard.start) for shard in self.optimizer.shards]
        found = []
        for slots, flat, begin in pieces:
            for slot in slots:
                start, end = max(slot.start, begin), min(slot.end, begin + len(flat))
                if start < end:
                    found.append((slot.name, flat[start - begin : end - begin]))
        return found

    def scale_gradients(self, factor: float) -> None:
        """Multiply all mean gradients that this rank will step with."""
        if self.plan.zero == 0:
            flats = [unit.grad for unit in self.optimizer.units]
        else:
            flats = [shard.grad for shard in self.optimizer.shards]
        for flat in flats:
            flat.mul_(factor)

    def memory(self) -> dict[str, int]:
        """Return the bytes held by live tensors: of parameters, gradients and optimizer state."""
        held = self.optimizer.memory()
        return held if self.plan.zero == 0 else {kind: live for kind, (_, live) in held.items()}

    def sent(self) -> dict[str, int]:
        """Return the payload bytes so far, by "axis operation"; on a mesh also "wire": bytes that left this rank."""
        groups = {axis: getattr(self.grid, axis) for axis in (*AXES, "world")}
        payload = {
            f"{axis} {name}": size for axis, comm in groups.items() for name, size in comm.counters.bytes.items()
        }
        mesh = getattr(self.grid.world, "mesh", None)
        return payload if mesh is None else payload | {"wire": mesh.counters.bytes_sent}
