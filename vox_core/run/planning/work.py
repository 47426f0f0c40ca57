"""What a whole run goes through: documents and tokens, by the order in which it takes them."""

from __future__ import annotations

from vox_core.data.batching import documents_in_step, epochs_after
from vox_core.run.loop import is_validated
from vox_core.run.planning.report import Work
from vox_core.run.prepare import Prepared


def work_of(prepared: Prepared) -> Work:
    """Added up over every step, as its telemetry will add it up."""
    contract, documents = prepared.plan.contract, prepared.train.documents
    rows, size, steps = len(documents), contract.batch_size, contract.total_steps
    lengths_D, trained_D = documents.lengths_D, documents.trained_D()
    taken = tokens = trained = 0
    for step in range(1, steps + 1):
        chosen = documents_in_step(prepared.train, size, contract.seed, step)
        taken += len(chosen)
        tokens += int(lengths_D[chosen].sum())
        trained += int(trained_D[chosen].sum())
    return Work(epochs_after(rows, size, steps), taken, tokens, trained)


def validations_of(prepared: Prepared, every: int) -> int:
    """How often the held-out rows are gone through: before the first step, and with `every` as
    `--eval-every` says."""
    if prepared.valid is None:
        return 0
    total = prepared.plan.contract.total_steps
    return 1 + sum(is_validated(step, total, every) for step in range(1, total + 1))
