"""Backends that merge, load or generate wrongly, each with the test that has to catch it."""

from __future__ import annotations

import numpy as np
from libs.vox_testing.tests.broken_results import (
    all_at_once,
    answering,
    astray_after,
    eagerly,
    foreign_errors,
    in_float32,
    loading,
    loads_in_float32,
    merging,
    of_the_last,
    one_too_many,
    out_of_order,
    sampling_with,
)
from libs.vox_testing.tests.broken_training import (
    rounded,
    unscaled,
    without_effect,
    without_magnitude,
)
from libs.vox_testing.tests.mutant import Mutant

RESULTS: dict[str, Mutant] = {
    # merge
    "a merge drops the adapter": Mutant(
        "test_merged_weights_are_the_formula", merge=merging(without_effect)
    ),
    "a merge is unscaled": Mutant("test_merged_weights_are_the_formula", merge=merging(unscaled)),
    "a merge ignores DoRA's magnitude": Mutant(
        "test_merged_weights_are_the_formula", merge=merging(without_magnitude)
    ),
    "a merge rounds twice": Mutant("test_merged_weights_are_the_formula", merge=merging(rounded)),
    "a merge is out of order": Mutant("test_merged_weights_are_the_formula", merge=out_of_order),
    "a merge is float32 whatever the base is": Mutant(
        "test_a_merge_rounds_once_to_the_bases_dtype", merge=in_float32
    ),
    "a merge holds everything in memory": Mutant(
        "test_a_merge_wants_one_tensor_at_a_time", merge=eagerly
    ),
    # load
    "bfloat16 is loaded as float32": Mutant(
        "test_loading_is_in_the_dtype_asked_for", load=loads_in_float32
    ),
    "a load ignores the adapter": Mutant(
        "test_logits_with_an_adapter_are_the_references", load=loading(lambda adapter: None)
    ),
    "a load is unscaled": Mutant(
        "test_logits_with_an_adapter_are_the_references", load=loading(unscaled)
    ),
    "a load ignores DoRA's magnitude": Mutant(
        "test_logits_with_an_adapter_are_the_references", load=loading(without_magnitude)
    ),
    "logits are float64": Mutant(
        "test_logits_are_float32_of_each_position",
        load=answering(logits=lambda logits_TV: logits_TV.astype(np.float64)),
    ),
    "logits of the last position alone": Mutant(
        "test_logits_are_float32_of_each_position",
        load=answering(logits=lambda logits_TV: logits_TV[-1:]),
    ),
    # generate
    "every token after the 30th is another": Mutant(
        "test_greedy_generation_takes_the_likeliest_token",
        load=answering(generate=astray_after(30)),
    ),
    "a prompt is cut to its last 300 tokens": Mutant(
        "test_a_long_prompt_is_read_whole", load=answering(generate=of_the_last(300))
    ),
    "the limit is off by one": Mutant(
        "test_generation_ends_at_the_limit", load=answering(generate=one_too_many)
    ),
    "tokens come all at once": Mutant(
        "test_tokens_come_as_they_are_made", load=answering(generate=all_at_once)
    ),
    "the sampling seed is ignored": Mutant(
        "test_a_sampling_seed_gives_the_same_tokens_again", load=sampling_with(seed=0)
    ),
    **{
        f"{name} is ignored": Mutant(
            "test_tokens_are_those_the_core_chooses", load=sampling_with(**{name: value})
        )
        for name, value in {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "row": 0,
        }.items()
    },
    "a bare ValueError": Mutant("test_a_broken_model_is_told_as_such", load=foreign_errors),
}
