import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import warnings

import torch
import torch.distributed as dist
from comm import TorchComm
from gpt import Block, MiniGPT
from ranks import run_ranks
from torch import nn
from zero_cases import optimizer_for

LR, STEPS, VOCAB = 1e-2, 4, 13


def model() -> nn.Module:
    """Return a GPT with two blocks, and an odd number of rows in some of its parameters."""
    return MiniGPT(vocab=VOCAB, dim=12, heads=2, blocks=2, seq=8)


def loss_of(call, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def whole(tensor) -> torch.Tensor:
    """Put the shards of a DTensor together."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def plain(rank: int, world_size: int, rows: dict) -> None:
    """Every rank computes all ranks' losses; the gradient is their mean."""
    module = model()
    optimizer, log = torch.optim.AdamW(module.parameters(), LR, weight_decay=0.1), []
    for step in range(STEPS):
        losses = [loss_of(module, step, each) for each in range(world_size)]
        (sum(losses) / world_size).backward()
        grads = {name: param.grad.clone() for name, param in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        log.append((losses[rank].item(), grads, {name: p.detach().clone() for name, p in module.named_parameters()}))
    rows["plain loop"] = log


def ours(rank: int, stage: int, rows: dict) -> None:
    module, log = model(), []
    optimizer = optimizer_for(module, TorchComm(), LR, stage=stage, weight_decay=0.1)
    for step in range(STEPS):
        loss = loss_of(module, step, rank)
        loss.backward()
        optimizer.reduce_gradients()
        grads = {}
        for unit, shard in zip(optimizer.units, optimizer.shards, strict=True):
            flat = torch.empty(unit.padded)
            TorchComm().all_gather(flat, shard.grad)
            grads |= {slot.name: flat[slot.start : slot.end].view(slot.param.shape).clone() for slot in unit.slots}
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered():
            log.append((loss.item(), grads, {name: p.detach().clone() for name, p in module.named_parameters()}))
    rows[f"stage {stage}"] = log


def fsdp2(rank: int, reshard: bool, rows: dict) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module, log = model(), []
    for part in [*module.blocks, module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(module.parameters(), LR, weight_decay=0.1)
    for step in range(STEPS):
        loss = loss_of(module, step, rank)
        loss.backward()
        grads = {name: whole(param.grad) for name, param in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), grads, {name: whole(param) for name, param in module.named_parameters()}))
    rows[f"FSDP2, reshard {reshard}"] = log


def fsdp1(rank: int, strategy: str, rows: dict) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module, log = model(), []
    call = FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(call.parameters(), LR, weight_decay=0.1)
    for step in range(STEPS):
        loss = loss_of(call, step, rank)
        loss.backward()
        with FullyShardedDataParallel.summon_full_params(call, with_grads=True, writeback=False):
            names = [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in call.named_parameters()]
            grads = {name: param.grad.clone() for name, param in names}
        optimizer.step()
        optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(call, writeback=False):
            names = [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in call.named_parameters()]
            log.append((loss.item(), grads, {name: param.detach().clone() for name, param in names}))
    rows[f"FSDP1, {strategy}"] = log


def compare(rank: int, world_size: int) -> dict:
    """Train with each on the same rows; return {row: [(loss, gradients, parameters) of each step]}."""
    rows: dict = {}
    plain(rank, world_size, rows)
    for stage in (1, 2, 3):
        ours(rank, stage, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        for reshard in (True, False):
            fsdp2(rank, reshard, rows)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            fsdp1(rank, strategy, rows)
    return rows


def same(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class TestBesideFSDP(unittest.TestCase):
    """Two ranks: a mean of two rounds once, in any order. So all nine rows can hold the same bits, and they do."""

    @classmethod
    def setUpClass(cls):
        cls.ranks = run_ranks(compare, 2, timeout=180)

    def test_losses_gradients_and_parameters_have_the_same_bits(self):
        for rank, rows in enumerate(self.ranks):
            self.assertEqual(len(rows), 1 + 3 + 2 + 3)
            for name, log in rows.items():
                for step, (loss, grads, params) in enumerate(log):
                    expected = rows["plain loop"][step]
                    with self.subTest(rank=rank, name=name, step=step):
                        self.assertEqual(loss, expected[0])
                        self.assertTrue(same(grads, expected[1]))
                        self.assertTrue(same(params, expected[2]))

    def test_the_runs_were_runs(self):
        one, two = (rows["stage 3"] for rows in self.ranks)
        self.assertNotEqual(one[0][0], two[0][0])  # each rank its own rows
        self.assertTrue(all(same(a[2], b[2]) for a, b in zip(one, two, strict=True)))
        self.assertFalse(same(one[0][2], one[1][2]))


if __name__ == "__main__":
    unittest.main()
