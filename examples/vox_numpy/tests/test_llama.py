"""Settings of a Llama against transformers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vox_core.errors import ModelError
from vox_core.weights import WEIGHTS, SafetensorsFile, write_safetensors
from vox_numpy.config import Llama
from vox_numpy.trainer import NumpyModel
from vox_testing.llama import write_llama
from vox_testing.tiny import VOCABULARY

torch = pytest.importorskip("torch")

# float32 against float32, relative to the largest logit. Seen: 7e-7.
NEAR = 1e-5
# A setting that is ignored moves the logits by more than this; the least seen is 2e-2 (the scaling
# "linear").
MOVED = 1e-3
TOKENS = np.arange(5, 69)
PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 300.0}},
    "head_dim": {"head_dim": 16},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no groups": {"num_key_value_heads": 4},
    "one group": {"num_key_value_heads": 1},
}


def make(folder: Path, **settings: Any) -> Any:
    """Write a Llama with random norms and biases, and return it as a torch module."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**PLAIN, **settings})).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.copy_((0 if "bias" in name else 1) + 0.3 * torch.randn(value.shape))
    model.save_pretrained(folder)
    return model


def expected(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)[None]).logits[0].numpy()


def apart(found: Any, other: Any) -> float:
    return float(np.abs(found - other).max() / np.abs(other).max())


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_transformers(name: str, tmp_path: Path) -> None:
    reference = expected(make(tmp_path, **SETTINGS[name]))
    assert apart(NumpyModel(Llama(tmp_path)).logits(TOKENS), reference) < NEAR


@pytest.mark.parametrize("name", ["rope_theta", "linear", "llama3", "rms_norm_eps"])
def test_a_setting_without_tensors_has_an_effect(name: str, tmp_path: Path) -> None:
    """Otherwise the comparison with transformers could not see that it was ignored."""
    reference = expected(make(tmp_path, **SETTINGS[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    plain = {k: v for k, v in config.items() if k not in SETTINGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert apart(NumpyModel(Llama(tmp_path)).logits(TOKENS), reference) > MOVED


@pytest.mark.parametrize("name", ["rope_theta", "linear", "llama3"])
def test_the_older_spelling_means_the_same(name: str, tmp_path: Path) -> None:
    reference = expected(make(tmp_path, **SETTINGS[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **scaling} if scaling else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert apart(NumpyModel(Llama(tmp_path)).logits(TOKENS), reference) < NEAR


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"attention_bias": True},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"vocab_size": None},
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError) as caught:
        Llama(folder)
    assert caught.value.code == "VOX-M002"


def test_a_tensor_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    file = SafetensorsFile(folder / WEIGHTS)
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(folder / WEIGHTS, specs, tensors.items())
    with pytest.raises(ModelError, match="q_norm"):
        Llama(folder)


def test_a_streamed_model_reads_when_it_computes(tmp_path: Path) -> None:
    """The same logits, from files that a model in memory needs no more once it has computed."""
    make(tmp_path)
    whole, streamed = (NumpyModel(Llama(tmp_path, streamed=on)) for on in (False, True))
    assert np.array_equal(streamed.logits(TOKENS), whole.logits(TOKENS))
    shutil.rmtree(tmp_path)
    whole.logits(TOKENS)
    with pytest.raises(Exception, match=WEIGHTS):
        streamed.logits(TOKENS)


def test_a_batch_of_rows_gives_the_logits_of_whole_texts(tmp_path: Path) -> None:
    """Rows enter, leave and grow at their own times, with tokens that enter several at once."""
    make(tmp_path)
    model = NumpyModel(Llama(tmp_path))
    model.insert(3, TOKENS[:7])
    first = model.advance({})
    model.insert(5, TOKENS[10:12])
    second = model.advance({3: 9})
    third = model.advance({5: 8, 3: 2})
    model.remove(3)
    fourth = model.advance({5: 1})
    assert [[*each] for each in (first, second, third, fourth)] == [[3], [3, 5], [3, 5], [5]]
    for found, tokens in (
        (first[3], TOKENS[:7]),
        (third[3], [*TOKENS[:7], 9, 2]),
        (fourth[5], [*TOKENS[10:12], 8, 1]),
    ):
        assert apart(found, model.logits(np.array(tokens))[-1]) < NEAR
