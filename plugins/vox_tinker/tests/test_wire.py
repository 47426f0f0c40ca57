"""Arrays of a datum, as bytes that the SDK would not send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from vox_tinker.futures import Refused
from vox_tinker.wire import read_pass


def read(shape: list[int], crow: list[int], col: list[int], values: list[float]) -> Any:
    """Send an array in the sparse form, which has no zeros."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend(shape)
    tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(col, "<i8").tobytes()
    tensor.sparse_csr.values = np.array(values, "<f4").tobytes()
    return read_pass(message.SerializeToString()).examples()[0].inputs["weights"]


def test_a_sparse_array() -> None:
    found = read([3, 2], [0, 1, 1, 3], [1, 0, 1], [1.0, 2.0, 3.0])
    assert found.tolist() == [[0.0, 1.0], [0.0, 0.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("col", "values"), [([0, 1], [5.0]), ([0, -1], [1.0, 2.0]), ([0, 2], [1.0, 2.0])]
)
def test_a_sparse_array_that_does_not_fit(col: list[int], values: list[float]) -> None:
    with pytest.raises(Refused, match="do not fill the shape"):
        read([2, 2], [0, 1, 2], col, values)


@pytest.mark.parametrize(
    ("shape", "crow"),
    [
        ([1 << 40, 2], [0, 0]),
        ([1, 1 << 40], [0, 0]),
        ([1, 2], [0, 1 << 40]),
        ([4, 2], [0, 1 << 62, -1 << 63, -1 << 62, 0]),  # the differences overflow
        ([2, 2], [0, 1, 0]),
        ([-1, 2], []),
        ([], [0]),
    ],
)
def test_a_few_bytes_take_no_memory(shape: list[int], crow: list[int]) -> None:
    with pytest.raises(Refused, match="do not fill the shape"):
        read(shape, crow, [], [])
