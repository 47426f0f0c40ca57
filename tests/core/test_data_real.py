"""The embedded default model's tokenizer on the data that ship with vox."""

from __future__ import annotations

from pathlib import Path

import pytest

import vox_core
from tests.core.data_samples import build_dataset, completion, load_records, plain
from vox_core.data.formats import find_split
from vox_core.data.tokenizer import load_tokenizer

QUESTION = "Q: What is the capital of France?\nA:"
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


@pytest.mark.real_model
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_a_space_that_ends_a_prompt_takes_the_answers_first_token(model: str) -> None:
    from vox_core.models import resolve

    tokenizer = load_tokenizer(resolve(model).path)
    tokenizer.chat_template = None
    space, none = (QUESTION + " ", "Paris"), (QUESTION, " Paris")
    digits, line = (QUESTION + " ", "75"), (QUESTION + "\n", "Paris")
    said = []
    for number, row in enumerate((space, none, digits, line)):
        dataset = build_dataset([completion(*row)], tokenizer, seq_len=99)
        assert dataset.stats.counts["joined-answer"] == (number == 0), row
        said.append(tokenizer.decode(dataset[0].tokens_T[dataset[0].weights_T > 0]))
    end = str(tokenizer.eos_token)
    assert said == [end, f" Paris{end}", f"75{end}", f"Paris{end}"]
