"""The ranks of a run, over MLX's ring: what they exchange, and the sum of their gradients.

`gather_sum` adds gradients in the order of ranks, as one process does: rank 0 sends its sum to rank
1, which adds its own gradients one after the other, and so on; the total goes on around the ring.
So N ranks send 2 (N - 1) gradients, and the total is the same bit for bit. A rank above 0 keeps its
gradients apart until then.

MLX takes the addresses of the ring from the file in `MLX_HOSTFILE`, and the rank from `MLX_RANK`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from vox_core.contract import Doubles, World
from vox_core.errors import unreachable
from vox_mlx.optimizer import Values

RENDEZVOUS = "RENDEZVOUS_FILE"
"""Variable with a path; each rank that has started makes a file with its number appended."""


class Ring:
    """A run's ranks, each with two neighbours."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._await_others()
        with self._reached():
            group = mx.distributed.init(strict=True, backend="ring")
            if (group.rank(), group.size()) != (world.rank, world.size):
                raise RuntimeError(f"MLX_RANK and MLX_HOSTFILE: {group.rank()} of {group.size()}")

    def share(self, values_N: Doubles) -> Doubles:
        """Return the elementwise sum of arrays whose elements are 0 on all ranks but one."""
        words_2N = mx.array(values_N.view(np.uint32))  # MLX's GPUs have no float64
        with self._reached():
            summed_2N = np.array(mx.distributed.all_sum(words_2N, stream=mx.cpu))
        found: Doubles = summed_2N.view(np.float64)
        return found

    def gather_sum(self, sums: Values, kept: Sequence[Values], like: Values) -> Values:
        """Return the sum of all ranks' gradients, in the order of ranks.

        Args:
            sums: of rank 0; empty if there are none.
            kept: gradients of a rank above 0, in the order in which they were computed.
            like: arrays of the same names and shapes.
        """
        rank, size = self.world.rank, self.world.size
        total_N, last = _flat(sums, like), size - 1
        with self._reached():
            if rank:
                total_N = self._received(total_N, rank - 1)
            for gradients in kept:
                total_N = _flat(gradients, like) + total_N
            if rank < last:
                self._send(total_N, rank + 1)
                total_N = self._received(total_N, (rank - 1) % size)
            if rank != last - 1:
                self._send(total_N, (rank + 1) % size)
        bounds = np.cumsum([value.size for value in like.values()])[:-1].tolist()
        parts = zip(like.items(), mx.split(total_N, bounds), strict=True)
        return {name: part.reshape(value.shape) for (name, value), part in parts}

    def _send(self, array: mx.array, rank: int) -> None:
        mx.eval(mx.distributed.send(array, rank, stream=mx.cpu))

    def _received(self, like: mx.array, rank: int) -> mx.array:
        array = mx.distributed.recv_like(like, rank, stream=mx.cpu)
        mx.eval(array)
        return array

    def _await_others(self) -> None:
        """Wait until all ranks have started: `init` would wait with the interpreter locked, and
        this rank would seem to hang."""
        if file := os.environ.get(RENDEZVOUS):
            Path(f"{file}-{self.world.rank}").touch()
            while not all(Path(f"{file}-{rank}").exists() for rank in range(self.world.size)):
                time.sleep(0.05)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise unreachable(self.world.rank, self.world.size, error) from error


def _flat(gradients: Values, like: Values) -> mx.array:
    """Return gradients in one piece; zeros for those that are not there."""
    parts = [gradients[n] if n in gradients else mx.zeros_like(v) for n, v in like.items()]
    flat_N = mx.concatenate([part.reshape(-1) for part in parts])
    mx.eval(flat_N)
    return flat_N
