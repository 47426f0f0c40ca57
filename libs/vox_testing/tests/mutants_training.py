"""Backends that train wrongly, each with the test of the suite that has to catch it."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from libs.vox_testing.tests.broken_models import (
    alpha_over_r,
    everywhere,
    heads_of_another_size,
    named,
    of_the_tokens,
    one_document,
    unscaled,
    where_trained,
    with_settings,
    with_tensors,
    without_biases,
    without_head,
    without_whole,
)
from libs.vox_testing.tests.broken_training import (
    NAME,
    a_B,
    another_A,
    applied_anyway,
    applied_with_a_finite_loss,
    as_it_was,
    base_part_undropped,
    by_count,
    by_plan,
    caching,
    counted,
    first_alone,
    first_hundred,
    first_weighed,
    in_place,
    into_the_next_document,
    kept_after,
    learning_from,
    mean_of_means,
    norm_after_clipping,
    norm_before_division,
    of_all,
    of_the_first,
    on_batches,
    one_update_old,
    printing,
    returning,
    scored_as_the_first,
    scored_is_trained,
    seeded,
    shared,
    squared_dropout,
    undecayed,
    unscaled_dropout,
    updating,
    views,
    weigh_before,
    weigh_ignored,
    weigh_twice,
    weighing,
    with_adapter,
    without_bias_correction,
    without_moments,
)
from libs.vox_testing.tests.mutant import Mutant, answering, remembering
from libs.vox_testing.tests.quantising import as_quantisation

TRAINING: dict[str, Mutant] = {
    # log-probabilities of accumulate
    "documents see one another": Mutant(
        "test_accumulate_returns_the_log_probs", answering(accumulate=on_batches(one_document))
    ),
    "accumulate returns what is trained alone": Mutant(
        "test_accumulate_returns_the_log_probs", answering(accumulate=on_batches(where_trained))
    ),
    "accumulate returns nll": Mutant(
        "test_accumulate_returns_the_log_probs",
        answering(accumulate=returning(lambda found_T, batch: -found_T)),
    ),
    "accumulate returns float64": Mutant(
        "test_accumulate_returns_the_log_probs",
        answering(accumulate=returning(lambda found_T, batch: found_T.astype(np.float64))),
    ),
    "accumulate returns the weighted": Mutant(
        "test_accumulate_returns_the_log_probs",
        answering(accumulate=returning(lambda found_T, batch: found_T * batch.weights_T)),
    ),
    "accumulate predicts the token itself": Mutant(
        "test_the_first_loss_is_the_base_models", answering(accumulate=on_batches(of_the_tokens))
    ),
    "accumulate scores every position": Mutant(
        "test_accumulate_returns_the_log_probs",
        answering(
            accumulate=lambda right, batch, *args: right.accumulate(everywhere(batch), *args)
        ),
    ),
    "a long document is cut at its end": Mutant(
        "test_a_long_document_is_trained_whole", answering(accumulate=first_hundred)
    ),
    # gradients
    "a document predicts the next one's first token": Mutant(
        "test_the_gradient_is_that_of_the_loss",
        answering(accumulate=on_batches(into_the_next_document)),
    ),
    "weights are taken for a mask": Mutant(
        "test_the_gradient_is_that_of_the_loss", answering(accumulate=weighing(lambda w: w != 0))
    ),
    "negative weights are left out": Mutant(
        "test_the_gradient_is_that_of_the_loss",
        answering(accumulate=weighing(lambda w: np.maximum(w, 0))),
    ),
    "weights have no sign": Mutant(
        "test_the_gradient_is_that_of_the_loss", answering(accumulate=weighing(np.abs))
    ),
    "weights have the other sign": Mutant(
        "test_the_gradient_is_that_of_the_loss", answering(accumulate=weighing(np.negative))
    ),
    "what is scored is trained": Mutant(
        "test_positions_without_weight_get_no_gradient",
        answering(accumulate=on_batches(scored_is_trained)),
    ),
    "a mean of micro-batch means": Mutant(
        "test_gradients_of_batches_add_up", answering(accumulate=weighing(mean_of_means))
    ),
    "discard forgets nothing": Mutant(
        "test_what_was_accumulated_is_forgotten", answering(discard=lambda right, learner: None)
    ),
    "an update keeps its gradient": Mutant(
        "test_what_was_accumulated_is_forgotten", remembering(kept_after("update"))
    ),
    "an update that failed keeps its gradient": Mutant(
        "test_a_gradient_that_is_not_finite_changes_nothing",
        remembering(kept_after("update", only_failed=True)),
    ),
    "total_weight is ignored": Mutant(
        "test_the_total_weight_divides_the_gradient",
        answering(update=updating(lambda update: replace(update, total_weight=1.0))),
    ),
    "the norm is that before the division": Mutant(
        "test_the_total_weight_divides_the_gradient", answering(update=norm_before_division)
    ),
    # one pass
    "weigh sees no dropout": Mutant(
        "test_one_pass_is_two_passes", answering(accumulate=weigh_before)
    ),
    "weigh is called twice": Mutant(
        "test_one_pass_is_two_passes", answering(accumulate=weigh_twice)
    ),
    "weigh's result is ignored": Mutant(
        "test_one_pass_is_two_passes", answering(accumulate=weigh_ignored)
    ),
    # several targets
    "only the first target has a gradient": Mutant(
        "test_several_targets_of_a_position_add_up", answering(accumulate=weighing(first_alone))
    ),
    "targets share the mean of their weights": Mutant(
        "test_several_targets_of_a_position_add_up", answering(accumulate=weighing(shared))
    ),
    "every target is scored as the first": Mutant(
        "test_several_targets_of_a_position_add_up", answering(log_probs=scored_as_the_first)
    ),
    "one pass weighs the first target alone": Mutant(
        "test_several_targets_in_one_pass_are_those_in_two", answering(accumulate=first_weighed)
    ),
    # learners, by name
    "a learner is scored as at its start": Mutant(
        "test_a_learner_is_scored_as_it_is_now", remembering(as_it_was)
    ),
    "a learner is sampled from as at its start": Mutant(
        "test_a_learner_is_sampled_from_as_it_is_now", remembering(as_it_was)
    ),
    "the base is the learner": Mutant(
        "test_a_learner_is_scored_as_it_is_now", answering(**named(lambda name: name or NAME))
    ),
    "a fixed adapter is the learner": Mutant(
        "test_an_adapter_beside_a_learner_stays",
        answering(**named(lambda name: NAME if name else None)),
    ),
    "gradients go to the first learner": Mutant(
        "test_learners_on_one_base_are_as_alone", remembering(of_the_first)
    ),
    "an update of one learner is one of all": Mutant(
        "test_learners_on_one_base_are_as_alone", remembering(of_all("update"))
    ),
    "an update of one discards all": Mutant(
        "test_gradients_of_learners_stay_apart", remembering(of_all("update"))
    ),
    "dropout depends on the learner's name": Mutant(
        "test_learners_on_one_base_are_as_alone",
        answering(
            accumulate=lambda right, batch, seed, learner: right.accumulate(
                batch, seed + len(learner), learner
            )
        ),
    ),
    # dtypes and quantisation
    "float32 is quietly bfloat16": Mutant(
        "test_the_first_loss_is_the_base_models", by_plan("plan", dtype="bf16")
    ),
    "bfloat16 is quietly float32": Mutant(
        "test_training_is_in_the_dtype_asked_for", by_plan("plan", dtype="fp32")
    ),
    "the quantisation is ignored": Mutant(
        "test_training_is_on_the_quantisation_asked_for", as_quantisation("none"), quantises=True
    ),
    "every quantisation is affine8": Mutant(
        "test_training_is_on_the_quantisation_asked_for", as_quantisation("affine8"), quantises=True
    ),
    "every quantisation is affine4": Mutant(
        "test_training_is_on_the_quantisation_asked_for", as_quantisation("affine4"), quantises=True
    ),
    "the dtype that auto becomes is not declared": Mutant(
        "test_the_dtype_that_auto_becomes_is_declared",
        patch=("vox_testing.suite.package.resolve_dtype", lambda choice, hardware: "fp16"),
    ),
    # configurations
    "rope_theta is ignored in training": Mutant(
        "test_training_on_each_configuration_scores_as_the_reference",
        with_settings(rope_theta=10000.0),
    ),
    "attention biases are ignored in training": Mutant(
        "test_training_on_each_configuration_scores_as_the_reference", with_tensors(without_biases)
    ),
    "heads have another size in training": Mutant(
        "test_training_on_each_configuration_scores_as_the_reference",
        with_tensors(heads_of_another_size),
    ),
    # adapter
    "training is unscaled": Mutant(
        "test_accumulate_returns_the_log_probs", remembering(with_adapter(unscaled))
    ),
    "rsLoRA is scaled by alpha / r": Mutant(
        "test_accumulate_returns_the_log_probs", remembering(with_adapter(alpha_over_r))
    ),
    "B does not start at zero": Mutant(
        "test_the_first_loss_is_the_base_models", remembering(with_adapter(a_B))
    ),
    "A is not the one that was given": Mutant(
        "test_a_restored_state_is_the_same_to_the_bit", remembering(with_adapter(another_A))
    ),
    "modules_to_save are not trained": Mutant(
        "test_whole_tensors_and_the_head_are_trained", remembering(with_adapter(without_whole))
    ),
    "an adapter on the head is not trained": Mutant(
        "test_whole_tensors_and_the_head_are_trained", remembering(with_adapter(without_head))
    ),
    "whole tensors do not decay": Mutant(
        "test_whole_tensors_and_the_head_are_trained",
        answering(update=undecayed("embed_tokens.weight")),
    ),
    # optimizer
    "no bias correction": Mutant(
        "test_adamw_is_the_papers", answering(update=updating(without_bias_correction))
    ),
    "the backend counts updates": Mutant(
        "test_the_number_of_an_update_decides_its_bias_correction", remembering(counted)
    ),
    **{
        f"{name} is always {value}": Mutant(
            "test_adamw_is_the_papers",
            answering(update=updating(lambda update, n=name, v=value: replace(update, **{n: v}))),
        )
        for name, value in (("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("weight_decay", 0.0))
    },
    "A does not decay": Mutant("test_adamw_is_the_papers", answering(update=undecayed("A.weight"))),
    "DoRA's magnitude does not decay": Mutant(
        "test_adamw_is_the_papers", answering(update=undecayed("magnitude_vector"))
    ),
    "weight decay goes through the moments": Mutant(
        "test_adamw_is_the_papers", patch=("torch.optim.AdamW", torch.optim.Adam)
    ),
    "the learning rate is ignored": Mutant(
        "test_adamw_is_the_papers", answering(update=updating(lambda u: replace(u, lr=1e-3)))
    ),
    "no clipping": Mutant(
        "test_the_gradient_is_clipped_to_the_norm",
        answering(update=updating(lambda update: replace(update, clip=0.0))),
    ),
    "the norm is that after clipping": Mutant(
        "test_the_gradient_is_clipped_to_the_norm", answering(update=norm_after_clipping)
    ),
    "an infinite norm is applied": Mutant(
        "test_a_gradient_that_is_not_finite_changes_nothing", answering(update=applied_anyway)
    ),
    "an infinite norm with a finite loss is applied": Mutant(
        "test_a_gradient_that_is_not_finite_changes_nothing",
        remembering(applied_with_a_finite_loss),
    ),
    "an infinite norm is returned as 0": Mutant(
        "test_a_gradient_that_is_not_finite_changes_nothing",
        answering(
            update=lambda right, *args: float(np.nan_to_num(right.update(*args), posinf=0.0))
        ),
    ),
    "moments in 8 bits are in float32": Mutant(
        "test_moments_in_8_bits_are_near_and_rounded", by_plan("optimizer", name="adamw")
    ),
    # randomness
    "the seed is ignored": Mutant(
        "test_dropout_is_a_function_of_the_seed", answering(accumulate=seeded(lambda seed: 1))
    ),
    "dropout by the clock": Mutant(
        "test_dropout_is_a_function_of_the_seed",
        answering(accumulate=seeded(lambda seed: time.perf_counter_ns())),
    ),
    "dropout is ignored": Mutant(
        "test_dropout_is_a_function_of_the_seed", by_plan("adapter", dropout=0.0)
    ),
    "dropout is always 0.1": Mutant(
        "test_dropout_drops_at_the_rate_asked_for", by_plan("adapter", dropout=0.1)
    ),
    "dropout is squared": Mutant("test_dropout_drops_at_the_rate_asked_for", squared_dropout),
    "what is kept is not scaled": Mutant(
        "test_dropout_drops_at_the_rate_asked_for",
        patch=("torch.nn.functional.dropout", unscaled_dropout),
    ),
    "dropout spares DoRA's base part": Mutant(
        "test_dropout_reaches_doras_base_part",
        patch=(
            "peft.tuners.lora.variants.DoraLinearVariant.forward",
            staticmethod(base_part_undropped),
        ),
    ),
    "dropout depends on how often it was drawn": Mutant(
        "test_dropout_is_a_function_of_the_seed", remembering(by_count)
    ),
    "log_probs has no dropout": Mutant(
        "test_scores_and_gradients_see_the_same_dropout",
        answering(
            log_probs=lambda right, batch, name=None, seed=None: right.log_probs(batch, name)
        ),
    ),
    "log_probs always has dropout": Mutant(
        "test_scores_and_gradients_see_the_same_dropout",
        answering(
            log_probs=lambda right, batch, name=None, seed=None: right.log_probs(
                batch, name, seed or 1
            )
        ),
    ),
    # states
    "moments are dropped when resuming": Mutant(
        "test_a_resumed_run_is_the_uninterrupted_one",
        remembering(learning_from(lambda state: replace(state, moments={}))),
    ),
    "moments are dropped when restoring": Mutant(
        "test_a_restored_state_is_the_same_to_the_bit",
        remembering(learning_from(lambda state: replace(state, moments={}))),
    ),
    "a state counts skipped steps": Mutant(
        "test_a_restored_state_is_the_same_to_the_bit",
        remembering(learning_from(lambda state: replace(state, skipped=0))),
    ),
    "moments do not come back": Mutant("test_states_are_whole", answering(state=without_moments)),
    "the state is one update old": Mutant(
        "test_a_resumed_run_is_the_uninterrupted_one", remembering(one_update_old)
    ),
    "states change with the learner": Mutant(
        "test_a_state_does_not_change_later", remembering(views)
    ),
    "the start is changed in place": Mutant(
        "test_a_state_does_not_change_later", remembering(in_place)
    ),
    "it prints": Mutant("test_nothing_is_written_to_stdout_or_beside_the_weights", printing),
    "it caches beside the weights": Mutant(
        "test_nothing_is_written_to_stdout_or_beside_the_weights", caching
    ),
}
