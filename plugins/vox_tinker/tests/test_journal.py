"""Training clients after a restart: their requests are in the journal, and are computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from plugins.vox_tinker.tests.conftest import running
from plugins.vox_tinker.tests.data import DATA
from plugins.vox_tinker.tests.raw import Raw

from vox_core.api.settings import TrainSettings
from vox_tinker import training
from vox_tinker.server import opened

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}


@contextmanager
def server(base: Path, runs: Path, dtype: str = "fp32") -> Iterator[str]:
    settings = TrainSettings(backend="cpu", dtype=dtype)
    with (
        opened("tiny", str(base), settings, lambda _: None) as served,
        running({"tiny": served}, runs) as url,
    ):
        yield url


def made(url: str, start: str | None = None) -> Raw:
    """Make a session and a training client, of saved weights if there are some."""
    with Raw(url, "") as raw:
        session = raw.post("create_session", SESSION).json()["session_id"]
        given: dict[str, Any] = {"session_id": session, "model_seq_id": 0}
        if start:
            found = raw.post("load_weights", {**given, "path": start, "optimizer": True})
        else:
            lora = {"rank": 4, "seed": 1}
            body = {**given, "base_model": "tiny", "lora_config": lora}
            found = raw.post("create_model", body)
        return Raw(url, raw.result(found).json()["model_id"])


def learnt(raw: Raw, seq_ids: range) -> list[bytes]:
    """Send passes and steps by turns; return their results."""
    sent = [raw.stepped(n) if n % 2 == 0 else raw.passed(n, DATA) for n in seq_ids]
    return [raw.result(each).content for each in sent]


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["resume point", "all again"])
def test_what_was_acknowledged_outlives_the_server(
    seconds: float, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "REPEAT_SECONDS", seconds)
    with server(base, tmp_path) as url, made(url) as whole, made(url) as raw, made(url) as idle:
        expected = learnt(whole, range(1, 9))
        assert learnt(raw, range(1, 5)) == expected[:4]
        fifth, seventh = raw.passed(5, DATA), raw.passed(7, DATA)  # the sixth is on its way
        saved = raw.result(idle.post("save_weights", idle.numbered(1, path="a"))).json()["path"]
        idle.result(idle.post("unload_model", {"model_id": idle.model_id}))
    with server(base, tmp_path) as url, Raw(url, raw.model_id) as again:
        assert again.result(fifth).content == expected[4]
        assert learnt(again, range(1, 4)) == expected[:3], "answered once, and kept"
        sixth = again.stepped(6)
        assert [again.result(each).content for each in (sixth, seventh)] == expected[5:7]
        assert again.result(again.stepped(8)).content == expected[7]
        assert again.stepped(8, lr=1.0).status_code == 400, "another request of that number"
        with Raw(url, idle.model_id) as gone:
            assert "was unloaded" in gone.stepped(2).text
            unloaded = gone.post("retrieve_future", {"request_id": f"{gone.model_id}:unload"})
            assert unloaded.json()["model_id"] == gone.model_id
        with made(url, saved) as started:
            assert learnt(started, range(1, 3)) == expected[:2]
    with server(base, tmp_path) as url, Raw(url, started.model_id) as once_more:
        assert learnt(once_more, range(1, 9)) == expected, "from saved weights, too"
    with server(base, tmp_path, "bf16") as url, Raw(url, raw.model_id) as other:
        refused = other.stepped(9)
        assert (refused.status_code, "bf16" in refused.text) == (400, True)


def test_a_refused_load_stays_refused_after_a_restart(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that it asked for are there by then."""
    monkeypatch.setattr(training, "REPEAT_SECONDS", 1e9)
    with server(base, tmp_path) as url, made(url) as whole, made(url) as raw:
        for each in (whole, raw):
            learnt(each, range(1, 3))
        late = raw.numbered(3, path=f"tinker://{raw.model_id}/weights/late", optimizer=True)
        assert "error" in raw.result(raw.post("load_weights", late)).json()
        whole.result(whole.post("save_weights", whole.numbered(3, path="other")))
        for each in (whole, raw):
            each.result(each.post("save_weights", each.numbered(4, path="late")))
        expected = learnt(whole, range(5, 9))
        assert learnt(raw, range(5, 7)) == expected[:2]
    with server(base, tmp_path) as url, Raw(url, raw.model_id) as again:
        assert "error" in again.result(again.post("load_weights", late)).json()
        assert learnt(again, range(7, 9)) == expected[2:]


def test_a_save_is_done_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends between the save and the note of its result."""
    from vox_tinker.journal import Journal

    with server(base, tmp_path) as url, made(url) as raw:
        learnt(raw, range(1, 3))
        monkeypatch.setattr(Journal, "answer", lambda *_, **__: None)
        saved = raw.result(raw.post("save_weights", raw.numbered(3, path="a"))).json()
        monkeypatch.undo()
    assert saved["path"].endswith("/weights/a")
    with server(base, tmp_path) as url, Raw(url, raw.model_id) as again:
        assert again.result(again.post("save_weights", raw.numbered(3, path="a"))).json() == saved
        refused = again.result(again.post("save_weights", raw.numbered(4, path="a"))).json()
        assert "it exists" in refused["error"]


def test_a_sampler_is_made_once_although_the_sdk_counts_on(base: Path, tmp_path: Path) -> None:
    with server(base, tmp_path) as url, made(url) as raw:
        first = raw.post("save_weights_for_sampler", raw.numbered(1, sampling_session_seq_id=0))
        expected = raw.result(first).json()
        sent = raw.post("save_weights_for_sampler", raw.numbered(1, sampling_session_seq_id=1))
        assert raw.result(sent).json() == expected
        session = raw.model_id.partition(":")[0]
        assert (
            next(iter(Path(tmp_path / ".sessions").glob("*.json"))).read_text().count("sampler-")
            == 1
        )
        assert expected["sampling_session_id"] == f"{session}:sample:0"


def test_a_finished_session_is_not_made_again(base: Path, tmp_path: Path) -> None:
    with server(base, tmp_path) as url, made(url) as raw:
        learnt(raw, range(1, 3))
    with server(base, tmp_path) as url, Raw(url, raw.model_id) as again:
        assert (
            again.post(f"sessions/{raw.model_id.partition(':')[0]}/finish", {}).status_code == 204
        )
        assert again.stepped(3).status_code == 404


def test_a_client_that_is_not_made_again_as_it_was_says_so(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails when it is computed again; the next server makes the client again."""
    run_pass, passes = training.Training.run_pass, list[int]()

    def failing(self: Any, *given: Any) -> Any:
        passes.append(1)
        if len(passes) == 1:
            raise MemoryError
        return run_pass(self, *given)

    with server(base, tmp_path) as url, made(url) as raw:
        expected = learnt(raw, range(1, 5))
    with monkeypatch.context() as patched, server(base, tmp_path) as url:
        patched.setattr(training.Training, "run_pass", failing)
        with Raw(url, raw.model_id) as again:
            for refused in learnt(again, range(5, 7)):
                assert b"seq_id=1 had another result" in refused
    with server(base, tmp_path) as url, Raw(url, raw.model_id) as once_more:
        assert learnt(once_more, range(1, 5)) == expected
        assert b"error" not in once_more.result(once_more.passed(5, DATA)).content
