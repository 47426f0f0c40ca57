"""A client below the SDK, whose requests come in any order and as often as a test wants."""

from __future__ import annotations

from typing import Any, Self

import httpx
from plugins.vox_tinker.tests.conftest import KEY
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto


class Raw:
    """Requests of a training client."""

    def __init__(self, url: str, model_id: str) -> None:
        own = {"X-API-Key": KEY}
        self._http = httpx.Client(base_url=url + "/api/v1", headers=own, timeout=120)
        self.model_id = model_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, body: object) -> httpx.Response:
        return self._http.post(path, json=body)

    def numbered(self, seq_id: int, **body: object) -> dict[str, Any]:
        return {"model_id": self.model_id, "seq_id": seq_id, **body}

    def passed(self, seq_id: int, data: list[types.Datum]) -> httpx.Response:
        given = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(given, self.model_id, seq_id)
        content = forward_backward_request_to_proto(request).SerializeToString()
        kind = {"Content-Type": "application/x-protobuf"}
        return self._http.post("forward_backward", content=content, headers=kind)

    def stepped(self, seq_id: int, lr: float = 1e-2) -> httpx.Response:
        return self.post("optim_step", self.numbered(seq_id, adam_params={"learning_rate": lr}))

    def result(self, found: httpx.Response) -> httpx.Response:
        return self.post("retrieve_future", {"request_id": found.json()["request_id"]})
