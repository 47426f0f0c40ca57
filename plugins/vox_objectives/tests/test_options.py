"""Objectives by name, and their options."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from plugins.vox_objectives.tests.samples import CASES

import vox_objectives
from vox_core.contract import Objective, ObjectiveSpec
from vox_core.errors import ConfigError
from vox_objectives import vox_objective

MANIFEST = Path(vox_objectives.__file__).with_name("vox_plugin.toml")
NAMES = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))["provides"]["objectives"]


def made(name: str, **options: str) -> Any:
    return vox_objective(ObjectiveSpec(name, options))


def refused(name: str, **options: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        made(name, **options)
    assert caught.value.exit_code == 2
    return caught.value


def test_every_name_of_the_manifest_is_an_objective_and_has_a_test() -> None:
    assert all(isinstance(made(name), Objective) for name in NAMES)
    assert {name for name, _ in CASES.values()} == set(NAMES)


def test_options_are_read_from_strings() -> None:
    dpo = made("dpo", beta="0.25", loss_type="robust", label_smoothing="0.1")
    assert (dpo.beta, dpo.loss_type, dpo.label_smoothing) == (0.25, "robust", 0.1)
    assert made("simpo", simpo_gamma="0.5").gamma == made("simpo", gamma="0.5").gamma == 0.5


@pytest.mark.parametrize(
    ("name", "options", "code", "fault"),
    [
        ("dpo", {"bta": "1"}, "C001", "bta is unknown; did you mean beta?"),
        ("grpo", {"scale_reward": "none"}, "C001", "did you mean scale_rewards?"),
        ("distill", {"topk": "8"}, "C001", "did you mean top_k?"),
        ("distill", {"top_k": "257"}, "C002", "less than or equal to 256"),
        ("dpo", {"beta": "0"}, "C002", "beta = '0': input should be greater than 0"),
        ("orpo", {"beta": "-0.1"}, "C002", "greater than 0"),
        ("kto", {"beta": "0"}, "C002", "greater than 0"),
        ("simpo", {"beta": "0"}, "C002", "greater than 0"),
        ("grpo", {"beta": "-1"}, "C002", "greater than or equal to 0"),
        ("dpo", {"beta": "nan"}, "C002", "finite"),
        ("dpo", {"beta": "small"}, "C002", "beta = 'small': input should be a valid number"),
        ("dpo", {"loss_type": "sigmod"}, "C002", "'sigmoid', 'ipo', 'hinge' or 'robust'"),
        ("dpo", {"label_smoothing": "0.5"}, "C002", "less than 0.5"),
        ("dpo", {"loss_type": "ipo", "label_smoothing": "0.1"}, "C002", "loss_type=ipo"),
        ("grpo", {"loss_type": "cispo", "epsilon_high": "0.28"}, "C002", "at least 1"),
        ("grpo", {"loss_type": "cispo", "kl_estimator": "k1"}, "", ""),
    ],
)
def test_wrong_options(name: str, options: dict[str, str], code: str, fault: str) -> None:
    if not code:
        made(name, **options)
        return
    error = refused(name, **options)
    assert error.code == f"VOX-{code}"
    assert fault in "\n".join(error.faults)
    assert repr(name) in error.what and error.where == "--objective-option"
    assert "-O NAME=VALUE" in error.remedy


def test_every_wrong_option_is_named_at_once() -> None:
    error = refused("dpo", beta="0", los_type="ipo")
    assert len(error.faults) == 2
    assert error.expected == "options: beta, loss_type, label_smoothing"


def test_what_objectives_need() -> None:
    assert made("dpo").needs == {"reference"}
    assert made("orpo").needs == made("simpo").needs == frozenset()
    assert made("kto").needs == {"reference", "mismatched"}
    assert made("kto", loss_type="apo_zero_unpaired").needs == {"reference"}
    assert made("grpo").needs == made("ppo").needs == {"rollouts", "rewards"}
    assert made("grpo", beta="0.04").needs == {"rollouts", "rewards", "reference"}
    assert made("distill").needs == {"rollouts", "teacher"}
    assert (made("distill", top_k="4").needs, made("distill", top_k="4").top_k) == ({"teacher"}, 4)
    assert (made("grpo").min_rollouts, made("ppo").min_rollouts) == (2, 1)
