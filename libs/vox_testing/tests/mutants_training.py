"""Backends that train wrongly, each with the test of the suite that has to catch it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch
from libs.vox_testing.tests.broken_training import (
    a_B,
    alpha_over_r,
    another_A,
    by_plan,
    changing_its_start,
    checkpoints_that_change,
    constant_rate,
    every_token,
    finite,
    first_hundred,
    from_start,
    into_the_next_document,
    leaving_gradients,
    listening,
    mean_of_means,
    on_batches,
    on_steps,
    one_document,
    one_step_old,
    printing,
    squared_dropout,
    telling,
    trained_or_not,
    unscaled,
    unscaled_dropout,
    with_adapter,
    without_bias_correction,
    without_moments,
)
from libs.vox_testing.tests.mutant import Mutant
from libs.vox_testing.tests.quantising import as_quantisation

from vox_core.contract import StepDone, Validation

_CALLS = itertools.count()

TRAINING: dict[str, Mutant] = {
    # loss
    "a mean of micro-batch means": Mutant(
        "test_micro_batches_do_not_change_a_step", on_steps(mean_of_means)
    ),
    "documents see one another": Mutant(
        "test_documents_never_see_one_another", on_batches(one_document)
    ),
    "a document predicts the next one's first token": Mutant(
        "test_the_first_loss_is_the_base_models", on_batches(into_the_next_document, True)
    ),
    "untrained tokens are trained": Mutant(
        "test_untrained_positions_do_not_count", on_batches(every_token, True)
    ),
    "weights are taken for a mask": Mutant(
        "test_the_first_loss_is_the_base_models", on_batches(trained_or_not, True)
    ),
    "an infinite loss is passed over": Mutant(
        "test_a_step_that_is_not_finite_is_skipped", on_batches(finite)
    ),
    "a skipped step leaves its gradient": Mutant(
        "test_a_step_that_is_not_finite_is_skipped",
        patch=("vox_torch.train.Trainer._finite_gradients", leaving_gradients),
    ),
    "a skipped step counts as an update": Mutant(
        "test_a_run_goes_on_after_a_skipped_step",
        from_start(lambda state: replace(state, skipped=0)),
    ),
    "a skipped step ends the run": Mutant(
        "test_a_step_that_is_not_finite_is_skipped",
        patch=("vox_core.contract.loop.NotFinite", KeyError),
    ),
    "float32 is quietly bfloat16": Mutant(
        "test_the_first_loss_is_the_base_models", by_plan("plan", dtype="bf16")
    ),
    "bfloat16 is quietly float32": Mutant(
        "test_training_is_in_the_dtype_asked_for", by_plan("plan", dtype="fp32")
    ),
    # quantisation
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
    # adapter
    "training is unscaled": Mutant(
        "test_the_loss_is_that_of_base_and_adapter", with_adapter(unscaled)
    ),
    "rsLoRA is scaled by alpha / r": Mutant(
        "test_the_loss_is_that_of_base_and_adapter", with_adapter(alpha_over_r)
    ),
    "B does not start at zero": Mutant("test_the_first_loss_is_the_base_models", with_adapter(a_B)),
    "A is not the one that was given": Mutant(
        "test_a_rate_of_zero_moves_nothing", with_adapter(another_A)
    ),
    "a long document is cut at its end": Mutant(
        "test_a_long_document_is_trained_whole", on_batches(first_hundred, True)
    ),
    # optimizer
    "no bias correction": Mutant("test_adamw_is_the_papers", on_steps(without_bias_correction)),
    "beta1 is always 0.9": Mutant("test_adamw_is_the_papers", by_plan("optimizer", beta1=0.9)),
    "beta2 is always 0.999": Mutant("test_adamw_is_the_papers", by_plan("optimizer", beta2=0.999)),
    "eps is always 1e-8": Mutant("test_adamw_is_the_papers", by_plan("optimizer", eps=1e-8)),
    "weight decay is ignored": Mutant(
        "test_adamw_is_the_papers", by_plan("optimizer", weight_decay=0.0)
    ),
    "weight decay goes through the moments": Mutant(
        "test_adamw_is_the_papers", patch=("torch.optim.AdamW", torch.optim.Adam)
    ),
    "the schedule is ignored": Mutant("test_adamw_is_the_papers", on_steps(constant_rate)),
    "no clipping": Mutant(
        "test_the_gradient_is_clipped_to_the_norm", by_plan("optimizer", clip=0.0)
    ),
    "the norm is told as it is after clipping": Mutant(
        "test_the_gradient_is_clipped_to_the_norm",
        telling(StepDone, lambda event: replace(event, grad_norm=min(event.grad_norm, 0.1))),
    ),
    "moments in 8 bits are in float32": Mutant(
        "test_moments_in_8_bits_are_near_and_rounded", by_plan("optimizer", name="adamw")
    ),
    "a resumed run begins with no moments": Mutant(
        "test_each_optimizer_learns_and_goes_on", without_moments
    ),
    # randomness
    "the seed is ignored": Mutant(
        "test_another_seed_gives_another_run", listening(lambda context: {"seed": 1})
    ),
    "dropout by the clock": Mutant(
        "test_the_same_seed_gives_the_same_run",
        listening(lambda context: {"seed": time.perf_counter_ns()}),
    ),
    "dropout is ignored": Mutant(
        "test_another_seed_gives_another_run", by_plan("adapter", dropout=0.0)
    ),
    "dropout is always 0.1": Mutant(
        "test_dropout_drops_at_the_rate_asked_for", by_plan("adapter", dropout=0.1)
    ),
    "dropout is squared": Mutant("test_dropout_drops_at_the_rate_asked_for", squared_dropout),
    "what is kept is not scaled": Mutant(
        "test_dropout_drops_at_the_rate_asked_for",
        patch=("torch.nn.functional.dropout", unscaled_dropout),
    ),
    "dropout is the same in every step": Mutant(
        "test_dropout_is_drawn_anew_for_each_step_and_micro_batch",
        patch=("vox_torch.train.micro_batch_seed", lambda seed, step, index: 100 * seed + index),
    ),
    "dropout is the same in every micro-batch": Mutant(
        "test_dropout_is_drawn_anew_for_each_step_and_micro_batch",
        patch=("vox_torch.train.micro_batch_seed", lambda seed, step, index: 100 * seed + step),
    ),
    "dropout depends on how often it was drawn": Mutant(
        "test_dropout_does_not_depend_on_what_came_before",
        patch=("vox_torch.train.micro_batch_seed", lambda seed, step, index: next(_CALLS)),
    ),
    # states
    "moments are dropped when resuming": Mutant(
        "test_a_resumed_run_is_the_uninterrupted_one",
        from_start(lambda state: replace(state, moments={})),
    ),
    "moments do not come back": Mutant("test_states_are_whole", without_moments),
    "the state is one step old": Mutant(
        "test_a_resumed_run_is_the_uninterrupted_one", one_step_old
    ),
    "a stop is not obeyed": Mutant(
        "test_a_stop_is_obeyed_after_the_step",
        listening(lambda context: {"stop_requested": lambda: False}),
    ),
    "no checkpoints": Mutant(
        "test_checkpoints_are_made_when_due",
        listening(lambda context: {"checkpoint_due": lambda step: False}),
    ),
    "checkpoints change with the run": Mutant(
        "test_checkpoints_are_made_when_due", checkpoints_that_change
    ),
    "the start is changed in place": Mutant(
        "test_what_was_given_is_not_changed", changing_its_start
    ),
    "trained tokens are miscounted": Mutant(
        "test_events_tell_each_step",
        telling(StepDone, lambda event: replace(event, trained_tokens=event.tokens)),
    ),
    "no validation before the first step": Mutant(
        "test_validation_is_the_weighted_mean_without_dropout",
        telling(Validation, lambda event: event if event.step else None),
    ),
    "it prints": Mutant("test_nothing_is_written_to_stdout", printing),
}
