"""A model that says a given text, under the chat template of a family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from starlette.testclient import TestClient
from tests.golden.families import tokenizer

from vox_core.api.generating import Generator
from vox_core.contract import RowByRow
from vox_serve.app import Api, Limits
from vox_serve.engine import Engine
from vox_serve.served import Served


class Scripted(RowByRow):
    """Each answer is `script`, then the end of the turn; a grammar may forbid both.

    Attributes:
        script: tokens.
    """

    def __init__(self, vocabulary: int, end: int, closing: list[int]) -> None:
        self.vocabulary, self.end, self.closing = vocabulary, end, closing
        self.script: list[int] = []
        self._prompts: dict[int, int] = {}

    def insert(self, row, tokens_T, adapter=None) -> None:
        self._prompts[row] = len(tokens_T)
        super().insert(row, tokens_T, adapter)

    def advance(self, tokens):
        found = super().advance(tokens)
        return {row: self._next(len(self._rows[row][0]) - self._prompts[row]) for row in found}

    def _next(self, place: int) -> np.ndarray:
        """The script's token; where a grammar forbids it, what closes JSON soon."""
        logits_V = -np.arange(self.vocabulary, dtype=np.float32) / self.vocabulary
        logits_V[self.closing] = np.arange(len(self.closing), 0, -1)
        logits_V[self.script[place] if place < len(self.script) else self.end] = 9
        return logits_V

    def logits(self, tokens_T, adapter=None, first=0):
        return np.zeros((1, self.vocabulary), np.float32)

    def add_adapter(self, name, adapter) -> None:
        raise NotImplementedError

    remove_adapter = log_probs = close = add_adapter


class Speaker:
    """Endpoints over a `Scripted` model.

    Args:
        family: of `tests.golden.families`.
    """

    def __init__(
        self, family: str, engine: Engine, model: Scripted, served: Served, max_tokens: int
    ) -> None:
        self.model, self.served = model, served
        self.app = Api(engine, {family: served}, Limits(max_tokens, None)).app
        self.client = TestClient(self.app, "http://127.0.0.1", raise_server_exceptions=False)

    def says(self, text: str) -> Speaker:
        """Let each answer be `text`."""
        self.model.script = self.served.encode(text, special=False)
        return self

    def chat(self, **fields: Any) -> Any:
        """Post a chat; greedy."""
        messages = [{"role": "user", "content": "Is it warm in Köln?"}]
        body = {"model": next(iter(self._names)), "messages": messages, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def chunks(self, **fields: Any) -> list[dict[str, Any]]:
        """Post a chat and read its stream."""
        *events, done, rest = self.chat(stream=True, **fields).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(each.removeprefix("data: ")) for each in events]

    @property
    def _names(self) -> list[str]:
        return [each["id"] for each in self.client.get("/v1/models").json()["data"]]


@contextmanager
def speaker(family: str, max_tokens: int = 400) -> Iterator[Speaker]:
    """A speaker with the tokenizer and the chat template of a family."""
    served = Served(family, tokenizer(family))
    (end, *_) = sorted(served._renderer.end_of_turn)
    closing_ids = [served.encode(text, special=False)[0] for text in ("]", "}", '"')]
    model = Scripted(served.vocabulary, end, closing_ids)
    with closing(Engine(Generator(model, rows=4), queue=8)) as engine:
        yield Speaker(family, engine, model, served, max_tokens)
