"""Backends with one thing broken each, made out of a right one.

A mutant stands before the hooks of the CPU backend: it hands on another job, listens to another
context, or changes what comes back, and in everything else it is the backend that it wraps. Where
what is to be broken lies inside the engine, it replaces one name there.

Each names the test of the suite that has to catch it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tests.conformance.broken_results import (
    Load,
    Merge,
    all_at_once,
    answering,
    eagerly,
    foreign_errors,
    in_float32,
    loading,
    loads_in_float32,
    merging,
    one_too_many,
    out_of_order,
    sampling_with,
    with_the_stop_token,
)
from tests.conformance.broken_training import (
    Train,
    a_B,
    alpha_over_r,
    another_A,
    by_plan,
    changing_its_start,
    checkpoints_that_change,
    constant_rate,
    every_token,
    finite,
    from_start,
    into_the_next_document,
    listening,
    mean_of_means,
    on_batches,
    on_steps,
    one_document,
    one_step_old,
    printing,
    rounded,
    telling,
    trained_or_not,
    unscaled,
    with_adapter,
    without_bias_correction,
    without_effect,
    without_magnitude,
    without_moments,
)
from tests.conformance.quantising import as_quantisation
from vox_core.contract import (
    LoadedModel,
    LoadJob,
    MergeJob,
    MergeResult,
    RunContext,
    StepDone,
    TrainJob,
    TrainResult,
    Validation,
)
from vox_core.hookspecs import hookimpl


@dataclass(frozen=True)
class Mutant:
    """What is broken, and by which test it is caught.

    Args:
        train, merge, load: called with the right hook and its arguments.
        patch: name inside the engine, and what stands there instead.
        quantises: the right backend is `Quantising`, and declares every quantisation.
    """

    caught_by: str
    train: Callable[[Train, TrainJob, RunContext], TrainResult] | None = None
    merge: Callable[[Merge, MergeJob], MergeResult] | None = None
    load: Callable[[Load, LoadJob], LoadedModel] | None = None
    patch: tuple[str, object] | None = None
    quantises: bool = False


class Mutated:
    """The hooks of `backend`, those of the mutant before them."""

    def __init__(self, backend: Any, mutant: Mutant) -> None:
        self._backend, self._mutant = backend, mutant

    @hookimpl
    def vox_train(self, job: TrainJob, context: RunContext) -> TrainResult:
        right = self._backend.vox_train
        return (
            self._mutant.train(right, job, context) if self._mutant.train else right(job, context)
        )

    @hookimpl
    def vox_merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        def right(job: MergeJob) -> MergeResult:
            return self._backend.vox_merge(job, context)

        return self._mutant.merge(right, job) if self._mutant.merge else right(job)

    @hookimpl
    def vox_load(self, job: LoadJob, context: RunContext) -> LoadedModel:
        def right(job: LoadJob) -> LoadedModel:
            return self._backend.vox_load(job, context)

        return self._mutant.load(right, job) if self._mutant.load else right(job)


_CALLS = itertools.count()

MUTANTS: dict[str, Mutant] = {
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
        "test_a_loss_that_is_not_finite_ends_the_run", on_batches(finite)
    ),
    "float32 is quietly bfloat16": Mutant(
        "test_the_first_loss_is_the_base_models", by_plan("plan", dtype="bf16")
    ),
    "bfloat16 is quietly float32": Mutant(
        "test_training_is_in_the_dtype_asked_for", by_plan("plan", dtype="fp32")
    ),
    "bfloat16 is loaded as float32": Mutant(
        "test_loading_is_in_the_dtype_asked_for", load=loads_in_float32
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
        patch=("vox_core.plan.resolve_dtype", lambda choice, hardware: "fp16"),
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
    # optimizer
    "no bias correction": Mutant("test_adamw_is_the_papers", on_steps(without_bias_correction)),
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
    "the stop token is told": Mutant(
        "test_a_stop_token_ends_generation_and_is_not_told",
        load=answering(generate=with_the_stop_token),
    ),
    "stop tokens are ignored": Mutant(
        "test_a_stop_token_ends_generation_and_is_not_told",
        load=sampling_with(stop_tokens=frozenset()),
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
    "top-p is ignored": Mutant("test_sampling_keeps_to_the_nucleus", load=sampling_with(top_p=1.0)),
    "the temperature is ignored": Mutant(
        "test_temperature_spreads_the_choice", load=sampling_with(temperature=1.0)
    ),
    # manners
    "it prints": Mutant("test_nothing_is_written_to_stdout", printing),
    "a bare ValueError": Mutant("test_a_broken_model_is_told_as_such", load=foreign_errors),
}
