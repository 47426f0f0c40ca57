"""Bodies of the API to arrays and back, with the SDK's own messages.

Shape legend: N positions of a datum, K targets of a position, P tokens of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as pb

from vox_tinker.futures import Answer, Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tinker import types

    from vox_core.api.generating import Token
    from vox_core.contract import Floats, Ints

PROTO = "application/x-protobuf"
MOST_VALUES = 1 << 24
"""Of a sparse array; a dense one has no more in 64 MB, the largest body."""
_DTYPES: dict[Any, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_EMPTY = -99999.0
"""The SDK's mark for an entry of a top-k list that does not exist."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A datum: input tokens (N,), and by name the arrays of its loss, (N,) or (N, K)."""

    tokens_N: Ints
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A request for a forward pass, or also a backward one."""

    model_id: str
    seq_id: int
    message: Any
    forward_only: bool

    @property
    def loss_fn(self) -> str:
        return str(self.message.loss_fn)

    @property
    def config(self) -> dict[str, float | str]:
        """`loss_fn_config`; older clients send numbers alone."""
        found: dict[str, float | str] = dict(self.message.loss_fn_config)
        for key, value in self.message.loss_fn_config_v2.items():
            found[key] = value.text if value.WhichOneof("value") == "text" else value.number
        return found

    def examples(self) -> list[Example]:
        """Return the data.

        Raises:
            Refused: a datum cannot be read.
        """
        return [
            Example(
                _tokens(datum.model_input, f"data[{number}].model_input"),
                {
                    name: _array(tensor, f"data[{number}].loss_fn_inputs[{name!r}]")
                    for name, tensor in datum.loss_fn_inputs.items()
                },
            )
            for number, datum in enumerate(self.message.data)
        ]


def read_json(kind: type[M], body: bytes) -> M:
    """Parse a body as one of the SDK's types.

    Raises:
        Refused: 422, naming the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(f"{where}: {first['msg']} ({kind.__name__} of tinker 0.38)", 422) from error


def read_pass(body: bytes) -> Pass:
    """Parse the body of `forward_backward`.

    Raises:
        Refused: 422, it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused("the body is no ForwardBackwardRequest of tinker 0.38", 422) from error
    return Pass(message.model_id, message.seq_id, message, message.forward_only)


def prompt_tokens(prompt: types.ModelInput) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        Refused: a part of it is no text.
    """
    for number, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise Refused(f"prompt.chunks[{number}]: {chunk.type} is not supported; send tokens")
    return prompt.to_ints()


def _tokens(chunks: Sequence[Any], where: str) -> Ints:
    parts = [np.zeros(0, np.int64)]
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"{where}: {kind} is not supported; send tokens")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), where).astype(np.int64))
    return np.concatenate(parts)


def _array(tensor: Any, where: str) -> NDArray[Any]:
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise Refused(f"{where}: dtype {tensor.dtype} is not supported; send float32 or int64")
    try:
        if tensor.WhichOneof("encoding") != "sparse_csr":
            values = _numbers(tensor.dense, dtype, where)
            return values.reshape(shape or values.shape)
        sparse, index = tensor.sparse_csr, np.dtype("<i8")
        crow = _numbers(sparse.crow_indices, index, where)
        col = _numbers(sparse.col_indices, index, where)
        values = _numbers(sparse.values, dtype, where)
        fits = len(crow) == shape[0] + 1 and len(values) == len(col) == crow[-1]
        ascending = crow[0] == 0 and (crow[:-1] <= crow[1:]).all() and not (col < 0).any()
        if not (fits and ascending) or math.prod(shape) > MOST_VALUES:
            raise ValueError  # before numpy takes the memory
        rows = np.repeat(np.arange(shape[0]), np.diff(crow))
        found: NDArray[Any] = np.zeros(shape, dtype)
        found[rows, col] = values
    except (ValueError, IndexError) as error:
        raise Refused(f"{where}: the values do not fill the shape {list(shape)}") from error
    return found


def _numbers(content: bytes, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise Refused(f"{where}: {len(content)} bytes are no whole number of {dtype}")
    return np.frombuffer(content, dtype)


def pass_answer(log_probs: Sequence[Floats], metrics: Mapping[str, float]) -> Answer:
    """Answer a pass with the log-probabilities of each datum's targets, (N,) or (N, K)."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(num_datums=len(log_probs))
    tensor = record.fields["logprobs"]
    tensor.data = b"".join(each.astype("<f4").tobytes() for each in log_probs)
    tensor.offsets = np.cumsum([0, *(4 * each.size for each in log_probs)], dtype="<i8").tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.trailing_shape.extend(log_probs[0].shape[1:])
    return Answer(message.SerializeToString(), PROTO)


def sample_answer(
    sequences: Sequence[Sequence[Token]],
    prompt_log_probs_P: Floats | None,
    prompt_top: Sequence[Sequence[tuple[int, float]]] | None,
    top: int,
) -> Answer:
    """Answer a request for samples.

    Args:
        prompt_log_probs_P: float32, NaN where there is none.
        prompt_top: for each token of the prompt the most likely ones; empty where there are none.
        top: number of most likely tokens that were wanted for each sampled one.
    """
    message = pb.SampleResponse()
    for tokens in sequences:
        sequence = message.sequences.add()
        stopped = tokens[-1].finish == "stop"
        sequence.stop_reason = pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH
        sequence.tokens = np.array([token.id for token in tokens], "<i4").tobytes()
        sequence.logprobs = np.array([token.log_prob for token in tokens], "<f4").tobytes()
        if top:
            _write_top(sequence.topk_sampled_logprobs, [token.top for token in tokens])
    if prompt_log_probs_P is not None:
        message.prompt_logprobs = prompt_log_probs_P.astype("<f4").tobytes()
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, prompt_top)
    return Answer(message.SerializeToString(), PROTO)


def _write_top(message: Any, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
    count = max(map(len, rows))
    filled = [[*row, *[(0, _EMPTY)] * (count - len(row))] for row in rows]
    message.token_ids = np.array([[token for token, _ in row] for row in filled], "<i4").tobytes()
    message.logprobs = np.array([[each for _, each in row] for row in filled], "<f4").tobytes()
    message.k, message.length = count, len(rows)
