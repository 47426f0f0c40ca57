"""Every mutant, by what is broken in it: mutant.py says what one is."""

from __future__ import annotations

from tests.conformance.mutant import Mutant
from tests.conformance.mutants_results import RESULTS
from tests.conformance.mutants_training import TRAINING

MUTANTS: dict[str, Mutant] = {**TRAINING, **RESULTS}
