"""The ranks of a run, over gloo: what they exchange, and the sum of their gradients.

`gather_sum` adds the gradients of every part of a step in the order of ranks: rank 0 sends its sum
to rank 1, which adds its own gradients to it one after the other, and so on; the total goes back
the same way. One process adds the same numbers in the same order, so the total is the same bit for
bit. It travels in pieces, so that all ranks send at once. A rank sends 2 (N - 1) / N times the
adapter's gradient, on average. A rank above 0 keeps its gradients apart until then: one copy of the
adapter's size for each part that it computes.

On one machine the ranks find one another through a file and talk over the loopback interface.
`MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them, name another place. No message is pickled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from vox_core.errors import unreachable

if TYPE_CHECKING:
    import torch

    from vox_core.contract import Doubles, World

RENDEZVOUS = "RENDEZVOUS_FILE"
"""Variable with the path of the file through which the ranks of one machine find one another."""
PIECE = 1 << 20
"""Numbers that a rank sends at once; the next rank adds to them while it sends the next."""
PATIENCE = timedelta(hours=2)
"""How long a rank waits for the others, whose steps and checkpoints take time. A launcher notices a
dead one long before."""


class Ranks:
    """The process group of a run's ranks.

    Attributes:
        settle: called before `share`, `gather_sum` and `close`, until all ranks call one of them.
    """

    def __init__(self, world: World) -> None:
        import torch.distributed as dist

        self.world, self._dist, self._left = world, dist, False
        self.settle: Callable[[], None] = lambda: None
        file = os.environ.get(RENDEZVOUS)
        with self._reached():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{file}" if file else "env://",
                rank=world.rank,
                world_size=world.size,
                timeout=PATIENCE,
            )

    def share(self, values_N: Doubles) -> Doubles:
        """Return the elementwise sum of the ranks' arrays."""
        import torch

        self.settle()
        summed = torch.from_numpy(values_N.copy())
        with self._reached():
            self._dist.all_reduce(summed)
        result: Doubles = summed.numpy()
        return result

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        import torch

        largest = torch.tensor(number)
        with self._reached():
            self._dist.all_reduce(largest, self._dist.ReduceOp.MAX)
        return int(largest)

    def gather_sum(self, total: torch.Tensor, kept: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' gradients, on the host, in the order of ranks.

        Args:
            total: flat, of rank 0; others receive into it.
            kept: flat gradients of a rank above 0, in the order in which they were computed.
        """
        self.settle()
        rank, last = self.world.rank, self.world.size - 1
        pieces = zip(*(flat.split(PIECE) for flat in (total, *kept)), strict=True)
        with self._reached():
            for piece, *own in pieces:
                if rank:
                    self._dist.recv(piece, rank - 1)
                for gradients in own:
                    piece.add_(gradients)
                if rank < last:
                    self._dist.send(piece, rank + 1)
            for piece in total.split(PIECE):
                if rank < last:
                    self._dist.recv(piece, rank + 1)
                if rank:
                    self._dist.send(piece, rank - 1)
        return total

    def close(self) -> None:
        if sys.exc_info()[0] is None:  # else the others learn of it from the closed connections
            self.settle()
        self._dist.destroy_process_group()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Convert the error of a collective within a model's own computation. After any error in
        it the others may wait in another collective, so later exchanges are refused."""
        try:
            yield
        except BaseException as error:
            self._left = True
            if isinstance(error, RuntimeError) and "gloo" in str(error):
                raise unreachable(self.world.rank, self.world.size, error) from error
            raise

    @contextmanager
    def _reached(self) -> Iterator[None]:
        rank, size = self.world.rank, self.world.size
        if self._left:
            left = RuntimeError("this process has left a computation that the others are in")
            raise unreachable(rank, size, left)
        try:
            yield
        except BaseException as error:
            self._left = True
            if isinstance(error, RuntimeError | ValueError | OSError):
                raise unreachable(rank, size, error) from error
            raise
