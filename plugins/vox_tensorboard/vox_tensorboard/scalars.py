"""Map the numbers of an event to TensorBoard's tags."""

from __future__ import annotations

from vox_core.contract import CheckpointWritten, Event, StepDone, Validation


def scalars(event: Event) -> dict[str, float]:
    """Return tag -> value; empty for an event without numbers to draw."""
    match event:
        case StepDone():
            return _of_step(event)
        case Validation(loss=loss):
            return {"validation/loss": loss}
        case CheckpointWritten(seconds=seconds):
            return {"checkpoint/seconds": seconds}
    return {}


def step_of(event: Event) -> int:
    """Return the step of an event with numbers."""
    assert isinstance(event, StepDone | Validation | CheckpointWritten)
    return event.step


def _of_step(step: StepDone) -> dict[str, float]:
    values = {
        "train/loss": step.loss,
        "train/learning_rate": step.lr,
        "train/gradient_norm": step.grad_norm,
        "train/trained_tokens": step.trained_tokens,
        "train/tokens_per_second": step.tokens / max(step.seconds, 1e-9),
    }
    if step.memory is not None:
        values["train/memory_bytes"] = step.memory
    return values
