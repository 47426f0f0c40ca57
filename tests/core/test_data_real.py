"""The embedded default model's tokenizer on the data that ship with vox."""

from __future__ import annotations

from pathlib import Path

import pytest

import vox_core
from tests.core.data_samples import load_records, plain
from vox_core.data.dataset import build_dataset
from vox_core.data.formats import find_split
from vox_core.data.tokenizer import load_tokenizer

FOLDER = Path(vox_core.__file__).parent / "quickstart" / "data"


@pytest.mark.real_model
def test_smollm2_is_trained_on_what_the_assistant_says() -> None:
    from vox_core.models import resolve

    tokenizer = load_tokenizer(resolve("smollm2-135m").path)
    train, valid = find_split([FOLDER])
    records = load_records([*train, *valid])
    dataset = build_dataset(records, tokenizer, seq_len=2048)
    assert (dataset.stats.dropped, dataset.stats.truncated) == ({}, {})
    for record, document in zip(records, dataset, strict=True):
        messages = plain(record)
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        assert document.tokens_T.tolist() == whole
        said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(document.tokens_T[document.weights_T > 0]) == "".join(said)
        assert "named SmolLM, trained by Hugging Face" in tokenizer.decode(document.tokens_T)
