import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
import torch.nn.functional as F
from comm import TorchComm
from gpt import Block, MiniGPT
from mesh_comm import MeshComm
from noise import Noise
from ranks import RankError, run_ranks
from tensor_parallel import ColumnLinear, RowLinear, is_split, split_block
from torch import nn
from virtual import VirtualCluster

DIM, HEADS, ROWS, SEQ = 8, 4, 3, 5


def setUpModule():
    torch.set_num_threads(1)


def whole_block(dropout=0.0, dtype=torch.float64) -> Block:
    """A block in which no parameter is zero and no two elements are alike."""
    block = Block(DIM, HEADS, dropout).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in block.parameters():
            param.copy_(torch.randn(param.shape, generator=generator).to(dtype) * 0.4)
    return block


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    x, g = torch.randn(2, ROWS, SEQ, DIM, generator=generator).to(dtype)
    return x.requires_grad_(), g


def alone(dtype=torch.float64):
    """(output, input gradient, {name: gradient}) of one rank that holds the whole block."""
    block, (x, g) = whole_block(dtype=dtype), inputs(dtype)
    y = block(x)
    (y * g).sum().backward()
    return y.detach(), x.grad, {name: param.grad for name, param in block.named_parameters()}


def together(comm, dtype=torch.float64):
    """The same of a rank that holds its slices; and the number of all-reduces after forward and after backward."""
    block = split_block(whole_block(dtype=dtype), comm.unchecked(), Noise(comm.rank, comm.device))
    x, g = inputs(dtype)
    y = block(x)
    forward = comm.counters.calls["all_reduce"], comm.counters.bytes["all_reduce"]
    (y * g).sum().backward()
    both = comm.counters.calls["all_reduce"], comm.counters.bytes["all_reduce"]
    return y.detach(), x.grad, {name: param.grad for name, param in block.named_parameters()}, forward, both


def in_a_process(rank, world_size):
    return together(TorchComm())


def expected_slice(name: str, whole: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """A rank's part of a whole gradient, cut here by hand."""
    if name.startswith("attention.qkv"):
        return torch.cat([part.chunk(n)[rank] for part in whole.chunk(3)])
    if name in ("mlp.0.weight", "mlp.0.bias"):
        return whole.chunk(n)[rank]
    if name in ("attention.out.weight", "mlp.2.weight"):
        return whole.chunk(n, dim=1)[rank]
    return whole


class TestBlock(unittest.TestCase):
    """Attention and MLP over N ranks are those of one rank: outputs, input gradients, every slice's gradient."""

    @classmethod
    def setUpClass(cls):
        cls.alone = alone()
        cls.found = {n: VirtualCluster(n).run(lambda mesh: together(MeshComm(mesh))) for n in (1, 2, 4)}

    def check(self, found, n):
        y, x_grad, grads = self.alone
        for rank, (its_y, its_x_grad, its_grads, _, _) in enumerate(found):
            torch.testing.assert_close(its_y, y, rtol=0, atol=1e-13)
            torch.testing.assert_close(its_x_grad, x_grad, rtol=0, atol=1e-13)
            self.assertEqual(its_grads.keys(), grads.keys())
            for name, grad in its_grads.items():
                expected = expected_slice(name, grads[name], rank, n)
                torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12, msg=f"{name}, rank {rank} of {n}")
                if n > 1:
                    self.assertEqual(is_split(name), grad.shape != grads[name].shape)

    def test_values_and_gradients_are_one_ranks(self):
        for n, found in self.found.items():
            self.check(found, n)

    def test_processes(self):
        self.check(run_ranks(in_a_process, 2, timeout=120), 2)

    def test_what_is_whole_has_the_same_bits_on_all_ranks(self):
        """All ranks see the same stream and the same gradient of it, so norms and row biases need no all-reduce."""
        for found in self.found.values():
            for y, x_grad, grads, _, _ in found[1:]:
                self.assertTrue(torch.equal(y, found[0][0]))
                self.assertTrue(torch.equal(x_grad, found[0][1]))
                for name in grads:
                    if not is_split(name):
                        self.assertTrue(torch.equal(grads[name], found[0][2][name]), name)

    def test_fp32_is_within_the_derived_bound(self):
        """A row layer's output is a sum of 4 DIM products; two orders of it differ by 2 (n - 1) eps sum|x|, at most."""
        torch.manual_seed(0)
        whole, x = nn.Linear(4 * DIM, DIM), torch.randn(ROWS, 4 * DIM)
        magnitude = F.linear(x.abs(), whole.weight.abs(), whole.bias.abs())
        bound = 2 * (4 * DIM) * torch.finfo(torch.float32).eps * magnitude
        for n in (2, 4):

            def run(mesh):
                return RowLinear(whole, MeshComm(mesh))(x.chunk(mesh.world_size, dim=-1)[mesh.rank]).detach()

            for y in VirtualCluster(n).run(run):
                self.assertTrue(bool(((y - whole(x)).abs() <= bound).all()))

    def test_one_all_reduce_each_way_for_attention_and_for_the_mlp(self):
        size = ROWS * SEQ * DIM * 8  # of an activation in float64
        for n, found in self.found.items():
            for *_, forward, both in found:
                self.assertEqual(forward, (2, 2 * size), n)
                self.assertEqual(both, (4, 4 * size), n)

    def test_each_rank_holds_its_share(self):
        whole = sum(p.numel() for p in whole_block().parameters())
        kept = 6 * DIM  # two norms and two row biases
        for n, found in self.found.items():
            for _, _, grads, _, _ in found:
                self.assertEqual(sum(g.numel() for g in grads.values()), (whole - kept) // n + kept)


class TestLayers(unittest.TestCase):
    def test_column_outputs_are_the_ranks_own(self):
        whole, x = nn.Linear(6, 12).double(), torch.randn(2, 6, dtype=torch.float64)
        for n in (2, 3, 4):
            found = VirtualCluster(n).run(lambda mesh: ColumnLinear(whole, MeshComm(mesh))(x).detach())
            torch.testing.assert_close(torch.cat(found, dim=-1), whole(x), rtol=0, atol=1e-14)

    def test_slices_are_copies(self):
        whole = nn.Linear(4, 4)
        before = whole.weight.clone()

        def change(mesh):
            for layer in (ColumnLinear(whole, MeshComm(mesh)), RowLinear(whole, MeshComm(mesh))):
                self.assertTrue(layer.weight.is_contiguous())
                layer.weight.data.add_(1)

        VirtualCluster(2).run(change)
        self.assertTrue(torch.equal(whole.weight, before))

    def test_the_gradient_that_arrives_is_not_changed(self):
        """Autograd may have handed the same tensor to another consumer (the residual stream does)."""
        layer = VirtualCluster(1).run(lambda mesh: ColumnLinear(nn.Linear(3, 3), MeshComm(mesh)))[0]
        x, g = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3)
        layer(x).backward(g)
        self.assertTrue(torch.equal(g, torch.ones(2, 3)))


class TestWholeModel(unittest.TestCase):
    def test_the_loss_of_a_model_whose_heads_are_shared(self):
        """The exercise: N = 2 and 4, loss and gradients of one rank."""
        tokens = torch.arange(32).view(2, 16)
        whole = MiniGPT().double()
        expected = whole.loss(tokens, tokens.flip(1))
        expected.backward()

        def run(mesh):
            model, comm = MiniGPT().double(), MeshComm(mesh)
            for block in model.blocks:
                split_block(block, comm, Noise(mesh.rank, comm.device))
            loss = model.loss(tokens, tokens.flip(1))
            loss.backward()
            return loss.item(), model.tokens.weight.grad, comm.counters.calls["all_reduce"]

        for n in (2, 4):
            for loss, grad, calls in VirtualCluster(n).run(run):
                self.assertAlmostEqual(loss, expected.item(), places=13)
                torch.testing.assert_close(grad, whole.tokens.weight.grad, rtol=0, atol=1e-14)
                self.assertEqual(calls, 2 * 4)  # 2 blocks: attention and MLP, forward and backward


class TestDropout(unittest.TestCase):
    def run_block(self, n, dropout, train=True):
        def run(mesh):
            block = split_block(whole_block(dropout), MeshComm(mesh), Noise(100 + mesh.rank, torch.device("cpu")))
            block.train(train)
            torch.manual_seed(5)  # the usual stream: equal on all ranks
            x, _ = inputs()
            with torch.no_grad():
                first, second = block(x), block(x)
            return first, second, torch.rand(1), block.attention.noise.state

        return VirtualCluster(n).run(run)

    def test_ranks_hold_the_same_stream_and_drop_other_weights_of_their_heads(self):
        first = self.run_block(2, 0.5)
        for a, b in zip(*first, strict=True):
            same = torch.equal(a, b)
            self.assertTrue(same if a is not first[0][3] else not same)
        self.assertFalse(torch.equal(first[0][0], first[0][1]))  # each pass has noise of its own

    def test_the_own_stream_leaves_the_usual_one_where_it_was(self):
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        noise = Noise(9, torch.device("cpu"))
        drawn = []
        for _ in range(2):
            with noise:
                drawn.append(torch.rand(2))
        self.assertTrue(torch.equal(torch.rand(3), expected))
        generator = torch.Generator().manual_seed(9)
        self.assertTrue(torch.equal(torch.cat(drawn), torch.cat([torch.rand(2, generator=generator) for _ in "ab"])))

    def test_no_noise_without_training_or_dropout(self):
        for dropout, train in ((0.5, False), (0.0, True)):
            for first, second, _, state in self.run_block(2, dropout, train):
                self.assertTrue(torch.equal(first, second))
                self.assertIn(True, [torch.equal(state, Noise(100 + r, torch.device("cpu")).state) for r in range(2)])


class TestRefusals(unittest.TestCase):
    def test_heads_that_cannot_be_shared(self):
        with self.assertRaisesRegex(RankError, "4 heads cannot be shared by 3 tensor parallel ranks"):
            VirtualCluster(3).run(lambda mesh: split_block(whole_block(), MeshComm(mesh), None))

    def test_hidden_units_that_cannot_be_shared(self):
        block = whole_block()
        block.mlp = nn.Sequential(nn.Linear(DIM, 6), nn.GELU(), nn.Linear(6, DIM))
        with self.assertRaisesRegex(RankError, "6 hidden cannot be shared by 4 tensor parallel ranks"):
            VirtualCluster(4).run(lambda mesh: split_block(block, MeshComm(mesh), None))


if __name__ == "__main__":
    unittest.main()
