"""`MeshComm`: the interface of `Comm`, run by this lesson's own collectives over any `Mesh`."""

import collectives
import plain
from comm import Comm
from mesh import Mesh


class MeshComm(Comm):
    """`Comm` through lesson 76's own collectives, over any `Mesh`. Launched work is complete when the call returns."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh
        self.rank, self.world_size, self.device = mesh.rank, mesh.world_size, mesh.device

    def _all_reduce(self, x, op):
        work = plain.flat(x)
        collectives.ring_in_place(self.mesh, work, op)
        plain.fill(x, work)

    def _reduce_scatter(self, out, x, op):
        chunk = collectives.reduce_scatter(self.mesh, x.reshape(-1), op, check=False)
        out.detach().copy_(chunk.view(out.shape))

    def _all_gather(self, out, x):
        out.detach().copy_(collectives.allgather(self.mesh, x.reshape(-1), check=False).view(out.shape))

    def _broadcast(self, x, src):
        x.detach().copy_(collectives.broadcast(self.mesh, x, src, check=False))

    def _exchange(self, sends, recvs):
        for tensor, peer, tag in sends:
            self.mesh.send(peer, tensor, tag, lone=False)

        def finish():
            for tensor, peer, tag in recvs:
                got = self.mesh.recv(peer, tag)
                if (got.shape, got.dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError(plain.unexpected(self.rank, tensor, peer, tag, plain.kind(got)))
                tensor.detach().copy_(got)

        return finish

    def _agree(self, facts):
        return self.mesh.agree(facts)

    def split(self, color: int, key: int = 0) -> "MeshComm":
        """Return the communicator of the ranks that gave the same color, ordered by (key, rank). All ranks call it."""
        self.counters.control_calls += 1
        return MeshComm(self.mesh.split(color, key))
