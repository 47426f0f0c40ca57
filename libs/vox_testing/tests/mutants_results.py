"""Backends that merge, load, score or generate wrongly, each with the test that has to catch it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from libs.vox_testing.tests.broken_merges import (
    eagerly,
    in_float32,
    in_its_own_dtype,
    merging,
    out_of_order,
    rounded,
    rounded_to_the_base,
    without_whole_tensors,
)
from libs.vox_testing.tests.broken_models import (
    adapter_of_the_first,
    adding,
    base_with_adapter,
    closing_up,
    everywhere,
    foreign_errors,
    heads_of_another_size,
    in_float64,
    inserting,
    named,
    norms_of_one_more,
    numbered_by_place,
    of_the_tokens,
    one_document,
    one_row_a_step,
    one_token_late,
    padded_with_tokens,
    scores,
    scoring,
    short_memory,
    the_last_added,
    unchecked,
    unscaled,
    where_trained,
    with_settings,
    with_tensors,
    without_biases,
    without_effect,
    without_head,
    without_magnitude,
    without_whole,
)
from libs.vox_testing.tests.mutant import Mutant, answering, remembering

CONFIGURATIONS = "test_logits_of_each_configuration_are_the_references"
WHOLE = "test_whole_tensors_and_the_head_are_loaded"
SCORES = "test_log_probs_are_the_references"
TOGETHER = "test_rows_together_are_rows_alone"

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
    "a merge ignores the job's dtype": Mutant(
        "test_a_merge_is_in_the_dtype_asked_for", merge=in_its_own_dtype
    ),
    "a merge rounds to the base's dtype first": Mutant(
        "test_a_merge_is_in_the_dtype_asked_for", merge=rounded_to_the_base
    ),
    "a merge ignores whole tensors": Mutant(
        "test_whole_tensors_and_the_head_are_merged", merge=without_whole_tensors
    ),
    "a merge ignores an adapter on the head": Mutant(
        "test_whole_tensors_and_the_head_are_merged", merge=merging(without_head)
    ),
    "a merge holds everything in memory": Mutant(
        "test_a_merge_wants_one_tensor_at_a_time", merge=eagerly
    ),
    # load
    "bfloat16 is loaded as float32": Mutant(
        "test_loading_is_in_the_dtype_asked_for",
        load=lambda right, job: right(replace(job, dtype="fp32")),
    ),
    "a load ignores the adapter": Mutant(
        "test_logits_with_an_adapter_are_the_references",
        load=answering(add_adapter=adding(without_effect)),
    ),
    "a load is unscaled": Mutant(
        "test_logits_with_an_adapter_are_the_references",
        load=answering(add_adapter=adding(unscaled)),
    ),
    "a load ignores DoRA's magnitude": Mutant(
        "test_logits_with_an_adapter_are_the_references",
        load=answering(add_adapter=adding(without_magnitude)),
    ),
    "a load ignores whole tensors": Mutant(
        WHOLE, load=answering(add_adapter=adding(without_whole))
    ),
    "a load ignores an adapter on the head": Mutant(
        WHOLE, load=answering(add_adapter=adding(without_head))
    ),
    "whole tensors are the base's, too": Mutant(WHOLE, load=remembering(base_with_adapter)),
    "every adapter is the last one": Mutant(
        "test_each_adapter_answers_under_its_name", load=remembering(the_last_added)
    ),
    "remove_adapter removes all": Mutant(
        "test_each_adapter_answers_under_its_name",
        load=answering(
            remove_adapter=lambda right, name: [right.remove_adapter(each) for each in "ab"]
        ),
    ),
    "an adapter is not held against the base": Mutant(
        "test_an_adapter_of_another_model_is_refused", load=answering(add_adapter=unchecked)
    ),
    "logits are float64": Mutant(
        "test_logits_are_float32_of_each_position",
        load=answering(
            logits=lambda right, *args, **more: right.logits(*args, **more).astype(np.float64)
        ),
    ),
    "logits of the last position alone": Mutant(
        "test_logits_are_float32_of_each_position",
        load=answering(logits=lambda right, *args: right.logits(*args)[-1:]),
    ),
    "logits of all positions always": Mutant(
        "test_logits_of_the_last_positions_are_those_of_all",
        load=answering(
            logits=lambda right, tokens_T, adapter=None, first=0: right.logits(tokens_T)
        ),
    ),
    "logits of several documents ignore the adapter": Mutant(
        "test_logits_of_several_documents_are_those_of_each",
        load=answering(
            logits_all=lambda right, documents, adapter=None: right.logits_all(documents)
        ),
    ),
    "logits of the first positions": Mutant(
        "test_logits_of_the_last_positions_are_those_of_all",
        load=answering(
            logits=lambda right, tokens_T, adapter=None, first=0: right.logits(tokens_T)[
                : len(tokens_T) - first
            ]
        ),
    ),
    "a streamed load ignores the adapter": Mutant(
        "test_streamed_logits_are_the_references",
        load=answering(add_adapter=adding(without_effect)),
    ),
    "a streamed load ignores whole tensors": Mutant(
        "test_a_streamed_load_has_whole_tensors_and_the_head",
        load=answering(add_adapter=adding(without_whole)),
    ),
    "a streamed load loads all": Mutant(
        "test_a_streamed_load_reads_weights_when_they_are_used",
        load=lambda right, job: right(replace(job, streamed=False)),
    ),
    "a bare ValueError": Mutant("test_a_broken_model_is_told_as_such", load=foreign_errors),
    # configurations
    "rope_theta is ignored": Mutant(CONFIGURATIONS, load=with_settings(rope_theta=10000.0)),
    "rope_parameters are ignored": Mutant(CONFIGURATIONS, load=with_settings(rope_parameters=None)),
    "rope_scaling is ignored": Mutant(CONFIGURATIONS, load=with_settings(rope_scaling=None)),
    "every rope_scaling is linear": Mutant(
        CONFIGURATIONS, load=with_settings(rope_scaling={"rope_type": "linear", "factor": 8.0})
    ),
    "rms_norm_eps is ignored": Mutant(CONFIGURATIONS, load=with_settings(rms_norm_eps=1e-6)),
    "hidden_act is ignored": Mutant(CONFIGURATIONS, load=with_settings(hidden_act="silu")),
    "biases are ignored": Mutant(CONFIGURATIONS, load=with_tensors(without_biases)),
    "heads have another size": Mutant(CONFIGURATIONS, load=with_tensors(heads_of_another_size)),
    "norms are 1 + weight": Mutant(CONFIGURATIONS, load=with_tensors(norms_of_one_more)),
    "another family's norms are 1 + weight": Mutant(
        "test_logits_of_each_family_are_the_references", load=with_tensors(norms_of_one_more)
    ),
    # log-probabilities
    "log_probs ignores the adapter": Mutant(SCORES, load=answering(**named(lambda name: None))),
    "log_probs of what is trained alone": Mutant(
        SCORES, load=answering(log_probs=scoring(where_trained))
    ),
    "log_probs of every position": Mutant(SCORES, load=answering(log_probs=scoring(everywhere))),
    "log_probs of the tokens": Mutant(SCORES, load=answering(log_probs=scoring(of_the_tokens))),
    "log_probs are weighted": Mutant(
        SCORES, load=answering(log_probs=scores(lambda found_T, batch: found_T * batch.weights_T))
    ),
    "log_probs are float64": Mutant(
        SCORES, load=answering(log_probs=scores(lambda found_T, batch: found_T.astype(np.float64)))
    ),
    "documents see one another in log_probs": Mutant(
        "test_log_probs_of_a_document_do_not_depend_on_the_others",
        load=answering(log_probs=scoring(one_document)),
    ),
    # generation
    "logits of a row are a step late": Mutant(
        "test_a_row_has_the_logits_of_its_text", load=remembering(one_token_late)
    ),
    "a row ignores its adapter": Mutant(
        "test_a_row_has_the_logits_of_its_text",
        load=answering(insert=lambda right, row, tokens_T, name=None: right.insert(row, tokens_T)),
    ),
    "a row sees its last 64 tokens": Mutant(
        "test_a_row_has_the_logits_of_its_text", load=remembering(short_memory)
    ),
    "logits of a row are float64": Mutant(
        "test_a_row_has_the_logits_of_its_text", load=answering(advance=in_float64)
    ),
    "a prompt is cut to its last 200 tokens": Mutant(
        "test_any_text_can_be_continued",
        load=answering(insert=inserting(lambda tokens_T: tokens_T[-200:])),
    ),
    "a prompt is cut to its last 1024 tokens": Mutant(
        "test_a_long_prompt_enters_a_running_batch",
        load=answering(insert=inserting(lambda tokens_T: tokens_T[-1024:])),
    ),
    "a row sees the padding": Mutant(TOGETHER, load=remembering(padded_with_tokens)),
    "a batch has one adapter": Mutant(TOGETHER, load=remembering(adapter_of_the_first)),
    "rows are in the order of their numbers": Mutant(
        TOGETHER, load=answering(advance=numbered_by_place)
    ),
    "one row a step": Mutant(TOGETHER, load=answering(advance=one_row_a_step)),
    "rows close up when one leaves": Mutant(
        "test_a_row_that_leaves_does_not_disturb_the_others", load=remembering(closing_up)
    ),
    "a row that was removed stays": Mutant(
        "test_a_row_that_leaves_does_not_disturb_the_others",
        load=answering(remove=lambda right, row: None),
    ),
}
