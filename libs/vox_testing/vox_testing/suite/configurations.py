"""Test that every setting of a model's configuration counts: Llamas away from the defaults.

A backend that refuses a configuration with `ModelError` passes that case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vox_core.errors import ModelError
from vox_testing.jobs import batch, documents, signed, start, stirred
from vox_testing.llama import CONFIGURATIONS, write_llama
from vox_testing.reference import Reference
from vox_testing.subject import NAME, Subject
from vox_testing.suite.load import TOKENS, require_near
from vox_testing.suite.requirements import loads, needs, trains

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"config": changes} for name, changes in CONFIGURATIONS.items()},
    "large norms": {"norms": 4.0},
}
each_configuration = pytest.mark.parametrize("configuration", MODELS)


@loads
@needs(family="llama")
@each_configuration
def test_logits_of_each_configuration_are_the_references(
    vox_subject: Subject, configuration: str, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path, **MODELS[configuration])
    expected = Reference.of(folder).logits(TOKENS)
    with _skip_if_refused(), vox_subject.loaded(model=folder) as model:
        require_near(vox_subject, model.logits(TOKENS), expected)


@trains
@needs(family="llama")
@each_configuration
def test_training_on_each_configuration_scores_as_the_reference(
    vox_subject: Subject, configuration: str, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path, **MODELS[configuration])
    some, plan = signed(batch(documents(2))), vox_subject.plan(folder)
    begin = stirred(start(folder, plan))
    expected = Reference.of(folder).log_probs(some, begin.adapter)
    with _skip_if_refused(), vox_subject.trainer(plan, model=folder) as trainer:
        trainer.add_learner(NAME, begin)
        found = trainer.accumulate(some, 0, NAME)
        require_near(vox_subject, found, expected)


@contextmanager
def _skip_if_refused() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        pytest.skip(f"refused: {error.what}")
