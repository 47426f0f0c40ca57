"""Models as mlx-lm reads their `config.json`, against transformers: the same logits, or a refusal.

Every family that the MLX backend's manifest lists; then rotary embeddings, which newer
configurations write otherwise than mlx-lm reads them; then settings that mlx-lm does not have.
`gemma3` and `qwen3_5`, which have a vision tower, are test_composites.py's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.parity import mlx_models, tolerances
from tests.parity.held import apart
from tests.parity.mlx_models import TOKENS_T, make, mlx_logits, transformers_logits
from vox_core.contract import LoadJob
from vox_core.errors import ModelError
from vox_mlx import backend

COMPOSITES = {"gemma3", "qwen3_5"}
FAMILIES = sorted(set(mlx_models.listed()) - COMPOSITES)
# Where mlx-lm scales the rotary embedding as transformers does.
SCALED = (
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
THETA = {"rope_type": "default", "rope_theta": 5e5}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
# The least that a rotary embedding here moves the logits by is 3e-2.
MOVED = 100 * tolerances.LOGITS


def rope(family: str, full: dict[str, Any], local: dict[str, Any] = PLAIN) -> dict[str, Any]:
    """The setting `rope_parameters`; `local` is that of the sliding layers where these differ."""
    if family not in ("gemma3_text", "olmo3"):
        return {"rope_parameters": dict(full)}
    return {"rope_parameters": {"full_attention": dict(full), "sliding_attention": dict(local)}}


@functools.cache
def plain_logits(root: Path, family: str) -> Any:
    """transformers' logits of the family, its rotary embedding unscaled, theta 1e4."""
    changed = {} if family == "gpt2" else rope(family, PLAIN)
    return transformers_logits(make(family, root / family, **changed))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def refused(folder: Path) -> str:
    """What is said instead of logits."""
    with pytest.raises(ModelError) as caught:
        mlx_logits(folder)
    assert caught.value.code == "VOX-M002"
    return str(caught.value)


# --- the same logits ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_is_listed(family, tmp_path):
    folder = make(family, tmp_path)
    assert apart(mlx_logits(folder), transformers_logits(folder)) < tolerances.LOGITS


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_decode_together(family, tmp_path):
    """Each row's logits are those of its document; the second is longer than a window of 16."""
    model = backend.vox_load(LoadJob(make(family, tmp_path), "fp32"), Mock())
    for row, length in enumerate((1, 40, 9)):
        model.insert(row, TOKENS_T[:length])
    model.advance({})
    for end in (1, 2):
        found = model.advance({row: int(TOKENS_T[end]) for row in range(3)})
    for row, length in enumerate((1, 40, 9)):
        document_T = np.append(TOKENS_T[:length], TOKENS_T[1:3])
        assert apart(found[row], model.logits(document_T)[-1]) < tolerances.LOGITS


@pytest.mark.parametrize("kind", [LINEAR, LLAMA3, YARN, THETA], ids=lambda k: k["rope_type"])
@pytest.mark.parametrize("family", SCALED)
def test_rotary_embeddings(family, kind, root, tmp_path):
    folder = make(family, tmp_path, **rope(family, kind))
    expected = transformers_logits(folder)
    assert apart(mlx_logits(folder), expected) < tolerances.LOGITS
    assert apart(plain_logits(root, family), expected) > MOVED


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {*SCALED, "gpt2"}))
def test_another_base_frequency_where_nothing_is_scaled(family, theta, tmp_path):
    kind = {**PLAIN, "rope_theta": theta}
    folder = make(family, tmp_path, **rope(family, kind, kind))
    assert apart(mlx_logits(folder), transformers_logits(folder)) < tolerances.LOGITS


@pytest.mark.parametrize("kind", [LINEAR, LLAMA3, YARN], ids=lambda k: k["rope_type"])
def test_the_words_of_older_configurations(kind, tmp_path):
    folder = make("llama", tmp_path, **rope("llama", kind))
    expected = transformers_logits(folder)
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert apart(mlx_logits(folder), expected) < tolerances.LOGITS


def test_gemma3s_sliding_layers_have_a_base_frequency_of_their_own(root, tmp_path):
    folder = make("gemma3_text", tmp_path, **rope("gemma3_text", PLAIN, {**PLAIN, **THETA}))
    expected = transformers_logits(folder)
    assert apart(mlx_logits(folder), expected) < tolerances.LOGITS
    assert apart(plain_logits(root, "gemma3_text"), expected) > MOVED


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {*SCALED, "gpt2", "phi3"}))
def test_scaling_where_mlx_lm_has_none(family, tmp_path):
    """`phi3` cannot be made with it: transformers knows longrope alone there."""
    told = refused(make(family, tmp_path, **rope(family, LINEAR)))
    assert f"linear in {family}" in told


def test_base_frequencies_by_kind_of_layer_where_mlx_lm_has_one(tmp_path):
    told = refused(make("olmo3", tmp_path, **rope("olmo3", THETA, PLAIN)))
    assert "rope_theta" in told


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize(
    ("family", "kind", "named"),
    [
        ("phi3", LONGROPE, "longrope"),
        ("llama", LONGROPE, "longrope"),
        ("llama", {**LINEAR, "rope_type": "dynamic"}, "dynamic"),
        ("llama", {**YARN, "attention_factor": 1.5}, "attention_factor"),
        ("qwen3", {**YARN, "attention_factor": 1.5}, "attention_factor"),
        ("llama", {**YARN, "truncate": False}, "truncate"),
        ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}, "mscale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rotary_embeddings_that_mlx_lm_computes_otherwise(family, kind, named, tmp_path):
    assert named in refused(make(family, tmp_path, **rope(family, kind)))


def activation(family: str) -> str:
    """The setting that names the activation of the feed-forward layers."""
    if family == "gpt2":
        return "activation_function"
    return "hidden_activation" if family.startswith("gemma") else "hidden_act"


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"lfm2_moe"}))
def test_another_activation(family, tmp_path):
    """`lfm2_moe` has one in all its models."""
    told = refused(make(family, tmp_path, **{activation(family): "relu"}))
    assert f"{activation(family)} = 'relu'" in told


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("gemma3_text", "attention_bias", True),
        ("gemma3_text", "attn_logit_softcapping", 20.0),
        ("gemma3_text", "final_logit_softcapping", 20.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gpt2", "n_inner", 96),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "tie_word_embeddings", False),
        ("phi", "qk_layernorm", True),
        ("qwen3", "attention_bias", True),
    ],
)
def test_settings_that_mlx_lm_leaves_out(family, setting, value, tmp_path):
    assert f"{setting} = {value!r}" in refused(make(family, tmp_path, **{setting: value}))
