"""The expected results of a backend, computed in float64.

The adapter is merged into float64 weights by the formula, and the merged model is computed: in
numpy for Llama (llama.py), with transformers for other families, if it and torch are installed.

    LoRA:  W + scale * B A          DoRA:  m * (W + scale * B A) / ||W + scale * B A||_row

Tensors of `AdapterState.saved` replace the base's.

Shape legend: T tokens, V vocabulary, O output features, I input features.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.adapter.targets import linear_modules, parameter_names
from vox_core.contract import AdapterState, Batch, Ints, ModuleShape, Step
from vox_core.weights import WeightFolder
from vox_testing.llama import Doubles as Doubles
from vox_testing.llama import llama_logits


@dataclass(frozen=True, slots=True)
class Reference:
    """The model of a folder, in float64.

    Args:
        weights: parameter name in the Hugging Face model -> stored tensor.
        shapes: path -> shape of its linear modules.
        norms: path -> row norms that DoRA divides by instead of those of `W + scale * B A`.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Doubles] = field(repr=False)
    shapes: Mapping[str, ModuleShape] = field(repr=False)
    norms: Mapping[str, Doubles] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, folder: Path) -> Reference:
        """Read the model of `folder`."""
        config = json.loads((folder / "config.json").read_text())
        model_type = config["model_type"]
        files = WeightFolder(folder)
        names = parameter_names(files.tensors, model_type)
        weights = {name: files.read(tensor).astype(np.float64) for name, tensor in names.items()}
        return cls(folder, config, weights, linear_modules(files.tensors, model_type))

    def merged(self, adapter: AdapterState | None) -> dict[str, Doubles]:
        """Return every weight, with the adapter merged."""
        changed = dict(self.weights)
        if adapter is None:
            return changed
        changed.update({name: value.astype(np.float64) for name, value in adapter.saved.items()})
        for path in adapter.modules:
            name, transposed = f"{path}.weight", self.shapes[path].transposed
            W_OI = self.weights[name].T if transposed else self.weights[name]
            merged_OI = merged_weight(W_OI, adapter, path, self.norms.get(path))
            changed[name] = merged_OI.T if transposed else merged_OI
        return changed

    def with_norms_of(self, adapter: AdapterState) -> Reference:
        """Return this model with the row norms of one adapter, which DoRA's gradient takes for
        constants (arXiv:2402.09353, section 4.3)."""
        norms = {
            path: np.linalg.norm(self.weights[f"{path}.weight"] + update(adapter, path), axis=1)
            for path in adapter.modules
        }
        return replace(self, norms=norms)

    def logits(self, tokens_T: Ints, adapter: AdapterState | None = None) -> Doubles:
        """Return float64 logits (T, V) of one document."""
        weights = self.merged(adapter)
        if self.config["model_type"] == "llama":
            return llama_logits(weights, tokens_T, self.config)
        return _transformers_logits(self.folder, weights, tokens_T)

    def loss(self, step: Step, adapter: AdapterState | None = None) -> float:
        """Return `sum(weight * nll) / total_weight` over the documents of a step."""
        return self.weighted_nll(step.batches, adapter) / step.total_weight

    def weighted_nll(self, batches: Iterable[Batch], adapter: AdapterState | None = None) -> float:
        """Return `sum(weight * nll)`; weights may be negative."""
        pairs = ((batch.weights_T, self.log_probs(batch, adapter)) for batch in batches)
        return -sum(float(weights_T @ log_probs_T) for weights_T, log_probs_T in pairs)

    def log_probs(self, batch: Batch, adapter: AdapterState | None = None) -> Doubles:
        """Return log p(target), (T,): where `batch.scored_T`, and 0 elsewhere."""
        found_T = np.zeros(len(batch.tokens_T))
        for document in batch.documents():
            logits_TV = self.logits(batch.tokens_T[document], adapter)
            found_T[document] = log_likelihood(logits_TV, batch.targets_T[document])
        return np.where(batch.scored_T, found_T, 0.0)


def update(adapter: AdapterState, path: str) -> Doubles:
    """Return `scale * B A` of one module, (O, I)."""
    module = adapter.modules[path]
    product: Doubles = module.B_OR.astype(np.float64) @ module.A_RI.astype(np.float64)
    return adapter.scale(path) * product


def merged_weight(
    W_OI: Doubles, adapter: AdapterState, path: str, norms_O: Doubles | None = None
) -> Doubles:
    """Merge the adapter into one weight."""
    merged_OI = W_OI + update(adapter, path)
    magnitude_O = adapter.modules[path].magnitude_O
    if magnitude_O is None:
        return merged_OI
    if norms_O is None:
        norms_O = np.linalg.norm(merged_OI, axis=1)
    return merged_OI * (magnitude_O / norms_O)[:, None]


def log_likelihood(logits_TV: Doubles, targets_T: Ints) -> Doubles:
    """Return log softmax of each position's target."""
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    found_T: Doubles = shifted_TV[np.arange(len(targets_T)), targets_T]
    found_T -= np.log(np.exp(shifted_TV).sum(-1))
    return found_T


def _transformers_logits(folder: Path, weights: Mapping[str, Doubles], tokens_T: Ints) -> Doubles:
    """Compute the logits with transformers; skip the test if it or torch is missing."""
    import pytest

    torch = pytest.importorskip("torch", reason="no reference for this family without torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(weights[name]))
        logits_TV: Doubles = model.eval()(input_ids=torch.tensor(tokens_T)[None]).logits[0].numpy()
    return logits_TV
