"""A tiny base with two adapters, and the endpoints over it in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.cli.fixtures import _clean_place, vox

from vox_core.adapter.peft import write_adapter
from vox_core.api.generating import open_base
from vox_core.config import TrainSettings, validate
from vox_core.run.train import train
from vox_serve.adapters import Adapters
from vox_serve.app import Api, Limits
from vox_serve.engine import Engine
from vox_serve.served import select, served_models
from vox_serve.settings import ServeSettings
from vox_testing import jobs
from vox_testing.tiny import make_model

__all__ = ["_clean_place", "vox"]

SCALE = {"one": 0.1, "two": 0.3, "zero": 0.0, "three": 0.5}


@pytest.fixture(autouse=True)
def _unsupervised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command serves in this process."""
    monkeypatch.setattr("vox_serve.supervisor.is_needed", lambda: False)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and the adapters `one`, `two`, `three` and `zero`, whose B is zero."""
    place = tmp_path_factory.mktemp("serve")
    make_model("llama", place / "base")
    for rank, (name, scale) in enumerate(SCALE.items(), start=2):
        start = jobs.start(place / "base", jobs.plan(place / "base", rank=rank))
        state = jobs.stirred(start, scale).adapter if scale else start.adapter
        (place / name).mkdir()
        write_adapter(place / name, state, base=str(place / "base"), modules={})
    return place


@pytest.fixture(scope="session")
def trained(folders: Path) -> Path:
    """A run of a few steps on `base`, with its `probe.json`."""
    rows = folders / "rows.jsonl"
    made = [{"prompt": f"{n} + {n}?", "completion": str(2 * n)} for n in range(8)]
    rows.write_text("\n".join(map(json.dumps, made)))
    settings: dict[str, Any] = {
        "model": str(folders / "base"), "data": [rows], "out": folders / "run", "backend": "cpu",
        "dtype": "fp32", "max_steps": 3, "lr": 5e-3,
    }  # fmt: skip
    return train(validate(TrainSettings, settings)).run


class Opened:
    """Models in memory; `client(...)` gives a client of endpoints of its own over them."""

    def __init__(
        self, place: Path, stack: ExitStack, backend: str, names: Sequence[str] = ("one", "two")
    ) -> None:
        self.chosen = select([str(place / name) for name in names], [])
        self.models = served_models(self.chosen)
        found = self.chosen.models.items()
        adapters = {name: each.adapter for name, each in found if each.adapter}
        settings = validate(ServeSettings, {"backend": backend, "dtype": "fp32"})
        self.base = stack.enter_context(open_base(self.chosen.source, adapters, settings, rows=4))
        self._stack = stack

    def client(
        self,
        *,
        queue: int = 64,
        key: str | None = None,
        allowed: Path | None = None,
        **limits: int,
    ) -> TestClient:
        engine = self._stack.enter_context(closing(Engine(self.base.generator, queue)))
        found = Limits(limits.get("max_tokens", 64), limits.get("positions", 512))
        given = allowed and Adapters(allowed, self.chosen, self.models, self.base, engine)
        api = Api(engine, self.models, found, key, given.routes if given else ())
        client = TestClient(api.app, "http://127.0.0.1", raise_server_exceptions=False)
        client.engine = engine  # type: ignore[attr-defined]
        return client


@pytest.fixture(scope="session")
def opened_on(folders: Path) -> Iterator[Callable[..., Opened]]:
    """`opened_on(backend, names)` -> the models in memory, in float32."""
    with ExitStack() as stack:
        yield lambda backend, *names: Opened(folders, stack, backend, *names)


@pytest.fixture(scope="session")
def opened(opened_on: Callable[..., Opened]) -> Opened:
    """On the CPU."""
    return opened_on("cpu")


@pytest.fixture(scope="session")
def client(opened: Opened) -> TestClient:
    """Endpoints without a key."""
    return opened.client()


@pytest.fixture(scope="session")
def chat(client: TestClient) -> Callable[..., Any]:
    """`chat(text, model=..., ...)` -> the response of `/v1/chat/completions`; greedy."""

    def ask(text: str, model: str = "one", **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        return client.post("/v1/chat/completions", json=body)

    return ask
