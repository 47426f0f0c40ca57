"""The loss: only trained positions, documents isolated, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents

from vox_testing.tiny import FAMILIES
from vox_torch.base import load_base
from vox_torch.layout import rows
from vox_torch.loss import weighted_nll

# Two float32 forwards of the same documents, padded differently: the largest relative difference
# seen over the families is 3e-7 (a few units in the last place of a sum of some hundred terms).
FLOAT32 = 2e-6


def loss_of(model: torch.nn.Module, some: list) -> float:
    head = model.get_output_embeddings()
    return weighted_nll(model, head, rows(batch(some), "cpu")).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_batch_never_see_one_another(tiny, family):
    model = load_base(tiny(family), "fp32", "cpu")
    some = documents(5)
    together = loss_of(model, some)
    alone = sum(loss_of(model, [document]) for document in some)
    assert together == pytest.approx(alone, rel=FLOAT32)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "gpt2"])
def test_loss_equals_transformers_own_logits_in_float64(tiny, family):
    model = load_base(tiny(family), "fp32", "cpu")
    some = documents(3)
    mine = loss_of(model, some)
    model.double()
    reference = 0.0
    for tokens, weights in some:
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0, :-1]
        nll = -logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        reference += float((nll * torch.tensor(weights[:-1])).sum())
    assert mine == pytest.approx(reference, rel=FLOAT32)


def test_weights_scale_the_loss_of_their_position(tiny):
    model = load_base(tiny("llama"), "fp32", "cpu")
    ((tokens, weights),) = documents(1)
    doubled = loss_of(model, [(tokens, 2 * weights)])
    assert doubled == pytest.approx(2 * loss_of(model, [(tokens, weights)]), rel=FLOAT32)


def test_no_logits_are_computed_where_nothing_is_trained(tiny):
    model = load_base(tiny("llama"), "fp32", "cpu")
    head, seen = model.get_output_embeddings(), []
    head.register_forward_hook(lambda _m, _i, out: seen.append(tuple(out.shape)))
    some = documents(4)
    loss_of(model, some)
    assert seen == [(sum(int((w > 0).sum()) for _, w in some), model.config.vocab_size)]
