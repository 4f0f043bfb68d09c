"""The smallest distributed program: two ranks, one send, one receive."""

import torch
from ranks import run_ranks
from torch_mesh import TorchMesh


def hello(rank: int, world_size: int) -> str:
    """Run on each of two ranks: rank 0 sends three numbers, rank 1 receives them."""
    mesh = TorchMesh()
    if rank == 0:
        mesh.send(1, torch.tensor([1.0, 2.0, 3.0]))
        return "rank 0 has sent"
    return f"rank 1 has received {mesh.recv(0).tolist()}"


if __name__ == "__main__":
    print(*run_ranks(hello, 2), sep="\n")
