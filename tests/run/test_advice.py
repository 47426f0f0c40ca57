"""`vox_advise`: whose advice counts, what it may change, and what a broken plugin costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path

import pytest

from tests.core.plugin_site import Site
from vox_core.contract import Event, Notice
from vox_core.errors import BackendError, PlanError
from vox_core.host.load import no_provider
from vox_core.run.train import train

MANIFEST = """
id = "{id}"
name = "{id}"
version = "0.1.0"
api = "{api}"
licence = "MIT"
[provides]
hooks = ["vox_advise"]
"""
NUMBERS = count()
BODY = """
from vox_core.contract import Advice, Notice
from vox_core.errors import PlanError
from vox_core.hookspecs import hookimpl

class Adviser:
    @hookimpl
    def vox_advise(self, plan):
        {does}

backend = Adviser()
"""


@pytest.fixture
def adviser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """`adviser(id, body of the hook)` installs a plugin; no other gives advice."""
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "plan")
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = Site(folder)

    def add(id: str, does: str) -> str:
        package = f"adviser_{id}_{next(NUMBERS)}"  # imported once in this process
        return site.add(id, body=BODY.format(does=does), manifest=MANIFEST, package=package)

    return add


@pytest.fixture
def trained(tiny, settings, tmp_path):
    """`trained(...)` -> plan.json of a run of one step, and the warnings before it."""

    def run(**given: object) -> tuple[dict, list[str]]:
        events: list[Event] = []
        asked = settings(tiny("llama"), max_steps=1, **given)
        plan = json.loads((train(asked, observe=events.append).run / "plan.json").read_text())
        before = takewhile(lambda event: event.name != "run_start", events)
        notices = [event for event in before if isinstance(event, Notice)]
        return plan, [each.message for each in notices if each.level == "warning"]

    return run


def test_the_first_knob_wins_and_notices_add_up(adviser, trained) -> None:
    adviser(
        "b",
        'return Advice((Notice("b", "warning"),), 512, {"threads": "default", "layout": "padded"})',
    )
    adviser("a", 'return Advice((Notice("a", "warning"),), 1024, {"threads": "half"})')
    plan, warnings = trained()
    assert warnings == ["a", "b"]
    assert plan["micro_batch_tokens"] == 1024
    assert plan["tuning"] == {"threads": "half", "layout": "padded"}


@pytest.mark.parametrize(
    "given", [{"micro_batch_tokens": 2048}, {"dropout": 0.1}, {"tune": "ignore"}]
)
def test_what_would_be_another_run_is_not_changed(given, adviser, trained) -> None:
    adviser("a", "return Advice((), 1024)")
    assert trained(**given)[0]["micro_batch_tokens"] == 2048


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raise ValueError('no idea')", "vox_advise: ValueError: no idea"),
        ("raise SystemExit(3)", "vox_advise: SystemExit: 3"),
        ("return Advice((), -5)", "-5"),
        ("return Advice(('slow',))", "notices with 'slow', expected a Notice"),
        ("return Advice(refusal='no')", "refusal 'no', expected a PlanError"),
        ("return 7", "vox_advise gave [7], expected one Advice"),
        ("pass\nimport nothing_of_the_sort", "No module named 'nothing_of_the_sort'"),
    ],
)
def test_a_plugin_that_fails_is_one_warning(does, why, adviser, trained) -> None:
    adviser("a", does)
    adviser("b", 'return Advice((), 1024, {"threads": "half"})')
    plan, (warning,) = trained()
    assert warning.startswith("plugin 'a' gives no advice: ") and why in warning
    assert plan["tuning"] == {"threads": "half"}


def test_a_refusal_ends_the_run_before_it_begins(adviser, trained, tmp_path) -> None:
    adviser("a", 'return Advice(refusal=PlanError("P004", "too much", remedy="less"))')
    with pytest.raises(PlanError, match="too much") as caught:
        trained()
    assert caught.value.code == "VOX-P004" and not (tmp_path / "run").exists()


def test_without_advice_the_losses_are_the_same(tiny, settings, tmp_path, monkeypatch) -> None:
    def losses(name: str) -> list[float]:
        events: list[Event] = []
        train(settings(tiny("llama"), out=tmp_path / name), observe=events.append)
        return [event.loss for event in events if event.name == "step"]

    advised = losses("advised")
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "plan")
    assert losses("alone") == advised


def test_tuning_without_a_plugin_names_the_one_to_install(
    tiny, settings, monkeypatch, tmp_path
) -> None:
    assert no_provider("hooks", "vox_advise", []).remedy == "vox plugin install plan"
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "plan")
    with pytest.raises(BackendError, match="measures what is fastest") as caught:
        train(settings(tiny("llama"), tune="refresh"))
    assert (caught.value.code, caught.value.where) == ("VOX-B013", "--tune refresh")
    assert caught.value.found == "plugin 'plan' is blocked by VOX_DISABLE_PLUGINS"
    assert not (tmp_path / "run").exists()
