"""Clients that vanish, and more requests than may wait."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest
import tinker
from plugins.vox_tinker.tests.conftest import running
from plugins.vox_tinker.tests.data import ADAM, DATA
from plugins.vox_tinker.tests.raw import Raw
from plugins.vox_tinker.tests.test_journal import learnt, made
from tinker import types

from vox_core.api.settings import TrainSettings
from vox_core.errors import PluginError
from vox_tinker import sampling
from vox_tinker.futures import Refused
from vox_tinker.server import opened
from vox_tinker.sessions import Served, Sessions

PROMPT = types.ModelInput.from_ints([10, 20, 30])


def test_a_client_that_vanishes_makes_room_for_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are computed, its learner is removed, and it may come back."""
    settings = TrainSettings(backend="cpu", dtype="fp32")
    with (
        opened("tiny", str(base), settings, lambda _: None) as served,
        running({"tiny": served}, tmp_path) as url,
        made(url) as here,
        made(url) as gone,
    ):
        gone.passed(1, DATA)  # nobody waits for the result
        expected = learnt(here, range(1, 3))
        session = gone.model_id.partition(":")[0]
        monkeypatch.setattr(
            Sessions,
            "seen",
            lambda _, each: -math.inf if each == session else time.monotonic(),
        )
        with made(url):
            pass
        with pytest.raises(PluginError, match="KeyError"):
            served.base.trainer.state(gone.model_id)
        assert served.base.trainer.state(here.model_id).updates == 1
        expected += learnt(here, range(3, 7))
        assert learnt(gone, range(1, 7)) == expected


def test_more_samples_than_may_wait_are_sent_again_by_the_sdk(
    url: str,
    served: Served,
    service: tinker.ServiceClient,
    client: tinker.TrainingClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "WAITING", 1)
    refused, begin = threading.Event(), threading.Event()

    class Noted(Refused):
        def __init__(self, text: str, status: int = 400) -> None:
            super().__init__(text, status)
            refused.set()

    monkeypatch.setattr(sampling, "Refused", Noted)
    sampler = service.create_sampling_client(base_model="tiny").result()
    try:
        served.engine.run(lambda: begin.wait() and None)
        params = types.SamplingParams(max_tokens=2, stop=[])
        waiting = [sampler.sample(PROMPT, 1, params) for _ in range(2)]
        assert refused.wait(60)
        with Raw(url, "") as raw:
            given = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
            body = {"base_model": "tiny", "prompt": given, "sampling_params": {"max_tokens": 1}}
            found = raw.post("asample", body)
            assert (found.status_code, "wait already" in found.text) == (429, True)
    finally:
        begin.set()
    assert [len(each.result().sequences[0].tokens) for each in waiting] == [2, 2]
    client.forward_backward(DATA, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics
