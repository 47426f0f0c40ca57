"""A command looks at the machine once, however many backends it asks for."""

from __future__ import annotations

from collections import Counter

import pytest

from vox_core.config import GenerateSettings
from vox_core.errors import BackendError
from vox_core.host import Request, choose, discover, load, probe
from vox_core.host.select import Seen
from vox_core.run import reference
from vox_core.run.load import open_model
from vox_core.run.run_plan import plan_run, with_advice
from vox_core.run.train import train


@pytest.fixture
def looks(monkeypatch):
    """What was looked at, and how often."""
    counted = Counter()
    find, ask = discover.discover, probe._probe

    def discovering():
        counted["packages"] += 1
        return find()

    def asking(plugin, pretended):
        counted[plugin.id] += 1
        return ask(plugin, pretended)

    monkeypatch.setattr(discover, "discover", discovering)
    monkeypatch.setattr(probe, "_probe", asking)
    return counted


def plan(asked, progress=None):
    return with_advice(plan_run(asked, progress, tell=print), print)


def test_a_run_looks_once_and_loads_one_backend_once(looks, settings, tiny, monkeypatch):
    loaded, real = [], load.load_plugin

    def load_plugin(found):
        loaded.append(found.id)
        return real(found)

    monkeypatch.setattr(load, "load_plugin", load_plugin)
    train(settings(tiny("llama"), max_steps=1))
    assert loaded == ["cpu"]
    assert {"packages", "cpu"} <= {*looks}
    assert set(looks.values()) == {1}


def test_so_does_a_plan_but_for_what_may_have_changed_while_a_model_was_fetched(
    looks, settings, tiny, monkeypatch, tmp_path
):
    asked = settings(tiny("llama"), max_steps=1)
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))  # in which nothing is tokenised
    labels = []
    found = plan(asked, progress=lambda *told: labels.append(told[0]))
    assert "tokenising" in labels and not found.inputs.fetched
    assert {"packages", "cpu"} <= {*looks}
    assert set(looks.values()) == {1}
    resolve = reference.models.resolve

    def fetch(reference, *, progress, **options):
        progress("model", 1, 2)
        return resolve(reference, progress=progress, **options)

    monkeypatch.setattr(reference.models, "resolve", fetch)
    looks.clear()
    assert plan(asked).inputs.fetched
    assert set(looks.values()) == {2}


def test_a_missing_backend_is_found_before_a_model(monkeypatch):
    monkeypatch.setattr(discover, "discover", lambda: ())
    with pytest.raises(BackendError, match="no backend is installed"):
        open_model("no-such-model", GenerateSettings()).__enter__()


def test_a_probe_runs_for_the_first_request_that_needs_it(looks, monkeypatch):
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "")
    seen = Seen()
    with pytest.raises(BackendError, match="no usable backend"):
        choose(Request("train", model_type="no-such-family", quant="affine4"), seen=seen)
    before = {**looks}
    backend, selection = choose(Request("load", explicit="cpu"), seen=seen)
    assert (backend.id, looks["cpu"]) == ("cpu", 1)
    anew = choose(Request("load", explicit="cpu"))[1]
    assert (selection.chosen, selection.why) == (anew.chosen, anew.why)
    assert "cpu" not in before
